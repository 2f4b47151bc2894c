"""fairseq refuses or leaves out samples for their length, and does not say what lets them in."""

import logging

from fairseq.tasks.fairseq_task import FairseqTask

from relpos_fairseq.mends.replacing import replaces

logger = logging.getLogger(__name__)
# What tasks call the length of their samples.
LENGTHS = ("max_source_positions", "max_target_positions", "tokens_per_sample", "max_positions")


def explain_filtered_lengths() -> None:
    """Name the flags that raise the limit."""

    @replaces(FairseqTask, "filter_indices_by_size")
    def filter_indices_by_size(original, self, indices, dataset, max_positions=None, *args, **more):
        try:
            kept = original(self, indices, dataset, max_positions, *args, **more)
        except Exception as error:
            if "since max_positions=" not in str(error):
                raise
            raise ValueError(f"{error}; {_way_out(self, max_positions)}") from None
        dropped = len(indices) - len(kept)
        if dropped:
            logger.warning(
                "%d of %d samples left out, longer than %s: %s",
                dropped,
                len(indices),
                max_positions,
                _way_out(self, max_positions),
            )
        return kept


def _way_out(task: FairseqTask, limit: object) -> str:
    """Say what raises a length limit: the task's, a batch's, or that of a scheme's table."""
    known = [name for name in LENGTHS if getattr(task.cfg, name, None) is not None]
    flags = " and ".join(f"--{name.replace('_', '-')}" for name in known or LENGTHS)
    sides = limit if isinstance(limit, tuple) else (limit,)
    tables = [f"{n.scheme} has a table of {n} positions" for n in sides if hasattr(n, "scheme")]
    if tables:
        return (
            f"position scheme {' and '.join(dict.fromkeys(tables))}: train with larger {flags}, or "
            f"choose a relative scheme, which takes any length"
        )
    if limit == task.max_positions():
        return f"raise {flags}"
    return f"--max-tokens raises this limit, else {flags}"
