"""Results summed up: intervals, differences, curves, scores by length, costs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import count
from statistics import mean, median

import numpy as np

from relpos_fairseq.comparison import statistics
from relpos_fairseq.comparison.run import ComparisonRun
from relpos_fairseq.comparison.scores import METRICS, Metric, unpack
from relpos_fairseq.comparison.spec import Spec
from relpos_fairseq.comparison.statistics import Estimate
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.progress import counted

SURE = 0.05
BINS = 12  # of lengths


@dataclass
class Row:
    """A scheme's scores of a set: of every seed on all examples (S,), and on resamples (S, B)."""

    seeds: list[int]
    whole: np.ndarray
    drawn: np.ndarray
    estimate: Estimate


@dataclass(frozen=True)
class Difference:
    """A scheme against another."""

    scheme: str  # the one
    other: str  # what it is compared with
    seeds: int  # how many both have
    estimate: Estimate  # the mean difference and its interval
    p: float  # of the sign-flip permutation
    holm: float  # p corrected within the table
    detectable: float  # what so many seeds would find
    above: int  # in how many seeds the examples alone tell a difference above 0
    below: int  # likewise below 0

    @property
    def sure(self) -> bool:
        """Whether it survives Holm's correction."""
        return self.holm <= SURE


@dataclass
class Table:
    """A metric on a test set."""

    set: str
    metric: Metric
    examples: int
    rows: dict[str, Row]
    differences: list[Difference] = field(default_factory=list)

    def warnings(self) -> list[str]:
        """Return what a reader must know of its tests."""
        seeds = [one.seeds for one in self.differences]
        if not seeds:
            return []
        found, fewest = [], counted(min(seeds), "seed")
        if min(seeds) < statistics.FEW_SEEDS:
            found.append(
                f"{fewest} {'is' if min(seeds) == 1 else 'are'} too few: with below "
                f"{statistics.FEW_SEEDS} no exact test over seeds reaches p < .05"
            )
        if statistics.smallest_p(min(seeds)) * len(seeds) > SURE:
            needed = next(n for n in count(2) if 2.0 ** (1 - n) * len(seeds) <= SURE)
            found.append(
                f"with {fewest} and {counted(len(seeds), 'comparison')} not even the least "
                f"possible p survives Holm's correction; {needed} seeds would be needed"
            )
        return found


@dataclass(frozen=True)
class Cost:
    """Medians over seeds: parameters, processor seconds of training, tokens a second, memory."""

    parameters: int
    seconds: float
    speed: float
    megabytes: float


@dataclass
class Part:
    """A task's results."""

    label: str
    kind: str
    unit: str
    tables: list[Table]
    costs: dict[str, Cost]
    curves: dict[str, list[tuple[float, float]]]
    lengths: dict[str, list[tuple[float, float]]]
    data: str
    settings: dict


@dataclass
class Summary:
    """A whole comparison."""

    title: str
    baseline: str
    seeds: tuple[int, ...]
    done: int
    total: int
    tasks: list[Part]
    codes: list[str]
    versions: dict[str, str]
    seconds: float


def summarise(spec: Spec, results: list[tuple[ComparisonRun, dict]], total: int) -> Summary:
    """Sum up what results there are of a comparison of `total` cells."""
    parts = []
    for label in spec.tasks:
        found = [result for cell, result in results if cell.task.label == label]
        if found:
            parts.append(part_of(label, found, spec))
    every = [result for _, result in results]
    spent = (r["seconds"] + sum(s["seconds"] for s in r["sets"].values()) for r in every)
    return Summary(
        title=spec.title,
        baseline=spec.baseline,
        seeds=spec.seeds,
        done=len(results),
        total=total,
        tasks=parts,
        codes=sorted({result["code"] for result in every}),
        versions={name: v for result in every for name, v in result["versions"].items()},
        seconds=sum(spent),
    )


def part_of(label: str, results: list[dict], spec: Spec) -> Part:
    """Sum up a task."""
    if len({result["data"] for result in results}) > 1:
        raise UserError(f"results of {label} are of different data: remove those that are old")
    schemes = defaultdict(dict)
    for result in results:
        schemes[result["scheme"]][result["seed"]] = result
    schemes = {name: dict(sorted(schemes[name].items())) for name in spec.schemes if name in schemes}
    first = results[0]
    tables = [
        table_of(name, METRICS[metric], schemes, spec)
        for name, scored in first["sets"].items()
        for metric in scored["statistics"]
    ]
    train = first["settings"]["train"]
    same = {k: v for k, v in train.items() if all(r["settings"]["train"].get(k) == v for r in results)}
    return Part(
        label,
        first["settings"]["task"]["kind"],
        first["unit"],
        tables,
        {name: cost_of(list(runs.values())) for name, runs in schemes.items()},
        {name: curve_of(list(runs.values())) for name, runs in schemes.items()},
        {name: by_length(list(runs.values())) for name, runs in schemes.items()},
        first["data"],
        {**first["settings"]["task"], **same},
    )


def table_of(name: str, metric: Metric, schemes: dict[str, dict[int, dict]], spec: Spec) -> Table:
    """Compute intervals and tests of a metric on a set; every scheme on the same resamples."""
    generator = np.random.default_rng(0)
    rows, weights = {}, None
    for scheme, runs in schemes.items():
        rows_of = [unpack(r["sets"][name]["statistics"][metric.name]) for r in runs.values()]
        examples = np.stack(rows_of)
        if weights is None:
            weights = statistics.resample(examples.shape[1], statistics.DRAWS, generator)
        whole = metric.value(examples.sum(1))
        drawn = statistics.draws_of(metric, examples, weights)
        estimate = statistics.interval(whole, drawn, generator).within(*metric.limits)
        rows[scheme] = Row(list(runs), whole, drawn, estimate)
    table = Table(name, metric, weights.shape[1], rows)
    pairs = [(one, other) for one, other in spec.pairs if one in rows and other in rows]
    span = metric.limits[1] - metric.limits[0]
    found = [difference(one, other, rows, len(pairs), span, generator) for one, other in pairs]
    found = [one for one in found if one is not None]
    corrected = statistics.holm([one.p for one in found])
    table.differences = [replace(one, holm=p) for one, p in zip(found, corrected, strict=True)]
    return table


def difference(
    scheme: str, other: str, rows: dict[str, Row], comparisons: int, span: float, generator: np.random.Generator
) -> Difference | None:
    """Compare two schemes on the seeds that both have; None where there are none.

    Args:
        scheme: the one.
        other: the other.
        rows: of the table, by scheme.
        comparisons: of the table.
        span: the largest difference that there can be.
        generator: draws the seeds.
    """
    first, second = rows[scheme], rows[other]
    common = [seed for seed in first.seeds if seed in second.seeds]
    if not common:
        return None
    one, two = (([row.seeds.index(seed) for seed in common]) for row in (first, second))
    whole = first.whole[one] - second.whole[two]
    drawn = first.drawn[one] - second.drawn[two]
    p = statistics.sign_flip(whole)
    return Difference(
        scheme,
        other,
        len(common),
        statistics.interval(whole, drawn, generator).within(-span, span),
        p,
        p,
        statistics.detectable(whole, comparisons),
        *statistics.within(whole, drawn),
    )


def cost_of(results: list[dict]) -> Cost:
    """Return what a scheme costs, in the median of its seeds."""
    names = ("processor_seconds", "tokens_per_second", "megabytes")
    return Cost(results[0]["parameters"], *(median(r[name] for r in results) for name in names))


def curve_of(results: list[dict]) -> list[tuple[float, float]]:
    """Return the mean validation loss at every number of updates that all seeds have."""
    curves = [{v["updates"]: v["valid_loss"] for v in r["validations"]} for r in results]
    common = set(curves[0]).intersection(*curves[1:])
    return [(updates, mean(curve[updates] for curve in curves)) for updates in sorted(common)]


def by_length(results: list[dict]) -> list[tuple[float, float]]:
    """Return the first metric's mean over seeds by length, of all test sets together."""
    sets = results[0]["sets"].values()
    metric = METRICS[next(iter(next(iter(sets))["statistics"]))]
    lengths = np.concatenate([unpack(one["lengths"]) for one in sets])
    rows = np.stack(
        [
            np.concatenate([unpack(one["statistics"][metric.name]) for one in result["sets"].values()])
            for result in results
        ]
    )
    edges = np.unique(lengths)
    if len(edges) > 2 * BINS:
        edges = np.unique(np.quantile(lengths, np.linspace(0, 1, BINS + 1))[:-1])
    bins, points = np.searchsorted(edges, lengths, "right"), []
    for number in np.unique(bins):
        inside = bins == number
        score = metric.value(rows[:, inside].sum(1)).mean()
        points.append((float(lengths[inside].mean()), float(score)))
    return points
