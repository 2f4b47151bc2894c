"""Gradients in bf16 that are sums over many tokens, beside those in fp64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from relpos_fairseq.patches.training import sum_in_fp32

TOKENS = 6000  # of which torch's own sums in bf16 lose half


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gradients_of_many_tokens(dtype: torch.dtype) -> None:
    """They are those of fp64 to a few per cent, padding has none, and outputs are as before."""
    torch.manual_seed(1)
    words = nn.Embedding(3, 16, padding_idx=1)
    plain = nn.Sequential(words, nn.LayerNorm(16), nn.Tanh(), nn.LayerNorm(16, bias=False)).to(dtype)
    ids, given = torch.randint(3, (2, TOKENS // 2)), torch.randn(2, TOKENS // 2, 16).add(0.5).to(dtype)
    model, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    sum_in_fp32(model)
    model(ids).backward(given)
    exact(ids).backward(given.double())
    for found, right in zip(model.parameters(), exact.parameters(), strict=True):
        assert found.grad.dtype is dtype
        assert (found.grad - right.grad).norm() <= 0.03 * right.grad.norm()
    assert not model[0].weight.grad[1].any()
    if dtype is torch.bfloat16:
        assert torch.equal(model(ids), plain(ids))


def test_others_are_left_alone() -> None:
    """A class of another's own, and embeddings whose gradients are more than sums, stay what they are."""

    class Own(nn.LayerNorm):
        pass

    kept = [Own(4), nn.Linear(4, 4), nn.Embedding(4, 4, max_norm=1.0), nn.Embedding(4, 4, scale_grad_by_freq=True)]
    kinds = [type(part) for part in kept]
    sum_in_fp32(nn.ModuleList(kept))
    assert [type(part) for part in kept] == kinds
