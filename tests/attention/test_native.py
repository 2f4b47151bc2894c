"""The native kernel equals the reference in values and every gradient, whatever the sizes.

Small calls of every scheme and option are in test_backends.py and test_native_lowering.py; here are
sizes that they do not reach: several blocks, several chunks, and what lies across their borders.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import CASES, INPUT, Case, kinds_without
from helpers.native_calls import ODD, make_terms, parameters_of
from helpers.native_calls import make_call as make_odd
from helpers.scheme_calls import as_leaves, hold, hold_case
from helpers.shaped_calls import Shape, compare, make_inputs, results
from relpos_fairseq.attention import native

pytestmark = pytest.mark.skipif(native.build.problem() is not None, reason="no C compiler")
DOUBLE, SINGLE = torch.float64, torch.float32
TYPES = pytest.mark.parametrize("dtype", [DOUBLE, SINGLE], ids=["fp64", "fp32"])
# Every scheme of cases.py that the kernel serves in an encoder.
SCHEMES = [
    case.scheme
    for case in CASES
    if not (case.flags or case.without_kernel or case.scheme in INPUT or "+" in case.scheme)
    and native.refusal_anywhere(make_inputs(case.scheme, Shape(40, after=400))) is None
]
HYBRIDS = (
    "shaw+t5",
    "m1+m4",
    "m4m+m4",
    "rope+shaw",
    "transformer_xl+m2",
    "m2+m4m+shaw",
    "rope+m4m",
    "m3+rel_scalar+shaw",
    "m3+transformer_xl",
    "rope+transformer_xl",
    "deberta+tupe",
    "tupe+rel_scalar",
    "tupe+fox+m2",
)
IN_ATTENTION = [case for case in CASES if case.scheme not in INPUT and not case.without_kernel]
# One for each kind of term; to the kernel the other schemes are the same calls with other numbers.
KINDS = ("none", "rope", "shaw", "transformer_xl", "m2", "m3", "m4", "m4m", "tupe", "abs_scalar", "rel_scalar", "cable")
# One for each way in which the kernel reads a table.
FAMILIES = ("none", "shaw", "m2", "m3", "m4", "m4m", "tupe", "rel_scalar", "rope+m4", "fox")
SHAPES = {
    "one block": Shape(95, after=1),
    "blocks": Shape(203, masks=("right",)),
    "many rows": Shape(107, after=490, batch=6, heads=1),
    "chunks": Shape(37, before=300, after=411, masks=("left",)),
    "three chunks": Shape(101, after=1072, heads=1, batch=1),
    "wide band": Shape(110, before=9, after=580, clip=90, heads=1),
    "causal memory": Shape(115, before=640, causal=True, clip=40, batch=1),
    "window": Shape(150, before=200, causal=True, window=131, clip=5),
    "window of one": Shape(99, causal=True, window=1, batch=1),
    "documents": Shape(199, before=3, causal=True, masks=("documents", "dead")),
    "unclipped": Shape(205, clip=0, masks=("left", "right"), heads=1),
    "unclipped chunks": Shape(121, before=333, after=307, clip=0, heads=1, batch=1),
    "unclipped causal": Shape(97, before=500, causal=True, clip=0, window=490, heads=1),
}


@pytest.mark.parametrize(("number", "case"), list(enumerate(IN_ATTENTION[::3])), ids=str)
def test_schemes_and_options(number: int, case: Case) -> None:
    """Gradients of the schemes' own parameters, through what forms the terms; kinds in turn."""
    kind = ("square", "block", "pad_left", "causal_memory")[number % 4]
    hold_case("native", case, kind)


def sizes() -> Iterator[object]:
    """Every kind of term in every shape; other schemes, and fp32, in some of the shapes in turn."""
    for number, scheme in enumerate(SCHEMES):
        for place, shape in enumerate(SHAPES):
            if scheme in KINDS or (number + place) % 3 == 0:
                yield pytest.param(scheme, shape, DOUBLE, id=f"{scheme}-{shape}-fp64")
            if (number + place) % 4 == 0:
                yield pytest.param(scheme, shape, SINGLE, id=f"{scheme}-{shape}-fp32")


@TYPES
@pytest.mark.parametrize("shape", ["causal memory", "window", "documents", "unclipped causal"])
@pytest.mark.parametrize("scheme", ["fox", "m4m+fox+tupe_a", "cable"])
def test_gates(scheme: str, shape: str, dtype: torch.dtype) -> None:
    """Factors of a layer's input, that no row of the batch has in common with another."""
    compare(make_inputs(scheme, SHAPES[shape]), dtype)


@pytest.mark.parametrize(("scheme", "shape", "dtype"), list(sizes()))
def test_sizes(scheme: str, shape: str, dtype: torch.dtype) -> None:
    """No size is a multiple of the kernel's own."""
    compare(make_inputs(scheme, SHAPES[shape]), dtype)


@pytest.mark.parametrize("shape", ["blocks", "wide band", "causal memory", "unclipped chunks"])
@pytest.mark.parametrize("scheme", HYBRIDS)
def test_hybrids(scheme: str, shape: str) -> None:
    """Several schemes share one window of distances."""
    compare(make_inputs(scheme, SHAPES[shape]))


def test_every_kind_of_term_is_in_a_hybrid() -> None:
    """Of the terms that the kernel serves in an encoder."""
    assert not kinds_without(SCHEMES, HYBRIDS)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_size(data: st.DataObject) -> None:
    """Any lengths, channels, clip distance and masks, in both types."""
    lengths = st.one_of(st.integers(1, 40), st.integers(90, 100), st.sampled_from([191, 192, 193, 210]))
    around = st.one_of(st.just(0), st.integers(1, 100), st.integers(470, 700))
    causal = data.draw(st.booleans())
    shape = Shape(
        data.draw(lengths),
        data.draw(around),
        data.draw(around),
        batch=data.draw(st.integers(1, 3)),
        heads=data.draw(st.integers(1, 2)),
        dim=data.draw(st.sampled_from([2, 4, 6, 18])),
        value_dim=data.draw(st.sampled_from([None, 1, 7, 33])),
        clip=data.draw(st.sampled_from([0, 1, 2, 15, 60, 97, 200])),
        causal=causal,
        window=data.draw(st.sampled_from([None, 1, 50, 96, 300])) if causal else None,
        masks=tuple(data.draw(st.sets(st.sampled_from(["left", "right", "dead", "documents"])))),
    )
    compare(
        make_inputs(data.draw(st.sampled_from((*SCHEMES, *HYBRIDS))), shape),
        data.draw(st.sampled_from([DOUBLE, SINGLE])),
    )


@pytest.mark.parametrize("dim", [1, 3, 8, 40, 64, 80, 128, 200])
@pytest.mark.parametrize("scheme", ["shaw", "m3", "tupe", "m2+m4m+shaw"])
def test_channels(scheme: str, dim: int) -> None:
    """Numbers of channels, with values of as many and of others, one head and one row."""
    shape = Shape(98, after=5, dim=dim, heads=2 - dim % 2, batch=1)
    if dim == 1:
        shape = replace(shape, heads=2)  # schemes of the input have an even width
    compare(make_inputs(scheme, shape))
    dtype = SINGLE if "m4m" not in scheme else DOUBLE
    compare(make_inputs(scheme, replace(shape, value_dim=dim // 2 + 3)), dtype)


@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
@pytest.mark.parametrize("kind", ODD)
def test_terms_that_no_scheme_has(kind: str, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets, products, folded and bucketed relations and resets side by side."""
    monkeypatch.setattr(native.call, "MAX_CLIPPED_WIDTH", 0 if wide else 192)
    terms = make_terms(kind)
    hold("native", make_odd(terms), parameters_of(terms))


# --- the softmax over chunks ---------------------------------------------------------------------


@TYPES
@pytest.mark.parametrize("towards", ["later", "earlier", "middle"])
@pytest.mark.parametrize("clip", [3, 0], ids=["band", "unclipped"])
@pytest.mark.parametrize("scheme", ["shaw", "m3", "m2+m4m+shaw"])
def test_logits_that_grow_over_chunks(scheme: str, clip: int, towards: str, dtype: torch.dtype) -> None:
    """The largest logit so far changes with each chunk, or never, or in the second."""
    inputs = make_inputs(scheme, Shape(61, before=700, after=650, clip=clip, heads=1, batch=1))
    line = torch.linspace(-1, 1, inputs.k.size(2), dtype=DOUBLE)
    rise = {"later": line, "earlier": -line, "middle": -(line**2)}[towards]
    q, k = inputs.q.clone(), inputs.k.clone()
    q[..., 0], k[..., 0] = 4.0, 15 * rise
    if scheme == "m2+m4m+shaw":
        k[..., 0] /= 8
    compare(replace(inputs, q=q, k=k), dtype)


@TYPES
@pytest.mark.parametrize("scheme", FAMILIES)
def test_chunks_without_a_key(scheme: str, dtype: torch.dtype) -> None:
    """Padding and documents hide the first chunks, the last ones, or one between."""
    inputs = make_inputs(scheme, Shape(50, before=1000, after=500, batch=3, heads=1))
    slots = torch.arange(1550)
    padding = torch.stack([slots < 1200, slots > 300, (slots > 400) & (slots < 1250)])
    compare(replace(inputs, key_padding=padding), dtype)
    documents = torch.stack([slots // 1010, slots // 1040, (slots > 1020).long() * 5])
    found = compare(replace(inputs, documents=documents), dtype)
    assert all(x.isfinite().all() for x in found.values())


@TYPES
@pytest.mark.parametrize("scheme", FAMILIES)
def test_large_logits(scheme: str, dtype: torch.dtype) -> None:
    """Probabilities that are 1 and 0, and such that vanish, make nothing that is not finite."""
    inputs = make_inputs(scheme, Shape(100, after=520, heads=1, batch=1))
    for factor in (30.0, 1e4):
        made, leaves = as_leaves(replace(inputs, q=inputs.q * factor), dtype)
        found = results(made, leaves, "native")
        assert all(x.isfinite().all() for x in found.values())
        if dtype == DOUBLE and (scheme != "m4m" or factor < 100):  # whose logits are 1e9
            compare(replace(inputs, q=inputs.q * factor))


# --- resets --------------------------------------------------------------------------------------


FIRSTS = ((0,), (1,), (96,), (577,), (704,), (0, 95, 650), (3, 199, 704))


@pytest.mark.parametrize(
    ("first", "dtype"),
    [
        pytest.param(first, dtype, id=f"first{place}-{name}")
        for name, dtype in (("fp64", DOUBLE), ("fp32", SINGLE))
        for place, first in enumerate(FIRSTS)
        if dtype == DOUBLE or len(first) > 1
    ],
)
@pytest.mark.parametrize("scheme", ["tupe", "m4", "shaw+t5", "tupe+rel_scalar"])
def test_resets_anywhere(scheme: str, first: tuple[int, ...], dtype: torch.dtype) -> None:
    """The first token in any block and chunk, before the queries and after them, row by row."""
    shape = Shape(197, before=90, after=420, batch=3, heads=1, reset="on", clip=4)
    inputs = make_inputs(scheme, shape)
    slots = torch.tensor(first)
    terms = tuple(
        term if term.reset is None else replace(term, reset=replace(term.reset, first=slots)) for term in inputs.terms
    )
    assert any(term.reset is not None for term in terms)
    inputs = replace(inputs, terms=terms)
    compare(inputs, dtype)
    if len(first) > 1:
        padding = torch.arange(707) < slots[:, None]
        compare(replace(inputs, key_padding=padding.expand(3, -1)), dtype)


@pytest.mark.parametrize(
    ("batch", "dtype"),
    [(2, DOUBLE), (4, DOUBLE), (5, SINGLE), (9, DOUBLE)],
    ids=["2-fp64", "4-fp64", "5-fp32", "9-fp64"],
)
@pytest.mark.parametrize("scheme", ["tupe", "tupe_a", "abs_scalar", "tupe+rel_scalar"])
def test_rows_that_share_factors(scheme: str, batch: int, dtype: torch.dtype) -> None:
    """Rows of the batch that share factors share their products, but not masks and resets."""
    inputs = make_inputs(scheme, Shape(130, after=480, batch=batch, heads=2, dim=2))
    compare(inputs, dtype)
    generator = torch.Generator().manual_seed(batch)
    lengths = torch.randint(0, 620, (batch, 1), generator=generator)
    starts = torch.randint(0, 300, (batch, 1), generator=generator)
    slots = torch.arange(610)
    terms = tuple(
        term if term.reset is None else replace(term, reset=replace(term.reset, first=starts[:, 0]))
        for term in inputs.terms
    )
    padding = (slots >= lengths) | (slots < starts)
    masked = replace(inputs, terms=terms, key_padding=padding, causal=True)
    compare(replace(masked, documents=(slots > starts + 100).long()), dtype)


@pytest.mark.parametrize("scheme", ["tupe", "m4", "rel_scalar", "m2", "rope+shaw"])
@pytest.mark.parametrize("reset", ["on", "off"])
def test_segments(scheme: str, reset: str) -> None:
    """Pairs of segments are factors, which a reset may or may not replace."""
    given = reset if scheme in ("tupe", "m4", "rel_scalar") else None
    shape = Shape(105, before=20, after=480, heads=2, batch=2, reset=given, masks=("left",))
    compare(make_inputs(scheme, shape, segment_encoding="head"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", FAMILIES)
def test_half_precision(scheme: str, dtype: torch.dtype) -> None:
    """Evaluated in fp32: the output and all gradients are those of fp32, rounded."""
    inputs, leaves = as_leaves(make_inputs(scheme, Shape(100, after=500, heads=1)), dtype)
    found = results(inputs, leaves, "native")
    wide, wanted = as_leaves(inputs, SINGLE)
    for name, right in results(wide, wanted, "native").items():
        assert found[name].dtype == dtype
        size = float(right.abs().max())
        rough = {"rtol": torch.finfo(dtype).eps, "atol": 2 * torch.finfo(dtype).eps * size}
        torch.testing.assert_close(found[name].float(), right, **rough, msg=lambda m, name=name: f"{name}: {m}")
