"""Conversions between values of an option: exact in numbers, or named."""

from __future__ import annotations

import contextlib

import pytest
import torch

from cases import ENCODERS
from helpers import FULL
from helpers.conversion import assert_exact, config, converted, difference, random_state
from helpers.lm_models import randomized, small_lm
from relpos_fairseq.conversion import ConversionError, NotExactError, convert
from relpos_fairseq.conversion.layouts import ENCODER
from relpos_fairseq.core.options import RANDOMIZATION, Choice, Option, in_order
from relpos_fairseq.core.scheme import PositionMismatchError
from relpos_fairseq.formats.on_load import prepare_sides
from relpos_fairseq.saved.identity import plan_of
from relpos_fairseq.schemes import scheme_class


def other_values(option: Option) -> tuple[str, ...]:
    """Values that a user may give, beside `auto`; a scheme may refuse some of them.  Each night more."""
    values = option.choices if isinstance(option, Choice) else ("0.5", "2", "5")
    return values if FULL else values[-2:]


@pytest.mark.parametrize("scheme", [name for name in ENCODERS if scheme_class(name).takes - RANDOMIZATION])
def test_another_value_of_an_option_is_exact_or_named(scheme):
    """Whosever option it is, and whether or not a rule knows of it."""
    compared = 0
    for option in in_order(option for option in scheme_class(scheme).takes if not option.training_only):
        for value in other_values(option):
            pair = [config(scheme), config(scheme, **{option.field: value})]
            try:
                plan_of(pair[1])
            except ValueError:
                continue
            for source, target in (pair, pair[::-1]):
                with contextlib.suppress(ConversionError):  # tables of another width
                    done = convert(random_state(source), plan_of(source), plan_of(target), allow_loss=True)
                    if done.report.exact:
                        assert difference(source, target, done.state, done.report.longest) < 1e-5, option.name
                    compared += 1
    assert compared > 1


DRAWN = {"position_random_range": "100"}
UNKNOWN = [
    ("sandwich", {"position_sandwich_dim": "8"}, "sandwich_dim 8 instead of 128"),
    ("fire", {"position_fire_threshold": "2"}, "fire_threshold 2.0 instead of 512.0"),
    ("log_cpb", {"position_cpb_form": "dynamic"}, "cpb_form dynamic instead of swin"),
    ("rope", DRAWN | {"position_random_at": "always"}, "random_at always instead of train"),
    ("sandwich", DRAWN | {"position_sandwich_dim": "64", "position_scale": "5"}, "sandwich_dim 64 instead of 128"),
]


@pytest.mark.parametrize(("scheme", "options", "named"), UNKNOWN)
def test_an_option_that_no_rule_knows_is_named(scheme, options, named):
    """It alone, of several."""
    source, target = config(scheme), config(scheme, **options)
    with pytest.raises(NotExactError, match=f"{scheme}: {named}"):
        converted(source, target)
    done, _ = converted(source, target, allow_loss=True)
    [lost] = done.report.lost
    assert lost.startswith(f"{scheme}: {named}") and (" (attention differs by" in lost or scheme == "rope")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_16_bits_hide_nothing_and_stay_so(dtype):
    """They are converted and compared in 32, and rounded once, at the end."""
    source, other = config("fire"), config("fire", position_fire_threshold="2")
    state = random_state(source, dtype)
    with pytest.raises(NotExactError, match=r"fire: fire_threshold 2.0 instead of 512.0 \(attention differs"):
        convert(state, plan_of(source), plan_of(other))
    done = convert(state, plan_of(source), plan_of(config("fire+m4", position_scale="5")))
    assert done.report.exact and done.report.rounding > 1e-3
    assert {value.dtype for value in done.state.values() if value.is_floating_point()} == {dtype}
    mixed = random_state(source) | {"encoder.lm_head.bias": state["encoder.lm_head.bias"]}
    assert not convert(mixed, plan_of(source), plan_of(other), allow_loss=True).report.exact


def test_tied_numbers_of_16_bits_stay_tied():
    state = random_state(config("m4"), torch.float16)
    tokens, output = f"{ENCODER}.embed_tokens.weight", "encoder.lm_head.weight"
    state[output] = state[tokens].view(state[tokens].shape)  # as a file is read: two tensors of one memory
    done = convert(state, plan_of(config("m4")), plan_of(config("deberta")))
    assert done.state[output].data_ptr() == done.state[tokens].data_ptr()


def test_what_16_bits_do_not_hold_is_refused():
    state, name = random_state(config("m4"), torch.float16), f"{ENCODER}.layers.1.self_attn.q_proj.weight"
    state[name] = state[name].clone()
    state[name][0, 0] = 60000
    with pytest.raises(ConversionError, match=r"layers.1.self_attn.q_proj.weight becomes as large as .*torch.float16"):
        convert(state, plan_of(config("m4")), plan_of(config("m4", position_scale="5")))


def test_new_tables_have_the_type_of_the_projections():
    state = random_state(config("m4"), torch.float32)
    state |= {key: state[key].half() for key in (f"{ENCODER}.version", f"{ENCODER}.embed_tokens.weight")}
    done = convert(state, plan_of(config("m4")), plan_of(config("m4+t5")))
    tables = [value.dtype for key, value in done.state.items() if ".position" in key and "table" in key]
    assert set(tables) == {torch.float32}


def test_tensors_of_a_layer_that_do_not_fit_are_named():
    state, plans = random_state(config("m4")), (plan_of(config("m4")), plan_of(config("m4+t5")))
    name = f"{ENCODER}.layers.1.self_attn.out_proj.bias"
    with pytest.raises(ConversionError, match=f"do not fit: there is no {name}"):
        convert({key: value for key, value in state.items() if key != name}, *plans)
    with pytest.raises(ConversionError, match=r"do not fit: .*layers.1.self_attn.: size mismatch for out_proj.bias"):
        convert(state | {name: torch.zeros(3)}, *plans)


def test_a_number_that_is_none_is_a_difference():
    state = random_state(config("m4"))
    state |= {f"{ENCODER}.layers.1.self_attn.q_proj.bias": torch.full((16,), torch.nan, dtype=torch.float64)}
    assert not convert(state, plan_of(config("m4")), plan_of(config("m4+t5")), allow_loss=True).report.exact


@pytest.mark.parametrize("longest", [1, 2, 3])
@pytest.mark.parametrize(("scheme", "target"), [("t5", "rel_scalar"), ("learned", "learned+m4"), ("m4", "deberta")])
def test_models_of_few_positions(longest, scheme, target):
    size = {"max_positions": longest}
    assert_exact(config(scheme, **size), config(target, **size))


def test_more_parts_than_layers_are_refused():
    with pytest.raises(ValueError, match="is for 3 layers, and .*2"):
        converted(config("learned"), config("learned+m4/learned+t5/learned+m2"))


def test_what_an_option_adds_begins_as_its_table_says():
    """Neutral where the table has such a value, else as the scheme begins."""
    done, _ = converted(config("deberta_released"), config("deberta_released", position_norm="on"), allow_loss=True)
    for name, start in (("norm_weight", 1), ("norm_bias", 0)):
        found = [value for key, value in done.state.items() if key.endswith(f".position.0.{name}")]
        assert found and all(bool((value == start).all()) for value in found)


def test_a_width_of_tables_is_named():
    said = "log_cpb: hidden_weight came out as .*: log_cpb: cpb_width 5 instead of"
    with pytest.raises(ConversionError, match=said):
        converted(config("log_cpb"), config("log_cpb", position_cpb_width="5"))


def test_a_decoders_option_is_not_changed_on_load_unsaid():
    old, new = small_lm(position_scheme="sandwich"), small_lm(position_scheme="sandwich", position_sandwich_dim="8")
    checkpoint = {"model": dict(randomized(old).state_dict()), "cfg": {"model": {"position_scheme": "sandwich"}}}
    with pytest.raises(PositionMismatchError, match=r"cannot compute the same .*sandwich_dim 8 instead of"):
        prepare_sides(checkpoint, "old.pt", new)
