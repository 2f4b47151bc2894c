"""One row per scheme and option set: its flags, and how the oracle is asked for the same.

A new scheme has a row by itself, and one for each value of the options that many schemes take; its own
options need a row in `_cases`.  Its oracle is a function in tests/naive.py that takes the scheme's
parameters under their own names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from relpos_fairseq.core.config import PositionConfig, resolve
from relpos_fairseq.core.options import CLIP_DISTANCE, RESET_CLS, SCALE, SHARE, Option
from relpos_fairseq.core.placement import Placement, SchemeStack
from relpos_fairseq.core.plan import PositionPlan
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.scheme import AttentionShape, PositionScheme
from relpos_fairseq.core.terms import PositionTerms
from relpos_fairseq.schemes import scheme_class, scheme_names

# The oracle has the schemes' own parameter names, but for this one.
RENAMED = {"theta": ("theta1", "theta2")}


def taking(option: Option) -> list[str]:
    """Names of the schemes that take an option."""
    return [name for name in scheme_names() if option in scheme_class(name).takes]


CLIPPED = taking(CLIP_DISTANCE)
INPUT = [name for name in scheme_names() if scheme_class(name).own_scale is None]
# Schemes of encoders too; the others are for decoders alone.
ENCODERS = [name for name in scheme_names() if not scheme_class(name).causal_only]
# Those whose terms are another's, with other numbers or fewer (test_contract.py looks at the kinds).
LIKE_OTHERS = {"shaw_keys", "m1", "tupe_a", "alibi", "sandwich", "kerple", "xpos", "transformer_xl_learned"}
LIKE_OTHERS |= {name for name in scheme_names() if name.endswith("_released")}


@dataclass(frozen=True)
class Case:
    """A scheme under some flags."""

    scheme: str
    flags: dict = field(default_factory=dict)

    @property
    def gated(self) -> bool:
        """Whether it has gates, which Triton serves in causal calls alone."""
        own = PositionScheme.log_gates
        return any(scheme_class(name).log_gates is not own for name in self.scheme.split("+"))

    @property
    def causal_only(self) -> bool:
        """Whether it is defined for decoders alone."""
        return any(scheme_class(name).causal_only for name in self.scheme.split("+"))

    @property
    def without_kernel(self) -> bool:
        """Whether no kernel serves it: contextual positions, mixed heads."""
        return bool({"cope", "dape"} & set(self.scheme.split("+")))

    def __str__(self) -> str:
        """The test's id."""
        short = (f"{k.removeprefix('position_')}={v}" for k, v in self.flags.items())
        return "-".join((self.scheme, *short))


GAIN = {"position_scalar_gain": "3"}


def _cases() -> list[Case]:
    rows = [Case(name) for name in scheme_names()]
    rows += [Case(n, {"position_clip_distance": k}) for n in CLIPPED for k in ("0", "1", "3")]
    rows += [Case(n, {"position_share": s}) for n in taking(SHARE) for s in ("none", "heads", "layers", "both")]
    rows += [Case(n, {"position_scale": "1.7"}) for n in taking(SCALE)]
    rows += [Case(n, {"position_reset_cls": r}) for n in taking(RESET_CLS) for r in ("on", "off")]
    rows += [
        Case("abs_scalar", {"position_rank": "3"}),
        Case("t5", {"position_buckets": "6", "position_max_distance": "9"} | GAIN),
        Case("transformer_xl", {"position_query_bias": "off"}),
        Case("transformer_xl", {"position_query_bias": "shared"}),
        Case("transformer_xl", {"clamp_len": "2"}),
        Case("transformer_xl", {"position_query_bias": "u"}),
        Case("transformer_xl", {"position_query_bias": "v"}),
        Case("transformer_xl", {"position_projections": "content"}),
        Case("deberta", {"position_p2c_index": "mirrored"}),
        Case("alibi_learned", {"position_alibi_form": "symmetric", "position_share": "both"}),
        Case("alibi_learned+m4+rel_scalar"),
        Case("log_cpb", {"position_cpb_form": "dynamic", "position_cpb_width": "5"}),
        Case("sandwich", {"position_sandwich_dim": "6"}),
        Case("fire", {"position_share": "heads", "position_reset_cls": "on"}),
        Case("deberta", {"position_projections": "one"}),
        Case("tupe", {"position_projections": "one"}),
        Case("tupe_a", {"position_projections": "one"}),
        Case("tupe", {"position_scalars": "inside", "position_scale": "1"}),
        Case("shaw", {"position_keys": "off"}),
        Case("t5", {"position_buckets": "0", "position_share": "heads"}),
        Case("deberta_released", {"position_terms": "c2p", "position_norm": "on"}),
        Case("deberta_released", {"position_terms": "p2c"}),
        Case(
            "deberta_released",
            {
                "position_projections": "content",
                "position_norm": "on",
                "position_log_buckets": "4",
                "position_clip_distance": "5",
            },
        ),
        Case("xpos", {"position_xpos_base": "4", "position_rope_pairs": "halves"}),
        Case("xpos", {"position_xpos_base": "0"}),
        Case("xpos", {"position_rope_base": "50"}),
        Case("xpos+m2+shaw", {"position_xpos_base": "3"}),
        Case("pope", {"position_rope_base": "50"}),
        Case("tupe_released", {"position_reset_cls": "off"}),
        Case("learned+m4m"),
        Case("sinusoidal+shaw"),
        Case("rope+m4"),
        Case("rope+m2+rel_scalar"),
        Case("m3+rel_scalar+shaw"),
        Case("m2+m4m+shaw"),
        Case("transformer_xl+m2+t5"),
        Case("fox+rope"),
        Case("cope", {"position_contexts": "3", "position_contexts_scaled": "on"}),
        Case("cope", {"position_contexts": "4"}),
        Case("cope+rel_scalar", {"position_share": "none"}),
        Case("m4m+fox+t5"),
        Case("dape+kerple"),
        Case("dape+cable+m2"),
        Case("rope+cable+rel_scalar"),
        Case("m4+rel_scalar", {"position_reset_cls": "on"} | GAIN),
        Case("deberta+tupe", {"position_scale": "3"}),
        Case("rel_scalar", {"segment_encoding": "head"}),
        Case("m4", {"segment_encoding": "head", "position_share": "layers"}),
        Case("rope", {"position_rope_pairs": "halves", "position_rope_base": "100"}),
        Case("rope", {"position_rope_share": "0.5"}),
        Case("rope", {"position_rope_scaling": "yarn", "position_rope_factor": "4"}),
        Case("rope+m4", {"position_rope_scaling": "dynamic", "position_rope_log_n": "on"}),
        Case("rope", {"position_rope_scaling": "llama3", "position_rope_factor": "8", "position_rope_base": "50"}),
        Case("m4", {"segment_encoding": "head", "segment_share": "heads"}),
    ]
    return rows


CASES = _cases()
SHORT = {"position_rope_length": "4"}
TURNS = {"position_rope_slow_turns": "0.1", "position_rope_fast_turns": "2"}  # 4 tokens turn the first pair 0.6 times
LONGROPE = {
    "position_rope_scaling": "longrope",
    "position_rope_factor": "4",
    "position_rope_short_factor": "1,1.25",
    "position_rope_long_factor": "1.5,3",
}
# Inputs longer than in training, which are read by their own length: a shift changes them; and what
# no kernel evaluates.
BEYOND = [
    Case("pope+m4"),
    *(Case("rope", {"position_rope_scaling": s} | SHORT) for s in ("linear", "ntk", "yarn")),
    Case("rope", {"position_rope_scaling": "dynamic", "position_rope_factor": "3"} | SHORT),
    Case("rope", {"position_rope_scaling": "ntk", "position_rope_factor": "3"}),
    *(Case("rope", {"position_rope_scaling": s} | TURNS | SHORT) for s in ("yarn", "llama3")),
    Case("rope", {"position_rope_scaling": "yarn", "position_rope_attention_factor": "1.5"} | SHORT),
    *(Case("rope", LONGROPE | {"position_rope_length": length}) for length in ("4", "6", "50")),
    Case("fire", {"position_fire_threshold": "3"}),
    Case("fire+m4", {"position_fire_threshold": "2", "position_reset_cls": "on"}),
    Case("fire", {"position_fire_threshold": "0.01", "position_share": "both"}),
    Case("rope", {"position_rope_log_n": "on", "position_rope_share": "0.5"} | SHORT),
    Case("rope+shaw", {"position_rope_scaling": "yarn", "position_rope_log_n": "on"} | SHORT),
]
DEFAULTS = {"position_clip_distance": "2"}


def plan_of(case: Case, *, causal: bool = False, heads: int = 2, dim: int = 4, longest: int = 12) -> PositionPlan:
    """The case's plan for a small attention; some cases are causal always."""
    causal = causal or case.causal_only
    shape = AttentionShape(
        embed_dim=heads * dim, num_heads=heads, max_positions=longest, causal=causal, seed_name="test"
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
            if name.endswith("phase"):
                parameter.mul_(4)  # to both ends of [-2 pi, 0]


def build(case: Case, **shape) -> tuple[Placement, torch.nn.ModuleList]:
    """Shared schemes and one layer's own, in fp64, with random parameters."""
    stack = Placement(plan_of(case, **shape)).double()
    layer = stack.layer_schemes(0).double()
    randomize(stack, 1)
    randomize(layer, 2)
    width = stack.plan.shape.embed_dim
    projections = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in "qk").double()
    randomize(projections, 3)
    for scheme in layer:
        scheme.read_content(*projections)
    return stack, layer


def source_of(positions: Positions, batch: int = 2, width: int = 8) -> Tensor:
    """A layer's input (S, B, E) in fp64 for schemes that read it; the last slots are the same."""
    size = (max(positions.src_len, 256), batch, width)
    generator = torch.Generator().manual_seed(11)
    every = torch.randn(size, generator=generator, dtype=torch.float64)
    return every[len(every) - positions.src_len :]


def terms_of(stack: Placement, layer: SchemeStack, positions: Positions, batch: int = 2) -> tuple[PositionTerms, ...]:
    """All terms of a layer, those of its input among them."""
    own = layer.evaluate(positions).terms
    some = next(layer.parameters(), None)
    if some is not None:
        source = source_of(positions, batch, stack.plan.shape.embed_dim)
        own += layer.gated(source.to(some), None)
    return stack.context(positions).shared + own


def kinds_of(scheme: str) -> set[str]:
    """The kinds of terms that a scheme has by default: the fields of its terms that are filled, and "rotation"."""
    case, positions = Case(scheme), Positions(5, 5)
    stack, layer = build(case, causal=case.causal_only)
    terms = terms_of(stack, layer, positions)
    values = {(one.name, id(getattr(term, one.name))) for term in terms for one in fields(term)}
    found = {name for name, value in values if value not in (id(None), id(False))} - {"relation"}
    return found | ({"rotation"} if stack.context(positions).rotation is not None else set())


def kinds_without(schemes: Iterable[str], tested: Iterable[str]) -> dict[str, set[str]]:
    """The schemes with a kind of term that no member of the tested schemes and hybrids has, and which kinds."""
    known = set().union(*(kinds_of(name) for joined in tested for name in joined.split("+")))
    return {name: kinds for name in schemes if (kinds := kinds_of(name) - known)}


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
        for name, projection in zip(("queries", "keys"), getattr(scheme, "content", ()), strict=False):
            params[f"content_{name}"] = projection.weight.detach()
            params[f"content_{name}_bias"] = projection.bias.detach()
        options = vars(scheme.options) | {
            "reset": scheme.options.reset_cls,
            "bidirectional": not scheme.shape.causal,
            "clamp": getattr(scheme.options, "clamp_len", 0),
            "trained": getattr(scheme, "trained_length", None),
        }
        members.append((scheme.name, params, options))
    return members
