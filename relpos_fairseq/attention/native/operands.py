"""The operands of the kernel in C (call.h): a lowered call over the kernel's own windows.

Tables of vectors share one window: a narrow band between two tails, or, where a term has more
distances than `NARROW`, all distances.  Scalars lie over all distances.
"""

from __future__ import annotations

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.lowering import Lowered, Reach, Window, lower
from relpos_fairseq.attention.lowering.tables import SAME_EVERYWHERE, needs_offset_table, relations_of_vectors

NARROW = 192  # distances up to which a window is kept narrow


def lower_for_c(inputs: AttentionInputs) -> Lowered:
    """Lower a call that `refusal` does not refuse; its tensors are the kernel's operands."""
    positions = inputs.positions
    everywhere = Window(positions.lowest_distance, positions.highest_distance)
    low = lower(inputs, _window(inputs, everywhere), everywhere, inputs.exact)
    operands = low.tensors
    q, k, content_q, content_k = inputs.exact_pairs()
    operands["v"] = inputs.v.to(inputs.exact)
    vectors = ("query_vectors", "key_vectors", "product_query")
    if inputs.rotated and any(name in operands for name in vectors):
        operands["content_q"], operands["content_k"] = content_q, content_k
    else:
        q, k = content_q, content_k
    operands["q"], operands["k"] = q, k
    return low


def _window(inputs: AttentionInputs, everywhere: Window) -> Window:
    """Return the distances beyond which no table of vectors changes, or all distances."""
    if relations := relations_of_vectors(inputs):
        narrow = Window.over(relations, Reach(everywhere.low, everywhere.high))
    elif needs_offset_table(inputs):
        narrow = SAME_EVERYWHERE
    else:
        return everywhere
    return narrow if narrow.width <= min(NARROW, everywhere.width) else everywhere
