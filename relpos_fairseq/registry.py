"""The register of schemes, and what a name such as `learned+m4m` means."""

from __future__ import annotations

import relpos_fairseq.schemes  # noqa: F401  (importing the schemes registers them)
from relpos_fairseq.scheme import REGISTER, PositionScheme


def scheme_names() -> list[str]:
    """Names of all schemes, in the contract's order (that of their files' import)."""
    return list(REGISTER)


def scheme_class(name: str) -> type[PositionScheme]:
    """The class registered as `name`.

    Raises:
        ValueError: if there is none; lists those there are.
    """
    if name not in REGISTER:
        raise ValueError(
            f"unknown position scheme {name!r}: choose one of {', '.join(REGISTER)}, or join "
            f"several by + (learned+m4m)"
        )
    return REGISTER[name]


def parse_hybrid(text: str) -> tuple[type[PositionScheme], ...]:
    """Classes of the members of a scheme or hybrid name.

    Args:
        text: `m4`, or several names joined by `+`.

    Raises:
        ValueError: an unknown or repeated member, `none` beside another, or members whose content
            terms exclude each other.
    """
    names = [name.strip() for name in str(text).split("+")]
    members = tuple(scheme_class(name) for name in names)
    if len(members) > 1 and "none" in names:
        raise ValueError(f"position scheme {text}: none adds nothing, leave it out of the hybrid")
    if len(set(names)) < len(names):
        raise ValueError(f"position scheme {text}: each member may stand in a hybrid once")
    for trait, what in (("rotates", "rotates q and k"), ("replaces_content", "replaces q.k")):
        doing = [member.name for member in members if getattr(member, trait)]
        if len(doing) > 1:
            raise ValueError(
                f"position scheme {text}: only one member of a hybrid {what}, not "
                f"{' and '.join(doing)}"
            )
    rotating = [member.name for member in members if member.rotates]
    replacing = [member.name for member in members if member.replaces_content]
    if rotating and replacing:
        # sum_c (R_i q)_c (R_j k)_c w_c depends on i and j apart: no longer a relative scheme.
        raise ValueError(
            f"position scheme {text}: {rotating[0]} rotates q and k, and {replacing[0]} weighs "
            f"their channels apart, which together depend on absolute positions: choose one"
        )
    return members
