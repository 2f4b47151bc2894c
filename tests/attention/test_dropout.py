"""Attention dropout: every backend draws from one distribution, and replays its mask exactly."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers.scheme_calls import as_leaves
from helpers.shaped_calls import Shape, make_inputs, results
from relpos_fairseq.attention import BACKENDS, AttentionInputs, attend, blocked, native, reference, triton

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
def _slices_and_whole_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocked has several slices; kernels take a head as one tile: interpreted, they cost by the tile."""
    monkeypatch.setattr(blocked, "slice_rows", lambda _: 50)
    if "triton" not in UNSERVED:
        from relpos_fairseq.attention.triton import kernel_args

        tile = kernel_args.Launch(LENGTH, LENGTH, 4, 1)
        monkeypatch.setattr(kernel_args, "launch_of", lambda *args, **kwargs: tile)


def make_call(scheme: str, causal: bool = False) -> tuple[AttentionInputs, dict[str, Tensor]]:
    """A call with dropout in fp32, and its leaves; tables weigh less than content."""
    made = make_inputs(scheme, Shape(LENGTH, batch=BATCH, heads=HEADS, dim=LENGTH, causal=causal))
    inputs, leaves = as_leaves(replace(made, dropout=RATE), torch.float32)
    for name in leaves.keys() - set("qkv"):
        leaves[name].data.mul_(0.3)
    return inputs, leaves


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
    inputs, _ = make_call("none")
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
    inputs, _ = make_call(scheme)
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
def test_both_directions_use_one_mask(backend: str, scheme: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output and every gradient are those of the formula under the mask of the seed."""
    inputs, leaves = make_call(scheme, causal)
    mask = (dropped_probabilities(inputs, backend, 11) > 0) / (1 - RATE)
    torch.manual_seed(11)
    found = results(inputs, leaves, backend)
    monkeypatch.setattr(reference, "drop", lambda probs, rate: probs * mask)
    for name, right in results(inputs, leaves, "reference").items():
        torch.testing.assert_close(found[name], right, rtol=1e-4, atol=1e-4 * float(right.abs().max()))


@pytest.mark.parametrize(("backend", "scheme"), SERVED)
def test_a_seed_gives_the_same_bits(backend: str, scheme: str) -> None:
    """The seed decides; the next call draws anew."""
    call = make_call(scheme)
    torch.manual_seed(4)
    first, other = (results(*call, backend) for _ in range(2))
    torch.manual_seed(4)
    again = results(*call, backend)
    assert all(torch.equal(again[name], one) for name, one in first.items())
    assert not torch.equal(first["output"], other["output"])
