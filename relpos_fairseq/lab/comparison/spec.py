"""Read a comparison, schemes x seeds x tasks, from a YAML file.

    title: What the report is called
    baseline: shaw                    # the scheme that others are compared with; default: the first
    pairs: baseline                   # the differences that are tested; or all, or a list of [scheme, scheme]
    seeds: 6                          # 1 to 6, or a list
    schemes: [none, t5]               # or, with flags of fairseq-train:
      near: {position-scheme: shaw, position-clip-distance: 4}
    train: {max-update: 500}          # flags of all trainings
    generate: {beam: 1}               # flags of fairseq-generate, where the task uses it
    tasks:
      copying: {kind: copy, symbols: 20, train: {max-update: 800}}
      RTE: {kind: glue, name: RTE, data: data-bin/glue, lr: [1.0e-5, 2.0e-5], epochs: [5, 10]}    # a grid
      CoLA: {kind: glue, name: CoLA, data: data-bin/glue, protocol: chen}    # the grid of a published protocol
    slurm: {timeout_min: 60}          # submitit's parameters, for --executor slurm

A grid is several tasks, `RTE-lr1e-05-epochs5` and so on; of each scheme the report has the best by `choices.choose`.
Paths count from the folder in which the command runs.
"""

from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, TypedDict

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.reading import of_type, read_yaml
from relpos_fairseq.lab.comparison.tasks.base import Task, check_label
from relpos_fairseq.lab.comparison.tasks.registry import make_tasks

SCHEME = "position-scheme"
SEEDS = 1000  # that a comparison may have
LARGEST = 2**31 - 1  # seed, which fairseq gives to numpy and to torch
Label = str | int  # YAML's 4 is a name, too
Scalar = None | bool | int | float | str
Flags = dict[str, Scalar | list[Scalar]]


class _Optional(TypedDict, total=False):
    title: Scalar
    baseline: Label | None
    pairs: object  # `pairs_of` checks it
    seeds: int | list[int]
    train: Flags | None
    generate: Flags | None
    slurm: dict[str, Scalar | list[Scalar] | dict[str, Scalar]] | None


class _Content(_Optional):
    schemes: list[Label] | dict[Label, Flags | None]
    tasks: dict[Label, dict[str, object]]


KEYS = tuple(_Content.__annotations__)


@dataclass(frozen=True)
class Spec:
    """A comparison: every scheme on every task with every seed."""

    name: str  # of its folders
    title: str  # of its report
    schemes: dict[str, dict]  # flags of fairseq-train by label
    seeds: tuple[int, ...]
    tasks: dict[str, Task]  # by label
    baseline: str  # label of the scheme that the others are compared with
    pairs: tuple[tuple[str, str], ...]  # (scheme, other): the differences that are tested
    slurm: dict = field(default_factory=dict)  # submitit's parameters
    grids: dict[str, str] = field(default_factory=dict)  # label of the grid by that of each task that is a point of one


def read_spec(path: Path) -> Spec:
    """Read a specification."""
    content = read_yaml(path)
    try:
        return make_spec(path.stem, content)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def make_spec(name: str, content: Any) -> Spec:
    """Return a specification from the content of a YAML file; an error in it is a ValueError."""
    if unknown := [key for key in of_type(content, dict[Label, object]) if key not in KEYS]:
        raise ValueError(f"a comparison has no {', '.join(map(str, unknown))}; known: {', '.join(KEYS)}")
    of_type(content, _Content)
    schemes = schemes_of(content["schemes"])
    baseline = str(content.get("baseline") or next(iter(schemes)))
    shared = {name: content.get(name) or {} for name in ("train", "generate")}
    tasks, grids = {}, {}
    for label, options in content["tasks"].items():
        made = make_tasks(str(label), options, shared)
        if twice := tasks.keys() & made:
            raise ValueError(f"two tasks would be called {', '.join(sorted(twice))}: choose other labels")
        tasks |= made
        grids |= {point: str(label) for point in made if point != str(label)}
    if not tasks:
        raise ValueError("tasks is empty: name at least one")
    for label in (*schemes, *tasks, *grids.values()):
        check_label(label)
    return Spec(
        name=name,
        title=str(content.get("title") or name),
        schemes=schemes,
        seeds=seeds_of(content.get("seeds", 6)),
        tasks=tasks,
        baseline=baseline,
        pairs=pairs_of(content.get("pairs", "baseline"), baseline, list(schemes)),
        slurm=content.get("slurm") or {},
        grids=grids,
    )


def schemes_of(given: list[Label] | dict[Label, Flags | None]) -> dict[str, dict]:
    """Return the flags of schemes by label; a label without a scheme, architecture or model is the scheme's name."""
    schemes = {}
    for label, flags in (dict.fromkeys(given) if isinstance(given, list) else given).items():
        flags = flags or {}
        named = any(str(flag).endswith((SCHEME, "arch", "from-model")) for flag in flags)
        schemes[str(label)] = flags if named else {SCHEME: str(label), **flags}
    if not schemes:
        raise ValueError("schemes is empty: name at least one")
    return schemes


def seeds_of(given: int | list[int]) -> tuple[int, ...]:
    """Return the seeds: a number stands for 1 to that number."""
    if (len(given) if isinstance(given, list) else given) > SEEDS:
        raise ValueError(f"seeds must be at most {SEEDS:,}, got {given!r:.40}")
    seeds = tuple(given if isinstance(given, list) else range(1, given + 1))
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be a number above 0 or a list of different ones, got {given!r:.40}")
    if not all(0 < seed <= LARGEST for seed in seeds):
        raise ValueError(f"seeds must be whole numbers from 1 to {LARGEST}, got {given!r:.40}")
    return seeds


def pairs_of(given: object, baseline: str, labels: list[str]) -> tuple[tuple[str, str], ...]:
    """Return the pairs of schemes whose difference is tested: (scheme, other)."""
    if baseline not in labels:
        raise ValueError(f"baseline {baseline} is none of the schemes: {', '.join(labels)}")
    if given == "baseline":
        return tuple((label, baseline) for label in labels if label != baseline)
    if given == "all":
        return tuple((second, first) for first, second in combinations(labels, 2))
    pairs = [tuple(map(str, p)) if isinstance(p, list) else () for p in given] if isinstance(given, list) else []
    if not pairs or any(len(p) != 2 or len({*p}) != 2 or {*p} - {*labels} for p in pairs):
        raise ValueError(f"pairs must be baseline, all, or a list of two schemes each, got {given!r}")
    if len({frozenset(p) for p in pairs}) < len(pairs):
        raise ValueError(f"pairs must be different ones, whichever scheme comes first, got {given!r}")
    return tuple((first, second) for first, second in pairs)
