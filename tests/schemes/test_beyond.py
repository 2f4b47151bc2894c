"""Inputs longer than in training, where what a scheme does depends on how many tokens there are."""

from __future__ import annotations

import pytest
import torch

from cases import BEYOND, Case
from helpers.layers import EXACT, Layer, tokens
from relpos_fairseq.core.placement import generation_of


@pytest.mark.parametrize("case", BEYOND, ids=str)
def test_a_step_beyond_training_equals_the_full_pass(case: Case) -> None:
    """Each step of a generation equals the last row of a pass over as many tokens, padded or not."""
    layer = Layer(case, causal=True)
    length, pad = 9, 2
    x = tokens(2, length)
    padding = torch.zeros(2, length, dtype=torch.bool)
    padding[0, :pad] = True
    cache: dict = {}
    with generation_of(length):
        for t in range(length):
            got = layer(x[:, t : t + 1], padding[:, : t + 1], cache, t)[:, 0]
            torch.testing.assert_close(got[1], layer(x[1:, : t + 1])[0, -1], **EXACT)
            if t >= pad:
                torch.testing.assert_close(got[0], layer(x[:1, pad : t + 1])[0, -1], **EXACT)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", BEYOND, ids=str)
def test_padding_does_not_lengthen_a_row(case: Case, causal: bool) -> None:
    """Tokens are counted, wherever padding stands."""
    layer = Layer(case, causal)
    alone = layer(tokens(1, 6))
    wide = tokens(3, 9, seed=9)
    for left in (0, 3):
        padding = torch.zeros(3, 9, dtype=torch.bool)
        padding[1, :left] = padding[1, left + 6 :] = True
        wide[1, left : left + 6] = tokens(1, 6)[0]
        torch.testing.assert_close(layer(wide, padding)[1, left : left + 6], alone[0], **EXACT)
