"""Attention dropout: every backend draws from one distribution, and replays its mask exactly."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cases import Case, build
from helpers.scheme_calls import remaker
from relpos_fairseq.attention import BACKENDS, AttentionInputs, attend, native, triton
from relpos_fairseq.core.positions import Positions

BATCH, HEADS, LENGTH, RATE = 2, 2, 128, 0.3  # heads as wide as long: unit values show the mask
SCHEMES = ("none", "rel_scalar", "shaw", "m2", "m4m")
SDPA = {"none", "rel_scalar"}
UNSERVED = {"auto"} | ({"triton"} if not triton.interpreted() else set())
UNSERVED |= {"native"} if native.build.problem() else set()
SERVED = [
    (backend, scheme)
    for backend in BACKENDS
    for scheme in SCHEMES
    if backend not in UNSERVED and (backend != "sdpa" or scheme in SDPA)
]


@pytest.fixture(autouse=True)
def _whole_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels take a head as one tile: interpreted, they cost by the tile."""
    if "triton" not in UNSERVED:
        from relpos_fairseq.attention.triton import kernel_args

        tile = kernel_args.Launch(LENGTH, LENGTH, 4, 1)
        monkeypatch.setattr(kernel_args, "launch_of", lambda *args, **kwargs: tile)


def make_call(scheme: str, causal: bool = False):
    """A call with dropout in fp32, its parameters, and what remakes it."""
    flags = {} if scheme == "none" else {"position_clip_distance": "3"}
    stack, layer = build(Case(scheme, flags), causal=causal, heads=HEADS, dim=LENGTH, longest=LENGTH)
    stack.float(), layer.float()
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(BATCH, HEADS, LENGTH, LENGTH, generator=generator) for _ in range(3))
    for module in (stack, layer):
        for parameter in module.parameters():
            parameter.data.mul_(0.3)
    positions = Positions(LENGTH, LENGTH)
    scale = stack.plan.scale
    inputs = AttentionInputs(q, k, v, (), positions, scale, causal=causal, dropout=RATE)
    remake = remaker(inputs, stack, layer)
    return remake(q, k, v), [*stack.parameters(), *layer.parameters()], remake


def dropped_probabilities(inputs: AttentionInputs, backend: str, seed: int) -> Tensor:
    """(B, H, T, S) probabilities after dropout: what unit values let through."""
    unit = torch.eye(LENGTH).expand(BATCH, HEADS, -1, -1).contiguous()
    bare = tuple(
        term if term.value_vectors is None else replace(term, value_vectors=term.value_vectors * 0)
        for term in inputs.terms
    )
    torch.manual_seed(seed)
    with torch.no_grad():
        return attend(replace(inputs, v=unit, terms=bare), backend)[0]


def plain_probabilities(inputs: AttentionInputs) -> Tensor:
    """(B, H, T, S) without dropout."""
    return attend(replace(inputs, dropout=0.0), "reference", need_weights=True)[1]


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name not in UNSERVED])
def test_cells_are_dropped_independently(backend: str) -> None:
    """Each cell at the asked rate, alike over seeds, and no two of them together."""
    inputs, *_ = make_call("none")
    seeds = 30
    kept = torch.stack([dropped_probabilities(inputs, backend, s) > 0 for s in range(seeds)])
    kept = kept.double()
    noise = (kept - (1 - RATE)) / math.sqrt(RATE * (1 - RATE))  # mean 0, variance 1
    assert abs(float(noise.mean())) < 5 / math.sqrt(noise.numel())
    by_cell = noise.sum(0).square() / seeds  # chi-square with one degree of freedom
    assert abs(float(by_cell.mean()) - 1) < 5 * math.sqrt(2 / by_cell.numel())
    for dim in range(noise.dim()):
        for step in (1, 2, 16, 32, 64):
            if step < noise.size(dim):
                pair = noise.narrow(dim, step, noise.size(dim) - step)
                together = pair * noise.narrow(dim, 0, noise.size(dim) - step)
                assert abs(float(together.mean())) < 5 / math.sqrt(together.numel()), (dim, step)


@pytest.mark.parametrize(("backend", "scheme"), SERVED)
def test_survivors_are_scaled(backend: str, scheme: str) -> None:
    """What is kept is the probability over 1 - p, and so the mean over many seeds is kept."""
    inputs, *_ = make_call(scheme)
    probs = plain_probabilities(inputs)
    total, seeds = torch.zeros_like(probs), 12
    for seed in range(seeds):
        found = dropped_probabilities(inputs, backend, seed)
        total += found
        allowed = torch.where(found > 0, probs / (1 - RATE), found)
        torch.testing.assert_close(found, allowed, rtol=1e-4, atol=1e-7)
    error = (total / seeds - probs).sum((-1, -2))
    deviation = (probs.square().sum((-1, -2)) * RATE / (1 - RATE) / seeds).sqrt()
    assert (error.abs() < 5 * deviation).all()


@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
@pytest.mark.parametrize(("backend", "scheme"), SERVED)
def test_both_directions_use_one_mask(backend: str, scheme: str, causal: bool) -> None:
    """The output and every gradient are those of the formula under the mask of the seed."""
    inputs, parameters, remake = make_call(scheme, causal)
    mask = (dropped_probabilities(inputs, backend, 11) > 0) / (1 - RATE)

    def run(attention) -> tuple[Tensor, ...]:
        leaves = [x.detach().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        torch.manual_seed(11)
        out = attention(remake(*leaves))
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
        return out.detach(), *torch.autograd.grad(out, [*leaves, *parameters], upstream)

    def by_formula(again: AttentionInputs) -> Tensor:
        dropped = plain_probabilities(again) * mask
        out = dropped @ again.v
        for term in again.terms:
            if term.value_vectors is not None:
                vectors = term.value_vectors[:, term.relation.ids(again.positions)[0]]
                vectors = vectors.expand(HEADS, -1, -1, -1)
                out = out + torch.einsum("bhij,hijd->bhid", dropped, vectors)
        return out

    def by_backend(again: AttentionInputs) -> Tensor:
        return attend(again, backend)[0]

    expected = run(by_formula)
    for found, right in zip(run(by_backend), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4 * float(right.abs().max()))


@pytest.mark.parametrize(("backend", "scheme"), SERVED)
def test_a_seed_gives_the_same_bits(backend: str, scheme: str) -> None:
    """The seed decides; the next call draws anew."""
    inputs, parameters, remake = make_call(scheme)

    def run() -> tuple[Tensor, ...]:
        leaves = [x.detach().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        out, _ = attend(remake(*leaves), backend)
        return out.detach(), *torch.autograd.grad(out.square().sum(), [*leaves, *parameters])

    torch.manual_seed(4)
    first, other = run(), run()
    torch.manual_seed(4)
    again = run()
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
