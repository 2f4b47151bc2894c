"""Every scheme equals its paper's equation, worked out pair by pair (fp64, 1e-10)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import naive
from cases import BEYOND, CASES, INPUT, Case, build, oracle_members, source_of, terms_of
from helpers import FULL
from helpers.forms import in_turn, told_apart
from helpers.scheme_calls import call, shape_of
from relpos_fairseq.attention import AttentionInputs, attend, native, triton
from relpos_fairseq.core.placement import Placement
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.relations import Bucketed, DistanceRelation
from relpos_fairseq.core.rotation import Turns, rotate
from relpos_fairseq.core.scheme import REGISTER
from relpos_fairseq.schemes import scheme_class
from relpos_fairseq.schemes.absolute import sinusoid
from relpos_fairseq.schemes.alibi import slopes
from relpos_fairseq.schemes.segments import SegmentHead

TOLERANCE = 1e-10
IN_ATTENTION = [*(case for case in CASES if case.scheme not in INPUT), *BEYOND]
KINDS = ("square", "memory", "causal", "causal_memory", "step", "pad_left", "pad_right", "step_padded", "block")


def expected(
    case: Case, inputs: AttentionInputs, stack: Placement, layer: torch.nn.ModuleList, extra: dict
) -> tuple[Tensor, Tensor, Tensor]:
    """The oracle's logits, probabilities and output of the same call."""
    scale = case.flags.get("position_scale")  # without it the oracle knows the paper's
    schemes = [*stack.shared, *layer]
    heads = [scheme for scheme in schemes if isinstance(scheme, SegmentHead)]
    padding = extra["padding"]
    return naive.attention(
        oracle_members(schemes) or [("none", {}, {})],
        inputs.q,
        inputs.k,
        inputs.v,
        query_start=inputs.positions.query_start,
        causal=inputs.causal,
        real=None if padding is None else ~padding,
        index=inputs.positions.token_index,
        segments=extra["segments"] if heads else None,
        segment_table=heads[0].pair_table.detach() if heads else None,
        scale_factor=None if scale is None else float(scale),
        inputs=source_of(inputs.positions, inputs.q.size(0), stack.plan.shape.embed_dim),
        places=None if inputs.positions.randomized is None else inputs.positions.randomized.tolist(),
    )


def hold_to_paper(case: Case, kind: str, backend: str, **how) -> AttentionInputs:
    """Hold the probabilities and output of real queries to the scalar loops; returns the call."""
    inputs, stack, layer, extra = call(case, kind, **how)
    _, *wanted = expected(case, inputs, stack, layer, extra)
    out, probs = attend(inputs, backend, need_weights=True)
    real = torch.ones(len(out), 1, out.size(2), 1, dtype=torch.bool)
    if inputs.key_padding is not None:
        positions = inputs.positions
        real = ~inputs.key_padding[:, None, positions.query_start : positions.query_stop, None]
    for found, right in zip((probs, out), wanted, strict=True):
        pick = real.expand_as(right)
        torch.testing.assert_close(found[pick], right[pick], rtol=0, atol=TOLERANCE)
    return inputs


# What blocked adds to the reference are forms of terms: their numbers are the reference's own, and
# attention/test_backends.py compares both in more calls.
BLOCKED = in_turn(told_apart(IN_ATTENTION), KINDS if FULL else ("square", "causal", "pad_left"))
EVALUATED = [("reference", *one) for one in in_turn(IN_ATTENTION, KINDS, 2)] + [("blocked", *one) for one in BLOCKED]


@pytest.mark.parametrize(("backend", "case", "kind"), EVALUATED, ids=str)
def test_equals_the_paper(backend: str, case: Case, kind: str) -> None:
    """Probabilities and output equal the scalar loops."""
    hold_to_paper(case, "step" if kind == "step_padded" and "none" in case.scheme.split("+") else kind, backend)


UNLIMITED = [c for c in IN_ATTENTION if not any(scheme_class(name).table_limited for name in c.scheme.split("+"))]


@pytest.mark.parametrize(("case", "kind"), in_turn(UNLIMITED, ("square", "causal"), 0), ids=str)
def test_inputs_longer_than_trained_equal_the_paper(case: Case, kind: str) -> None:
    """A scheme without a table of positions takes any length, as its equation does."""
    hold_to_paper(case, kind, "reference", longest=3)


@pytest.mark.parametrize("value", [-1.0, 0.005, 0.02])
def test_kerples_parameters_are_held_at_their_bound(value: float) -> None:
    """Which random parameters of other tests do not reach, so that gradients are those of differences."""
    case = Case("kerple")
    inputs, stack, layer, extra = call(case, "square")
    with torch.no_grad():
        layer[0].amplitude[0] = layer[0].rate[1] = value
    inputs = replace(inputs, terms=terms_of(stack, layer, inputs.positions))
    torch.testing.assert_close(attend(inputs, "reference")[0], expected(case, inputs, stack, layer, extra)[2])


# A reset's oracle knows the first token by its position 0.
DRAWN = [Case(name) for name in ("m3+rel_scalar+shaw", "rope+m4", *REGISTER) if name not in INPUT] + [
    Case("m4", {"position_reset_cls": "on"}),
    Case("t5", {"segment_encoding": "head"}),
]


@pytest.mark.parametrize("kind", ["causal", "pad_left", "block"])
@pytest.mark.parametrize("case", DRAWN, ids=str)
@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_positions_drawn_at_random(case: Case, kind: str, backend: str) -> None:
    """Schemes read the positions that were drawn, and masks the slots (Ruoss 2023)."""
    drawn = [0, 1, 4, 5, 6, 8, 9, 10, 11][: shape_of(kind)["src_len"]]
    if not any(m.options.reset_cls for m in build(case)[0].plan.members):
        drawn = [3, 4, 5, 7, 10, 11] if len(drawn) == 6 else [1, 2, *drawn[2:]]
    inputs = hold_to_paper(case, kind, backend, drawn=drawn)
    for kernel in (native, triton):
        refused = kernel.refusal_anywhere(inputs)
        distances = any(isinstance(t.relation, DistanceRelation) for t in inputs.terms)
        assert ("drawn at random" in (refused or "")) == distances


@settings(max_examples=200, deadline=None)
@given(
    half=st.integers(1, 20), reach=st.integers(2, 400), distance=st.integers(-1000, 1000), bidirectional=st.booleans()
)
def test_t5_buckets(half: int, reach: int, distance: int, bidirectional: bool) -> None:
    """Buckets equal the published function in exact integers, edges included."""
    buckets = 4 * half if bidirectional else 2 * half
    exact = half
    if reach <= exact:
        reach = exact + 1 + reach
    relation = Bucketed(buckets, reach, bidirectional)
    got = relation.of_distance(torch.tensor([distance]))
    assert got.item() == naive.t5_bucket(distance, buckets, reach, bidirectional)
    beyond = relation.of_distance(torch.tensor([relation.lowest, relation.lowest - 7]))
    assert beyond[0] == beyond[1]


@pytest.mark.parametrize("heads", range(1, 34))
def test_alibi_slopes(heads: int) -> None:
    assert slopes(heads) == pytest.approx(naive.alibi_slopes(heads))


@pytest.mark.parametrize("dim", [6, 7, 16])
def test_sinusoid(dim: int) -> None:
    """Fairseq's layout, counted as fairseq counts."""
    got = sinusoid(torch.arange(40), dim)
    for position in range(40):
        expected = torch.tensor(naive.sinusoid_fairseq(position, dim))
        torch.testing.assert_close(got[position], expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("where", [(5, 5, 0), (3, 9, 0), (2, 7, 5), (1, 4, 3)], ids=str)
def test_transformer_xl_projects_either_direction(where: tuple[int, int, int]) -> None:
    """W_R R of every distance, the longer side past or future, and its gradient."""
    _, layer = build(Case("transformer_xl"))
    (scheme,) = layer
    (relation, vectors), positions = scheme.prepare(Positions(*where)), Positions(*where)
    distances = range(positions.lowest_distance, positions.highest_distance + 1)
    for row, distance in enumerate(distances):
        wave = torch.tensor(naive.sinusoid_xl(-distance, 8), dtype=torch.float64)
        expected = (scheme.projection.detach() @ wave).view(2, 4)
        torch.testing.assert_close(vectors[:, row].detach(), expected)
    upstream = torch.randn_like(vectors)
    (grad,) = torch.autograd.grad(vectors, scheme.projection, upstream)
    waves = [naive.sinusoid_xl(-distance, 8) for distance in distances]
    expected = upstream.transpose(0, 1).flatten(1).t() @ torch.tensor(waves, dtype=torch.float64)
    torch.testing.assert_close(grad, expected)
    assert vectors.size(1) == relation.size == len(distances)


@pytest.mark.parametrize("dim", [2, 5, 6])
def test_rotations_of_any_layout(dim: int) -> None:
    """Derivatives, twice, where heads are slices, channels lie apart, or begin at odd places."""
    turn = Turns(torch.randn(5, dim // 2, dtype=torch.float64)).of(torch.float64, 0, 5)
    x = torch.randn(5, 2, 3, dim, dtype=torch.float64)
    wide = torch.cat([x, x], -1)
    for apart in (x, wide[..., 1 : dim + 1], wide[..., ::2]):
        q = apart.permute(1, 2, 0, 3)
        torch.testing.assert_close(rotate(q, turn), rotate(q.contiguous(), turn))
    leaf = x.permute(1, 2, 0, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda q: rotate(q, turn), leaf)
    assert torch.autograd.gradgradcheck(lambda q: rotate(q, turn), leaf)
