"""Around the native kernel: types, layouts, what is kept for the backward pass, dropout's seed.

The kernel's formula is evaluated densely by torch here (`native_formula`).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from helpers.native_calls import make_call, make_terms, parameters_of
from helpers.native_formula import Formula, Libraries
from helpers.operations import Watch
from relpos_fairseq.attention import AttentionInputs, attend, native
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.relations import Clipped
from relpos_fairseq.core.terms import PositionTerms

EXACT = {"rtol": 1e-10, "atol": 1e-10}
pytestmark = pytest.mark.usefixtures("formula")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types(dtype: torch.dtype, formula: Libraries) -> None:
    """Half precision is evaluated in fp32; output and gradients have the inputs' type."""
    terms = make_terms("several", dtype)
    made = make_call(terms)
    leaves = [x.to(dtype).requires_grad_() for x in (made.q, made.k, made.v)]
    inputs = replace(made, q=leaves[0], k=leaves[1], v=leaves[2])
    out, _ = attend(inputs, "native")
    expected, _ = attend(inputs, "reference")
    assert out.dtype == dtype
    wanted = [*leaves, *parameters_of(terms)]
    found, right = (torch.autograd.grad(x.sum(), wanted) for x in (out, expected))
    rough = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 64 * torch.finfo(dtype).eps}
    for one, other in zip((out, *found), (expected, *right), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, **rough)
    assert formula[torch.float32].calls == {"forward": 1, "backward": 1}


def test_layouts() -> None:
    """Channels that are apart, heads and rows that are broadcast, gradients that are."""
    inputs = make_call(make_terms("several"))
    apart = inputs.v.transpose(-1, -2).contiguous().transpose(-1, -2)
    odd = replace(
        inputs,
        q=inputs.q.transpose(-1, -2).contiguous().transpose(-1, -2),
        k=inputs.k[:1, :1].expand(2, 2, -1, -1),
        v=apart.flip(0),
    )
    expected, _ = attend(odd, "reference")
    wanted = parameters_of(inputs.terms)
    right = torch.autograd.grad(expected.sum(), wanted)
    out, _ = attend(odd, "native")
    torch.testing.assert_close(out, expected, **EXACT)
    for one, other in zip(torch.autograd.grad(out.sum(), wanted), right, strict=True):
        torch.testing.assert_close(one, other, **EXACT)
    out, _ = attend(replace(inputs, v=inputs.v[..., :4], terms=()), "native")
    assert out.stride() == inputs.q.stride()


def test_only_what_learns_has_a_gradient(formula: Libraries, monkeypatch) -> None:
    """The call points to the gradients that are wanted, and keeps nothing without any."""
    seen = []

    def backward(call) -> int:
        wanted = [name for name in (f"d{operand}" for operand in native.call.OPERANDS) if asked(call, name)]
        seen.append(wanted)
        return Formula.relpos_backward(formula[torch.float64], call)

    def asked(call, name: str) -> bool:
        place = getattr(call, name)
        return bool(place.data if hasattr(place, "data") else place)

    monkeypatch.setattr(formula[torch.float64], "relpos_backward", backward)
    inputs = make_call(make_terms("several"))
    frozen = tuple(
        replace(term, query_vectors=None, query_offset=None)
        if number == 0
        else replace(term, static_factors=tuple(x.detach() for x in term.static_factors))
        if term.static_factors
        else term
        for number, term in enumerate(inputs.terms)
    )
    v = inputs.v.clone().requires_grad_()
    attend(replace(inputs, v=v, terms=frozen), "native")[0].sum().backward()
    assert seen == [["dv", "dquery_vectors", "dkey_vectors", "dvalue_vectors", "dstatic", "dgate"]]
    with torch.no_grad():
        out, _ = attend(replace(inputs, v=v), "native")
    assert not out.requires_grad and len(seen) == 1


def test_recomputed_and_moved_tensors() -> None:
    """What was saved may lie elsewhere in the backward pass, in another layout."""
    inputs = make_call(make_terms("several"), key_padding=torch.arange(9).expand(2, -1) > 7)
    q = inputs.q.clone().requires_grad_()
    wanted = [q, *parameters_of(inputs.terms)]

    def run(q: torch.Tensor) -> torch.Tensor:
        return attend(replace(inputs, q=q * 2), "native")[0]

    expected = torch.autograd.grad(run(q).square().sum(), wanted)
    again = torch.autograd.grad(checkpoint(run, q, use_reentrant=False).square().sum(), wanted)

    def pack(x: torch.Tensor) -> torch.Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = run(q)
    loss = out.square().sum()
    moved = torch.autograd.grad(loss, wanted, retain_graph=True)
    twice = torch.autograd.grad(loss, wanted)
    for right, *others in zip(expected, again, moved, twice, strict=True):
        for other in others:
            torch.testing.assert_close(other, right, **EXACT)


def test_a_mask_changed_before_the_backward_pass() -> None:
    """The tiles are formed again there, so another mask would give other gradients."""
    q, k, v = (torch.randn(1, 2, 5, 4).requires_grad_() for _ in range(3))
    padding = torch.tensor([[False, False, False, True, True]])
    inputs = AttentionInputs(q, k, v, (), Positions(5, 5), 0.5, key_padding=padding)
    out = native.attend(inputs)
    padding[0, 1] = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_dropout_follows_the_generator(formula: Libraries) -> None:
    """Torch's seed decides; both directions drop the same; 65536ths are kept count of."""
    inputs = make_call((), dropout=0.3)
    unit = torch.eye(9).double().expand(2, 2, -1, -1).clone().requires_grad_()
    inputs = replace(inputs, v=unit)

    def run(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(seed)
        out, _ = attend(inputs, "native")
        (grad,) = torch.autograd.grad(out[..., 0].sum(), unit)
        return out.detach(), grad

    (one, grad), (same, _), (other, _) = run(1), run(1), run(2)
    torch.testing.assert_close(one, same, rtol=0, atol=0)
    assert ((one == 0) != (other == 0)).any()
    probs = attend(replace(inputs, dropout=0.0), "reference", need_weights=True)[1]
    kept = torch.where(one == 0, 0.0, probs * 65536 / (65536 - round(0.3 * 65536)))
    torch.testing.assert_close(one, kept, **EXACT)
    torch.testing.assert_close(grad[..., 0], one.sum(2), **EXACT)


def test_no_memory(formula: Libraries, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without room for its buffers says so, with a remedy."""
    monkeypatch.setattr(formula[torch.float64], "relpos_forward", lambda call: 1)
    with pytest.raises(MemoryError, match="1 threads.*7 queries.*blocked"):
        attend(make_call(()), "native")


def test_operands_that_do_not_fit() -> None:
    """The kernel gets addresses: what is too short, or elsewhere, would be read past its end."""

    def table(*size: int, **chosen) -> tuple[PositionTerms, ...]:
        return (PositionTerms(Clipped(2, 1), query_vectors=torch.zeros(size, **chosen)),)

    def factors(*sizes: tuple[int, ...]) -> tuple[PositionTerms, ...]:
        return (PositionTerms(static_factors=tuple(map(torch.zeros, sizes))),)

    inputs = make_call(())
    for odd, message in (
        (replace(inputs, k=inputs.k[..., :3]), r"keys must be \(2, 2, 9, 4\), got \(2, 2, 9, 3\)"),
        (replace(inputs, k=inputs.k[:1]), "keys must be"),
        (replace(inputs, v=inputs.v[:, :, :8]), "values must be"),
        (replace(inputs, q=inputs.q[:, :, :6]), "queries must be"),
        (replace(inputs, content_q=inputs.q, content_k=inputs.k[:, :1]), "keys must be"),
        (replace(inputs, terms=table(3, 4, 4)), r"query_vectors must be \(2, 4, 4\) over its window"),
        (replace(inputs, terms=table(1, 4, 3)), "query_vectors must be"),
        (replace(inputs, terms=table(1, 4, 4, device="meta")), "query_vectors is on meta"),
        (replace(inputs, terms=factors((1, 1, 6, 3), (1, 1, 9, 3))), "static_factors of queries"),
        (replace(inputs, terms=factors((1, 1, 7, 3), (3, 1, 9, 3))), "static_factors of keys"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(odd, "native")


def test_nothing_to_attend(formula: Libraries) -> None:
    """A batch without rows has an output without rows, and gradients of 0."""
    terms = make_terms("offsets")
    inputs = make_call(terms)
    empty = replace(inputs, q=inputs.q[:0], k=inputs.k[:0], v=inputs.v[:0])
    out, _ = attend(empty, "native")
    assert out.shape == (0, 2, 7, 5) and not formula[torch.float64].calls["forward"]
    for grad in torch.autograd.grad(out.sum(), parameters_of(terms)):
        torch.testing.assert_close(grad, torch.zeros_like(grad))


def test_no_forward_mode() -> None:
    """A tangent is not lost without a word, with gradients off either."""
    inputs = make_call(())
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(inputs.q, inputs.q)
        with pytest.raises(NotImplementedError, match="jvp"):
            attend(replace(inputs, q=dual), "native")


def test_a_reset_shared_in_one_of_its_numbers() -> None:
    """The row's logit for all heads, the column's for each."""
    (scalars, free) = make_terms("reset of scalars and factors")
    row, column = torch.zeros(1).double(), torch.tensor([1.0, 2.0]).double()
    held = replace(scalars, reset=replace(scalars.reset, row=row, column=column))
    inputs = make_call((held, free))
    torch.testing.assert_close(attend(inputs, "native")[0], attend(inputs, "reference")[0], **EXACT)


@pytest.mark.parametrize("product", [False, True], ids=["added", "product"])
@pytest.mark.parametrize("heads", [1, 2])
def test_one_table_of_queries_and_keys(heads: int, product: bool) -> None:
    """The operation is given one tensor, and gives it one gradient: the sum of both parts."""
    table = torch.randn(heads, 4, 4).double().requires_grad_()
    term = PositionTerms(Clipped(2, 1), query_vectors=table, key_vectors=table, product=product)
    inputs = make_call((term,))
    with Watch() as watch:
        found = [
            torch.autograd.grad(attend(inputs, backend)[0].square().sum(), table)[0]
            for backend in ("native", "reference")
        ]
    (_, (tensors, *_)), _ = watch.seen
    assert len(tensors) == 4  # q, k, v, table
    torch.testing.assert_close(*found, **EXACT)
