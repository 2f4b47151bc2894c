"""Torch sees the kernels in Triton: as operations that compilers and tracers record."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")
from helpers.attention_calls import same
from helpers.operations import check_operations
from relpos_fairseq.attention import AttentionInputs, attend
from relpos_fairseq.attention import triton as backend
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.relations import Clipped
from relpos_fairseq.core.terms import PositionTerms, Reset

pytestmark = pytest.mark.skipif(not backend.interpreted(), reason="on CPUs they are interpreted (TRITON_INTERPRET=1)")
TOKENS, DIM = 9, 4


def draw(*size: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(size))
    return torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_()


def every_kind() -> tuple[PositionTerms, ...]:
    """Bands of vectors, vectors of values, scalars, a gate, factors that rows share, a reset."""
    relation = Clipped(2, 1)
    reset = Reset(draw(1), draw(2), torch.tensor([0, 3]))
    table = draw(1, 4, DIM)
    return (
        PositionTerms(relation, query_vectors=table, key_vectors=table, static=draw(2, 4)),
        PositionTerms(relation, value_vectors=draw(1, 4, DIM), gate=draw(1, 4)),
        PositionTerms(static_factors=(draw(1, 2, TOKENS, 3), draw(1, 1, TOKENS, 3)), reset=reset),
    )


TERMS = {
    "none": lambda: (),
    "every kind": every_kind,
    "trilinear": lambda: (PositionTerms(Clipped(2, 1), trilinear=draw(1, 4, DIM)),),
    "many distances": lambda: (
        PositionTerms(Clipped(8, 8), query_vectors=draw(2, 17, DIM), key_vectors=draw(1, 17, DIM)),
    ),
}


def call(terms: tuple[PositionTerms, ...], **masks) -> AttentionInputs:
    q, k, v = (draw(2, TOKENS, 2, DIM).transpose(1, 2) for _ in range(3))  # as in fairseq
    return AttentionInputs(q, k, v, terms, Positions(TOKENS, TOKENS), 0.5, **masks)


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.slow
def test_they_are_operations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schemas, shapes and strides without numbers, and dispatch are as torch wants them."""
    if name == "many distances":
        monkeypatch.setattr("relpos_fairseq.attention.triton.operands.STORED_DISTANCES", 4)
    padding = torch.arange(TOKENS).expand(2, -1) > 7
    documents = (torch.arange(TOKENS) // 4).expand(2, -1)
    inputs = call(TERMS[name](), key_padding=padding, documents=documents, dropout=0.25)
    band = ["trilinear_band"] * (name == "trilinear")
    check_operations(
        lambda: attend(inputs, "triton")[0].square().sum().backward(),
        [*band, "attend_fused", "attend_fused_backward", *(f"{each}_backward" for each in band)],
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["every kind", "trilinear"])
def test_one_graph(name: str) -> None:
    """Compiled without a break, with eager's output and gradients."""
    terms = TERMS[name]()
    inputs = call(terms)
    leaves = [inputs.q, inputs.k, inputs.v, *(t for term in terms for t in tables_of(term))]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(replace(inputs, q=q, k=k, v=v), "triton")[0].square()

    torch._dynamo.reset()
    found = []
    for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        out = function(*leaves[:3])
        found.append([out, *torch.autograd.grad(out.sum(), leaves, allow_unused=True)])
    assert sum(part is not None for part in found[0]) > 4
    same(*([part for part in each if part is not None] for each in found), rtol=1e-9, atol=1e-9)


def tables_of(term: PositionTerms) -> list[Tensor]:
    values = (getattr(term, name) for name in term.present)
    return [value for value in values if isinstance(value, Tensor)]
