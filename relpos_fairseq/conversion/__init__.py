"""Convert pretrained models from one position scheme, and one library's format, to another.

The rules are in `algebra` and `reshaping`, the formats in a file per library, and the steps of the command in `job`.
"""

from relpos_fairseq.conversion.algebra import Conversion, convert
from relpos_fairseq.conversion.report import ConversionError, ConversionReport, NotExactError

__all__ = ["Conversion", "ConversionError", "ConversionReport", "NotExactError", "convert"]
