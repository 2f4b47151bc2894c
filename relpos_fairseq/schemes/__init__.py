"""Every published position scheme: one paper, one file.

Importing this package imports every file of this folder, whose `register_scheme` registers the schemes: a
new scheme is a new file, and nothing else changes.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from relpos_fairseq.core.scheme import REGISTER, PositionScheme

for _file in sorted(module.name for module in iter_modules(__path__)):
    import_module(f"{__name__}.{_file}")

# The scheme of a model whose flags name none.
DEFAULT = {"translation": "sinusoidal", "masked_lm": "learned", "segment_recurrence": "transformer_xl"}
EXAMPLE = "learned+m4m"  # of a hybrid, for help texts and messages
LAYERED = "rope/none"  # of a scheme a layer


def scheme_names() -> list[str]:
    """Return the names of all schemes, in the order of the table of schemes (`SchemeInfo.row`)."""
    return sorted(REGISTER, key=lambda name: (REGISTER[name].info.row, name))


def scheme_class(name: str) -> type[PositionScheme]:
    """Return the class registered as `name`.

    Raises:
        ValueError: there is none; lists all names.
    """
    if name not in REGISTER:
        raise ValueError(
            f"unknown position scheme {name!r}: choose one of {', '.join(scheme_names())}, or join "
            f"several by + ({EXAMPLE})"
        )
    return REGISTER[name]


def schemes_for(causal: bool = False, attention: bool = False) -> list[str]:
    """Return the schemes that `all` stands for.

    Schemes for decoders alone are among them only with `causal`; schemes that act on the input alone only without
    `attention`.
    """
    names = [name for name in scheme_names() if causal or not scheme_class(name).causal_only]
    return [name for name in names if in_attention(name) or not attention]


def named_elsewhere(library: str) -> dict[str, str]:
    """Map the names that another library has for our schemes to ours."""
    named = ((REGISTER[ours].elsewhere.get(library), ours) for ours in scheme_names())
    return {theirs: ours for theirs, ours in named if theirs is not None}


def parse_layers(text: str) -> tuple[tuple[type[PositionScheme], ...], ...]:
    """Split a scheme's name at each / into the hybrids of single layers, and return their members.

    Raises:
        ValueError: as of `parse_hybrid`.
    """
    return tuple(parse_hybrid(part) for part in str(text).split("/"))


def parse_hybrid(text: str) -> tuple[type[PositionScheme], ...]:
    """Return the classes of the members of a scheme or hybrid name.

    Args:
        text: `m4`, or several names joined by `+`.

    Raises:
        ValueError: an unknown or repeated member, `none` with another, or two members that both change
            q.k.
    """
    names = [name.strip() for name in str(text).split("+")]
    members = tuple(scheme_class(name) for name in names)
    if len(members) > 1 and "none" in names:
        raise ValueError(f"position scheme {text}: none adds nothing, leave it out of the hybrid")
    if len(set(names)) < len(names):
        raise ValueError(f"position scheme {text}: each member may stand in a hybrid once")
    for trait, what in (("rotates", "rotates q and k"), ("replaces_qk", "replaces q.k")):
        doing = [member.name for member in members if getattr(member, trait)]
        if len(doing) > 1:
            raise ValueError(f"position scheme {text}: only one member of a hybrid {what}, not {' and '.join(doing)}")
    gated = [member.name for member in members if member.log_gates is not PositionScheme.log_gates]
    weighing = [member.name for member in members if member.gate_weights is not PositionScheme.gate_weights]
    if weighing and len(gated) > 1:
        raise ValueError(
            f"position scheme {text}: {weighing[0]} would weigh the gates of {' and '.join(gated)}: choose one"
        )
    rotating = [member.name for member in members if member.rotates]
    replacing = [member.name for member in members if member.replaces_qk]
    if rotating and replacing:
        # sum_c (R_i q)_c (R_j k)_c w_c depends on i and j apart: no longer a relative scheme.
        raise ValueError(
            f"position scheme {text}: {rotating[0]} rotates q and k, and {replacing[0]} weighs "
            f"their channels apart, which together depend on absolute positions: choose one"
        )
    return members


def in_attention(name: str) -> bool:
    """Return whether a scheme is evaluated in attention; others act on the input alone."""
    return any(member.own_scale is not None for member in parse_hybrid(name))
