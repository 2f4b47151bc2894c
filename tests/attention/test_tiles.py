"""Tiles equal the reference whatever the lengths, clip distances, masks and sizes of tiles."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention.test_backends import EXACT, gradients, remaker
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import Case, build
from relpos_fairseq.attention import AttentionInputs, attend, tiles
from relpos_fairseq.attention.tiles import forward, geometry, plan, planning
from relpos_fairseq.positions import Positions

SCHEMES = (
    "none", "shaw", "shaw_keys", "transformer_xl", "t5", "m1", "m2", "m4", "deberta", "tupe",
    "abs_scalar", "rel_scalar", "alibi", "kerple", "m2+rel_scalar", "m4+rel_scalar",
    "m3", "m4m", "m2+m4m", "m3+rel_scalar+shaw",
)  # fmt: skip
MASKS = ("none", "padding", "window", "documents", "dead")


@pytest.fixture(autouse=True)
def _short_calls_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "LEAST_ROWS", 0)


def make_call(case: Case, tgt_len: int, memory: int, causal: bool, mask: str, batch: int = 3):
    """A call in fp64 with random parameters, and what remakes it."""
    stack, layer = build(case, causal=causal, heads=3, dim=4, longest=tgt_len + memory)
    src_len = tgt_len + memory
    generator = torch.Generator().manual_seed(tgt_len * 31 + src_len)

    def draw(length: int) -> torch.Tensor:
        return torch.randn(batch, 3, length, 4, generator=generator, dtype=torch.float64)

    segments = (torch.arange(src_len) > src_len // 2).long().expand(batch, -1)
    index = torch.arange(src_len).expand(batch, -1).clone()
    if mask == "padding" and not causal:  # one row is padded on the left
        index[2] = (index[2] - src_len // 4).clamp(min=0)
    positions = Positions(tgt_len, src_len, memory, token_index=index, segments=segments)
    chosen = {}
    if mask == "padding":
        padding = torch.zeros(batch, src_len, dtype=torch.bool)
        padding[1, src_len - src_len // 3 :] = True
        padding[2, : 0 if causal else src_len // 4] = True
        chosen["key_padding"] = padding
    elif mask == "dead":
        chosen["key_padding"] = torch.zeros(batch, src_len, dtype=torch.bool)
        chosen["key_padding"][0] = True
    elif mask == "window" and causal:
        chosen["window"] = max(1, src_len // 3)
    elif mask == "documents":
        edges = torch.rand(batch, src_len, generator=generator) < 0.2
        chosen["documents"] = edges.long().cumsum(1)
    inputs = AttentionInputs(
        draw(tgt_len), draw(src_len), draw(src_len), (), positions, stack.plan.scale,
        causal=causal, **chosen,
    )  # fmt: skip
    remake = remaker(inputs, stack, layer)
    inputs = remake(inputs.q, inputs.k, inputs.v)
    return inputs, [*stack.parameters(), *layer.parameters()], remake


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_equals_the_reference(data: st.DataObject) -> None:
    """Output and all gradients, for any lengths, clip distance, mask, strip and tile size."""
    name = data.draw(st.sampled_from(SCHEMES))
    flags = {"position_clip_distance": str(data.draw(st.integers(0, 20)))}
    clipped = {"m3", "m4m", "shaw", "shaw_keys", "m2", "m4", "deberta", "rel_scalar", "tupe"}
    flags = flags if clipped & set(name.split("+")) else {}
    tgt_len, causal = data.draw(st.integers(1, 70)), data.draw(st.booleans())
    memory = data.draw(st.integers(0, 40)) if "tupe" not in name and "abs" not in name else 0
    call = make_call(Case(name, flags), tgt_len, memory, causal, data.draw(st.sampled_from(MASKS)))
    rows = data.draw(st.sampled_from([1, 5, 16, 33, 128]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles.function, "tile_rows", lambda _: rows)
        patch.setitem(forward.ELEMENTS, "cpu", data.draw(st.sampled_from([1, 2000, 1 << 20])))
        patch.setattr(tiles.wide, "CHUNK", data.draw(st.sampled_from([7, 128])))
        strip = data.draw(st.sampled_from([4, 32, 256]))
        for module in (tiles.bands, tiles.vectors):
            patch.setattr(module, "STRIP", strip)
        compare(*call)


def compare(inputs: AttentionInputs, parameters: list, remake) -> None:
    """Values and gradients of `blocked` (tiles, where they serve) and of the reference."""
    expected, wanted = gradients(inputs, "reference", parameters, remake)
    got, found = gradients(inputs, "blocked", parameters, remake)
    torch.testing.assert_close(got, expected, **EXACT)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scheme", ["shaw", "m4", "m2", "transformer_xl", "rel_scalar"])
@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
def test_every_mask(scheme: str, mask: str, causal: bool) -> None:
    """Padding, windows, documents, and a row of the batch without any key."""
    compare(*make_call(Case(scheme), 37, 9, causal, mask))


def test_rotated_content_is_still_served() -> None:
    """A call that tiles refuse says why, and goes the general way."""
    inputs, parameters, remake = make_call(Case("rope+m4"), 40, 0, False, "none")
    assert "rotated" in tiles.refusal(inputs)
    compare(inputs, parameters, remake)


@pytest.mark.parametrize("mask", ["none", "padding"])
@pytest.mark.parametrize(
    "case",
    [
        Case("m4m+m4"), Case("m4", {"position_reset_cls": "on"}), Case("transformer_xl+m2+t5"),
        Case("m2+m4"), Case("transformer_xl", {"position_reset_cls": "on"}),
        Case("tupe", {"position_reset_cls": "off"}), Case("tupe", {"position_share": "none"}),
        Case("shaw+t5", {"position_reset_cls": "on"}), Case("m1+m2+alibi+kerple"),
        Case("m4", {"segment_encoding": "head"}), Case("m2", {"segment_encoding": "head"}),
    ],
    ids=str,
)  # fmt: skip
def test_folds_resets_and_segments(case: Case, mask: str) -> None:
    """What cannot be folded, a reset and segments become factors of the logits."""
    inputs, parameters, remake = make_call(case, 40, 0, False, mask)
    assert tiles.refusal(inputs) is None
    compare(inputs, parameters, remake)


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if "+" not in name])
def test_tiles_serve(scheme: str) -> None:
    """No scheme of the list falls off the fast path unnoticed."""
    inputs, *_ = make_call(Case(scheme), 40, 0, False, "none")
    assert tiles.refusal(inputs) is None


def test_short_calls_keep_their_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below a fixed number of queries, nothing is formed twice."""
    monkeypatch.undo()
    inputs, *_ = make_call(Case("shaw"), 40, 0, False, "none")
    assert "kept" in tiles.refusal(inputs)


def test_a_diverged_call_leaves_nothing_behind() -> None:
    """Buffers are used again, guard cells and all; NaN in one call must not reach the next."""
    inputs, parameters, remake = make_call(Case("shaw"), 37, 0, False, "none")
    attend(replace(inputs, q=inputs.q * float("nan")), "blocked")[0].sum().backward()
    kept = vars(geometry._STORAGE)["cells"]
    assert len(kept) >= 2
    for cells in kept.values():
        cells.fill_(float("nan"))
    compare(inputs, parameters, remake)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_keys_give_no_denormal_probabilities(dtype: torch.dtype) -> None:
    """ALiBi's far keys: products with denormal numbers would be a hundred times slower."""
    stack, layer = build(Case("alibi"), heads=2, dim=4, longest=4000)
    stack.to(dtype), layer.to(dtype)
    positions = Positions(4000, 4000)
    q, k, v = (torch.randn(1, 2, 4000, 4, dtype=dtype) for _ in range(3))
    context = stack.context(positions)
    terms = context.shared + layer.terms(layer.prepare(positions), positions)
    inputs = AttentionInputs(q, k, v, terms, positions, 0.5)
    made = planning.make_plan(inputs, 64)
    run = forward.Forward(made, None, q, k, v, made.tables)
    probs = run.probabilities(next(run.tiles()))
    smallest = probs[probs > 0].min()
    assert smallest >= torch.finfo(dtype).tiny / torch.finfo(dtype).eps ** 2
    torch.testing.assert_close(probs.sum(-1), torch.ones_like(probs.sum(-1)))


def test_dropout_is_drawn_anew_for_every_tile_and_call() -> None:
    """No two tiles, and no two calls, drop the same cells; the rate is the asked one."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 64, 4).double(), torch.randn(2, 2, 64, 4).double()
    v = torch.eye(64).double().expand(2, 2, -1, -1)
    inputs = AttentionInputs(q, k, v, (), Positions(64, 64), 0.5, dropout=0.25)
    first, second = (tiles.attend(inputs, rows=16) == 0 for _ in range(2))
    assert abs(float(first.double().mean()) - 0.25) < 0.02
    assert (first != second).any()
    patterns = {bytes(part.flatten().tolist()) for part in first.view(4, 4, 16, 64).flatten(0, 1)}
    assert len(patterns) == 16
