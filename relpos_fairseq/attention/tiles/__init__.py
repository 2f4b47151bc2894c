"""Attention by tiles (some rows of some heads) with a hand-written backward pass.

A tile's logits are formed in a buffer that stays in the cache, become probabilities there, and are
formed again in the backward pass, so that memory is linear in length.  Vectors over clipped
distances are a diagonal band of that buffer, addressed in place as a view.
"""

from relpos_fairseq.attention.tiles.function import attend
from relpos_fairseq.attention.tiles.plan import refusal

__all__ = ["attend", "refusal"]
