"""The published ways to fine-tune on GLUE, and what they report.

- `huang` (Huang et al. 2020, section 4.2): batches of 32, 3 epochs, learning rate 3e-5.
- `multiplicative` (Multiplicative Position-aware Transformer Models, section 3.2): the same, and
  the best of the learning rates 2e-5, 3e-5 and 4e-5.
- `chen` (Chen et al. 2021, Tables 4 and 7): batches of 32, 5 or 10 epochs, learning rates 1e-5 to
  4e-5, warm-up over a tenth of the updates, a checkpoint every 3,500 updates; of five runs the
  median of each run's best checkpoint.
- `xtreme` (the same, section 4.2 and Table 7): 3 epochs, 1e-5 to 4e-5, five trials, for which
  `relpos finetune xtreme` reports medians; learning rates are chosen on English.

All but `chen` count a run's last checkpoint.  What a paper does not say is BERT's (Devlin et al.
2018): Adam with betas 0.9 and 0.999, weight decay 0.01, linear decay to zero; and Chen's warm-up.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

BATCH_SIZE = 32
WARMUP = 0.1


@dataclass(frozen=True)
class Protocol:
    """Which runs there are and which number they give."""

    name: str
    learning_rates: tuple[float, ...]  # learning rates to choose from
    epochs: tuple[int, ...]  # numbers of epochs to choose from
    seeds: tuple[int, ...]  # the runs of each learning rate and number of epochs
    checkpoint: str  # `last` or `best`: which of a run's validations counts
    interval: int = 0  # updates between checkpoints, beside each epoch's end; 0: none


PROTOCOLS = {
    "huang": Protocol("huang", (3e-5,), (3,), (1,), "last"),
    "multiplicative": Protocol("multiplicative", (2e-5, 3e-5, 4e-5), (3,), (1,), "last"),
    "chen": Protocol("chen", (1e-5, 2e-5, 3e-5, 4e-5), (5, 10), (1, 2, 3, 4, 5), "best", 3500),
    "xtreme": Protocol("xtreme", (1e-5, 2e-5, 3e-5, 4e-5), (3,), (1, 2, 3, 4, 5), "last"),
}


@dataclass(frozen=True)
class Result:
    """One run that has ended."""

    learning_rate: float  # its learning rate
    epochs: int  # its number of epochs
    seed: int
    # metric to value of each validation, in their order; of a second validation set (MNLI's
    # mismatched) the name of the metric begins with `valid1_`
    validations: tuple[dict[str, float], ...]
    folder: Path | None = None  # what the run left

    def counted(self, metric: str, checkpoint: str) -> dict[str, float]:
        """The validation that counts, of a deciding metric; the first of equals."""
        if not self.validations:
            raise ValueError("a run without a validation has no result")
        if checkpoint == "last":
            return self.validations[-1]
        return max(self.validations, key=lambda values: _comparable(values[metric]))


@dataclass(frozen=True)
class Summary:
    """What a table prints of a model on a task."""

    # metric to value of the run that is reported: the only one, or the median one
    values: dict[str, float]
    learning_rate: float  # the chosen learning rate
    epochs: int  # the chosen number of epochs
    runs: int  # how many runs were chosen from; with that learning rate and number of epochs
    lowest: float  # the lowest of those runs' deciding values
    highest: float  # the highest of them
    folder: Path | None = None  # what the run that is reported left


def summarise(results: list[Result], metric: str, checkpoint: str) -> Summary:
    """The median run of the best learning rate and number of epochs, by the deciding metric.

    Of an even number of runs the lower of the two in the middle: what is reported is a run that was
    made, with all its metrics.
    """
    if not results:
        raise ValueError("there is nothing to summarise: no run has ended")
    groups = defaultdict(list)
    for result in results:
        key = (result.learning_rate, result.epochs)
        groups[key].append((result.counted(metric, checkpoint), result.folder))
    summaries = []
    for (learning_rate, epochs), found in sorted(groups.items()):
        scores = [_comparable(values[metric]) for values, _ in found]
        middle = statistics.median_low(scores)
        values, folder = found[scores.index(middle)]
        summaries.append(Summary(values, learning_rate, epochs, len(found), min(scores), max(scores), folder))
    return max(summaries, key=lambda summary: _comparable(summary.values[metric]))


def updates_of(examples: int, epochs: int, batch_size: int = BATCH_SIZE) -> int:
    """Updates of a fine-tuning; the last batch of an epoch may be smaller."""
    return math.ceil(examples / batch_size) * epochs


def _comparable(value: float) -> float:
    """A correlation is no number where all predictions are the same: as good as none."""
    return -math.inf if math.isnan(value) else value
