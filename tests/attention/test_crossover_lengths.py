"""From which lengths `auto` takes the kernel in C, and for which steps of decoding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from relpos_fairseq.attention import AttentionInputs, api, attend
from relpos_fairseq.attention.api import choose
from relpos_fairseq.attention.native import build
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.relations import Clipped, Segments
from relpos_fairseq.core.terms import PositionTerms


def test_what_a_call_is() -> None:
    """Its dearest term decides, and what is left out, dropped, learnt."""
    q, k, v = (torch.randn(1, 1, 8, 4) for _ in range(3))
    scalars = PositionTerms(Clipped(1, 1), static=torch.zeros(1, 3))
    segments = PositionTerms(Segments(2), static=torch.zeros(1, 4))
    vectors = PositionTerms(Clipped(1, 1), key_vectors=torch.zeros(1, 3, 4))
    one = AttentionInputs(q, k, v, (), Positions(8, 8), 1.0)
    for terms, both, half in (
        ((), 128, 48),
        ((PositionTerms(),), 128, 48),
        ((scalars,), 128, 64),
        ((segments, scalars), 256, 96),
        ((scalars, segments), 256, 96),
        ((segments, vectors), 2, 2),
    ):
        given = replace(one, terms=terms)
        assert api.crossover_length(given) == both
        assert api.crossover_length(replace(given, causal=True)) == half
        assert api.crossover_length(replace(given, dropout=0.1)) == half
        with torch.no_grad():
            assert api.crossover_length(replace(given, dropout=0.1)) == half, "a layer formed again"
            assert api.crossover_length(given) < both or both == 2


@pytest.mark.parametrize(
    ("rows", "keys", "dtype", "chosen", "without"),
    [
        (16, 128, torch.float32, "native", "blocked"),
        (1, 128, torch.float32, "native", "sdpa"),
        (1, 127, torch.float32, "sdpa", "sdpa"),
        (160, 24, torch.float32, "native", "blocked"),
        (16, 128, torch.bfloat16, "sdpa", "sdpa"),
    ],
)
def test_a_step_without_terms(
    rows: int, keys: int, dtype: torch.dtype, chosen: str, without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel serves many keys (without it two products), SDPA few; all give the same."""
    q, k, v = (torch.randn(rows, 12, n, 8).to(dtype) for n in (1, keys, keys))
    inputs = AttentionInputs(q, k, v, (), Positions(1, keys, keys - 1), 0.3, causal=True)
    with torch.no_grad():
        for problem, expected in ((None, chosen), ("anything here", without)):
            monkeypatch.setattr(build, "problem", lambda _, problem=problem: problem)
            assert choose(inputs) == expected
        found, expected = (attend(inputs, backend)[0] for backend in ("blocked", "sdpa"))
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2 if dtype == torch.bfloat16 else 1e-5)
    assert choose(inputs) == "sdpa", "gradients"
