"""The native kernel's dropout: its random bits, and one mask in both directions."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from helpers.native_formula import kept
from helpers.scheme_calls import as_leaves
from helpers.shaped_calls import EXACT, Shape, make_inputs, results
from relpos_fairseq.attention import AttentionInputs, attend, native, reference, triton

if triton.interpreted():
    import triton as compiler
    import triton.language as tl

    from relpos_fairseq.attention.triton.tile import dropout_mask as kept_by_triton

    Tile = namedtuple("Tile", ["first", "index"])
    Sizes = namedtuple("Sizes", ["ROWS", "KEYS", "DROPOUT"])

    @compiler.jit
    def store(out, seed, n, first, DROP: tl.constexpr, X: tl.constexpr):  # noqa: N803
        """Write which cells of the queries 0..X and the keys first..first + X are kept."""
        rows = tl.arange(0, X)
        mask = kept_by_triton(seed, n, Tile(0, rows), Tile(first, rows), False, Sizes(X, X, DROP))
        tl.store(out + rows[:, None] * X + rows[None, :], mask.to(tl.int8))


pytestmark = pytest.mark.skipif(native.build.problem() is not None, reason="no C compiler")
RATE = 0.3
SHAPES = {
    "blocks": Shape(103, after=2, masks=("left",)),
    "chunks": Shape(35, before=500, after=641, heads=1),
    "window": Shape(110, before=220, causal=True, window=150),
    "unclipped": Shape(99, before=400, after=201, clip=0, heads=1),
}


def drops(rate: float) -> int:
    """Of 65536 cells, how many are dropped."""
    return round(rate * 65536)


def expected_mask(inputs: AttentionInputs, seed: int) -> Tensor:
    """(B, H, T, S) cells kept after torch.manual_seed(seed), by Philox worked out in numpy."""
    torch.manual_seed(seed)
    drawn = int(torch.randint(1 << 40, 1 << 62, (), dtype=torch.long))
    batch, heads, tgt_len, _ = inputs.q.shape
    numbers = {"batch": batch, "heads": heads, "tgt_len": tgt_len, "src_len": inputs.k.size(2)}
    return kept(SimpleNamespace(**numbers, seed=drawn, drop_threshold=drops(inputs.dropout)))


@pytest.mark.parametrize("rate", [1e-4, 0.1, RATE, 0.9, 1 - 2.0**-15])
def test_cells_are_philoxes(rate: float) -> None:
    """Cell by cell what the counter-based generator says, across blocks and chunks of keys."""
    shape = Shape(101, before=7, after=1100, batch=2, heads=2)
    inputs = replace(make_inputs("none", shape), dropout=rate)
    inputs = replace(inputs, v=torch.eye(shape.src_len).double().expand(2, 2, -1, -1))
    mask = expected_mask(inputs, 5)
    torch.manual_seed(5)
    out, _ = attend(inputs, "native")
    assert int(((out > 0) != mask).sum()) == 0
    probs = attend(replace(inputs, dropout=0.0), "reference", need_weights=True)[1]
    right = probs * mask * (65536 / (65536 - drops(rate)))
    torch.testing.assert_close(out, right, **EXACT)


@pytest.mark.skipif(not triton.interpreted(), reason="triton's interpreter is not on")
def test_cells_are_the_fused_kernels() -> None:
    """One seed drops the same cells on a CPU as on a GPU."""
    out, seed, first = torch.zeros(64, 64, dtype=torch.int8), (1 << 61) + 987654321, 64
    store[(1,)](out, seed, 3, first, drops(RATE), 64)
    call = SimpleNamespace(batch=2, heads=2, tgt_len=64, src_len=128, seed=seed, drop_threshold=drops(RATE))
    expected = kept(call)[1, 1, :, first:]
    assert int((out.bool() != expected).sum()) == 0
    assert 0 < int(out.sum()) < out.numel()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scheme", ["none", "shaw", "m2+m4m+shaw", "m3", "tupe", "rope+m4", "transformer_xl", "cable"])
def test_both_directions_use_one_mask(scheme: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output and every gradient are the formula's under the mask of the seed."""
    inputs, leaves = as_leaves(make_inputs(scheme, SHAPES[shape]), torch.float64)
    inputs = replace(inputs, dropout=RATE)
    mask = expected_mask(inputs, 11).double() * (65536 / (65536 - drops(RATE)))
    torch.manual_seed(11)
    found = results(inputs, leaves, "native")
    monkeypatch.setattr(reference, "drop", lambda probs, rate: probs * mask)
    for name, right in results(inputs, leaves, "reference").items():
        torch.testing.assert_close(found[name], right, **EXACT, msg=lambda m, name=name: f"{name}: {m}")


def test_nothing_is_drawn_that_nobody_needs() -> None:
    """At a rate of 0; what a seed decides is in test_dropout.py."""
    inputs, state = make_inputs("shaw", SHAPES["blocks"]), torch.get_rng_state()
    attend(inputs, "native")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("scheme", ["shaw", "m3"])
def test_a_recomputed_layer_drops_the_same(scheme: str) -> None:
    """Activation checkpointing calls the kernel twice, with torch's generator set back."""
    inputs, leaves = as_leaves(make_inputs(scheme, SHAPES["blocks"]), torch.float64)
    inputs = replace(inputs, dropout=RATE)

    def layer(q: Tensor) -> Tensor:
        return attend(replace(inputs, q=q * 1.5), "native")[0].square()

    wanted = list(leaves.values())
    torch.manual_seed(9)
    expected = torch.autograd.grad(layer(inputs.q).sum(), wanted, allow_unused=True)
    torch.manual_seed(9)
    out = checkpoint(layer, inputs.q, use_reentrant=False)
    found = torch.autograd.grad(out.sum(), wanted, allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
