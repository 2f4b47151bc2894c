"""Find kinds of tasks in the modules of this folder, and make the tasks of a specification."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import MISSING, fields
from itertools import product
from pathlib import Path
from types import UnionType
from typing import Any, TypedDict, Union, get_args, get_origin, get_type_hints

from relpos_fairseq.io.reading import of_type
from relpos_fairseq.lab.comparison.protocols import PROTOCOLS
from relpos_fairseq.lab.comparison.tasks.base import KINDS, Task


def kinds() -> dict[str, type[Task]]:
    """Return every kind of task by its name."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"{__package__}.{module.name}")
    return KINDS


class _Grid(TypedDict, total=False):
    """What the entry of a fine-tuning may say of a grid."""

    lr: float | list[float] | None
    epochs: int | list[int] | None


def make_tasks(label: str, options: dict, shared: dict[str, dict]) -> dict[str, Task]:
    """Return the tasks of a specification's entry by label: one, or of a grid one for each of its points.

    The entry of a grid has a list under `lr` or `epochs`, or names a `protocol`, which stands for what is not given.
    The arguments are those of `make_task`.
    """
    try:
        return {name: make_task(name, point, shared) for name, point in _points(label, options).items()}
    except (TypeError, ValueError) as error:
        raise ValueError(f"task {label}: {error}") from None


def _points(label: str, options: dict) -> dict[str, dict]:
    """Return the options of each point of a grid by the task's label; of what is no grid those given."""
    own = getattr(kinds().get(str(options.get("kind", label))), "protocol", None)
    protocol = own and PROTOCOLS.get(str(options.get("protocol", own)))
    if not protocol:  # it is no fine-tuning, or `make_task` says that there is no such kind or protocol
        return {label: options}
    of_type(options, _Grid)
    given = [options.get(name) for name in _Grid.__annotations__]
    whole = protocol.learning_rates, protocol.epochs
    if "protocol" not in options:
        whole = whole[0][:1], whole[1][:1]
    axes = [
        one if isinstance(one, list) else values if one is None else [one]
        for one, values in zip(given, whole, strict=True)
    ]
    points = list(product(*axes))
    if len(points) == 1 and not any(isinstance(one, list) for one in given):
        return {label: options}
    names = [f"{label}-lr{rate:g}-epochs{epochs}" for rate, epochs in points]
    if not points or len(set(names)) < len(names):
        raise ValueError(f"lr and epochs must be different numbers each, got {axes[0]} and {axes[1]}")
    return {name: options | {"lr": lr, "epochs": epochs} for name, (lr, epochs) in zip(names, points, strict=True)}


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
        raise ValueError(f"there is no kind {kind!r}; known: {', '.join(known)}")
    own = {key: value for key, value in options.items() if key not in ("kind", *shared)}
    types = {f.name: str(f.type) for f in fields(known[kind]) if f.name not in ("label", *shared)}
    if unknown := [str(key) for key in own if key not in types]:
        raise ValueError(f"kind {kind} has no {', '.join(unknown)}; known: {', '.join(types)}")
    required = {f.name for f in fields(known[kind]) if f.default is MISSING and f.default_factory is MISSING}
    if missing := [name for name in types if name in required - own.keys()]:
        raise ValueError(f"kind {kind} needs {', '.join(missing)}: say it in the specification")
    hints = get_type_hints(known[kind], include_extras=True)
    flagged = {key: options[key] for key in shared if options.get(key) is not None}
    for key, value in (own | flagged).items():
        of_type(value, _as_yaml(hints[key]), key)
    flags = {key: {**flags, **flagged.get(key, {})} for key, flags in shared.items()}
    paths = {
        key: Path(value).absolute() for key, value in own.items() if types[key].startswith("Path") and value is not None
    }
    return known[kind](label=label, **own | paths, **flags)


def _as_yaml(wanted: Any) -> Any:
    """Return the type that an option has in YAML: a path is a text there, and a tuple a list."""
    if parts := get_args(wanted) if get_origin(wanted) is UnionType else ():
        return Union[tuple(map(_as_yaml, parts))]  # noqa: UP007  (of a tuple)
    if get_origin(wanted) is tuple:
        return list[get_args(wanted)[0]]
    return {Path: str, tuple: list[object], list: list[object], dict: dict[str, object]}.get(wanted, wanted)
