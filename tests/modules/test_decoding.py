"""Incremental decoding without gradients: buffers that grow, are reordered and shrink."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases import Case, build
from helpers.layers import BATCH, EXACT, FORMS, Layer, tokens
from relpos_fairseq.attention import AttentionInputs, attend, step
from relpos_fairseq.attention.inputs import of_rows
from relpos_fairseq.core import placement as stack
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.terms import PositionTerms
from relpos_fairseq.modules.multihead_attention import SPARES
from relpos_fairseq.nn import self_attention
from relpos_fairseq.nn.decoding_cache import DecodingCache

ORDERS = {3: [2, 0, 0], 5: [0, 2], 8: [1, 0], 9: [0, 0]}  # by step; at 5 a sentence is finished


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for 4 tokens, then 8, then 16."""
    monkeypatch.setattr(stack, "LEAST_CAPACITY", 4)


def poison(cache: DecodingCache, spares: dict) -> None:
    """NaN wherever nothing may be read."""
    for name in cache.kept:
        cache._buffers[name][:, :, cache.length :] = float("nan")
    if cache._products is not None:
        cache._products[:, :, cache._with_products :] = float("nan")
    for spare in spares.values():
        spare.fill_(float("nan"))


@torch.no_grad()
def decode(layer: Layer, left: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of the rows that are left after ORDERS, their padding, and their steps' outputs."""
    cache: dict = {}
    outputs, read = [], torch.zeros(BATCH, 0, 8, dtype=torch.float64)
    padding = torch.zeros(BATCH, 0, dtype=torch.bool)
    for place in range(11):
        if place in ORDERS:
            order = torch.tensor(ORDERS[place])
            layer.attention.reorder_incremental_state(cache["state"], order)
            read, padding = read[order], padding[order]
            outputs = [out[order] for out in outputs]
        new = tokens(len(read), 1, seed=place)
        padded = torch.zeros(len(read), 1, dtype=torch.bool)
        padded[0] = place < left
        read, padding = torch.cat([read, new], dim=1), torch.cat([padding, padded], dim=1)
        given = padding if padding.any() else None
        outputs.append(layer(new, given, cache, place))
        state = layer.attention._get_input_buffer(cache["state"])
        poison(state, cache["state"].get(SPARES, {}))
    return read, padding, torch.cat(outputs, dim=1)


@pytest.mark.parametrize("case", FORMS, ids=str)
def test_growing_reordered_and_shrunk_decoding_equals_full_forward(case: Case) -> None:
    """Token by token over two growths, reorders and a finished sentence; no stale key is read."""
    layer = Layer(case, causal=True)
    read, _, outputs = decode(layer)
    torch.testing.assert_close(outputs, layer(read).detach(), **EXACT)


@pytest.mark.parametrize("case", FORMS, ids=str)
def test_rows_are_moved_where_attention_reads_its_own(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """As without a C compiler, on a GPU, or with gates."""
    monkeypatch.setattr(self_attention, "reads_key_rows", lambda *_: False)
    layer = Layer(case, causal=True)
    read, _, outputs = decode(layer)
    torch.testing.assert_close(outputs, layer(read).detach(), **EXACT)


@pytest.mark.parametrize("scheme", ["none", "m4m", "shaw", "tupe", "rope+m4", "t5"])
def test_padded_prompts_grow_and_shrink(scheme: str) -> None:
    """The same where a row's prompt is padded left: its padding follows it."""
    layer = Layer(Case(scheme), causal=True)
    read, padding, outputs = decode(layer, left=2)
    full = layer(read, padding).detach()
    assert padding.any()
    torch.testing.assert_close(outputs[~padding], full[~padding], **EXACT)


@torch.no_grad()
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_cache_is_what_joining_and_selecting_give(data: st.DataObject) -> None:
    """Against lists: any chunks, any orders, any capacities."""
    cache, spares = DecodingCache(), {}
    expected = torch.zeros(3, 2, 0, 5)
    count = 0
    for _ in range(data.draw(st.integers(1, 12))):
        if cache.length and data.draw(st.booleans()):
            rows = st.integers(0, len(expected) - 1)
            order = torch.tensor(data.draw(st.lists(rows, min_size=1, max_size=5)))
            cache.reorder(order, spares)
            expected = expected[order]
        else:
            new = count + torch.arange(data.draw(st.integers(1, 6)) * 1.0)
            count += len(new)
            key = new[None, None, :, None] + torch.rand(len(expected), 2, 1, 5)
            kept = cache.append({"key": key, "absent": None, "value": -key}, None)
            expected = torch.cat([expected, key], dim=2)
            places = cache.places
            for name, sign in (("key", 1), ("value", -1)):
                found = kept[name] if places is None else of_rows(kept[name], places)
                torch.testing.assert_close(found, sign * expected, rtol=0, atol=0)
            assert kept["absent"] is None and cache.rows == len(expected)
            cache.is_read_by_rows = data.draw(st.booleans())
        poison(cache, spares)


@torch.no_grad()
def test_a_search_moves_no_key() -> None:
    """Where attention reads keys by their rows, buffers stay; what asks for the buffers gets those of the rows."""
    layer, cache = Layer(Case("m4"), causal=True), {}
    for place in range(4):
        layer(tokens(BATCH, 1, seed=place), None, cache, place)
    state = layer.attention._get_input_buffer(cache["state"])
    if not state.is_read_by_rows:
        pytest.skip("no C compiler")
    before = {name: buffer.data_ptr() for name, buffer in state._buffers.items()}
    layer.attention.reorder_incremental_state(cache["state"], torch.tensor([1, 1, 0]))
    assert {name: buffer.data_ptr() for name, buffer in state._buffers.items()} == before
    assert state.places.tolist() == [[1] * 4, [1] * 4, [0] * 4]
    rows = {name: of_rows(buffer[:, :, :4], state.places) for name, buffer in state._buffers.items()}
    assert all(torch.equal(buffer[:, :, :4], rows[name]) for name, buffer in state.buffers().items())
    assert state.places is None


@torch.no_grad()
def test_rows_of_finished_sentences_do_not_grow() -> None:
    """Buffers that grow have the rows that are left, wherever their keys lay: one long hypothesis is one row."""
    cache = DecodingCache()
    first = torch.rand(64, 2, 8, 5)
    cache.append({"key": first}, None)
    cache.is_read_by_rows = True
    cache.reorder(torch.tensor([40, 40, 7]), {})
    key = torch.rand(3, 2, 100, 5)
    kept = cache.append({"key": key}, None)["key"]
    torch.testing.assert_close(kept, torch.cat([first[[40, 40, 7]], key], dim=2), rtol=0, atol=0)
    assert cache.places is None and cache.buffers()["key"].size(0) == 3


@torch.no_grad()
def test_a_step_writes_its_own_slot_alone() -> None:
    """Within its capacity a buffer stays where it is, and earlier slots are not touched."""
    cache = DecodingCache()
    new = {"key": torch.rand(2, 1, 3, 4)}
    first = cache.append(new, None)["key"]
    second = cache.append({"key": torch.rand(2, 1, 1, 4)}, None)["key"]
    assert first.data_ptr() == second.data_ptr()
    third = cache.append({"key": torch.rand(2, 1, 1, 4)}, None)["key"]
    assert third.data_ptr() != second.data_ptr()
    torch.testing.assert_close(third[:, :, :4], second)


@torch.no_grad()
def test_layers_lend_each_other_one_spare_buffer() -> None:
    """Reordering all layers allocates one buffer a kind, once."""
    caches, spares = [DecodingCache() for _ in range(3)], {}
    for cache in caches:
        cache.append({"key": torch.rand(4, 1, 3, 4), "value": torch.rand(4, 1, 3, 4)}, None)
    places = set()
    for order in ([3, 2, 1, 0], [1, 1, 0], [2, 0, 1]):
        for cache in caches:
            cache.reorder(torch.tensor(order), spares)
            places |= {buffer.data_ptr() for buffer in cache._buffers.values()}
    assert len(places) == 7


@pytest.mark.parametrize("case", FORMS, ids=str)
def test_kept_tables_serve_shorter_and_later_steps(case: Case) -> None:
    """Tables made for 40 keys serve any fewer; gradients reach tables that a step makes itself."""
    schemes, layer = build(case, causal=True, heads=2, dim=4, longest=40)
    ahead = [(members, members.prepare(Positions(1, 40, 39))) for members in (schemes.shared, layer)]
    tables = None
    for length in (1, 2, 17, 40):
        positions = Positions(1, length, length - 1)
        found = (members.terms_of(prepared, positions) for members, prepared in ahead)
        terms = sum((evaluated.at(positions).terms for evaluated in found), ())
        if tables is not None:  # what stays the same is kept by decoding (stack.DecodingTerms)
            terms = tuple(
                replace(kept, static_factors=term.static_factors)
                for kept, term in zip(tables.terms, terms, strict=True)
            )
        if not step.supports_step(terms, positions):
            pytest.skip("a reset is no decoder's")
        q, k, v = (torch.randn(2, 2, n, 4, dtype=torch.float64) for n in (1, length, length))
        inputs = AttentionInputs(q, k, v, terms, positions, 0.3, causal=True)
        if tables is None:
            tables = step.StepTables(terms, 0.3, torch.float64, q.device, 40)
        assert tables.fit(terms, length) and not tables.fit(terms, 41)
        expected, _ = attend(inputs, "reference")
        for one in (inputs, replace(inputs, step_tables=tables)):
            torch.testing.assert_close(attend(one, "blocked")[0], expected, **EXACT)


@pytest.mark.parametrize("case", FORMS, ids=str)
def test_tables_are_formed_once_for_many_steps(case: Case) -> None:
    """Terms that move with the query bring the same tables at every step."""
    layer, cache = Layer(case, causal=True), {}
    with torch.no_grad():
        steps(layer, tokens(BATCH, 3), cache)
        kept = layer.attention._get_input_buffer(cache["state"])._tables
        steps(layer, tokens(BATCH, 4), cache, start=3)
    assert kept is layer.attention._get_input_buffer(cache["state"])._tables


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["abs_scalar", "tupe_a", "tupe", "tupe_released"])
def test_factors_stay_tables_between_steps(scheme: str) -> None:
    """Steps share their terms, and every step is held to the table's length; what is padded is read anew."""
    placement, layer = build(Case(scheme), causal=True, heads=2, dim=4, longest=11)
    schemes = layer if len(layer) else placement.shared
    kept = stack.DecodingTerms()
    first = kept.evaluate(schemes, Positions(1, 9, 8)).terms
    assert first[0].position_factors is not None
    assert kept.evaluate(schemes, Positions(1, 11, 10)).terms is first
    with pytest.raises(ValueError, match="has a table of 11 positions and the input has 12"):
        kept.evaluate(schemes, Positions(1, 12, 11))
    index = torch.arange(11).expand(2, 11).clone()
    index[1] = (index[1] - 4).clamp(min=0)
    padded = Positions(1, 11, 10, token_index=index)
    (term,) = kept.evaluate(schemes, padded).terms
    (expected,) = schemes.evaluate(padded).terms
    for found, wanted in zip(term.static_factors, expected.static_factors, strict=True):
        torch.testing.assert_close(found, wanted)


def test_tables_of_other_terms_do_not_fit() -> None:
    """Tables are known by their tensors: a changed one is never met with an old one's rows."""
    _, layer = build(Case("m4"), causal=True, heads=2, dim=4)
    positions = Positions(1, 5, 4)
    (term,) = layer.evaluate(positions).terms
    tables = step.StepTables((term,), 0.3, torch.float64, torch.device("cpu"), 8)
    assert tables.fit((replace(term),), 5)
    assert not tables.fit((replace(term, key_vectors=term.key_vectors.clone()),), 5)
    assert not tables.fit((term, PositionTerms()), 5)


def steps(layer: Layer, read: Tensor, cache: dict, start: int = 0) -> Tensor:
    """Outputs of the tokens from `start` on, one step each."""
    places = range(start, read.size(1))
    return torch.cat([layer(read[:, i : i + 1], None, cache, i) for i in places], dim=1)


@pytest.mark.parametrize("scheme", ["none", "shaw", "m4m", "rope+m4"])
def test_queries_alone_may_want_gradients(scheme: str) -> None:
    """Frozen keys are kept for the queries' gradients: later steps may not write beside them."""
    layer = Layer(Case(scheme), causal=True)
    for name, part in layer.named_parameters():
        part.requires_grad_("q_proj" in name)
    read = tokens(BATCH, 6)
    wanted = torch.autograd.grad(layer(read).square().sum(), layer.attention.q_proj.weight)
    found = torch.autograd.grad(steps(layer, read, {}).square().sum(), layer.attention.q_proj.weight)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("case", FORMS, ids=str)
def test_a_prompt_read_without_gradients(case: Case) -> None:
    """What it left in the cache gives later steps the gradients of every table."""
    layer, cache, read = Layer(case, causal=True), {}, tokens(BATCH, 4)  # no growth between
    with torch.no_grad():
        steps(layer, read[:, :3], cache)
    steps(layer, read, cache, start=3).square().sum().backward()
    tables = [name for name, part in layer.named_parameters() if "position" in name]
    assert all(layer.get_parameter(name).grad is not None for name in tables)


def test_a_prompt_read_in_inference_mode() -> None:
    """Its buffers are torch's to refuse: they are copied once, not written."""
    layer, cache, read = Layer(Case("m4m"), causal=True), {}, tokens(BATCH, 6)
    with torch.inference_mode():
        first = steps(layer, read[:, :2], cache).clone()
        layer.attention.reorder_incremental_state(cache["state"], torch.arange(BATCH))
    with torch.no_grad():
        layer.attention.reorder_incremental_state(cache["state"], torch.arange(BATCH))
        outputs = torch.cat([first, steps(layer, read, cache, start=2)], dim=1)
        torch.testing.assert_close(outputs, layer(read), **EXACT)


@pytest.mark.parametrize("held", [1, BATCH])
def test_rows_of_another_batch_are_refused(held: int) -> None:
    """Also where one row would spread over all, and where a buffer grows."""
    cache = DecodingCache()
    with torch.no_grad():
        cache.append({"key": torch.rand(held, 1, 4, 2)}, None)
        with pytest.raises(ValueError, match=f"holds {held} rows and the new tokens have"):
            cache.append({"key": torch.rand(BATCH + 1 - held, 1, 1, 2)}, None)
