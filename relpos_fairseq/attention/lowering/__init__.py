"""From terms to what a kernel reads: once, for the kernel in C and for those in Triton.

A relation over distances is a *band* between two *tails*: within a window every distance has a row
of its own, and the window's first and last row stand for all distances beyond it.  `lower` reads
every table of every term over such a window and sums the terms kind by kind, so that a kernel sees
one table of a kind whatever the schemes are:

    windows    distances, and tables read over a window of them
    factors    logits that are products of two factors: TUPE's, and pairs of segments
    resets     the first token's row and column, which a reset replaces
    tables     the sums: `Lowered`, with tensors by their names in `PositionTerms`
    refusal    the terms that have no such form, which remain for the backend `blocked`

Everything is formed under autograd, and nothing has a size of T x S.
"""

from relpos_fairseq.attention.lowering.refusal import refusal
from relpos_fairseq.attention.lowering.tables import Lowered, lower
from relpos_fairseq.attention.lowering.windows import Reach, Window, over_window

__all__ = ["Lowered", "Reach", "Window", "lower", "over_window", "refusal"]
