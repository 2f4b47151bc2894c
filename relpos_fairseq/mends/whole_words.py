"""`masked_lm --mask-whole-words` reads `task.args`, which the task has lost, and always fails.

fairseq's own BPEs say which symbols begin a word; here the data say it (data/word_starts.py).
"""

from __future__ import annotations

from typing import Any

from fairseq import utils
from fairseq.tasks import masked_lm

from relpos_fairseq.data.word_starts import word_starts
from relpos_fairseq.mends.replacing import replaces


class _ConfigAsArgs:
    """`task.args` is `task.cfg`; a subclass that sets its own `args` keeps it."""

    def __get__(self, task: Any, owner: type | None = None) -> Any:
        return self if task is None else task.cfg


def mask_whole_words() -> None:
    """Give the task its options back, and ask the data which symbols begin a word."""
    if not hasattr(masked_lm.MaskedLMTask, "args"):
        masked_lm.MaskedLMTask.args = _ConfigAsArgs()

    @replaces(masked_lm, "get_whole_word_mask")
    def get_whole_word_mask(original, args, dictionary):
        if getattr(args, "bpe", None):  # a task that works as it is
            return original(args, dictionary)
        return word_starts(utils.split_paths(args.data)[0], dictionary)
