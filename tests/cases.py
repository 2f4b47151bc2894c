"""One row per scheme and option set: its flags, and how the oracle is asked for the same.

A new scheme needs its name in one or more of the groups below, and a function in tests/naive.py
that takes the scheme's parameters under their own names.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from relpos_fairseq.config import PositionConfig, resolve
from relpos_fairseq.placement import Placement
from relpos_fairseq.plan import PositionPlan
from relpos_fairseq.scheme import AttentionShape, PositionScheme

# The oracle has the schemes' own parameter names, but for this one.
RENAMED = {"theta": ("theta1", "theta2")}
ADDITIVE = (
    "shaw", "shaw_keys", "transformer_xl", "t5", "m4", "deberta", "tupe", "tupe_a", "abs_scalar",
    "rel_scalar", "alibi", "kerple",
)  # fmt: skip
CLIPPED = ("shaw", "shaw_keys", "m2", "m3", "m4", "m4m", "deberta", "tupe", "rel_scalar")
SHARED = (
    "shaw", "shaw_keys", "transformer_xl", "t5", "m1", "m2", "m3", "m4", "m4m", "deberta", "tupe",
    "tupe_a", "abs_scalar", "rel_scalar", "kerple",
)  # fmt: skip
INPUT = ("sinusoidal", "learned", "sentence")


@dataclass(frozen=True)
class Case:
    """A scheme under some flags."""

    scheme: str
    flags: dict = field(default_factory=dict)

    def __str__(self) -> str:
        """The test's id."""
        short = (f"{k.removeprefix('position_')}={v}" for k, v in self.flags.items())
        return "-".join((self.scheme, *short))


def _cases() -> list[Case]:
    every = ("none", *INPUT, *SHARED, "rope", "alibi")
    rows = [Case(name) for name in dict.fromkeys(every)]
    rows += [Case(n, {"position_clip_distance": k}) for n in CLIPPED for k in ("0", "1", "3")]
    rows += [
        Case(n, {"position_share": s}) for n in SHARED for s in ("none", "heads", "layers", "both")
    ]
    rows += [Case(n, {"position_scale": "1.7"}) for n in ("none", "rope", "alibi", *SHARED)]
    rows += [Case(n, {"position_reset_cls": r}) for n in ADDITIVE for r in ("on", "off")]
    rows += [
        Case("abs_scalar", {"position_rank": "3"}),
        Case("t5", {"position_buckets": "6", "position_max_distance": "9"}),
        Case("transformer_xl", {"position_query_bias": "off"}),
        Case("transformer_xl", {"position_query_bias": "shared"}),
        Case("transformer_xl", {"clamp_len": "2"}),
        Case("deberta", {"position_p2c_index": "mirrored"}),
        Case("learned+m4m"),
        Case("sinusoidal+shaw"),
        Case("rope+m4"),
        Case("rope+m2+rel_scalar"),
        Case("m3+rel_scalar+shaw"),
        Case("m2+m4m+shaw"),
        Case("transformer_xl+m2+t5"),
        Case("m4+rel_scalar", {"position_reset_cls": "on"}),
        Case("deberta+tupe", {"position_scale": "3"}),
        Case("rel_scalar", {"segment_encoding": "head"}),
        Case("m4", {"segment_encoding": "head", "position_share": "layers"}),
    ]
    return rows


CASES = _cases()
DEFAULTS = {"position_clip_distance": "2"}


def plan_of(
    case: Case, *, causal: bool = False, heads: int = 2, dim: int = 4, longest: int = 12
) -> PositionPlan:
    """The case's plan for a small attention."""
    shape = AttentionShape(
        embed_dim=heads * dim,
        num_heads=heads,
        max_positions=longest,
        causal=causal,
        seed_name="test",
    )
    flags = dict(case.flags)
    if set(case.scheme.split("+")) & set(CLIPPED):
        flags = DEFAULTS | flags
    if causal and flags.get("position_reset_cls") == "on":
        flags.pop("position_reset_cls")
    config = PositionConfig(position_scheme=case.scheme, **flags)
    return resolve(config, shape, "translation")


def randomize(module: torch.nn.Module, seed: int = 0) -> None:
    """Draw every parameter from a unit normal, so that no table is neutral."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
            if name.endswith(("amplitude", "rate")):
                parameter.abs_().add_(0.05)


def build(case: Case, **shape) -> tuple[Placement, torch.nn.ModuleList]:
    """Shared schemes and one layer's own, in fp64, with random parameters."""
    stack = Placement(plan_of(case, **shape)).double()
    layer = stack.layer_schemes(0).double()
    randomize(stack, 1)
    randomize(layer, 2)
    return stack, layer


def oracle_members(schemes: list[PositionScheme]) -> list[tuple[str, dict, dict]]:
    """(name, parameters, options) of the schemes, as tests/naive.py takes them."""
    members = []
    for scheme in schemes:
        if scheme.name.startswith("segment"):
            continue
        params: dict[str, Tensor] = {}
        for name, value in scheme.named_parameters():
            if name in RENAMED:
                params.update(zip(RENAMED[name], value.detach(), strict=True))
            else:
                params[name] = value.detach()
        options = vars(scheme.options) | {
            "reset": scheme.options.reset_cls,
            "bidirectional": not scheme.shape.causal,
            "clamp": getattr(scheme.options, "clamp_len", 0),
        }
        members.append((scheme.name, params, options))
    return members
