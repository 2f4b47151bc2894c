"""Hold intervals over seeds against seeds that were left out, on the committed results of every comparison here.

    python examples/comparison/coverage.py

Every three of a scheme's six or more seeds are left out in turn: how many of them lie in the interval that the n others
give?  And how often does their mean lie in that of the mean, widened by √(1 + n/3), since a mean of three deviates too?
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from math import isinf, sqrt
from pathlib import Path

import numpy as np
from scipy.stats import beta, bootstrap, norm, t

from relpos_fairseq.io.progress import progress, table
from relpos_fairseq.lab.comparison import statistics
from relpos_fairseq.lab.comparison.results import read_archive
from relpos_fairseq.lab.comparison.scores import METRICS, Metric
from relpos_fairseq.lab.comparison.spec import read_spec
from relpos_fairseq.lab.comparison.statistics import Estimate
from relpos_fairseq.lab.comparison.summary import statistics_of

LEFT_OUT = 3
SEEDS = 6  # that a scheme must have
NEAR = 10.0  # from the least or the largest score
Cell = tuple[Metric, np.ndarray, float]  # with the scores (S,) of all seeds, and what one example changes


def cells(folder: Path) -> Iterator[Cell]:
    """Yield every scheme's scores on every test set of the committed comparisons."""
    for path in sorted(folder.glob("*/results.jsonl.gz")):
        schemes = defaultdict(list)
        seeds = read_spec(path.parent.with_suffix(".yaml")).seeds  # others are of who tried them
        for result in (one for one in read_archive(path).values() if one["seed"] in seeds):
            schemes[result["task"], result["scheme"]].append(result)
        for results in schemes.values():
            for name, scored in results[0]["sets"].items():
                for metric in (METRICS[one] for one in scored["statistics"]):
                    rows = [statistics_of(result["sets"][name], metric) for result in results]
                    if len(rows) >= SEEDS:
                        yield metric, np.array([metric.value(one.sum(0)) for one in rows]), metric.step(len(rows[0]))


def place_of(metric: Metric, scores: np.ndarray) -> str:
    """Return where the scores of the seeds lie between the metric's limits."""
    least, most = metric.limits
    if isinf(most):
        return "perplexity"
    near = (scores <= least + NEAR) | (scores >= most - NEAR)
    return "near 0 or 100" if near.all() else "partly near" if near.any() else "between"


def t_of_seeds(scores: np.ndarray, step: float) -> Estimate:
    """Return Student's t of a further seed, as it would be without the step of one example."""
    return statistics.next_seed(scores)


def beta_of_seeds(scores: np.ndarray, step: float) -> Estimate:
    """Return a beta distribution of a further seed's share, of the seeds' mean and variance."""
    seeds, mean = len(scores), float(np.clip(scores.mean() / 100, 1e-3, 1 - 1e-3))
    wider = (t.ppf(0.975, seeds - 1) / norm.ppf(0.975)) ** 2 * (1 + 1 / seeds)
    variance = max(scores.var(ddof=1), step**2 / seeds) / 1e4 * wider
    spread = mean * (1 - mean) / min(max(variance, 1e-9), 0.999 * mean * (1 - mean)) - 1
    low, high = beta.ppf([0.025, 0.975], mean * spread, (1 - mean) * spread)
    return Estimate(float(scores.mean()), 100 * low, 100 * high)


def range_of_seeds(scores: np.ndarray, step: float) -> Estimate:
    """Return the least and the largest score."""
    return Estimate(float(scores.mean()), float(scores.min()), float(scores.max()))


def hierarchical(scores: np.ndarray, step: float) -> Estimate:
    """Return the interval of the mean that reports print, of seeds alone: the examples are the same."""
    return statistics.interval(scores, np.repeat(scores[:, None], 400, 1), np.random.default_rng(0), step)


def t_of_mean(scores: np.ndarray, step: float) -> Estimate:
    """Return Student's t of the mean."""
    one = statistics.next_seed(scores, step)
    return Estimate(one.mean, *(one.mean + (end - one.mean) / sqrt(len(scores) + 1) for end in (one.low, one.high)))


def bca_of_mean(scores: np.ndarray, step: float) -> Estimate:
    """Return the bias-corrected and accelerated bootstrap of the mean."""
    mean = float(scores.mean())
    if scores.std() == 0:
        return Estimate(mean, mean, mean)
    found = bootstrap((scores,), np.mean, n_resamples=400, method="BCa", rng=0).confidence_interval
    low, high = (mean if np.isnan(end) else float(end) for end in found)
    return Estimate(mean, low, high)


def mean_alone(scores: np.ndarray, step: float) -> Estimate:
    """Return the interval of the mean, taken for that of a further seed."""
    return hierarchical(scores, 0.0)


FURTHER = {
    "a further seed: the interval of the mean": mean_alone,
    "a further seed: t": t_of_seeds,
    "a further seed: t, at least one example (reports)": statistics.next_seed,
    "a further seed: beta": beta_of_seeds,
    "a further seed: range": range_of_seeds,
}
MEANS = {
    "mean: hierarchical bootstrap, at least one example (reports)": hierarchical,
    "mean: t, at least one example": t_of_mean,
    "mean: BCa": bca_of_mean,
}


def coverage(every: list[Cell]) -> dict[tuple[str, str], tuple[int, float, float]]:
    """Return by interval and place: how often three seeds were left out, per cent inside, the median width."""
    found = defaultdict(list)
    for metric, scores, step in progress(every, description="coverage", unit="cells"):
        for held in combinations(range(len(scores)), LEFT_OUT):
            known, left = np.delete(scores, held), scores[list(held)]
            if len(known) < 3:
                continue
            where = place_of(metric, known)
            for name, interval in (FURTHER | MEANS).items():
                if interval is beta_of_seeds and isinf(metric.limits[1]):
                    continue
                one, values = interval(known, step), left
                if name in MEANS:
                    wider, values = sqrt(1 + len(known) / LEFT_OUT), left.mean(keepdims=True)
                    ends = (one.mean + (end - one.mean) * wider for end in (one.low, one.high))
                    one = Estimate(one.mean, *ends)
                one = one.within(*metric.limits)
                inside = (values >= one.low - 1e-9) & (values <= one.high + 1e-9)
                found[name, where].append((inside.mean(), one.high - one.low))
    return {
        key: (len(some), 100 * float(np.mean([share for share, _ in some])), float(np.median([w for _, w in some])))
        for key, some in found.items()
    }


if __name__ == "__main__":
    numbers = coverage(list(cells(Path(__file__).parent)))
    places = ("near 0 or 100", "partly near", "between", "perplexity")
    rows = []
    for method in FURTHER | MEANS:
        parts = [numbers.get((method, place)) for place in places]
        rows.append([method, *("" if one is None else f"{one[1]:.1f} ({one[2]:.3g})" for one in parts)])
    print(table(rows, ("per cent inside (median width)", *places)))
    print("subsets:", ", ".join(f"{place} {numbers['mean: BCa', place][0]:,}" for place in places))
