"""Initial values and defaults of every scheme are its paper's, written down once more."""

from __future__ import annotations

import math

import pytest
import torch

from relpos_fairseq.core.config import OPTIONS, PositionConfig, resolve
from relpos_fairseq.core.options import AttentionShape
from relpos_fairseq.core.placement import Placement
from relpos_fairseq.schemes import scheme_class, scheme_names

LAYERS, WIDTH, HEADS = 16, 64, 4
HEAD = WIDTH // HEADS


def normal(std: float, mean: float = 0.0) -> tuple[float, float, float]:
    """Mean, deviation and bound of a normal distribution."""
    return mean, std, math.inf


def uniform(low: float, high: float) -> tuple[float, float, float]:
    """The same of a uniform one; the bound is of the distance from the mean."""
    return (low + high) / 2, (high - low) / math.sqrt(12), (high - low) / 2


def linear(inputs: int) -> tuple[float, float, float]:
    """Weights and biases of torch's Linear."""
    return uniform(-(inputs**-0.5), inputs**-0.5)


ZERO, ONE, BERT = normal(0), normal(0, 1), normal(0.02)
UNIT = normal(HEAD**-0.5)  # products of unit vectors keep their size
SLOPES = normal(math.log(2) * math.sqrt(5), -math.log(2) * 5)  # logarithms of 2^-2, 2^-4, 2^-6, 2^-8
STARTS = {
    **dict.fromkeys(("none", "sinusoidal", "rope", "xpos", "alibi", "sandwich"), {}),
    **dict.fromkeys(("learned", "sentence", "m4"), {"table": BERT}),
    "shaw_keys": {"key_table": BERT},
    "shaw": {"key_table": BERT, "value_table": BERT},
    "transformer_xl": {"projection": BERT, "content_bias": ZERO, "position_bias": ZERO},
    "transformer_xl_learned": {"key_table": BERT, "content_bias": BERT, "bias_table": BERT},
    "t5": {"bias_table": BERT},
    **dict.fromkeys(("m1", "m2"), {"gate_table": ONE}),
    "m3": {"trilinear_table": normal(0.02, 1)},
    "m4m": {"table": normal(0, 2 / HEAD)},
    "deberta": {"table": BERT, "query_projection": UNIT, "key_projection": UNIT},
    "deberta_released": {"table": BERT, "query_projection": BERT, "key_projection": BERT, "key_bias": ZERO},
    "tupe_a": {"theta": ZERO, "position_table": BERT, "query_projection": UNIT, "key_projection": UNIT},
    "tupe": {
        **{"theta": ZERO, "position_table": BERT, "query_projection": UNIT, "key_projection": UNIT},
        "bias_table": ZERO,
    },
    "tupe_released": {
        **{"theta": ZERO, "position_table": BERT, "norm_weight": ONE, "norm_bias": ZERO, "query_projection": BERT},
        **{"query_bias": ZERO, "key_projection": BERT, "key_bias": ZERO, "bias_table": BERT},
    },
    "abs_scalar": {"position_table": BERT},
    "rel_scalar": {"bias_table": ZERO},
    "pope": {"phase": ZERO},
    "alibi_learned": {"log_past": SLOPES, "log_future": SLOPES, "log_first": SLOPES},
    "kerple": {"amplitude": uniform(0, 2), "rate": uniform(0, 1)},
    "fire": {
        **{"rate": normal(0, 0.1), "stretch": ONE, "hidden_weight": linear(1), "hidden_bias": linear(1)},
        "output_weight": linear(32),
    },
    "log_cpb": {"hidden_weight": BERT, "hidden_bias": ZERO, "output_weight": BERT},
    "fox": {"gate_weight": BERT, "gate_bias": ZERO},
    "cable": {"gate_weight": BERT, "gate_bias": ZERO, "slope_weight": BERT, "slope_bias": ZERO},
    "dape": {
        **{"hidden_weight": linear(2 * HEADS), "hidden_bias": linear(2 * HEADS)},
        **{"output_weight": linear(32), "output_bias": linear(32)},
    },
    "cope": {"table": ZERO},
}
# Numbers that `auto` means, of options that single schemes take.
NUMBERS = {
    **{"buckets": 32, "log_buckets": 0, "max_distance": 128, "clamp_len": 0, "r_dropout": 0, "rope_base": 10000},
    **{"rope_share": 1, "fire_threshold": 512, "sandwich_dim": 128, "cpb_width": 512, "xpos_base": 512},
    **{"clip_distance": 0, "random_range": 0, "scale": 1, "scalar_gain": 1},
}


def drawn(name: str) -> dict[str, torch.Tensor]:
    """A scheme's parameters in 16 layers, those of the input once, by name."""
    causal = scheme_class(name).causal_only
    shape = AttentionShape(embed_dim=WIDTH, num_heads=HEADS, max_positions=64, causal=causal, seed_name="test")
    placement = Placement(resolve(PositionConfig(position_scheme=name), shape, "translation"))
    found: dict[str, list[torch.Tensor]] = {}
    for stack in (placement.shared, *map(placement.layer_schemes, range(LAYERS))):
        for parameter, value in stack.named_parameters():
            found.setdefault(parameter.split(".", 1)[1], []).append(value.detach().double().flatten())
    return {parameter: torch.cat(values) for parameter, values in found.items()}


@pytest.mark.parametrize("name", scheme_names())
def test_initial_values_are_the_papers(name: str) -> None:
    found, expected = drawn(name), STARTS.get(name, {"?": ZERO})
    assert found.keys() == expected.keys(), "write its initial values into STARTS, from the paper or its code"
    for parameter, (mean, std, bound) in expected.items():
        values, n = found[parameter], len(found[parameter])
        assert (values - mean).abs().max() <= bound * 1.001, parameter
        assert abs(values.mean() - mean) <= 5 * std / math.sqrt(n) + 1e-6, parameter
        assert abs(values.std(correction=0) - std) <= 5 * std / math.sqrt(n) + 1e-6, parameter


@pytest.mark.parametrize("name", scheme_names())
def test_no_two_parameters_are_drawn_alike(name: str) -> None:
    """Their seeds differ, whether or not one was registered before the next was drawn."""
    found = [value[:8] for value in drawn(name).values() if value.std() > 0]
    if name == "alibi_learned":  # starts at the same slopes, and draws nothing
        return
    for place, one in enumerate(found):
        for other in found[:place]:
            together = torch.stack([one[: min(len(one), len(other))], other[: min(len(one), len(other))]])
            assert len(together[0]) < 3 or together.corrcoef()[0, 1].abs() < 0.999


def test_numbers_of_auto_are_the_papers() -> None:
    numbers = {option.name: option.auto for option in OPTIONS if isinstance(option.auto, (int, float))}
    assert numbers == NUMBERS, "write the number into NUMBERS, from the paper or its code"
