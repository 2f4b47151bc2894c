"""--window-positions; what the released code's own formula gives is tested with its conversion."""

from __future__ import annotations

import pytest
import torch

from helpers.lm_models import randomized, small_xl, stream
from relpos_fairseq.models.relpos_transformer_lm import ModelMismatchError
from relpos_fairseq.models.relpos_transformer_xl import RelPosTransformerXLModel

KINDS = ("first", "every")


def small(kind: str, **values: object) -> RelPosTransformerXLModel:
    """A small model with segments of 12 tokens and a memory of 8."""
    sizes = {"position_scheme": "none", "max_target_positions": 12, "window_positions": kind}
    return small_xl(**(sizes | values))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", ["none", "m4"])
def test_decoding_with_memory(kind: str, scheme: str) -> None:
    """Step by step as a whole segment, each after the same memory."""
    model = randomized(small(kind, position_scheme=scheme))
    memory = None
    for seed in range(3):
        tokens, state = stream(2, 12, seed), {}
        logits, extra = model(tokens, memory=memory)
        for step in range(1, 13):
            one = model(tokens[:, :step], memory=memory, incremental_state=state)[0]
            torch.testing.assert_close(one[:, -1], logits[:, step - 1], rtol=0, atol=1e-10)
        memory = extra["memory"]


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(kind: str) -> None:
    model = randomized(small(kind))
    tokens = stream(2, 9)
    memory = model(stream(2, 12, 1))[1]["memory"]
    plain, after = model(tokens, memory=memory)
    padded = torch.cat([tokens.new_ones(2, 3), tokens], dim=1)
    found, ragged = model(padded, memory=memory)
    torch.testing.assert_close(found[:, 3:], plain, rtol=0, atol=1e-10)
    for one, other in zip(after["memory"].states, ragged["memory"].states, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_tables_learn_from_what_is_remembered() -> None:
    """The gradient of this segment's addition, and of no other."""
    model = small("every").train()
    memory = model(stream(2, 8, 1))[1]["memory"]
    model(stream(2, 8), memory=memory)[0].sum().backward()
    rows = model.decoder.window.table.grad.abs().sum(-1) > 0
    assert rows[:, :16].all() and not rows[:, 16:].any()  # no token stands at the last four
    longer = small("every")
    longer.mem_len = 20  # the table has no row for what is older than 8 tokens: its first
    memory = longer(stream(2, 12, 1))[1]["memory"]
    longer(stream(2, 12), memory=memory)


@pytest.mark.parametrize("kind", KINDS)
def test_longer_segments_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=r"a segment has 12 positions, got 13 .*--tokens-per-samp"):
        small(kind)(stream(2, 13))


def test_a_checkpoint_keeps_its_kind() -> None:
    """Sinusoids have no parameter that a load would miss."""
    states = [small(kind).state_dict() for kind in ("none", *KINDS)]
    for number, kind in enumerate(("none", *KINDS)):
        for other, state in enumerate(states):
            if other == number:
                small(kind).load_state_dict(state)
            else:
                with pytest.raises(ModelMismatchError, match=r"decoder\.window\.(version|table)"):
                    small(kind).load_state_dict(state)


def test_no_other_initial_value_changes() -> None:
    plain, made = small("none").state_dict(), small("every").state_dict()
    assert all(torch.equal(made[name], value) for name, value in plain.items())
    assert 0.015 < float(made["decoder.window.table"].std()) < 0.025


def test_the_longest_segment_is_known() -> None:
    assert small("first").max_positions() == 12
    assert small("none").max_positions() > 10**6
