"""Find kinds of tasks in the modules of this folder, and make the tasks of a specification."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from relpos_fairseq.comparison.tasks.base import KINDS, Task
from relpos_fairseq.io.reading import of_type


def kinds() -> dict[str, type[Task]]:
    """Return every kind of task by its name."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"{__package__}.{module.name}")
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
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(f"task {label}: there is no kind {kind!r}; known: {', '.join(known)}")
    own = {key: value for key, value in options.items() if key not in ("kind", *shared)}
    types = {f.name: str(f.type) for f in fields(known[kind]) if f.name not in ("label", *shared)}
    if unknown := [str(key) for key in own if key not in types]:
        raise ValueError(f"task {label}: kind {kind} has no {', '.join(unknown)}; known: {', '.join(types)}")
    hints = get_type_hints(known[kind])
    for key, value in own.items():
        try:
            of_type(value, _as_yaml(hints[key]), key)
        except ValueError as error:
            raise ValueError(f"task {label}: {error}") from None
    flags = {key: {**flags, **(options.get(key) or {})} for key, flags in shared.items()}
    try:
        paths = {key: Path(value) for key, value in own.items() if types[key].startswith("Path") and value is not None}
        return known[kind](label=label, **own | paths, **flags)
    except (TypeError, ValueError) as error:
        raise ValueError(f"task {label}: {error}") from None


def _as_yaml(wanted: Any) -> Any:
    """Return the type that an option has in YAML: a path is a text there, and a tuple a list."""
    if parts := get_args(wanted) if get_origin(wanted) is UnionType else ():
        return Union[tuple(map(_as_yaml, parts))]  # noqa: UP007  (of a tuple)
    return {Path: str, tuple: list[object], list: list[object], dict: dict[str, object]}.get(wanted, wanted)
