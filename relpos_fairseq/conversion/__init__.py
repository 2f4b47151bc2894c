"""Convert pretrained models from one position scheme, and one library's format, to another."""

from relpos_fairseq.conversion.algebra import Conversion, convert
from relpos_fairseq.conversion.report import ConversionError, ConversionReport, NotExactError

# ---- Converting pretrained models from one position scheme, and one library's format, to another.
# The algebra is in `exact`, `scales` and `approximate`; formats in `checkpoints`, `huggingface`,
# `released_xl`, `translation` and `writer`.


__all__ = ["Conversion", "ConversionError", "ConversionReport", "NotExactError", "convert"]
