"""Compute intervals and tests of differences between schemes, and which differences could be found at all.

Runs are paired by seed: the same seed gives the same order of the data and the same initial values
of all parameters that two schemes share. The test set is common to all seeds.

- Interval of a mean: hierarchical bootstrap over seeds and examples.  A bootstrap of few seeds is too narrow,
  by √(n/(n-1)) and by Student's t in place of the normal distribution; the part of each deviation
  that seeds make is widened by that factor (Hesterberg 2015, "What teachers should know about the
  bootstrap").
- Interval of a next seed: Student's t.  `examples/comparison/coverage.py` holds both against seeds that were left out.
- Seeds that agree are not known to agree always: deviations count as at least one example in one of the seeds.
- Test: exact sign-flip permutation of the seeds' differences; Holm's correction over a table.
- Within one seed: paired bootstrap over examples (Koehn 2004), another question.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt

import numpy as np
from scipy.stats import norm, t

from relpos_fairseq.lab.comparison.scores import Metric

LEVEL = 0.05  # that a corrected p is compared with
FEW_SEEDS = 6  # below it no exact two-sided test over seeds reaches p < .05
EXACT = 16  # seeds up to which all sign flips are counted; beyond, so many random ones:
FLIPS = 1 << EXACT
DRAWS = 1000
POWER = 0.8


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its interval."""

    mean: float
    low: float
    high: float

    def within(self, least: float, most: float) -> Estimate:
        """Return the estimate with its interval cut at the least and the largest possible score."""
        return Estimate(self.mean, max(self.low, least), min(self.high, most))


def draws_of(metric: Metric, statistics: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the scores (S, B) of every seed on every resample of the examples.

    `statistics` (S, N, K) are of seeds and examples, `weights` (B, N) how often each is drawn.
    """
    return metric.value(np.einsum("bn,snk->sbk", weights, statistics, optimize=True))


def resample(examples: int, draws: int, generator: np.random.Generator) -> np.ndarray:
    """Return (draws, examples): how often each resample of the examples has each of them."""
    return generator.multinomial(examples, np.full(examples, 1 / examples), draws).astype(float)


def next_seed(whole: np.ndarray, step: float = 0.0, level: float = 0.95) -> Estimate:
    """Return the mean over seeds, with the interval that holds the score of a further seed.

    Args:
        whole: (S,) scores.
        step: what one example changes.
        level: of the interval; one seed has none.
    """
    seeds, mean = len(whole), float(whole.mean())
    if seeds == 1:
        return Estimate(mean, -inf, inf)
    deviation = max(whole.std(ddof=1), step / sqrt(seeds))
    half = float(t.ppf((1 + level) / 2, seeds - 1) * deviation * sqrt(1 + 1 / seeds))
    return Estimate(mean, mean - half, mean + half)


def interval(
    whole: np.ndarray, drawn: np.ndarray, generator: np.random.Generator, step: float = 0.0, level: float = 0.95
) -> Estimate:
    """Return the mean over seeds, with its hierarchical bootstrap interval.

    Args:
        whole: (S,) scores, or differences of scores, on all examples.
        drawn: (S, B) likewise on resamples of the examples, the same ones for all seeds.
        generator: draws the seeds.
        step: what one example changes.
        level: of the interval.
    """
    seeds, draws = drawn.shape
    tail, least = (1 + level) / 2, 0.0
    examples = drawn.mean(0) - whole.mean()
    if seeds == 1:
        deviations = examples
    else:
        counts = resample(seeds, draws, generator) / seeds  # (B, S)
        of_seeds = np.einsum("bs,sb->b", counts - 1 / seeds, drawn)
        least = t.ppf(tail, seeds - 1) * step / seeds  # of deviations of one example in one seed
        wider = sqrt(seeds / (seeds - 1)) * t.ppf(tail, seeds - 1) / norm.ppf(tail)
        deviations = wider * of_seeds + examples
    low, high = np.quantile(deviations, [1 - tail, tail])
    low, high = min(low, -least), max(high, least)
    return Estimate(float(whole.mean()), float(whole.mean() + low), float(whole.mean() + high))


def sign_flip(differences: np.ndarray) -> float:
    """Return the two-sided p of no difference (S,): the share of sign flips as far from 0."""
    seeds = len(differences)
    if seeds <= EXACT:
        signs = 1 - 2 * ((np.arange(1 << seeds)[:, None] >> np.arange(seeds)) & 1)
    else:
        signs = np.random.default_rng(0).choice([-1, 1], (FLIPS, seeds))
        signs[0] = 1  # what was seen is one of them
    sums = np.abs(signs @ differences)
    return float(np.mean(~(sums < abs(differences.sum()) * (1 - 1e-9) - 1e-300)))  # 1 where a run has no score, NaN


def smallest_p(seeds: int) -> float:
    """Return the least p that `sign_flip` can give."""
    return 2.0 ** (1 - seeds) if seeds <= EXACT else 1 / FLIPS


def holm(values: list[float]) -> list[float]:
    """Return p-values corrected for their number (Holm 1979), in the order given."""
    order, corrected, least = np.argsort(values), [0.0] * len(values), 0.0
    for rank, place in enumerate(order):
        least = max(least, min(1.0, (len(values) - rank) * values[place]))
        corrected[place] = least
    return corrected


def detectable(differences: np.ndarray, comparisons: int) -> float:
    """Return the difference that `sign_flip` of so many seeds (S,) would find with a power of 80 %.

    At 5 % divided by the number of comparisons: infinite where its least p is above, what lets the signs of all seeds
    agree where its next p is above, and else, as it hardly differs there, a paired t-test's.
    """
    seeds, level = len(differences), LEVEL / comparisons
    if smallest_p(seeds) > level:
        return inf
    needed = (t.ppf(1 - level / 2, seeds - 1) + t.ppf(POWER, seeds - 1)) / sqrt(seeds)
    if 2 * smallest_p(seeds) > level:
        needed = max(needed, norm.ppf(POWER ** (1 / seeds)))
    return float(needed * differences.std(ddof=1))


def within(whole: np.ndarray, drawn: np.ndarray) -> tuple[int, int]:
    """Return in how many seeds the examples alone tell a difference above and below 0 (p < .05).

    `whole` (S,) are differences on all examples, `drawn` (S, B) on resamples.
    """
    p = 2 * np.minimum((drawn <= 0).mean(1), (drawn >= 0).mean(1))
    sure = p < 0.05
    return int((sure & (whole > 0)).sum()), int((sure & (whole < 0)).sum())
