"""How many rows of a training step a memory holds (000, section 3.6), found by search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from relpos_fairseq.benchmarks.masked_lm import MaskedLMSetting, masked_lm, parameters, training_step
from relpos_fairseq.benchmarks.report import progress
from relpos_fairseq.benchmarks.rows import RowLog
from relpos_fairseq.benchmarks.timing import peak_mebibytes


def count_rows(labels: Sequence[str], what: MaskedLMSetting, limit: int, log: RowLog, where: dict) -> None:
    """Add to a log how many rows a training step holds in `limit` MiB."""
    column = where | {"column": f"rows in {limit} MiB, {what.length}"}
    with progress(len(labels), column["column"]) as bar:
        for scheme in labels:
            if log.lacks(column, [scheme]):
                own = weights(scheme, what)

                def needed(rows: int, scheme=scheme, own=own) -> float:
                    step = training_step(scheme, replace(what, batch=rows))
                    return own + peak_mebibytes(step, what.device)

                log.add(column, [{"name": scheme, "rows": most_rows(needed, limit)}])
            bar.update()


def weights(scheme: str, what: MaskedLMSetting) -> float:
    """Return MiB of weights, gradients and Adam's two moments."""
    return 4 * parameters(masked_lm(scheme, what)) * what.dtype.itemsize / 2**20


def most_rows(needed: Callable[[int], float], limit: float, most: int = 1 << 16) -> int:
    """Return the largest number of rows that needs no more than `limit` MiB, found by bisection.

    Out of memory counts as too much; the search ends at `most`.
    """

    def fits(rows: int) -> bool:
        try:
            return needed(rows) <= limit
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return False

    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
