"""The algebra of conversions: converted models compute what their sources do, to 1e-10 in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import ENCODERS, taking
from helpers.conversion import POSITIONS, assert_exact, config, converted, difference, random_state
from helpers.lm_models import randomized, small_lm, small_xl, stream
from relpos_fairseq.conversion import NotExactError, convert, layouts
from relpos_fairseq.conversion.layouts import ENCODER
from relpos_fairseq.conversion.report import ConversionReport, Probe
from relpos_fairseq.conversion.reshaping import resize
from relpos_fairseq.core.options import SHARE
from relpos_fairseq.core.relations import Bucketed, Clipped, Folded, remap_distances
from relpos_fairseq.core.scheme import PositionMismatchError
from relpos_fairseq.formats.on_load import prepare_sides
from relpos_fairseq.models.building import build_roberta, outputs_of
from relpos_fairseq.saved.identity import plan_of
from relpos_fairseq.schemes import scheme_class, scheme_names


def never_neutral(name: str) -> str:
    """Why no values of a scheme's tables change nothing, under its default options; "": some do."""
    plan = plan_of(config(name))
    ((place,),) = [layouts.places(plan)]
    return place.build(plan, 0).never_neutral


ADDED = [name for name in ENCODERS if name != "none" and scheme_class(name).own_scale is not None]
NEUTRAL = [name for name in ADDED if not never_neutral(name)]
REFUSED = [name for name in ADDED if never_neutral(name)]
CLOSE = 1e-10


@pytest.mark.parametrize("scheme", REFUSED)
def test_what_cannot_be_neutral_is_refused_and_offered(scheme):
    source, target = config("learned"), config(f"learned+{scheme}")
    with pytest.raises(NotExactError, match=rf"learned\+{scheme} is not exact.*--approximate"):
        converted(source, target)
    done, _ = converted(source, target, allow_loss=True)
    assert not done.report.exact
    assert scheme in " ".join(done.report.lost)


@pytest.mark.parametrize("name", ENCODERS)
def test_every_parameter_is_declared_and_neutral_or_says_why_not(name):
    takes = {option.name for option in scheme_class(name).takes}
    plan = plan_of(config(name, **{"position_norm": "on"} if "norm" in takes else {}))
    ((place,),) = [layouts.places(plan)]
    scheme = place.build(plan, 0)
    found = {part: scheme.table_of(part) for part, _ in scheme.named_parameters()}
    alone = {part for part, table in scheme.tables.items() if table.copies}  # of another option
    assert set(found) - {"theta"} == set(scheme.tables) - alone, f"{name}: what its `tables` say and its parameters"
    neutral = [part for part, table in found.items() if table.neutral is not None]
    assert bool(scheme.never_neutral) == (not neutral and name != "none"), f"{name}: Table.neutral, or never_neutral"


@pytest.mark.parametrize("scheme", NEUTRAL)
def test_a_scheme_is_added_at_its_own_values(scheme):
    target = config(f"learned+{scheme}")
    done, _ = converted(config("learned"), target, allow_loss=True, start="own")
    assert f"{scheme} starts at its own initial values (--init own)" in done.report.lost
    (place,) = [place for place in layouts.places(plan_of(target)) if place.name == scheme]
    for name, value in place.build(plan_of(target), 0).named_parameters():
        torch.testing.assert_close(done.state[place.prefix(0) + name].float(), value.detach(), msg=name)


@pytest.mark.parametrize("scheme", NEUTRAL)
def test_a_scheme_is_added_at_neutral_values(scheme):
    """And a gradient leaves them: else training could never use what was added."""
    target = config(f"learned+{scheme}")
    done = assert_exact(config("learned"), target)
    model = build_roberta(target, done.state)
    moved, known = set(), set()
    for _ in range(3):  # what a neutral table multiplies has its turn once that has moved
        model.zero_grad()
        model(Probe.draw(23, POSITIONS, False).tokens)[0].square().sum().backward()
        for name, parameter in model.named_parameters():
            if ".position." in name or ".positions.shared.1" in name:
                known.add(name.rsplit(".", 1)[1])
                if parameter.grad is not None and parameter.grad.abs().max() > 1e-12:
                    moved.add(name.rsplit(".", 1)[1])
                    parameter.data -= 1e-3 * parameter.grad / parameter.grad.abs().max()
    # One number that is added to all logits of a head moves no probability: these are that, at first.
    constant = {"dape": {"output_bias"}, "fire": {"hidden_bias"}}
    assert moved >= known - {"theta"} - constant.get(scheme, set())


OFF = {"position_reset_cls": "off", "position_share": "none"}
RULES = [
    ("shaw_keys", "shaw", {}),
    ("m1", "m2", {}),
    ("m1", "m3", {}),
    ("m2", "m3", {}),
    ("t5", "rel_scalar", {}),
    ("shaw_keys", "deberta", {}),
    ("m4", "deberta", {}),
    ("tupe_a", "tupe", {}),
    ("rel_scalar", "tupe", OFF),
    ("abs_scalar", "tupe_a", OFF),
    ("abs_scalar", "tupe", OFF),
    ("sinusoidal", "learned", {}),
    ("alibi", "fox", {}),
    ("alibi", "alibi_learned", {"position_alibi_form": "symmetric"}),
    ("alibi", "cable", {}),
    ("rope", "xpos", {"position_xpos_base": "0"}),
]


@pytest.mark.parametrize(("source", "target", "options"), RULES)
def test_one_scheme_in_the_words_of_another(source, target, options):
    assert_exact(config(source), config(target, **options))


@pytest.mark.parametrize(("source", "target", "options"), RULES)
def test_rules_are_exact_for_numbers_of_16_bits(source, target, options):
    """But for one rounding of the tables that they make."""
    source, target = config(source), config(target, **options)
    done = convert(random_state(source, torch.bfloat16), plan_of(source), plan_of(target))
    assert done.report.exact
    assert {value.dtype for value in done.state.values() if value.is_floating_point()} == {torch.bfloat16}


def test_every_rule_is_tested():
    rules = {(source, name) for name in scheme_names() for source in scheme_class(name).convert_from}
    assert {(source, target) for source, target, _ in RULES} == {
        (source, target) for source, target in rules if source != target
    }


CLIP = {"position_clip_distance": "3"}
GAIN, INSIDE = {"position_scalar_gain": "4"}, {"position_scalars": "inside"}
ONE, FIFTH, BOTH = ({"position_projections": "one"}, {"position_scale": "5"}, {"position_share": "both"})
SEGMENTS = [{"segment_encoding": kind} for kind in ("input", "head")]
CLIPPED = "shaw_keys shaw m2 m3 m4 m4m deberta tupe rel_scalar".split()
SCALED = (
    "shaw shaw_keys transformer_xl t5 m1 m2 m3 m4 m4m rel_scalar rope alibi alibi_learned sandwich kerple fire log_cpb "
    "abs_scalar tupe deberta learned+m4 m4+rel_scalar".split()
)
SHARED = [name for name in taking(SHARE) if name in ENCODERS]


def biased(kind: str) -> dict[str, str]:
    return {"position_query_bias": kind}


# Source, its options, target, its options.
EXACT = [
    # Hybrids are converted member by member.
    ("learned+m4", CLIP, "learned+m4+rel_scalar", CLIP),
    ("learned+t5", {}, "learned+rel_scalar", {}),
    ("m4+rope", CLIP, "m4+rope+t5", CLIP),
    # Layers are converted each for itself.
    ("learned", {}, "learned+m4+rel_scalar/learned+rel_scalar+shaw", CLIP),
    ("rope+t5/t5", {}, "rope+rel_scalar/t5+m4", {}),
    ("m4/t5", {}, "deberta/rel_scalar", {}),
    # A smaller clip becomes a larger one; 0 is none.
    *((name, CLIP, name, {"position_clip_distance": larger}) for name in CLIPPED for larger in "70"),
    # Who shared a table gets copies.
    *((name, BOTH, name, {"position_share": "none"}) for name in SHARED),
    ("transformer_xl", {"position_share": "heads"}, "transformer_xl", {"position_share": "none"}),
    ("m4", {"position_share": "layers"}, "m4", {"position_share": "none"}),
    # Another scale is folded in.
    *((name, {}, name, FIFTH) for name in SCALED),
    # What an option adds does nothing at zero.
    *(("transformer_xl", biased(kind), "transformer_xl", biased("on")) for kind in ("off", "shared", "u", "v")),
    ("abs_scalar", {"position_rank": "3"}, "abs_scalar", {"position_rank": "5"}),
    # One projection becomes two, and scales.
    *((name, ONE, name, to) for name in ("deberta", "tupe") for to in ({}, ONE | FIFTH)),
    # Scalars go inside the division and out.
    ("tupe", {}, "tupe", INSIDE | {"position_scale": "1"}),
    ("tupe", INSIDE | {"position_scale": "1"}, "tupe", {}),
    ("rel_scalar", {}, "tupe", INSIDE | OFF),
    ("t5", {"position_buckets": "0"}, "rel_scalar", {"position_share": "layers"}),
    ("abs_scalar", {}, "tupe", ONE | OFF),
    # Scalars of another gain are stored otherwise, and every logit stays.
    *((name, one, name, other) for name in ("t5", "rel_scalar") for one, other in (({}, GAIN), (GAIN, {}))),
    ("t5", GAIN, "rel_scalar", GAIN),
    # Segments start at zero and are kept.
    *(("learned", {}, "learned", segments) for segments in SEGMENTS),
    *(("m4", segments, "m4+rel_scalar", segments) for segments in SEGMENTS),
    *(("m4", segments, "m4", segments | {"num_segments": "3"}) for segments in SEGMENTS),
    # What is drawn in training alone.
    ("rope", {}, "rope", {"position_random_range": "100"}),
]
LITTLEBIRD = "the first token has one distance from all others"
# The same, and what is said of the loss.
NOT_EXACT = [
    ("rope/none", {}, "none/rope", {}, "rope/none -> none/rope is not exact"),
    ("m4", {"position_share": "none"}, "m4", BOTH, "of all heads become one table.*of all layers"),
    ("alibi_learned", {"position_alibi_form": "symmetric"}, "alibi_learned", {}, LITTLEBIRD),
    ("alibi_learned", {}, "alibi_learned", {"position_alibi_form": "symmetric"}, LITTLEBIRD),
    ("alibi", {}, "alibi_learned", {}, LITTLEBIRD),
    ("pope", {}, "pope", FIFTH, "another scale under pope"),
    ("rope", {}, "xpos", {}, "rope"),
    ("rope", {}, "rope", {"position_rope_pairs": "halves"}, "rope"),
    ("rope", {}, "rope", {"position_rope_scaling": "ntk", "position_rope_factor": "2"}, "rope"),
    *((name, {}, name, ONE, "query_projection of .* is dropped") for name in ("deberta", "tupe")),
    ("transformer_xl", {}, "transformer_xl", biased("off"), "u of transformer_xl is dropped"),
    ("transformer_xl", {}, "transformer_xl", biased("shared"), "of all layers become one"),
    ("m4", {}, "m4", {"position_reset_cls": "on"}, "the reset takes"),
    ("m4", {"position_reset_cls": "on"}, "m4", {}, "the reset of the first token of m4 is dropped"),
    ("deberta", {}, "deberta", {"position_p2c_index": "mirrored"}, "p2c index same -> mirrored"),
    ("abs_scalar", {"position_rank": "5"}, "abs_scalar", {"position_rank": "3"}, "rank 5 cut to 3"),
    ("t5", {}, "t5", {"position_buckets": "8"}, "averaged over Bucketed"),
    *(("learned", one, "learned", {}, f"segment_{one['segment_encoding']} is dropped") for one in SEGMENTS),
    ("t5", {}, "t5/none", {}, "t5 is dropped"),
    ("learned", {}, "m4", {}, "learned is dropped .320 numbers"),
    ("m4", {"position_clip_distance": "7"}, "m4", CLIP, r"averaged over Clipped\(past=3, future=3\)"),
]


def named(row: tuple) -> str:
    """A row's id: schemes, and the values of its options."""
    one, before, other, after, *_ = row
    return "-".join([one, *before.values(), other, *after.values()])


@pytest.mark.parametrize(("source", "before", "target", "after"), EXACT, ids=map(named, EXACT))
def test_tables_are_folded_copied_and_added_exactly(source, before, target, after):
    assert_exact(config(source, **before), config(target, **after))


@pytest.mark.parametrize(("source", "before", "target", "after", "said"), NOT_EXACT, ids=map(named, NOT_EXACT))
def test_what_is_lost_is_said(source, before, target, after, said):
    with pytest.raises(NotExactError, match=said):
        converted(config(source, **before), config(target, **after))


def test_a_smaller_clip_keeps_the_distances_within_it():
    source, target = (config("m4", position_clip_distance=clip) for clip in ("7", "3"))
    done, difference = converted(source, target, allow_loss=True)
    assert difference > 1e-6
    name = f"{ENCODER}.layers.0.self_attn.position.0.table"
    torch.testing.assert_close(done.state[name][:, 1:-1], random_state(source)[name][:, 5:-5])


def test_equal_tables_become_one_and_back():
    shared, own = (config("m4", position_share=share) for share in ("both", "none"))
    done, _ = converted(shared, own)
    back = convert(done.state, plan_of(own), plan_of(shared))
    assert back.report.exact
    for key, value in random_state(shared).items():
        if "position" in key:
            assert torch.equal(value, back.state[key]), key


def test_angles_by_length_are_those_of_training_up_to_there():
    done = assert_exact(config("rope"), config("rope", position_rope_scaling="yarn"))
    assert "inputs of up to" in " ".join(done.report.limits)


def test_what_was_never_used_may_be_left_out():
    added, _ = converted(config("learned"), config("learned+m4"))
    back = convert(added.state, plan_of(config("learned+m4")), plan_of(config("learned")))
    assert back.report.exact
    assert "m4 left out (its tables are neutral)" in back.report.steps


EIGHT = {"position_clip_distance": "8"}


@pytest.mark.parametrize(
    ("scheme", "clip"),
    [(name, EIGHT) for name in ("m4", "rel_scalar", "m2")] + [(name, {}) for name in "m4 m1 t5 rope kerple".split()],
)
def test_relative_schemes_take_longer_input(scheme, clip):
    """Trained at 20 (Huang trains at 512), read at 44 (at 704): distances beyond read the ends."""
    source, target = config(scheme, **clip), config(scheme, max_positions=44, **clip)
    state = random_state(source)
    done = convert(state, plan_of(source), plan_of(target))
    assert done.report.exact
    assert difference(source, target, done.state, longest=44) < CLOSE


@pytest.mark.parametrize("scheme", ["learned", "sentence", "tupe", "abs_scalar"])
def test_absolute_tables_are_filled_as_told(scheme):
    source, target = config(scheme), config(scheme, max_positions=44)
    with pytest.raises(ValueError, match="knows 20 absolute positions and 44 are wanted.*--fill"):
        converted(source, target)
    done, difference = converted(source, target, fill="tile")
    assert done.report.exact and difference < CLOSE
    assert "inputs of up to 20 tokens" in done.report.limits
    with pytest.raises(NotExactError, match="stretched over 44"):
        converted(source, target, fill="interpolate")


def test_a_shorter_table_is_cut():
    done, difference = converted(config("learned"), config("learned", max_positions=11))
    assert done.report.exact and difference < CLOSE
    assert "inputs of up to 11 tokens" in done.report.limits


def test_tiles_and_interpolation_by_hand():
    table = torch.tensor([[0.0, 10.0], [1.0, 20.0], [4.0, 40.0]])
    report = ConversionReport("", "")
    tiled = resize(table, 7, "tile", report)
    assert tiled[:, 0].tolist() == [0, 1, 4, 0, 1, 4, 0]
    stretched = resize(table, 5, "interpolate", report)
    assert stretched[:, 0].tolist() == [0.0, 0.5, 1.0, 2.5, 4.0]
    assert stretched[:, 1].tolist() == [10.0, 15.0, 20.0, 30.0, 40.0]
    with pytest.raises(ValueError, match="filled by one of tile, interpolate, got wrap"):
        resize(table, 7, "wrap", report)


def test_the_mean_of_dropped_positions_goes_into_the_tokens():
    """A table whose rows are all alike says nothing of positions: dropping it changes nothing."""
    old, new = config("learned"), config("m4")
    state = random_state(old)
    state["encoder.lm_head.weight"] = state[f"{ENCODER}.embed_tokens.weight"]
    table = state[f"{ENCODER}.positions.shared.0.table"]
    table[:] = table[0]
    done = convert(state, plan_of(old), plan_of(new), allow_loss=True)
    probe = Probe.draw(len(state[f"{ENCODER}.embed_tokens.weight"]), 12, False)
    before, after = (
        outputs_of(build_roberta(values, weights), probe.tokens, None)["logits"].log_softmax(-1)
        for values, weights in ((old, state), (new, done.state))
    )
    torch.testing.assert_close(after, before, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("make", "scheme"), [(small_lm, "sinusoidal"), (small_lm, "t5"), (small_xl, "rel_scalar")])
def test_language_models_are_converted_on_load_exactly(make, scheme):
    old, new = randomized(make(position_scheme=scheme)), make(position_scheme=f"{scheme}+m4")
    options = {"position_scheme": scheme}
    checkpoint = {"model": dict(old.state_dict()), "cfg": {"model": options}}
    prepare_sides(checkpoint, "old.pt", new)
    new.double().load_state_dict(checkpoint["model"], strict=True)
    tokens = stream()
    torch.testing.assert_close(new(tokens)[0], old(tokens)[0], rtol=0, atol=CLOSE)
    with pytest.raises(PositionMismatchError, match="trained with .* cannot compute the same"):
        other = make(position_scheme="alibi")
        prepare_sides({"model": dict(old.state_dict()), "cfg": {"model": options}}, "o", other)


relations = st.one_of(
    st.builds(Clipped, st.integers(1, 12), st.integers(1, 12)),
    st.builds(Folded, st.integers(1, 12)),
    st.builds(Bucketed, st.sampled_from([4, 8, 16]), st.integers(9, 20), st.just(True)),
)


@settings(max_examples=40, deadline=None)
@given(relations, relations, st.integers(1, 15))
def test_reread_tells_exactly_what_is_lost(source, target, length):
    table = torch.randn(1, source.size, 2, generator=torch.Generator().manual_seed(0))
    result, error, _ = remap_distances(table, source, target, length)
    assert result.shape == (1, target.size, 2)
    worst = 0.0
    for distance in range(1 - length, length):
        here = torch.tensor(distance)
        apart = table[0, source.of_distance(here)] - result[0, target.of_distance(here)]
        worst = max(worst, float(apart.abs().max()))
    assert error == pytest.approx(worst, abs=1e-6)
    assert (error == 0) == (worst == 0)


def test_a_state_that_does_not_fit_its_flags():
    state = random_state(config("m4"))
    plan = plan_of(config("m4", position_clip_distance="3"))
    with pytest.raises(ValueError, match=r"position.0.table is \(1, 39, 8\).*\(1, 7, 8\)"):
        convert(state, plan, plan)
    with pytest.raises(ValueError, match="has no .*key_table, which its position scheme shaw_keys"):
        convert(state, plan_of(config("shaw_keys")), plan)
    with pytest.raises(ValueError, match="start at one of neutral, own, got zero"):
        convert(state, plan_of(config("m4")), plan, start="zero")


@pytest.mark.parametrize("target", ["rope", "learned+rope"])
def test_a_conversion_keeps_the_length_that_rope_was_trained_at(target):
    """Beside its parameters, which it has none of."""
    source = plan_of(config("rope"))
    key = f"{layouts.places(source)[0].prefix(0)}length_version"
    state = random_state(config("rope")) | {key: torch.tensor(777)}
    done = convert(state, source, plan_of(config(target)), allow_loss=True)
    assert [int(value) for name, value in done.state.items() if name.endswith("length_version")] == [777]
