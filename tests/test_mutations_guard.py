"""Tests that planted bugs asked for (tests/planted_bugs.yaml)."""

from __future__ import annotations

import torch

import naive
from cases import Case, build
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.schemes.kerple import LEAST


def test_transformer_xl_in_fp32() -> None:
    """The fp32 path of the sinusoid has the sign and layout of the fp64 one."""
    stack, layer = build(Case("transformer_xl"))
    layer.float()
    ((relation, vectors),) = layer.prepare(Positions(5, 7, 2))
    projection = layer[0].projection.detach().double()
    for row, distance in enumerate(range(-relation.past, relation.future + 1)):
        wave = torch.tensor(naive.sinusoid_xl(-distance, 8), dtype=torch.float64)
        expected = (projection @ wave).view(2, 4)
        torch.testing.assert_close(vectors[:, row].double(), expected, rtol=0, atol=1e-4)


def test_kerple_stays_bounded() -> None:
    """Parameters that training drives below the bound act as the bound, and can come back."""
    _, layer = build(Case("kerple"))
    with torch.no_grad():
        layer[0].amplitude.fill_(-3.0)
    ((_, static),) = layer.prepare(Positions(4, 4))
    rate = layer[0].rate.detach()[:, None]
    expected = -LEAST * torch.log1p(rate * torch.arange(-3, 4).abs())
    torch.testing.assert_close(static.detach(), expected)
    static.sum().backward()
    assert (layer[0].amplitude.grad != 0).all()
