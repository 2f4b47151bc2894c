"""The contract of behaviour, for every scheme through the model's own modules."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases import CASES, INPUT, Case, build, plan_of, terms_of
from helpers.forms import in_turn, told_apart
from helpers.layers import BATCH, EXACT, FORMS, WITHOUT_SEGMENTS, Layer, tokens
from helpers.scheme_calls import call, rotated
from relpos_fairseq.attention import AttentionInputs, attend
from relpos_fairseq.core.placement import Placement
from relpos_fairseq.core.positions import Positions, index_in_sentence, index_of_tokens
from relpos_fairseq.modules.multihead_attention import RelPosMultiheadAttention


def _relative_cases() -> list[Case]:
    """Cases without absolute positions; a reset depends on the first token by design."""

    def relative(case: Case) -> bool:
        terms = terms_of(*build(case), Positions(2, 2))
        return not plan_of(case).absolute and all(term.reset is None for term in terms)

    return [case for case in WITHOUT_SEGMENTS if relative(case)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", FORMS, ids=str)
def test_padding_and_batch_change_nothing(case: Case, causal: bool) -> None:
    """A sentence's output is the same alone, padded left, padded right, in any batch."""
    layer = Layer(case, causal)
    length, pad = 5, 3
    x = tokens(1, length)
    alone = layer(x)
    for left in (0, 1, pad):
        wide = tokens(BATCH, length + pad, seed=9)
        wide[1, left : left + length] = x[0]
        padding = torch.zeros(BATCH, length + pad, dtype=torch.bool)
        padding[1, :left] = True
        padding[1, left + length :] = True
        out = layer(wide, padding)[1, left : left + length]
        torch.testing.assert_close(out, alone[0], **EXACT)


@pytest.mark.parametrize("case", FORMS, ids=str)
def test_decoding_equals_full_forward(case: Case) -> None:
    """Token by token with beam reorder equals one full causal pass."""
    layer = Layer(case, causal=True)
    length, order = 9, torch.tensor([2, 0, 0])
    x = tokens(BATCH, length)
    x = torch.cat([x[:, :4][order], x[:, 4:]], dim=1)  # what reordering after 4 steps amounts to
    full = layer(x)
    start = tokens(BATCH, length)[:, :4]
    cache: dict = {}
    steps = [layer(start[:, t : t + 1], cache=cache, offset=t) for t in range(4)]
    steps = [step[order] for step in steps]
    layer.attention.reorder_incremental_state(cache["state"], order)
    steps += [layer(x[:, t : t + 1], cache=cache, offset=t) for t in range(4, length)]
    torch.testing.assert_close(torch.cat(steps, dim=1), full, **EXACT)


@pytest.mark.parametrize("case", FORMS, ids=str)
def test_decoding_of_left_padded_prompts(case: Case) -> None:
    """Prompts of different lengths, padded left, decode as each alone."""
    layer = Layer(case, causal=True)
    length, pad = 7, 2
    x = tokens(2, length)
    padding = torch.zeros(2, length, dtype=torch.bool)
    padding[0, :pad] = True
    cache: dict = {}
    out = torch.cat([layer(x[:, t : t + 1], padding[:, : t + 1], cache, t) for t in range(length)], dim=1)
    torch.testing.assert_close(out[0, pad:], layer(x[:1, pad:])[0], **EXACT)
    torch.testing.assert_close(out[1], layer(x[1:])[0], **EXACT)


@pytest.mark.parametrize("case", FORMS, ids=str)
def test_several_new_tokens_on_a_cache(case: Case) -> None:
    """A chunk of tokens on cached ones (a prompt, a memory) equals one longer sequence."""
    layer = Layer(case, causal=True)
    x = tokens(2, 8)
    cache: dict = {}
    parts = [layer(x[:, :3], cache=cache), layer(x[:, 3:7], cache=cache, offset=3)]
    parts.append(layer(x[:, 7:], cache=cache, offset=7))
    torch.testing.assert_close(torch.cat(parts, dim=1), layer(x), **EXACT)


@pytest.mark.parametrize("case", FORMS, ids=str)
def test_causality(case: Case) -> None:
    """A later token changes no earlier output of a decoder."""
    layer = Layer(case, causal=True)
    x = tokens(1, 6)
    changed = x.clone()
    changed[:, 4:] += 1.0
    torch.testing.assert_close(layer(changed)[:, :4], layer(x)[:, :4], **EXACT)
    assert not torch.allclose(layer(changed)[:, 4:], layer(x)[:, 4:])


RELATIVE = _relative_cases()
SHIFTED = [("reference", case) for case in RELATIVE] + [("blocked", case) for case in told_apart(RELATIVE)]


@pytest.mark.parametrize(("backend", "case"), SHIFTED, ids=str)
def test_relative_schemes_ignore_a_shift(backend: str, case: Case) -> None:
    """The logits of a relative scheme do not change when all positions shift."""
    stack, layer = build(case)
    inputs, *_ = call(case, "square")
    length, far = 6, 5
    size = (*inputs.k.shape[:2], far, inputs.k.size(3))
    junk = torch.randn(size, dtype=torch.float64)
    positions = Positions(length, length + far, far)
    context = stack.context(positions)
    k, v = torch.cat([junk, inputs.k], 2), torch.cat([junk, inputs.v], 2)
    padding = torch.zeros(k.size(0), length + far, dtype=torch.bool)
    padding[:, :far] = True
    shifted = replace(
        inputs,
        k=k,
        v=v,
        positions=positions,
        key_padding=padding,
        terms=terms_of(stack, layer, positions, k.size(0)),
        **rotated(context, inputs.q, k),
    )
    expected, _ = attend(inputs, backend)
    torch.testing.assert_close(attend(shifted, backend)[0], expected, **EXACT)


@pytest.mark.parametrize(("case", "kind"), in_turn(CASES, ("square", "causal"), 0), ids=str)
def test_every_parameter_has_a_gradient(case: Case, kind: str) -> None:
    """No table is dead: training reaches each one from random values."""
    inputs, stack, layer, extra = call(case, kind)
    v = inputs.v.clone().requires_grad_()  # so that a scheme without parameters has a graph too
    loss = attend(replace(inputs, v=v))[0].square().sum()
    positions = inputs.positions
    added = stack.embed(replace(positions, segments=extra["segments"]))
    if added is not None:
        loss = loss + added.square().sum()
    loss.backward()
    for name, parameter in itertools.chain(stack.named_parameters(), layer.named_parameters()):
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize(
    ("scheme", "tolerance"),
    [
        *((scheme, 1e-12) for scheme in ("m1", "m2")),  # whose neutral gates change nothing
        *((scheme, 0.15) for scheme in ("rel_scalar", "shaw", "shaw_keys", "m3", "m4", "t5")),
    ],
)
def test_start_near_plain_attention(scheme: str, tolerance: float) -> None:
    """Added tables start at or near zero, M3's at one."""
    plan = plan_of(Case(scheme), heads=4, dim=32)
    torch.manual_seed(0)
    stack = Placement(plan)
    layer, positions = stack.layer_schemes(0), Positions(10, 10)
    q, k, v = torch.randn(3, 2, 4, 10, 32, dtype=torch.float64)
    inputs = AttentionInputs(q, k, v, terms_of(stack, layer, positions), positions, plan.scale)
    probs, plain = (attend(one, "reference", True)[1] for one in (inputs, replace(inputs, terms=())))
    assert (probs - plain).abs().max() < tolerance


def test_m4m_starts_near_plain_attention() -> None:
    """With its projection biases M4M's factors are near 1 and its attention near plain."""
    torch.manual_seed(0)
    plan = plan_of(Case("m4m"), heads=4, dim=64)
    stack = Placement(plan)
    attention = RelPosMultiheadAttention(256, 4, stack.layer_schemes(0), plan.scale)
    scheme = attention.position[0]
    scheme.initialize_projections(attention.q_proj, attention.k_proj)
    x = torch.nn.functional.layer_norm(torch.randn(50, 8, 256), (256,))
    q, k = (attention._heads(proj(x)) for proj in (attention.q_proj, attention.k_proj))
    for projected in (q, k):
        factor = (projected @ scheme.table[0, 0]).detach()
        assert abs(float(factor.mean()) - 1) < 0.05 and float(factor.std()) < 0.3
    positions = Positions(50, 50)
    terms = attention.position.evaluate(positions).terms
    inputs = AttentionInputs(q, k, k, terms, positions, plan.scale)
    _, probs = attend(inputs, "blocked", need_weights=True)
    _, plain = attend(replace(inputs, terms=()), "blocked", need_weights=True)
    total_variation = (probs - plain).abs().sum(-1).mean() / 2
    assert total_variation < 0.3
    uniform = (torch.full_like(plain, 1 / 50) - plain).abs().sum(-1).mean() / 2
    assert total_variation < uniform


@pytest.mark.parametrize("scheme", ["shaw", "shaw_keys", "m2", "m3", "m4", "m4m", "deberta", "rel_scalar"])
def test_a_clip_beyond_the_length_is_no_clip(scheme: str) -> None:
    """Clip >= length equals the unclipped table with the same rows."""
    longest, clip = 12, 20
    wide, wide_layer = build(Case(scheme, {"position_clip_distance": str(clip)}), longest=longest)
    full, full_layer = build(Case(scheme, {"position_clip_distance": "0"}), longest=longest)
    offset = clip - (longest - 1)
    with torch.no_grad():
        pairs = zip(wide_layer.named_parameters(), full_layer.named_parameters(), strict=True)
        for (_, source), (_, target) in pairs:
            same = source.shape == target.shape
            target.copy_(source if same else source[:, offset : source.size(1) - offset])
    inputs, *_ = call(Case(scheme), "square")
    outputs = [
        attend(replace(inputs, terms=layer.evaluate(inputs.positions).terms)) for layer in (wide_layer, full_layer)
    ]
    torch.testing.assert_close(outputs[0][0], outputs[1][0], **EXACT)
    assert wide.plan.longest is None and full.plan.longest is None


@pytest.mark.parametrize("case", WITHOUT_SEGMENTS, ids=str)
def test_any_length_or_a_clear_refusal(case: Case) -> None:
    """Past clip distance and trained length a relative scheme works and a table refuses."""
    layer = Layer(case, causal=False)  # trained for 12
    x = tokens(1, 40)
    if layer.stack.plan.longest is None and case.scheme != "sentence":
        assert layer(x).isfinite().all()
        return
    with pytest.raises(ValueError, match="table of 12 positions.*40.*--max-positions"):
        layer(x)


def test_a_row_without_keys_gives_zero() -> None:
    """A fully masked row gives 0, never NaN, in values and gradients."""
    for backend, kind in itertools.product(("reference", "blocked", "sdpa"), ("square", "step")):
        case = Case("rel_scalar") if backend == "sdpa" else Case("m4")
        inputs, _, layer, _ = call(case, kind)
        padding = torch.zeros(2, inputs.k.size(2), dtype=torch.bool)
        padding[1] = True
        q = inputs.q.clone().requires_grad_()
        out, _ = attend(replace(inputs, q=q, key_padding=padding), backend)
        assert (out[1] == 0).all() and out.isfinite().all()
        out.sum().backward()
        assert q.grad.isfinite().all()
        assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


def test_other_parameters_do_not_depend_on_the_scheme() -> None:
    """The scheme's initial values take nothing from the global random state."""
    states = []
    for case in (Case("none"), Case("shaw"), Case("deberta"), Case("learned+m3"), Case("kerple")):
        torch.manual_seed(7)
        Placement(plan_of(case)).layer_schemes(0)
        states.append(torch.get_rng_state())
    assert all(torch.equal(states[0], state) for state in states)


def test_layers_start_apart_and_seeds_differ() -> None:
    """Each layer, table and seed has its own initial values; the same seed has the same."""

    def tables(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        stack = Placement(plan_of(Case("deberta")))
        return [p for i in (0, 1) for p in stack.layer_schemes(i).parameters() if p.dim() == 3]

    first, again, other = tables(1), tables(1), tables(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for a, b in itertools.combinations([*first, *other], 2):
        assert a.shape != b.shape or not torch.equal(a, b)


@settings(max_examples=60, deadline=None)
@given(
    case=st.sampled_from([c for c in CASES if c.scheme not in INPUT]),
    length=st.integers(1, 12),
    start=st.integers(0, 11),
    rows=st.integers(1, 12),
    causal=st.booleans(),
    pads=st.lists(st.integers(0, 12), min_size=2, max_size=2),
    left=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_backends_agree_anywhere(case, length, start, rows, causal, pads, left, seed) -> None:
    """Blocked equals the reference for any slice, padding and causality."""
    causal |= case.causal_only
    start = min(start, length - 1)
    rows = min(rows, length - start)
    stack, layer = build(case, causal=causal)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 2, n, 4, generator=generator, dtype=torch.float64) for n in (rows, length, length))
    padding = torch.zeros(2, length, dtype=torch.bool)
    for row, pad in enumerate(pads):
        pad = min(pad, length)
        padding[row, slice(0, pad) if left else slice(length - pad, length)] = True
    positions = Positions(
        rows, length, start, token_index=index_of_tokens(padding), segments=torch.arange(length).expand(2, -1) % 2
    )
    context = stack.context(positions)
    inputs = AttentionInputs(
        q,
        k,
        v,
        terms_of(stack, layer, positions, q.size(0)),
        positions,
        stack.plan.scale,
        causal=causal,
        key_padding=padding,
        **rotated(context, q, k),
    )
    expected, probs = attend(inputs, "reference", need_weights=True)
    got, got_probs = attend(inputs, "blocked", need_weights=True)
    torch.testing.assert_close(got, expected, **EXACT)
    torch.testing.assert_close(got_probs, probs, **EXACT)


def test_sentence_positions_restart() -> None:
    """In a packed block positions count from each sentence's start, whatever the padding."""
    pad, eos = 1, 2
    block = torch.tensor([[pad, 0, 5, 6, eos, 7, 8, 9, eos, 5], [0, 5, eos, 6, eos, 7, eos, 1, 1, 1]])
    encoder = index_in_sentence(block, pad, eos, causal=False)
    assert encoder[0].tolist() == [0, 0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert encoder[1].tolist() == [0, 1, 2, 0, 1, 0, 1, 0, 0, 0]
    decoder = index_in_sentence(torch.tensor([[eos, 5, 6, eos, 7]]), pad, eos, causal=True)
    assert decoder[0].tolist() == [0, 1, 2, 0, 1]


def test_first_token_with_padding() -> None:
    """The first token's slot is found under padding on either side."""
    padding = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0], [0, 0, 1, 1]]).bool()
    positions = Positions(4, 4, token_index=index_of_tokens(padding))
    assert positions.first_slot().tolist() == [2, 0, 0, 0]
    assert Positions(4, 4).first_slot().tolist() == [0]


@pytest.mark.parametrize("scheme", ["tupe", "abs_scalar", "learned"])
def test_indices_where_tokens_are_not_in_place(scheme: str) -> None:
    """Padding after all tokens moves none of them; before one, or beyond a table's end, it does."""
    stack, layer = build(Case(scheme))
    rows = stack.plan.shape.max_positions
    words = torch.full((2, rows), 5)
    right, left, late = words.clone(), words.clone(), words.clone()
    right[0, 3:] = left[0, :3] = late[0, 2] = 1
    longer = torch.cat([right, torch.ones_like(words[:, :2])], dim=1)  # to a multiple of a length
    for ids, in_place in ((words, True), (right, True), (left, False), (late, False)):
        positions = stack.positions(ids, 1, 2)
        assert (positions.token_index is None) == in_place
        real = ids != 1
        counted = (real.cumsum(dim=1) - 1)[real]
        assert torch.equal(positions.key_index().expand_as(ids)[real], counted)
    positions = stack.positions(longer, 1, 2)
    assert positions.longest_row() == rows
    stack.embed(positions)
    for term in layer.evaluate(positions).terms:
        assert term.static_factors[1].size(2) == rows + 2
