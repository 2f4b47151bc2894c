"""A backward pass evaluated some heads at a time, as gradients of tables take much memory apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from helpers.attention_calls import threads
from relpos_fairseq.attention import AttentionInputs, attend, native
from relpos_fairseq.attention.native import call as native_call
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.relations import Clipped
from relpos_fairseq.core.terms import PositionTerms, Reset

BATCH, HEADS, LENGTH, DIM = 3, 5, 20, 4
Draw = Callable[..., Tensor]


def wide(draw: Draw) -> tuple[PositionTerms, ...]:
    """Tables of all heads and of each, over all distances."""
    relation = Clipped(LENGTH - 1, LENGTH - 1)
    rows = relation.size
    return (
        PositionTerms(relation, query_vectors=draw(1, rows, DIM), value_vectors=draw(1, rows, DIM)),
        PositionTerms(relation, key_vectors=draw(HEADS, rows, DIM), static=draw(HEADS, rows)),
    )


def factors(draw: Draw) -> tuple[PositionTerms, ...]:
    """Factors shared by heads, by the batch, by nothing; a reset of each head's own."""
    reset = Reset(draw(HEADS), draw(HEADS), torch.tensor([0, 4, 2]))
    pairs = (
        (draw(1, 1, LENGTH, 3), draw(1, 1, LENGTH, 3)),
        (draw(1, HEADS, LENGTH, 2), draw(BATCH, 1, LENGTH, 2)),
        (draw(BATCH, HEADS, LENGTH, 2), draw(BATCH, HEADS, LENGTH, 2)),
    )
    return tuple(PositionTerms(static_factors=pair, reset=reset) for pair in pairs)


def narrow(draw: Draw) -> tuple[PositionTerms, ...]:
    """A band whose vectors multiply, with gates."""
    relation = Clipped(2, 1)
    return (
        PositionTerms(relation, query_vectors=draw(HEADS, 4, DIM), key_vectors=draw(1, 4, DIM), product=True),
        PositionTerms(relation, gate=draw(1, 4), content_offset=draw(HEADS, DIM)),
    )


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    if problem := native.build.problem(torch.float64):
        pytest.skip(problem)
    with threads(1):
        yield


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("make", [wide, factors, narrow])
def test_parts_are_the_whole(make: Callable[[Draw], tuple], dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same gradients, and the same probabilities dropped, two heads at a time as at once."""
    generator = torch.Generator().manual_seed(3)

    def draw(*size: int) -> Tensor:
        drawn = torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_()
        leaves.append(drawn)
        return drawn

    leaves: list[Tensor] = []
    q = draw(BATCH, LENGTH, HEADS, DIM).transpose(1, 2)  # heads are slices, as in fairseq
    k, v = draw(BATCH, HEADS, LENGTH, DIM), draw(BATCH, HEADS, LENGTH, DIM)
    terms, positions = make(draw), Positions(LENGTH, LENGTH)
    parts, found = [], []
    honest = native_call._parts
    monkeypatch.setattr(native_call, "_parts", lambda *given: parts.append(list(honest(*given))) or parts[-1])
    for at_once in (1 << 30, 1):
        monkeypatch.setattr(native_call, "MAX_UNSUMMED_BYTES", at_once)
        torch.manual_seed(1)
        inputs = AttentionInputs(q, k, v, terms, positions, 0.5, dropout=dropout)
        out, _ = attend(inputs, "native")
        upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        found.append(torch.autograd.grad(out, leaves, upstream))
    assert parts == [[(0, 5)], [(0, 2), (2, 2), (4, 1)]]
    torch.testing.assert_close(found[0], found[1], rtol=1e-11, atol=1e-11)


def test_memory_decides() -> None:
    """What is summed counts; a gradient that each head has for itself does not."""
    call = native_call.Call(batch=2, heads=12, threads=2)
    limit = native_call.MAX_UNSUMMED_BYTES
    few, many, own = (
        native_call.UnsummedGradient(rows, shape)
        for rows, shape in ((2, (1, 1, limit // 96, 1)), (2, (1, 1, limit // 8, 1)), (2, (2, 12, limit, 1)))
    )
    assert list(native_call._parts(call, [few], 4)) == [(0, 12)]
    assert list(native_call._parts(call, [few, own], 4)) == [(0, 12)]
    assert list(native_call._parts(call, [few, few], 4)) == [(0, 6), (6, 6)]
    assert list(native_call._parts(call, [many], 4)) == [(0, 4), (4, 4), (8, 4)]
    assert list(native_call._parts(call, [], 4)) == [(0, 12)]
