"""Exact attention with positions: evaluates terms over relations and knows no paper."""

from relpos_fairseq.attention.api import BACKENDS, attend
from relpos_fairseq.attention.inputs import AttentionInputs

__all__ = ["BACKENDS", "AttentionInputs", "attend"]
