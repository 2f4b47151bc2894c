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
    moved: set[str] = set()
    known: set[str] = set()
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


RULES = [
    ("shaw_keys", "shaw", {}),
    ("m1", "m2", {}),
    ("m1", "m3", {}),
    ("m2", "m3", {}),
    ("t5", "rel_scalar", {}),
    ("shaw_keys", "deberta", {}),
    ("m4", "deberta", {}),
    ("tupe_a", "tupe", {}),
    ("rel_scalar", "tupe", {"position_reset_cls": "off", "position_share": "none"}),
    ("abs_scalar", "tupe_a", {"position_reset_cls": "off", "position_share": "none"}),
    ("abs_scalar", "tupe", {"position_reset_cls": "off", "position_share": "none"}),
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
    state = {k: v.bfloat16() if v.is_floating_point() else v for k, v in random_state(source).items()}
    done = convert(state, plan_of(source), plan_of(target))
    assert done.report.exact
    assert {value.dtype for value in done.state.values() if value.is_floating_point()} == {torch.bfloat16}


def test_every_rule_is_tested():
    rules = {(source, name) for name in scheme_names() for source in scheme_class(name).convert_from}
    assert {(source, target) for source, target, _ in RULES} == {
        (source, target) for source, target in rules if source != target
    }


def test_hybrids_are_converted_member_by_member():
    options = {"position_clip_distance": "3"}
    assert_exact(config("learned+m4", **options), config("learned+m4+rel_scalar", **options))
    assert_exact(config("learned+t5"), config("learned+rel_scalar"))
    assert_exact(config("m4+rope", **options), config("m4+rope+t5", **options))


def test_layers_are_converted_each_for_itself():
    options = {"position_clip_distance": "3"}
    layered = config("learned+m4+rel_scalar/learned+rel_scalar+shaw", **options)
    assert_exact(config("learned"), layered)
    assert_exact(config("rope+t5/t5"), config("rope+rel_scalar/t5+m4"))
    assert_exact(config("m4/t5"), config("deberta/rel_scalar"))
    done, _ = converted(config("t5"), config("t5/none"), allow_loss=True)
    assert [line for line in done.report.lost if "t5 is dropped" in line]
    with pytest.raises(NotExactError, match="rope/none -> none/rope is not exact"):
        converted(config("rope/none"), config("none/rope"))


CLIPPED = "shaw_keys shaw m2 m3 m4 m4m deberta tupe rel_scalar".split()


@pytest.mark.parametrize("scheme", CLIPPED)
def test_a_smaller_clip_becomes_a_larger(scheme):
    source = config(scheme, position_clip_distance="3")
    assert_exact(source, config(scheme, position_clip_distance="7"))
    assert_exact(source, config(scheme, position_clip_distance="0"))


def test_a_larger_clip_does_not_become_a_smaller():
    source, target = (config("m4", position_clip_distance=clip) for clip in ("7", "3"))
    with pytest.raises(NotExactError, match=r"averaged over Clipped\(past=3, future=3\)"):
        converted(source, target)
    done, difference = converted(source, target, allow_loss=True)
    assert difference > 1e-6
    table = done.state[f"{layouts.ENCODER}.layers.0.self_attn.position.0.table"]
    before = random_state(source)[f"{layouts.ENCODER}.layers.0.self_attn.position.0.table"]
    torch.testing.assert_close(table[:, 1:-1], before[:, 5:-5])


SHARED = [name for name in taking(SHARE) if name in ENCODERS]


@pytest.mark.parametrize(
    ("scheme", "share"), [*((scheme, "both") for scheme in SHARED), ("transformer_xl", "heads"), ("m4", "layers")]
)
def test_who_shared_a_table_gets_copies(scheme, share):
    assert_exact(config(scheme, position_share=share), config(scheme, position_share="none"))


def test_tables_that_differ_do_not_become_one():
    source, target = (config("m4", position_share=share) for share in ("none", "both"))
    with pytest.raises(NotExactError, match="of all heads become one table.*of all layers"):
        converted(source, target)


def test_equal_tables_become_one_and_back():
    shared, own = (config("m4", position_share=share) for share in ("both", "none"))
    done, _ = converted(shared, own)
    back = convert(done.state, plan_of(own), plan_of(shared))
    assert back.report.exact
    for key, value in random_state(shared).items():
        if "position" in key:
            assert torch.equal(value, back.state[key]), key


@pytest.mark.parametrize(
    "scheme",
    "shaw shaw_keys transformer_xl t5 m1 m2 m3 m4 m4m rel_scalar rope alibi alibi_learned sandwich kerple fire log_cpb "
    "abs_scalar tupe deberta learned+m4 m4+rel_scalar".split(),
)
def test_another_scale_is_folded_in(scheme):
    assert_exact(config(scheme), config(scheme, position_scale="5"))


def test_littlebirds_first_token_is_no_other_forms():
    symmetric, littlebird = config("alibi_learned", position_alibi_form="symmetric"), config("alibi_learned")
    for source, target in ((symmetric, littlebird), (littlebird, symmetric), (config("alibi"), littlebird)):
        with pytest.raises(NotExactError, match="the first token has one distance from all others"):
            converted(source, target)


def test_a_scale_is_not_folded_into_bent_content():
    with pytest.raises(NotExactError, match="another scale under pope"):
        converted(config("pope"), config("pope", position_scale="5"))


def test_rotations_become_others_where_that_is_exact():
    """Decay over 0 tokens is none; angles by length are those of training up to there."""
    assert_exact(config("rope"), config("xpos", position_xpos_base="0"))
    done = assert_exact(config("rope"), config("rope", position_rope_scaling="yarn"))
    assert "inputs of up to" in " ".join(done.report.limits)
    for target in (
        config("xpos"),
        config("rope", position_rope_pairs="halves"),
        config("rope", position_rope_scaling="ntk", position_rope_factor="2"),
    ):
        with pytest.raises(NotExactError, match="rope"):
            converted(config("rope"), target)


def test_options_that_add_nothing_at_zero():
    assert_exact(
        config("transformer_xl", position_query_bias="off"), config("transformer_xl", position_query_bias="on")
    )
    assert_exact(
        config("transformer_xl", position_query_bias="shared"), config("transformer_xl", position_query_bias="on")
    )
    assert_exact(config("abs_scalar", position_rank="3"), config("abs_scalar", position_rank="5"))
    for alone in ("u", "v"):
        assert_exact(config("transformer_xl", position_query_bias=alone), config("transformer_xl"))


@pytest.mark.parametrize("scheme", ["deberta", "tupe"])
def test_one_projection_becomes_two_and_scales(scheme):
    one = config(scheme, position_projections="one")
    assert_exact(one, config(scheme))
    assert_exact(one, config(scheme, position_projections="one", position_scale="5"))
    with pytest.raises(NotExactError, match="query_projection of .* is dropped"):
        converted(config(scheme), one)


def test_scalars_go_inside_the_division_and_out():
    inside = config("tupe", position_scalars="inside", position_scale="1")
    assert_exact(config("tupe"), inside)
    assert_exact(inside, config("tupe"))
    off = {"position_reset_cls": "off", "position_share": "none"}
    assert_exact(config("rel_scalar"), config("tupe", position_scalars="inside", **off))
    assert_exact(config("t5", position_buckets="0"), config("rel_scalar", position_share="layers"))
    assert_exact(config("abs_scalar"), config("tupe", position_projections="one", **off))


def test_options_that_lose_something_say_what():
    cases = [
        ("transformer_xl", {}, {"position_query_bias": "off"}, "u of transformer_xl is dropped"),
        ("transformer_xl", {}, {"position_query_bias": "shared"}, "of all layers become one"),
        ("m4", {}, {"position_reset_cls": "on"}, "the reset takes"),
        ("m4", {"position_reset_cls": "on"}, {}, "the reset of the first token of m4 is dropped"),
        ("deberta", {}, {"position_p2c_index": "mirrored"}, "p2c index same -> mirrored"),
        ("abs_scalar", {"position_rank": "5"}, {"position_rank": "3"}, "rank 5 cut to 3"),
        ("t5", {}, {"position_buckets": "8"}, "averaged over Bucketed"),
    ]
    for scheme, before, after, message in cases:
        with pytest.raises(NotExactError, match=message):
            converted(config(scheme, **before), config(scheme, **after))


def test_segments_start_at_zero_and_are_kept():
    plain = config("learned")
    for encoding in ("input", "head"):
        own = {"segment_encoding": encoding}
        assert_exact(plain, config("learned", **own))
        assert_exact(config("m4", **own), config("m4+rel_scalar", **own))
        assert_exact(config("m4", **own), config("m4", num_segments="3", **own))
        with pytest.raises(NotExactError, match=f"segment_{encoding} is dropped"):
            converted(config("learned", **own), plain)


def test_learned_to_m4_drops_the_table_and_says_so():
    with pytest.raises(NotExactError, match="learned is dropped .320 numbers"):
        converted(config("learned"), config("m4"))
    done, difference = converted(config("learned"), config("m4"), allow_loss=True)
    assert done.report.lost and difference > 1e-3


def test_what_was_never_used_may_be_left_out():
    added, _ = converted(config("learned"), config("learned+m4"))
    back = convert(added.state, plan_of(config("learned+m4")), plan_of(config("learned")))
    assert back.report.exact
    assert "m4 left out (its tables are neutral)" in back.report.steps


@pytest.mark.parametrize("scheme", ["m4", "rel_scalar", "m2", "m1", "t5", "rope", "kerple"])
def test_relative_schemes_take_longer_input(scheme):
    """Trained at 20 (Huang trains at 512), read at 44 (at 704): distances beyond read the ends."""
    clip = {"position_clip_distance": "8"} if scheme in ("m4", "rel_scalar", "m2") else {}
    source, target = config(scheme, **clip), config(scheme, max_positions=44, **clip)
    state = random_state(source)
    done = convert(state, plan_of(source), plan_of(target))
    assert done.report.exact
    assert difference(source, target, done.state, longest=44) < CLOSE


def test_unclipped_tables_grow_by_their_ends():
    source, target = config("m4"), config("m4", max_positions=44)
    state = random_state(source)
    done = convert(state, plan_of(source), plan_of(target))
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


def test_scalars_of_another_gain():
    """They are stored otherwise, and every logit stays."""
    gain = {"position_scalar_gain": "4"}
    for scheme in ("t5", "rel_scalar"):
        assert_exact(config(scheme), config(scheme, **gain))
        assert_exact(config(scheme, **gain), config(scheme))
    assert_exact(config("t5", **gain), config("rel_scalar", **gain))
