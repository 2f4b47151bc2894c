"""Define metrics as functions of sums over examples, so that all resamples of the examples are scored at once.

Every example has a row of statistics; `Metric.value` turns the sum of rows into the score. Leading axes, of bootstrap
draws or seeds, are kept.
"""

import base64
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, TypedDict

import numpy as np
from sacrebleu.metrics import BLEU, CHRF

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.reading import Count

ORDERS = 4  # of BLEU's n-grams
CHRF_ORDERS, CHRF_BETA = 6, 2
BLOCK = 32  # neighbouring predictions, which are alike, that count as one example


@dataclass(frozen=True)
class Metric:
    """A score."""

    name: str  # in tables
    value: Callable[[np.ndarray], np.ndarray]  # (..., K) sums of statistics -> (...) scores
    higher: bool = True  # whether a higher score is better
    digits: int = 1  # decimals in tables
    limits: tuple[float, float] = (0.0, 100.0)  # the least and the largest possible score

    def step(self, examples: int) -> float:
        """Return what one of so many examples may change; 0 where scores have no largest value."""
        least, most = self.limits
        return (most - least) / examples if most < inf else 0.0


def share(sums: np.ndarray) -> np.ndarray:
    """Return per cent of right examples from sums (..., 2): right ones, all."""
    return 100 * sums[..., 0] / sums[..., 1]


def perplexity(sums: np.ndarray) -> np.ndarray:
    """Return the perplexity from sums (..., 2): negative log-likelihood in nats, tokens."""
    return np.exp(np.minimum(sums[..., 0] / sums[..., 1], 700))


def bleu(sums: np.ndarray) -> np.ndarray:
    """Return BLEU as sacrebleu smooths it (NIST's `exp`).

    `sums` (..., 10): system's length, reference's length, matches and totals of 1- to 4-grams.
    """
    system, reference = sums[..., 0], sums[..., 1]
    right, total = sums[..., 2 : 2 + ORDERS], sums[..., 2 + ORDERS :]
    missed = (right == 0) & (total > 0)
    smoothed = 1 / (2.0 ** np.cumsum(missed, -1))
    precision = np.where(missed, smoothed, right) / np.maximum(total, 1)
    with np.errstate(divide="ignore"):
        logs = np.where(total > 0, np.log(np.maximum(precision, 1e-300)), -np.inf)
    brevity = np.minimum(0, 1 - reference / np.maximum(system, 1e-300))
    score = 100 * np.exp(logs.mean(-1) + brevity)
    return np.where(right.any(-1) & (total > 0).all(-1), score, 0.0)


def chrf(sums: np.ndarray) -> np.ndarray:
    """Return chrF2 from sums (..., 18): system's, reference's and matching n-grams of 1 to 6 characters each."""
    system, reference, right = np.moveaxis(sums.reshape(*sums.shape[:-1], CHRF_ORDERS, 3), -1, 0)
    known = (system > 0) & (reference > 0)
    orders = np.maximum(known.sum(-1), 1)
    precision = (np.where(known, right / np.maximum(system, 1), 0)).sum(-1) / orders
    recall = (np.where(known, right / np.maximum(reference, 1), 0)).sum(-1) / orders
    weight = CHRF_BETA**2
    below = weight * precision + recall
    return 100 * (1 + weight) * precision * recall / np.where(below > 0, below, 1)


def f1(sums: np.ndarray) -> np.ndarray:
    """Return F1 in per cent from sums (..., 3): right, predicted and true positives."""
    return 200 * sums[..., 0] / np.maximum(sums[..., 1] + sums[..., 2], 1e-300)


def matthews(sums: np.ndarray) -> np.ndarray:
    """Return Matthews' correlation, at most 100, from sums (..., 4): Σp, Σt, Σpt, n; p and t are 0 or 1."""
    predicted, true, both, count = np.moveaxis(sums, -1, 0)
    above = count * both - predicted * true
    square = predicted * (count - predicted) * true * (count - true)
    return 100 * above / np.where(square > 0, np.sqrt(np.maximum(square, 0)), np.inf)


def correlation(sums: np.ndarray) -> np.ndarray:
    """Return Pearson's correlation, at most 100, from sums (..., 6): Σx, Σy, Σxx, Σyy, Σxy, n."""
    x, y, xx, yy, xy, count = np.moveaxis(sums, -1, 0)
    square = (count * xx - x * x) * (count * yy - y * y)
    return 100 * (count * xy - x * y) / np.where(square > 0, np.sqrt(np.maximum(square, 0)), np.inf)


METRICS = {
    metric.name: metric
    for metric in (
        Metric("exact match", share),
        Metric("accuracy", share),
        Metric("question F1", share),  # the mean of what SQuAD's script gives each question
        Metric("BLEU", bleu),
        Metric("chrF", chrf),
        Metric("perplexity", perplexity, higher=False, digits=3, limits=(1.0, inf)),
        Metric("F1", f1),
        Metric("Matthews", matthews, limits=(-100.0, 100.0)),
        Metric("Pearson", correlation, limits=(-100.0, 100.0)),
        Metric("Spearman", correlation, limits=(-100.0, 100.0)),  # of ranks in the whole set
    )
}


def matches(right: Sequence[bool]) -> np.ndarray:
    """Return the statistics (N, 2) of examples that are right or wrong."""
    return np.stack([np.asarray(right, np.int64), np.ones(len(right), np.int64)], 1)


def of_predictions(nats: np.ndarray) -> np.ndarray:
    """Return perplexity's statistics (N, 2) of predictions (M,): examples are `BLOCK` neighbours, the last fewer."""
    starts = np.arange(0, len(nats), BLOCK)
    return np.stack([np.add.reduceat(nats, starts), np.diff([*starts, len(nats)])], 1)


def same_inputs(inputs: Sequence[str]) -> np.ndarray:
    """Return the index of the first equal input for every input (N,): those of one index are one example."""
    first: dict[str, int] = {}
    return np.array([first.setdefault(one, number) for number, one in enumerate(inputs)])


def by_input(rows: np.ndarray, inputs: np.ndarray) -> np.ndarray:
    """Return the sums of statistics (N, K) over the examples of each distinct input, in their order."""
    _, places = np.unique(inputs, return_inverse=True)
    sums = np.zeros((places.max() + 1, rows.shape[1]))
    np.add.at(sums, places, rows)
    return sums


def of_translations(system: list[str], reference: list[str], bleu: BLEU) -> dict[str, np.ndarray]:
    """Return BLEU's and chrF's statistics of every sentence."""
    metrics = {"BLEU": bleu, "chrF": CHRF()}
    return {
        name: np.asarray(metric._extract_corpus_statistics(system, [reference]), np.int64)
        for name, metric in metrics.items()
    }


class Packed(TypedDict):
    """An array as JSON."""

    type: Literal["|u1", "<i2", "<i4", "<i8", "<f4"]
    shape: list[Count]
    zlib: str


def pack(array: np.ndarray) -> Packed:
    """Return an array as JSON of few bytes; whole numbers stay exact, others have 32 bits."""
    array = np.asarray(array)
    if np.issubdtype(array.dtype, np.floating):
        array = array.astype("<f4")
    else:
        kinds = ("u1", "<i2", "<i4", "<i8")
        array = array.astype(next(k for k in kinds if (array.astype(k) == array).all()))
    data = base64.b64encode(zlib.compress(array.tobytes(), 9)).decode()
    return {"type": array.dtype.str, "shape": list(array.shape), "zlib": data}


def unpack(packed: Packed) -> np.ndarray:
    """Return the array of `pack`, as float64."""
    try:
        data = zlib.decompress(base64.b64decode(packed["zlib"]))
        return np.frombuffer(data, packed["type"]).reshape(packed["shape"]).astype(np.float64)
    except (zlib.error, ValueError) as error:
        raise UserError(f"an array of a result is damaged ({error}): copy the result again, or delete it") from None
