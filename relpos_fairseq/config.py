"""PositionConfig: every flag, once.

The fields below become `--position-scheme` and so on for `fairseq-train`, and `model.*` in hydra.
`resolve` turns what the user wrote into what schemes are built from, with every `auto` decided,
every option checked against the schemes that take it, and every error in one line.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from relpos_fairseq.attention import BACKENDS
from relpos_fairseq.scheme import AttentionShape, PositionScheme, SchemeOptions
from relpos_fairseq.schemes import parse_hybrid

SHARES = ("none", "heads", "layers", "both")
SEGMENT_ENCODINGS = ("none", "input", "head")
# What `auto` means for the clip distance, by kind of model: (vectors, scalars); 0 = unclipped.
CLIP_DISTANCE = {"translation": (16, 128), "language_model": (64, 256), "masked_lm": (0, 0)}


def _flag(default: str, text: str):
    return field(default=default, metadata={"help": text})


@dataclass
class PositionConfig:
    """Position flags as the user gives them; `auto` everywhere means the scheme's own choice."""

    position_scheme: str = _flag(
        "sinusoidal",
        "position scheme, or several joined by + (learned+m4m); see the README's table",
    )
    encoder_position_scheme: str = _flag("auto", "scheme of the encoder (auto: --position-scheme)")
    decoder_position_scheme: str = _flag("auto", "scheme of the decoder (auto: --position-scheme)")
    position_clip_distance: str = _flag(
        "auto",
        "tables cover distances -K..K and are read at their ends beyond; 0: no clipping (shaw, "
        "shaw_keys, m2, m3, m4, m4m, deberta, tupe, rel_scalar)",
    )
    position_share: str = _flag(
        "auto",
        "who has one table in common: none, heads (of a layer), layers (per head) or both (all "
        "schemes with parameters in attention)",
    )
    position_scale: str = _flag(
        "auto", "C in 1/sqrt(C * head_dim) instead of the scheme's own (every scheme in attention)"
    )
    position_reset_cls: str = _flag(
        "auto",
        "on: the first token's row and column of the position logits become learned scalars, in "
        "encoders (shaw, shaw_keys, transformer_xl, t5, m4, deberta, tupe, tupe_a, abs_scalar, "
        "rel_scalar, alibi, kerple); auto: on for tupe and tupe_a",
    )
    position_rank: str = _flag("auto", "rank of P (abs_scalar); auto: head_dim")
    position_buckets: str = _flag("auto", "number of buckets (t5); auto: 32")
    position_max_distance: str = _flag("auto", "distance of the last bucket (t5); auto: 128")
    position_query_bias: str = _flag(
        "auto",
        "u and v (transformer_xl): on (a layer's own), shared (by all layers, the released code's "
        "untie_r=False) or off; auto: on",
    )
    position_p2c_index: str = _flag("auto", "paper or mirrored (deberta); auto: paper")
    clamp_len: str = _flag(
        "auto",
        "distances beyond it read the same sinusoid; 0 or auto: none (transformer_xl)",
    )
    segment_encoding: str = _flag(
        "none", "none, input (added to the embedding) or head (a scalar a head and segment pair)"
    )
    num_segments: str = _flag(
        "auto", "number k of segments that --segment-encoding tells apart; auto: 2"
    )
    attention_backend: str = _flag(
        "auto", f"how self-attention is evaluated: {', '.join(BACKENDS)}; auto: by fixed rules"
    )


@dataclass(frozen=True)
class SchemePlan:
    """One member of a resolved hybrid: a class, and the options it is built with."""

    scheme: type[PositionScheme]
    options: SchemeOptions

    @property
    def across_layers(self) -> bool:
        """Whether one instance serves all layers."""
        return self.options.share in ("layers", "both") or self.scheme.default_share is None


@dataclass(frozen=True)
class PositionPlan:
    """A resolved stack (an encoder or a decoder): its members and everything they share."""

    name: str
    members: tuple[SchemePlan, ...]
    scale_constant: float
    segment_encoding: str
    segment_share: str
    num_segments: int
    backend: str
    shape: AttentionShape

    @property
    def scale(self) -> float:
        """What q.k is multiplied by."""
        return (self.scale_constant * self.shape.head_dim) ** -0.5

    @property
    def absolute(self) -> bool:
        """Whether any member reads absolute positions."""
        return any(plan.scheme.absolute for plan in self.members)

    @property
    def longest(self) -> int | None:
        """Longest input that the tables allow, or None."""
        limited = any(plan.scheme.table_limited for plan in self.members)
        return self.shape.max_positions if limited else None

    def describe(self) -> str:
        """One line, which also is what a checkpoint remembers and a resume is held against.

        Not in it: clamp_len, which the paper's own evaluation sets on a model trained without.
        """
        parts = [self.name]
        for plan in self.members:
            for option in _DESCRIBED:
                if option in plan.scheme.takes and option not in ("scale", "clamp_len"):
                    parts.append(f"{plan.scheme.name}.{option}={getattr(plan.options, option)}")
        parts.append(f"scale={self.scale_constant:g}")
        shared = f" segments.share={self.segment_share}" * (self.segment_encoding == "head")
        count = f" segments.count={self.num_segments}" * (self.num_segments != 2)
        parts.append(f"segments={self.segment_encoding}{shared}{count}")
        return " ".join(parts)


_DESCRIBED = tuple(part.name for part in fields(SchemeOptions))
# Flag of each option, in the order of the README.
_OPTION_FLAGS = {
    "clip_distance": "position_clip_distance",
    "share": "position_share",
    "scale": "position_scale",
    "reset_cls": "position_reset_cls",
    "rank": "position_rank",
    "buckets": "position_buckets",
    "max_distance": "position_max_distance",
    "query_bias": "position_query_bias",
    "p2c_index": "position_p2c_index",
    "clamp_len": "clamp_len",
}


def resolve(
    config: PositionConfig,
    shape: AttentionShape,
    model: str,
    *,
    side: str = "",
    sides: Iterable[str] = (),
) -> PositionPlan:
    """Decide every `auto` and check every option.

    Args:
        config: the flags (anything with PositionConfig's attributes).
        shape: the attention that is served.
        model: `translation`, `language_model` or `masked_lm`, which decides clip distances.
        side: `encoder` or `decoder` where each may have its own scheme, else "".
        sides: all sides of the model; an option is refused only if no side's scheme takes it.

    Raises:
        ValueError: names the flag, its value and the way out.
    """
    members = parse_hybrid(_scheme_of(config, side))
    name = "+".join(member.name for member in members)
    _refuse_untaken(config, tuple(sides) or (side,))
    constant = _scale_constant(config, name, members)
    resets = _resets(config, members, shape, decoder_only=shape.causal and not sides)
    plans = tuple(
        SchemePlan(member, _options(config, member, shape, model, constant, resets))
        for member in members
    )
    segments = _choice(config, "segment_encoding", SEGMENT_ENCODINGS)
    return PositionPlan(
        name=name,
        members=plans,
        scale_constant=constant,
        segment_encoding=segments,
        segment_share=_given(config, "position_share") or "none",
        num_segments=_num_segments(config, segments),
        backend=_choice(config, "attention_backend", BACKENDS),
        shape=shape,
    )


def _scheme_of(config: PositionConfig, side: str) -> str:
    own = getattr(config, f"{side}_position_scheme", "auto") if side else "auto"
    return config.position_scheme if own in ("auto", None) else own


def _refuse_untaken(config: PositionConfig, sides: tuple[str, ...]) -> None:
    """Refuse an option that no side's scheme takes (a decoder never takes the reset)."""
    schemes = {side: parse_hybrid(_scheme_of(config, side)) for side in sides}
    taken = {
        option
        for side, members in schemes.items()
        for member in members
        for option in member.takes
        if not (option == "reset_cls" and side == "decoder" and len(sides) > 1)
    }
    if str(config.segment_encoding) == "head":
        taken.add("share")
    for option, flag in _OPTION_FLAGS.items():
        value = _given(config, flag)
        if value is not None and option not in taken:
            names = "+".join(dict.fromkeys(m.name for part in schemes.values() for m in part))
            raise ValueError(
                f"--{flag.replace('_', '-')} {value} does not apply to position scheme {names}: "
                f"leave it out or at auto"
            )


def _given(config: PositionConfig, flag: str) -> str | None:
    value = getattr(config, flag)
    return None if value is None or str(value) == "auto" else str(value)


def _choice(config: PositionConfig, flag: str, choices: tuple[str, ...]) -> str:
    value = str(getattr(config, flag))
    if value not in choices:
        raise ValueError(
            f"--{flag.replace('_', '-')} must be one of {', '.join(choices)}, got {value}"
        )
    return value


def _number(config: PositionConfig, flag: str, least: int, auto: int) -> int:
    text = _given(config, flag)
    if text is None:
        return auto
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or value < least:
        name = flag.removeprefix("position_")
        kind = "a whole number " if value is None else ""
        said = f"{name} must be {kind}>= {least}, got {text} (--{flag.replace('_', '-')})"
        raise ValueError(said)
    return value


def _num_segments(config: PositionConfig, encoding: str) -> int:
    given = _given(config, "num_segments")
    if given is not None and encoding == "none":
        raise ValueError(
            f"--num-segments {given} does not apply to --segment-encoding none: leave it at auto, "
            f"or choose input or head"
        )
    return _number(config, "num_segments", 1, SchemeOptions.num_segments)


def _scale_constant(
    config: PositionConfig, name: str, members: tuple[type[PositionScheme], ...]
) -> float:
    own = {m.name: m.own_scale for m in members if m.own_scale is not None}
    given = _given(config, "position_scale")
    if given is not None:
        return _positive(given)
    if len(set(own.values())) > 1:
        scales = ", ".join(f"{key} 1/sqrt({value:g}d)" for key, value in own.items())
        raise ValueError(
            f"position scheme {name}: its members' scales disagree ({scales}): choose one by "
            f"--position-scale C for 1/sqrt(C d)"
        )
    return next(iter(own.values()), 1.0)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"scale must be > 0, got {text} (--position-scale)")
    return value


def _resets(
    config: PositionConfig,
    members: tuple[type[PositionScheme], ...],
    shape: AttentionShape,
    decoder_only: bool,
) -> bool:
    text = _given(config, "position_reset_cls")
    if text not in (None, "on", "off"):
        raise ValueError(f"--position-reset-cls must be auto, on or off, got {text}")
    if shape.causal:
        if text == "on" and decoder_only:
            raise ValueError(
                "--position-reset-cls on: a decoder has no [CLS] whose row and column could be "
                "reset; leave it at auto"
            )
        return False
    if text is None:
        return any(member.resets_by_default for member in members)
    return text == "on"


def _options(
    config: PositionConfig,
    scheme: type[PositionScheme],
    shape: AttentionShape,
    model: str,
    constant: float,
    resets: bool,
) -> SchemeOptions:
    clip = CLIP_DISTANCE[model][scheme.clip == "scalars"]
    share = _given(config, "position_share") or scheme.default_share or "none"
    if share not in SHARES:
        raise ValueError(f"--position-share must be auto, {', '.join(SHARES)}, got {share}")
    bias = _given(config, "position_query_bias") or "on"
    if bias not in ("on", "shared", "off"):
        raise ValueError(f"--position-query-bias must be auto, on, shared or off, got {bias}")
    p2c = _given(config, "position_p2c_index") or "paper"
    if p2c not in ("paper", "mirrored"):
        raise ValueError(f"--position-p2c-index must be auto, paper or mirrored, got {p2c}")
    options = SchemeOptions(
        clip_distance=_number(config, "position_clip_distance", 0, clip),
        share=share if "share" in scheme.takes else "none",
        scale=constant,
        reset_cls=resets and "reset_cls" in scheme.takes,
        rank=_number(config, "position_rank", 1, shape.head_dim),
        buckets=_number(config, "position_buckets", 2 if shape.causal else 4, 32),
        max_distance=_number(config, "position_max_distance", 1, 128),
        query_bias=bias,
        p2c_index=p2c,
        clamp_len=_number(config, "clamp_len", 0, 0),
    )
    if "buckets" in scheme.takes:
        _check_buckets(options, shape.causal)
    return options


def _check_buckets(options: SchemeOptions, causal: bool) -> None:
    exact = options.buckets // (2 if causal else 4)
    if options.max_distance <= exact:
        raise ValueError(
            f"max_distance must exceed the {exact} distances that have a bucket of their own, got "
            f"{options.max_distance} (--position-max-distance; or lower --position-buckets)"
        )
