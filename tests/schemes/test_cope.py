"""CoPE as the paper's listing has it, and as checkpoints of earlier versions have it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cases import Case, plan_of
from helpers.scheme_calls import call
from relpos_fairseq.attention import attend
from relpos_fairseq.conversion.algebra import convert
from relpos_fairseq.conversion.layouts import ENCODER
from relpos_fairseq.core.placement import Placement, PositionMismatchError
from relpos_fairseq.nn.self_attention import SelfAttention

KEY = "unscaled_version"


def listing(q: Tensor, k: Tensor, v: Tensor, e: Tensor) -> Tensor:
    """Causal attention by the steps of the paper's listing."""
    seen = torch.ones(q.size(-2), k.size(-2), dtype=q.dtype).tril()
    logits = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1)) + seen.log()
    place = logits.sigmoid().flip(-1).cumsum(-1).flip(-1).clamp(max=len(e) - 1)
    whole = q @ e.T
    low, high = (whole.gather(-1, end(place).long()) for end in (torch.floor, torch.ceil))
    between = place - place.floor()
    return (logits + high * between + low * (1 - between)).softmax(-1) @ v


def test_equals_the_listing() -> None:
    inputs, _, layer, _ = call(Case("cope", {"position_contexts": "4"}), "causal", dim=16)
    expected = listing(inputs.q, inputs.k, inputs.v, layer[0].table[0])
    torch.testing.assert_close(attend(inputs, "reference")[0], expected, rtol=0, atol=1e-12)


def scheme(scaled: str = "auto", name: str = "cope") -> torch.nn.Module:
    return Placement(plan_of(Case(name, {"position_contexts_scaled": scaled}))).layer_schemes(0)[0]


def vectors(made: torch.nn.Module) -> Tensor:
    return made.terms(None, None)[0].contextual


@pytest.mark.parametrize("trained", ["on", "off"])
def test_a_checkpoint_keeps_what_it_was_trained_with(trained: str) -> None:
    """Without a flag as it was trained; one that did not remember it is of a version that divided."""
    state = scheme(trained).state_dict()
    state["table"] = torch.randn_like(state["table"])
    if trained == "on":
        del state[KEY]
    factor = 1 if trained == "on" else math.sqrt(4)
    for flag in ("auto", trained):
        later = scheme(flag)
        later.load_state_dict(state)
        torch.testing.assert_close(vectors(later), state["table"] * factor)
    again = scheme()
    again.load_state_dict(later.state_dict())
    torch.testing.assert_close(vectors(again), vectors(later))
    other = "off" if trained == "on" else "on"
    with pytest.raises(PositionMismatchError, match=f"--position-contexts-scaled {other}: .* with {trained}"):
        scheme(other).load_state_dict(state)


@pytest.mark.parametrize(("old", "remembered"), [("cope", 0), ("cope", 1), ("cope", None), ("rel_scalar", None)])
def test_conversion_keeps_it(old: str, remembered: int | None) -> None:
    """A new member is the listing's; one that the source had stays what it was."""
    before, after = plan_of(Case(old), causal=True), plan_of(Case("cope+rel_scalar"), causal=True)
    prefix = f"{ENCODER}.layers.0.self_attn."
    shape = before.shape
    own = SelfAttention(shape.embed_dim, shape.num_heads, Placement(before).layer_schemes(0), before.scale)
    state = {f"{prefix}{name}": value for name, value in own.state_dict().items()}
    key = f"{prefix}position.0.{KEY}"
    if remembered is None:
        state.pop(key, None)
    else:
        state[key] = torch.tensor(remembered)
    found = convert(state, before, after).state.get(key)
    assert (None if found is None else int(found)) == (remembered if old == "cope" else 1)
