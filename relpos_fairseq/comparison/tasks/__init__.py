"""Tasks that schemes are compared on; every module of this folder is searched for kinds of them."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import fields
from pathlib import Path

from relpos_fairseq.comparison.tasks.base import KINDS, Task


def kinds() -> dict[str, type[Task]]:
    """Return every kind of task by its name."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return KINDS


def make_task(label: str, options: dict, shared: dict[str, dict]) -> Task:
    """Return a task of a specification; an option that holds a path becomes one.

    Args:
        label: the task's name in the specification.
        options: its `kind`, its own options, and flags of its own under `train` and `generate`.
        shared: flags of all tasks, under `train` and `generate`.

    Raises:
        ValueError: an unknown kind or option, or a wrong value.
    """
    known = kinds()
    kind = options.get("kind", label)
    if kind not in known:
        raise ValueError(f"task {label}: there is no kind {kind!r}; known: {', '.join(known)}")
    own = {key: value for key, value in options.items() if key not in ("kind", *shared)}
    types = {f.name: str(f.type) for f in fields(known[kind]) if f.name not in ("label", *shared)}
    if unknown := [str(key) for key in own if key not in types]:
        raise ValueError(f"task {label}: kind {kind} has no {', '.join(unknown)}; known: {', '.join(types)}")
    flags = {key: {**flags, **(options.get(key) or {})} for key, flags in shared.items()}
    try:
        paths = {key: Path(value) for key, value in own.items() if types[key].startswith("Path") and value is not None}
        return known[kind](label=label, **own | paths, **flags)
    except (TypeError, ValueError) as error:
        raise ValueError(f"task {label}: {error}") from None
