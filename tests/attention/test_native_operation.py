"""Torch sees the kernel: as operations that compilers and tracers record, with a derivative."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from helpers.attention_calls import same
from helpers.native_calls import make_call, make_terms, parameters_of
from helpers.native_formula import Libraries
from helpers.operations import check_operations
from relpos_fairseq.attention import AttentionInputs, api, attend
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.terms import PositionTerms

EXACT = {"rtol": 1e-10, "atol": 1e-10}
pytestmark = pytest.mark.usefixtures("formula")


def with_masks(kind: str) -> AttentionInputs:
    """A call with every mask, and dropout."""
    padding = torch.arange(9).expand(2, -1) > 7
    documents = (torch.arange(9) // 4).expand(2, -1)
    return make_call(make_terms(kind), key_padding=padding, documents=documents, dropout=0.25)


@pytest.mark.parametrize("kind", ["product", "reset of a term and not of its like"])
def test_they_are_operations(kind: str) -> None:
    """Schemas, shapes and strides without numbers, and dispatch are as torch wants them."""
    inputs = with_masks(kind)
    inputs = replace(inputs, q=inputs.q.requires_grad_(), v=inputs.v.requires_grad_())
    check_operations(lambda: attend(inputs, "native")[0].square().sum().backward(), ["attend", "attend_backward"])


def test_first_and_second_derivative() -> None:
    """Numbers agree with differences of the output; there is no second one."""
    inputs = make_call(make_terms("product"))
    leaves = [inputs.q.requires_grad_(), inputs.v.requires_grad_(), *parameters_of(inputs.terms)]

    def run(*parts: Tensor) -> Tensor:
        return attend(replace(inputs, q=parts[0], v=parts[1]), "native")[0]

    assert torch.autograd.gradcheck(run, leaves[:2], fast_mode=True)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "dropout"), [("eager", 0.0), ("aot_eager", 0.25)])
def test_one_graph(backend: str, dropout: float, formula: Libraries, monkeypatch) -> None:
    """Compiled without a break, for several lengths, with eager's gradients and dropout."""
    monkeypatch.setattr(api, "crossover_length", lambda _: 1)
    terms = tuple(term for term in make_terms("several"))
    given = make_call(terms, dropout=dropout)
    parameters = parameters_of(terms)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = Positions(q.size(2), k.size(2), 2, segments=given.positions.segments)
        free = tuple(term for term in terms if term.static_factors is None)
        return attend(replace(given, q=q, k=k, v=v, terms=free, positions=positions))[0].square()

    torch._dynamo.reset()
    compiled = torch.compile(run, backend=backend, fullgraph=True)
    for rows in (7, 6, 5):
        parts = [given.q[:, :, :rows], given.k[:, :, : rows + 2], given.v[:, :, : rows + 2]]
        parts = [part.detach().requires_grad_() for part in parts]
        found = []
        for function in (run, compiled):
            torch.manual_seed(3)
            out = function(*parts)
            grads = torch.autograd.grad(out.sum(), [*parts, *parameters], allow_unused=True)
            found.append([out, *(grad for grad in grads if grad is not None)])
        assert len(found[0]) > 8
        same(*found, **EXACT)
    assert formula[torch.float64].calls == {"forward": 6, "backward": 6}


def test_traced(formula: Libraries) -> None:
    """A tracer records both operations, and replays them for other numbers."""
    inputs = make_call(
        tuple(PositionTerms(static_factors=t.static_factors) for t in make_terms("several") if t.static_factors)
    )
    q = inputs.q.clone().requires_grad_()

    def run(q: Tensor) -> Tensor:
        out = attend(replace(inputs, q=q), "native")[0]
        return torch.autograd.grad(out.square().sum(), q)[0]

    traced = make_fx(run)(q)
    names = [str(node.target) for node in traced.graph.nodes]
    assert names.count("relpos.attend.default") == 1
    assert names.count("relpos.attend_backward.default") == 1
    other = (q * 2).detach().requires_grad_()
    torch.testing.assert_close(traced(other), run(other), **EXACT)
