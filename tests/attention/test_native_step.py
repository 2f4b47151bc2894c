"""A step of decoding by the compiled kernel, beside the formula in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases import Case, build, terms_of
from helpers.attention_calls import threads
from helpers.layers import FORMS, WITHOUT_SEGMENTS
from relpos_fairseq.attention import AttentionInputs, api, attend, native
from relpos_fairseq.attention.step import form_clipped_key_products, supports_step
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.relations import Clipped
from relpos_fairseq.core.terms import PositionTerms

pytestmark = pytest.mark.skipif(native.build.problem() is not None, reason="no C compiler")
EXACT = {torch.float64: {"rtol": 1e-10, "atol": 1e-10}, torch.float32: {"rtol": 1e-4, "atol": 2e-5}}


def heads_of(rows: int, heads: int, keys: int, dim: int, seed: int = 0) -> Tensor:
    """(B, H, L, D) in fp64 as projections leave it: heads beside channels."""
    draw = torch.Generator().manual_seed(seed)
    made = torch.randn(keys, rows, heads, dim, generator=draw, dtype=torch.float64)
    return made.permute(1, 2, 0, 3)


def step_of(case: Case, keys: int, dim: int) -> AttentionInputs:
    """The last query of a decoder's causal call over `keys` keys."""
    stack, layer = build(case, causal=True, heads=2, dim=dim, longest=64)
    positions = Positions(1, keys, keys - 1)
    q, k, v = (heads_of(2, 2, n, dim, seed) for seed, n in enumerate((1, keys, keys)))
    terms = terms_of(stack, layer, positions)
    return AttentionInputs(q, k, v, terms, positions, 0.3, causal=True)


def changed(inputs: AttentionInputs, dtype: torch.dtype) -> AttentionInputs:
    return inputs.mapped(lambda tensor: tensor.detach().to(dtype))


def scattered(inputs: AttentionInputs) -> AttentionInputs:
    """The same call, whose keys lie in more rows than there are queries; NaN where nothing is read."""
    draw = torch.Generator().manual_seed(9)
    rows, keys = inputs.q.size(0), inputs.k.size(2)
    places = torch.stack([torch.randperm(rows + 3, generator=draw)[:rows] for _ in range(keys)], 1)

    def spread(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        made = x.new_full((rows + 3, *x.shape[1:]), float("nan"))
        made[places, :, torch.arange(keys)] = x.transpose(1, 2)
        return made

    names = ("k", "v", "content_k", "clipped_key_products")
    return replace(inputs, key_rows=places, **{name: spread(getattr(inputs, name)) for name in names})


@torch.no_grad()
def compare(inputs: AttentionInputs) -> Tensor:
    """The kernel's output equals the formula's, in fp64 and fp32, wherever the keys lie."""
    expected, _ = attend(inputs, "reference")
    if inputs.q.size(0) and native.step.reads_key_rows(inputs):
        found, _ = attend(apart := scattered(inputs), "auto")
        torch.testing.assert_close(found, expected, **EXACT[torch.float64])
        torch.testing.assert_close(attend(apart, "blocked")[0], expected, **EXACT[torch.float64])
    for dtype, near in EXACT.items():
        given = changed(inputs, dtype)
        assert native.serves_step(given) and api.choose(given) in ("native", "sdpa")
        found = native.attend(given)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, **near)
    return expected


def cases() -> Iterator[object]:
    """Every scheme in every width; other forms of terms in one of them in turn."""
    dims = (4, 18, 80)
    for number, case in enumerate(FORMS):
        for dim in (dims[number % 3],) if case.flags else dims:
            yield pytest.param(case, dim, id=f"{case}-{dim}")


@pytest.mark.parametrize(("case", "dim"), list(cases()))
def test_every_case(case: Case, dim: int) -> None:
    """Fewer channels than a vector of the processor has, several vectors, and some beyond them."""
    for keys in (1, 3, 40):
        inputs = step_of(case, keys, dim)
        if not supports_step(inputs.terms, inputs.positions):
            pytest.skip("logits that `attention.step` does not serve")
        compare(inputs)
        padding = torch.zeros(2, keys, dtype=torch.bool)
        padding[1, : keys // 2] = True
        compare(replace(inputs, key_padding=padding))
        compare(replace(inputs, window=2))


def several() -> tuple[PositionTerms, ...]:
    """Two terms of each kind over different distances, a product with a gate among them."""
    draw = torch.Generator().manual_seed(3)

    def table(heads: int, rows: int, *dim: int) -> Tensor:
        return torch.randn(heads, rows, *dim, generator=draw, dtype=torch.float64)

    long, short = Clipped(5, 0), Clipped(2, 0)
    return (
        PositionTerms(long, query_vectors=table(2, 6, 6), value_vectors=table(1, 6, 5)),
        PositionTerms(short, query_vectors=table(1, 3, 6), key_vectors=table(2, 3, 6)),
        PositionTerms(short, key_vectors=table(1, 3, 6), value_vectors=table(2, 3, 5)),
        PositionTerms(long, key_vectors=table(2, 6, 6), static=table(1, 6), gate=table(2, 6)),
        PositionTerms(short, product=True, query_vectors=table(2, 3, 6), key_vectors=table(1, 3, 6)),
    )


@settings(max_examples=60, deadline=None)
@given(
    rows=st.sampled_from([1, 2, 9]),
    keys=st.integers(1, 40),
    kept=st.lists(st.integers(0, 4), unique=True),
    rotated=st.sampled_from([0, 6, 13]),
    padded=st.integers(0, 40),
    kept_tails=st.booleans(),
)
def test_terms_of_several_kinds(
    rows: int, keys: int, kept: list[int], rotated: int, padded: int, kept_tails: bool
) -> None:
    """Tables of several lengths meet their own keys, for few rows and many; a row without keys is 0."""
    q, k = heads_of(rows, 2, 1, 6, 1), heads_of(rows, 2, keys, 6, 3)
    terms = tuple(several()[number] for number in kept)
    padding = torch.zeros(rows, keys, dtype=torch.bool)
    padding[-1, :padded] = True
    inputs = AttentionInputs(
        q, k, heads_of(rows, 2, keys, 5, 5), terms, Positions(1, keys, keys - 1), 0.3, causal=True, key_padding=padding
    )
    if rotated:  # into as many channels, or more
        content_q, content_k = (heads_of(rows, 2, n, rotated, n) for n in (1, keys))
        inputs = replace(inputs, content_q=content_q, content_k=content_k)
    if kept_tails:
        inputs = replace(inputs, clipped_key_products=form_clipped_key_products(terms, k))
    out = compare(inputs)
    assert padded < keys or not out[-1].any()


@pytest.mark.parametrize("pairs", [1, 2])
@pytest.mark.parametrize("given", [0, 1])
def test_factors_by_position(pairs: int, given: int) -> None:
    """One pair is read where its tables lie, several by torch; beside them, factors of this step alone."""
    draw = torch.Generator().manual_seed(7)

    def factors(*sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tuple(torch.randn(*size, generator=draw, dtype=torch.float64) for size in sizes)

    turned = factors((12, 2, 3))[0].transpose(0, 1)  # as a projection leaves the heads
    tables = [(turned, factors((1, 12, 3))[0]), factors((1, 12, 5), (2, 12, 5))][:pairs]
    terms = tuple(PositionTerms(position_factors=pair) for pair in tables)
    for keys in (1, 7, 12):
        q, k, v = (heads_of(2, 2, n, 6, seed) for seed, n in enumerate((1, keys, keys)))
        own = tuple(PositionTerms(static_factors=factors((2, 2, 1, 4), (2, 1, keys, 4))) for _ in range(given))
        positions = Positions(1, keys, keys - 1)
        inputs = AttentionInputs(q, k, v, terms + own, positions, 0.3, causal=True)
        expected = compare(inputs)
        for backend in ("blocked", "auto"):
            torch.testing.assert_close(attend(inputs, backend)[0], expected, rtol=1e-10, atol=1e-10)


def test_who_reads_keys_by_their_rows() -> None:
    """The kernel, of all but what torch reads beside it."""
    read = {}
    for case in WITHOUT_SEGMENTS:
        with torch.no_grad():
            inputs = changed(step_of(case, 40, 18), torch.float32)
            if api._is_native_step(inputs, False):
                read[case.scheme] = api.reads_key_rows(inputs, "auto")
            assert not api.reads_key_rows(inputs, "blocked")
    assert not read.pop("fox") and not read.pop("cable") and sum(read.values()) > 0.8 * len(read)


@torch.no_grad()
def test_fewer_positions_than_keys() -> None:
    """The kernel reads nothing beyond a table, whatever the caller says."""
    tables = (torch.randn(1, 5, 3), torch.randn(1, 5, 3))
    q, k, v = (torch.randn(1, 2, n, 4) for n in (1, 6, 6))
    terms = (PositionTerms(position_factors=tables),)
    with pytest.raises(ValueError, match="position_factors have 5 positions, and there are 6 keys"):
        native.attend(AttentionInputs(q, k, v, terms, Positions(1, 6, 5), 0.3, causal=True))


def test_fewer_keys_than_rows_of_a_table() -> None:
    """They meet the last rows, wherever these stand in the panels that the kernel reads."""
    table = torch.randn(2, 41, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    terms = (PositionTerms(Clipped(40, 0), query_vectors=table),)
    for keys in (2, 9, 33):
        q, k, v = (heads_of(2, 2, n, 6, seed) for seed, n in enumerate((1, keys, keys)))
        compare(AttentionInputs(q, k, v, terms, Positions(1, keys, keys - 1), 0.3, causal=True))


@torch.no_grad()
def test_threads_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits with one thread and with three; no rows at all; the caller's tensors stay."""
    inputs = changed(step_of(Case("shaw"), 40, 18), torch.float32)
    alone = attend(inputs, "native")[0]
    monkeypatch.setattr(native.step, "WORK_OF_A_THREAD", 1)
    before = [tensor.clone() for tensor in inputs.tensors()]
    with threads(3):
        assert torch.equal(attend(inputs, "native")[0], alone)
    assert all(map(torch.equal, before, inputs.tensors()))
    empty = replace(inputs, q=inputs.q[:0], k=inputs.k[:0], v=inputs.v[:0])
    assert attend(empty, "native")[0].shape == (0, 2, 1, 18)


def test_what_the_kernel_leaves_to_torch() -> None:
    """Gradients, dropout, half precision and channels that are apart."""
    inputs = changed(step_of(Case("m4"), 9, 18), torch.float32)
    apart = inputs.v.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert not native.serves_step(inputs)
    with torch.no_grad():
        assert native.serves_step(inputs)
        others = {
            "bf16": changed(inputs, torch.bfloat16),
            "apart": replace(inputs, v=apart),
            "dropout": replace(inputs, dropout=0.5),
        }
        for name, other in others.items():
            assert not native.serves_step(other), name
            assert api.choose(other) == "blocked"
            if name != "dropout":
                attend(other, "native")


@torch.no_grad()
def test_tables_on_another_device() -> None:
    """The kernel has addresses alone: what lies elsewhere is refused by name."""
    inputs = changed(step_of(Case("m4"), 9, 18), torch.float32)
    (term,) = inputs.terms
    static = torch.zeros(1, term.relation.size, device="meta")
    elsewhere = (PositionTerms(term.relation, static=static),)
    with pytest.raises(ValueError, match="a table of positions is on meta"):
        attend(replace(inputs, terms=elsewhere), "native")
