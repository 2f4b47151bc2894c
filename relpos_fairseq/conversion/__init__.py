"""Convert the tensors of one position scheme to another.

The rules are in `algebra` and `reshaping`; other libraries, and the command, are in `formats/`.
"""

from relpos_fairseq.conversion.algebra import Conversion, convert
from relpos_fairseq.conversion.report import ConversionError, ConversionReport, NotExactError

__all__ = ["Conversion", "ConversionError", "ConversionReport", "NotExactError", "convert"]
