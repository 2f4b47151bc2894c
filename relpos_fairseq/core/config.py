"""PositionConfig: every flag of positions, declared once; and `resolve`, which makes a plan of the flags.

The fields of `PositionConfig` become `--position-scheme` and so on in `fairseq-train`, and `model.*` in
hydra.  `resolve` decides every `auto`, checks every option against the schemes that take it, and says
every error in one line.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field, make_dataclass, replace
from typing import Any

from relpos_fairseq.attention import BACKENDS
from relpos_fairseq.core.options import (
    CLIP_DISTANCE,
    RESET_CLS,
    SCALE,
    SHARE,
    AttentionShape,
    Number,
    Option,
    SchemeOptions,
    in_order,
)
from relpos_fairseq.core.plan import PositionPlan, SchemePlan
from relpos_fairseq.core.scheme import REGISTER, PositionScheme
from relpos_fairseq.schemes import DEFAULT, EXAMPLE, LAYERED, parse_layers, scheme_names

SEGMENT_ENCODINGS = ("none", "input", "head")
# What `auto` means for the clip distance, by kind of model: (vectors, scalars); 0 = unclipped.
AUTO_CLIP = {"translation": (16, 128), "language_model": (64, 256), "masked_lm": (0, 0)}
NUM_SEGMENTS = Number(
    name="num_segments",
    prefix="",
    place=0,
    help="number k of segments that --segment-encoding tells apart",
    auto=2,
    least=1,
)
SEGMENT_SHARE = replace(SHARE, name="share", prefix="segment_")
# Every option of every scheme, in the order of --help.
OPTIONS = in_order(frozenset().union(*(scheme.takes for scheme in REGISTER.values())))


def takers(option: Option) -> str:
    """Return the names of the schemes that take an option, or "all but" the others where these are fewer."""
    taking = [name for name in scheme_names() if option in REGISTER[name].takes]
    leaving = [name for name in scheme_names() if name not in taking]
    if len(leaving) < len(taking):
        return f"all but {', '.join(leaving)}"
    return ", ".join(taking)


def _flags() -> list[tuple[str, type, object]]:
    """Return (name, type, field) of every flag, in the order of --help."""
    texts = {
        "position_scheme": (
            DEFAULT["translation"],
            f"position scheme, or several joined by + ({EXAMPLE}); / gives each layer its own, "
            f"repeated over the layers ({LAYERED}); see the table of schemes",
        ),
        "encoder_position_scheme": ("auto", "scheme of the encoder (auto: --position-scheme)"),
        "decoder_position_scheme": ("auto", "scheme of the decoder (auto: --position-scheme)"),
    }
    for option in OPTIONS:
        auto = f"; auto: {option.auto_text}" if option.auto_text else ""
        texts[option.field] = ("auto", f"{option.help} ({takers(option)}){auto}")
    texts |= {
        "segment_encoding": ("none", "none, input (added to the embedding) or head (a scalar a head and segment pair)"),
        "segment_share": (
            "auto",
            f"who has one table of segments in common: none, heads, layers or both; auto: as {SHARE.flag}",
        ),
        "num_segments": ("auto", f"{NUM_SEGMENTS.help}; auto: {NUM_SEGMENTS.auto}"),
        "attention_backend": ("auto", f"how self-attention is evaluated: {', '.join(BACKENDS)}; auto: by fixed rules"),
    }
    return [(name, str, help_text(default, text)) for name, (default, text) in texts.items()]


def help_text(default: Any, text: str) -> Any:
    """Return a dataclass field with a default and its help text."""
    return field(default=default, metadata={"help": text})


PositionConfig: Any = make_dataclass("PositionConfig", _flags())
PositionConfig.__module__ = __name__
PositionConfig.__doc__ = "Position flags as the user gives them; `auto` everywhere means the scheme's own choice."
Flags = Any  # a PositionConfig, or any object with its attributes


def resolve(
    config: Flags, shape: AttentionShape, model: str, *, side: str = "", sides: Iterable[str] = ()
) -> PositionPlan:
    """Return the plan of an encoder or decoder: decide every `auto` and check every option.

    Args:
        config: the flags.
        shape: the attention that the schemes serve.
        model: `translation`, `language_model` or `masked_lm`, which decides clip distances.
        side: `encoder` or `decoder` where each may have its own scheme, else "".
        sides: all sides of the model; an option is refused only if no side's scheme takes it.

    Raises:
        ValueError: names the flag, its value and the way out.
    """
    _refuse_untaken(config, tuple(sides) or (side,))
    decoder_only = shape.causal and not sides
    parts = (
        _resolve_part(config, members, shape, model, decoder_only) for members in parse_layers(scheme_of(config, side))
    )
    return PositionPlan.of_parts(tuple(parts))


def _resolve_part(
    config: Flags, members: tuple[type[PositionScheme], ...], shape: AttentionShape, model: str, decoder_only: bool
) -> PositionPlan:
    """Return the plan of the hybrid of some layers; see `resolve`."""
    name = "+".join(member.name for member in members)
    constant = _scale_constant(config, name, members, shape)
    resets = _resets(config, members, shape, decoder_only)
    plans = tuple(SchemePlan(member, _options(config, member, shape, model, constant, resets)) for member in members)
    segments = _choice(config, "segment_encoding", SEGMENT_ENCODINGS)
    return PositionPlan(
        name=name,
        members=plans,
        scale_constant=constant,
        segment_encoding=segments,
        segment_share=_segment_share(config, segments, shape),
        num_segments=_num_segments(config, segments, shape),
        backend=_choice(config, "attention_backend", BACKENDS),
        shape=shape,
    )


def scheme_of(config: Flags, side: str) -> str:
    """Return the name of the position scheme of a side of the model, or where side is "" of its one stack."""
    own = getattr(config, f"{side}_position_scheme", "auto") if side else "auto"
    return config.position_scheme if own in ("auto", None) else own


def _refuse_untaken(config: Flags, sides: tuple[str, ...]) -> None:
    """Raise an error for an option that no side's scheme takes."""
    for option, value in untaken(config, sides).items():
        names = "+".join(dict.fromkeys(m.name for side in sides for m in members_of(scheme_of(config, side))))
        raise ValueError(f"{option.flag} {value} does not apply to position scheme {names}: leave it out or at auto")


def untaken(config: Flags, sides: Iterable[str]) -> dict[Option, str]:
    """Return the options given that no side's scheme takes (a decoder beside an encoder never takes the reset)."""
    schemes = {side: members_of(scheme_of(config, side)) for side in sides}
    taken = {
        option
        for side, members in schemes.items()
        for member in members
        for option in member.takes
        if not (option is RESET_CLS and side == "decoder" and len(schemes) > 1)
    }
    shared_alike = getattr(config, "segment_share", "auto") in ("auto", None)
    if str(config.segment_encoding) == "head" and shared_alike:
        taken.add(SHARE)
    given = {option: _given(config, option) for option in OPTIONS if option not in taken}
    return {option: value for option, value in given.items() if value is not None}


def members_of(name: str) -> tuple[type[PositionScheme], ...]:
    """Return the members of all layers of a scheme, each once, in the order of `PositionPlan.members`."""
    return tuple(dict.fromkeys(member for part in parse_layers(name) for member in part))


def shared_members(config: Flags, name: str) -> list[str]:
    """Return the members of a scheme that all its layers share, in the order of `Placement.shared`."""
    shares = {
        member: (_given(config, SHARE) or member.default_share) if SHARE in member.takes else "none"
        for member in members_of(name)
    }
    return [m.name for m, share in shares.items() if SchemePlan(m, SchemeOptions(share=share)).across_layers]


def _given(config: Flags, option: Option) -> str | None:
    value = getattr(config, option.field)
    return None if value is None or str(value) == "auto" else str(value)


def _choice(config: Flags, flag: str, choices: tuple[str, ...]) -> str:
    value = str(getattr(config, flag))
    if value not in choices:
        raise ValueError(f"--{flag.replace('_', '-')} must be one of {', '.join(choices)}, got {value}")
    return value


def _segment_share(config: Flags, encoding: str, shape: AttentionShape) -> str:
    given = getattr(config, "segment_share", "auto")
    if given in ("auto", None):
        return _given(config, SHARE) or "none"
    if encoding != "head":
        raise ValueError(
            f"--segment-share {given} does not apply to --segment-encoding {encoding}: leave it at auto, or choose head"
        )
    return SEGMENT_SHARE.read(given, shape)


def _num_segments(config: Flags, encoding: str, shape: AttentionShape) -> int:
    given = _given(config, NUM_SEGMENTS)
    if given is not None and encoding == "none":
        raise ValueError(
            f"--num-segments {given} does not apply to --segment-encoding none: leave it at auto, "
            f"or choose input or head"
        )
    return NUM_SEGMENTS.value(given, shape)


def _scale_constant(
    config: Flags, name: str, members: tuple[type[PositionScheme], ...], shape: AttentionShape
) -> float:
    own = {
        member.name: member.scale_under(lambda option: option.value(_given(config, option), shape))
        for member in members
        if member.own_scale is not None
    }
    given = _given(config, SCALE)
    if given is not None:
        return SCALE.read(given, shape)
    if len(set(own.values())) > 1:
        scales = ", ".join(f"{key} 1/sqrt({value:g}d)" for key, value in own.items())
        raise ValueError(
            f"position scheme {name}: its members' scales disagree ({scales}): choose one by "
            f"--position-scale C for 1/sqrt(C d)"
        )
    return next((scale for scale in own.values() if scale is not None), 1.0)


def _resets(
    config: Flags, members: tuple[type[PositionScheme], ...], shape: AttentionShape, decoder_only: bool
) -> bool:
    given = _given(config, RESET_CLS)
    text = None if given is None else RESET_CLS.read(given, shape)
    if shape.causal:
        if text == "on" and decoder_only:
            raise ValueError(
                f"{RESET_CLS.flag} on: a decoder has no [CLS] whose row and column could be reset; leave it at auto"
            )
        return False
    if text is None:
        return any(member.resets_by_default for member in members)
    return text == "on"


def _options(
    config: Flags, scheme: type[PositionScheme], shape: AttentionShape, model: str, constant: float, resets: bool
) -> SchemeOptions:
    given = {option: _given(config, option) for option in scheme.takes}
    values = {option.name: option.value(text, shape) for option, text in given.items()}
    # The `auto` of these options depends on the hybrid or the model.
    if SCALE in scheme.takes:
        values["scale"] = constant
    if RESET_CLS in scheme.takes:
        values["reset_cls"] = resets
    if CLIP_DISTANCE in scheme.takes and given[CLIP_DISTANCE] is None:
        values["clip_distance"] = AUTO_CLIP[model][scheme.clip == "scalars"]
    if SHARE in scheme.takes and given[SHARE] is None:
        values["share"] = scheme.default_share
    options = SchemeOptions(**values)
    scheme.check_options(options, shape)
    return options
