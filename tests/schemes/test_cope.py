"""CoPE as the paper's listing has it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cases import Case
from helpers.scheme_calls import call
from relpos_fairseq.attention import attend


def listing(q: Tensor, k: Tensor, v: Tensor, e: Tensor) -> Tensor:
    """Causal attention by the steps of the paper's listing."""
    seen = torch.ones(q.size(-2), k.size(-2), dtype=q.dtype).tril()
    logits = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1)) + seen.log()
    place = logits.sigmoid().flip(-1).cumsum(-1).flip(-1).clamp(max=len(e) - 1)
    whole = q @ e.T
    low, high = (whole.gather(-1, end(place).long()) for end in (torch.floor, torch.ceil))
    between = place - place.floor()
    return (logits + high * between + low * (1 - between)).softmax(-1) @ v


def test_equals_the_listing() -> None:
    inputs, _, layer, _ = call(Case("cope", {"position_contexts": "4"}), "causal", dim=16)
    expected = listing(inputs.q, inputs.k, inputs.v, layer[0].table[0])
    torch.testing.assert_close(attend(inputs, "reference")[0], expected, rtol=0, atol=1e-12)
