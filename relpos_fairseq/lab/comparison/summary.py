"""Sum up the results of a comparison: intervals, tests of differences, curves, scores by length, costs."""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from itertools import count
from statistics import mean, median

import numpy as np

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.progress import counted
from relpos_fairseq.lab.comparison import statistics
from relpos_fairseq.lab.comparison.choices import Choice, choices_of
from relpos_fairseq.lab.comparison.run import Run
from relpos_fairseq.lab.comparison.scores import METRICS, Metric, by_input, unpack
from relpos_fairseq.lab.comparison.spec import Spec
from relpos_fairseq.lab.comparison.statistics import Estimate
from relpos_fairseq.lab.comparison.tasks.base import Extra

Points = list[tuple[float, float]]
BINS = 12  # of lengths, where examples have more than twice as many


@dataclass
class Row:
    """A scheme's scores on a test set."""

    seeds: list[int]
    whole: np.ndarray  # (S,) of every seed on all examples
    drawn: np.ndarray  # (S, B) of every seed on resamples of the examples
    estimate: Estimate  # the mean over seeds
    further: Estimate  # the score of a further seed


@dataclass(frozen=True)
class Difference:
    """The difference between two schemes' scores."""

    scheme: str
    other: str  # the scheme that is subtracted
    seeds: int  # how many both have
    estimate: Estimate  # the mean difference and its interval
    p: float  # of the sign-flip permutation
    holm: float  # p corrected within the table
    detectable: float  # what so many seeds would find
    above: int  # in how many seeds the examples alone tell a difference above 0
    below: int  # in how many they tell one below 0

    @property
    def sure(self) -> bool:
        """Whether the difference survives Holm's correction."""
        return self.holm <= statistics.LEVEL


@dataclass
class Table:
    """A metric on a test set."""

    set: str
    metric: Metric
    examples: int
    distinct: int  # how many inputs of the examples are distinct
    rows: dict[str, Row]
    differences: list[Difference] = field(default_factory=list)

    def warnings(self) -> list[str]:
        """Return what a reader must know of the table's tests."""
        seeds = [one.seeds for one in self.differences]
        if not seeds:
            return []
        found, fewest = [], counted(min(seeds), "seed")
        if min(seeds) < statistics.FEW_SEEDS:
            found.append(
                f"{fewest} {'is' if min(seeds) == 1 else 'are'} too few: with below "
                f"{statistics.FEW_SEEDS} no exact test over seeds reaches p < .05"
            )
        if statistics.smallest_p(min(seeds)) * len(seeds) > statistics.LEVEL:
            needed = next(n for n in count(2) if 2.0 ** (1 - n) * len(seeds) <= statistics.LEVEL)
            found.append(
                f"with {fewest} and {counted(len(seeds), 'comparison')} not even the least "
                f"possible p survives Holm's correction; {needed} seeds would be needed"
            )
        return found


@dataclass(frozen=True)
class Cost:
    """Medians over seeds, as far as known: parameters, processor seconds of training, tokens per second, memory."""

    parameters: int
    seconds: float | None  # None: of no seed is it known
    speed: float | None
    megabytes: float | None


@dataclass
class TaskSummary:
    """The results of a task; costs, curves and lengths by scheme."""

    label: str
    kind: str
    unit: str  # of lengths
    tables: list[Table]
    costs: dict[str, Cost]
    curves: dict[str, Points]  # validation loss by updates
    lengths: dict[str, Points]  # score by length
    data: str  # the hash of the data
    settings: dict  # options and flags that all runs have in common
    extras: list[Extra]  # tables of this kind of task alone


@dataclass
class Summary:
    """A whole comparison."""

    spec: Spec
    done: int  # runs that have a result
    total: int  # runs
    tasks: list[TaskSummary]
    choices: dict[tuple[str, str], Choice]  # of grids, by scheme and task
    codes: list[str]  # versions of the code
    processors: dict[str, int]  # how many runs each has trained
    versions: dict[str, str]  # of the packages
    seconds: float  # of training and scoring
    processor_seconds: float  # of training, where it is known


def summarise(spec: Spec, results: list[tuple[Run, dict]], total: int) -> Summary:
    """Sum up the results of a comparison of `total` runs."""
    by_task, choices = defaultdict(list), choices_of(spec, results)
    for run, result in results:
        label = spec.grids.get(run.task.label, run.task.label)
        if label == run.task.label or run in choices[run.scheme, label].runs:
            by_task[label].append((run, result))
    labels = dict.fromkeys(spec.grids.get(label, label) for label in spec.tasks)
    every = [result for _, result in results]
    return Summary(
        spec=spec,
        done=len(results),
        total=total,
        tasks=[summarise_task(label, by_task[label], spec) for label in labels if label in by_task],
        choices=choices,
        codes=sorted({result["code"] for result in every}),
        processors=dict(Counter(one.get("processor", "not recorded") for one in every)),
        versions={name: v for result in every for name, v in result["versions"].items()},
        seconds=sum(one["seconds"] for result in every for one in (result, *result["sets"].values())),
        processor_seconds=sum(one["processor_seconds"] or 0 for one in every),
    )


def summarise_task(label: str, made: list[tuple[Run, dict]], spec: Spec) -> TaskSummary:
    """Sum up the results of one task; of a grid, those that each scheme's choice has."""
    results = [result for _, result in made]
    if len({result["data"] for result in results}) > 1:
        raise UserError(f"results of {label} are of different data: remove those that are old")
    schemes = {name: {run.seed: result for run, result in made if run.scheme == name} for name in spec.schemes}
    schemes = {name: dict(sorted(runs.items())) for name, runs in schemes.items() if runs}
    first, sets = results[0], made[0][0].task.sets()
    settings = [{**result["settings"]["task"], **result["settings"]["train"]} for result in results]
    common = {name: value for name, value in settings[0].items() if all(one.get(name) == value for one in settings)}
    return TaskSummary(
        label=label,
        kind=first["settings"]["task"]["kind"],
        unit=first["unit"],
        tables=[
            table_of(name, METRICS[metric], schemes, spec)
            for name in sets
            for metric in first["sets"][name]["statistics"]
        ],
        costs={name: cost_of(list(runs.values())) for name, runs in schemes.items()},
        curves={name: curve_of(list(runs.values())) for name, runs in schemes.items()},
        lengths={name: by_length(list(runs.values()), sets) for name, runs in schemes.items()},
        data=first["data"],
        settings=common,
        extras=made[0][0].task.extras(schemes),
    )


def table_of(name: str, metric: Metric, schemes: dict[str, dict[int, dict]], spec: Spec) -> Table:
    """Return the intervals and tests of a metric on a test set; all schemes are scored on the same resamples."""
    rows, weights = {}, None
    for scheme, runs in schemes.items():
        examples = alike({f"{scheme} / seed {seed}": run["sets"][name] for seed, run in runs.items()}, metric, weights)
        if weights is None:
            weights = statistics.resample(examples.shape[1], statistics.DRAWS, np.random.default_rng(0))
        whole, step = metric.value(examples.sum(1)), metric.step(examples.shape[1])
        drawn = statistics.draws_of(metric, examples, weights)
        estimate = statistics.interval(whole, drawn, draws_for(scheme), step).within(*metric.limits)
        further = statistics.next_seed(whole, step).within(*metric.limits)
        rows[scheme] = Row(list(runs), whole, drawn, estimate, further)
    first = next(iter(next(iter(schemes.values())).values()))["sets"][name]
    table = Table(name, metric, first["lengths"]["shape"][0], weights.shape[1], rows)
    pairs = [(one, other) for one, other in spec.pairs if one in rows and other in rows]
    span = metric.limits[1] - metric.limits[0]
    found = [difference(one, other, rows, len(pairs), span, step) for one, other in pairs]
    found = [one for one in found if one is not None]
    holm = statistics.holm([one.p for one in found])
    table.differences = [replace(one, holm=p) for one, p in zip(found, holm, strict=True)]
    return table


def alike(scored: dict[str, dict], metric: Metric, weights: np.ndarray | None) -> np.ndarray:
    """Return the statistics (S, N, K) of S runs' scores of one test set, given by the runs' titles.

    Raises:
        UserError: a run has another number of examples than the first, or than `weights` (B, N).
    """
    rows = {title: statistics_of(one, metric) for title, one in scored.items()}
    wanted = len(next(iter(rows.values()))) if weights is None else weights.shape[1]
    for title, row in rows.items():
        if len(row) != wanted:
            raise UserError(
                f"{title} has {metric.name} of {len(row)} examples, others of {wanted}: remove the results that are old"
            )
    return np.stack([*rows.values()])


def draws_for(*labels: str) -> np.random.Generator:
    """Return a generator for the resamples of a scheme or a pair, by its labels: further schemes change no other's."""
    return np.random.default_rng(zlib.crc32("\0".join(labels).encode()))


def statistics_of(scored: dict, metric: Metric) -> np.ndarray:
    """Return a metric's statistics (N, K) of every distinct input of a test set."""
    rows = unpack(scored["statistics"][metric.name])
    return by_input(rows, unpack(scored["inputs"])) if "inputs" in scored else rows


def difference(
    scheme: str, other: str, rows: dict[str, Row], comparisons: int, span: float, step: float
) -> Difference | None:
    """Compare two schemes on the seeds that both have; None where there are none.

    Args:
        scheme: label of the first scheme.
        other: label of the scheme that is subtracted.
        rows: the scores, by scheme.
        comparisons: how many the table has.
        span: the largest possible difference.
        step: what one example changes.
    """
    first, second = rows[scheme], rows[other]
    common = [seed for seed in first.seeds if seed in second.seeds]
    if not common:
        return None
    one, two = (([row.seeds.index(seed) for seed in common]) for row in (first, second))
    whole, drawn = first.whole[one] - second.whole[two], first.drawn[one] - second.drawn[two]
    p = statistics.sign_flip(whole)
    return Difference(
        scheme,
        other,
        len(common),
        statistics.interval(whole, drawn, draws_for(scheme, other), step).within(-span, span),
        p,
        p,
        statistics.detectable(whole, comparisons),
        *statistics.within(whole, drawn),
    )


def cost_of(results: list[dict]) -> Cost:
    """Return what a scheme costs, in the median of its seeds."""
    names = ("processor_seconds", "tokens_per_second", "megabytes")
    known = ([r[name] for r in results if r[name] is not None] for name in names)
    return Cost(results[0]["parameters"], *(median(one) if one else None for one in known))


def curve_of(results: list[dict]) -> Points:
    """Return the mean validation loss at every number of updates that all seeds have."""
    curves = [{v["updates"]: v["valid_loss"] for v in r["validations"]} for r in results]
    common = set(curves[0]).intersection(*curves[1:])
    return [(updates, mean(curve[updates] for curve in curves)) for updates in sorted(common)]


def by_length(results: list[dict], sets: tuple[str, ...]) -> Points:
    """Return the mean over seeds of the first set's first metric by length, of all sets that have it."""
    first = results[0]["sets"]
    metric = METRICS[next(iter(first[sets[0]]["statistics"]))]
    having = [name for name in sets if metric.name in first[name]["statistics"]]
    lengths = np.concatenate([unpack(first[name]["lengths"]) for name in having])
    rows = [[unpack(result["sets"][name]["statistics"][metric.name]) for name in having] for result in results]
    rows = np.stack([np.concatenate(one) for one in rows])
    edges = np.unique(lengths)
    if len(edges) > 2 * BINS:
        edges = np.unique(np.quantile(lengths, np.linspace(0, 1, BINS + 1))[:-1])
    bins, points = np.searchsorted(edges, lengths, "right"), []
    for number in np.unique(bins):
        inside = bins == number
        score = metric.value(rows[:, inside].sum(1)).mean()
        points.append((float(lengths[inside].mean()), float(score)))
    return points
