"""One self-attention of a case of `cases.py`, driven as a model drives it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from cases import CASES, Case, plan_of, randomize
from helpers.forms import told_apart
from relpos_fairseq.core.placement import DecodingTerms, Placement
from relpos_fairseq.core.positions import Positions, index_of_tokens
from relpos_fairseq.modules.multihead_attention import RelPosMultiheadAttention

BATCH, HEADS, DIM = 3, 2, 4
WIDTH = HEADS * DIM
EXACT = {"rtol": 0, "atol": 1e-11}
WITHOUT_SEGMENTS = [case for case in CASES if "segment_encoding" not in case.flags]
FORMS = told_apart(WITHOUT_SEGMENTS)  # what a layer sees of schemes are their terms


class Layer(torch.nn.Module):
    """One self-attention of a stack, driven as a model drives it."""

    def __init__(self, case: Case, causal: bool, backend: str = "auto") -> None:
        super().__init__()
        plan = replace(plan_of(case, causal=causal), backend=backend)
        self.stack = Placement(plan)
        schemes = self.stack.layer_schemes(0)
        self.attention = RelPosMultiheadAttention(WIDTH, HEADS, schemes, plan.scale, backend=backend)
        self.double().eval()
        randomize(self, 5)

    def forward(self, x: Tensor, padding: Tensor | None = None, cache: dict | None = None, offset: int = 0) -> Tensor:
        """(B, L, E) to (B, L, E); with a cache, x are the tokens after `offset` cached ones."""
        total = offset + x.size(1)
        positions = Positions(x.size(1), total, offset, token_index=index_of_tokens(padding))
        added = self.stack.embed(positions)
        if added is not None:
            x = x + added
        shared = None if cache is None else cache.setdefault("shared", DecodingTerms())
        context = self.stack.context(positions, shared)
        new_padding = None if padding is None else padding[:, offset:]
        state = None if cache is None else cache.setdefault("state", {})
        out, _ = self.attention(
            x.transpose(0, 1), key_padding_mask=new_padding, incremental_state=state, attn_mask=context
        )
        return out.transpose(0, 1)


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Random inputs (B, L, E)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, WIDTH, generator=generator, dtype=torch.float64)
