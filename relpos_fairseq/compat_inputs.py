"""What fairseq's own tasks must be told or given for RoBERTa, without tasks of our own.

- `sentence_prediction` supplies the segments of sentence pairs to a model that reads them
  (--segment-encoding input or head).  For every other model it is untouched.
- `masked_lm --mask-whole-words` works: fairseq reads an attribute that its task lost (`args`), and
  knows only its own BPEs.  Here the data say which symbols begin a word.
"""

from __future__ import annotations

import functools
from typing import Any

from relpos_fairseq.compat import not_replaced, replace
from relpos_fairseq.data.segments import add_segments
from relpos_fairseq.data.word_starts import word_starts


def apply() -> None:
    """Tell fairseq's tasks."""
    supply_segments()
    mask_whole_words()


def supply_segments() -> None:
    """sentence_prediction gives segments where `request_segments` asked for them."""
    from fairseq.tasks.sentence_prediction import SentencePredictionTask

    original = SentencePredictionTask.load_dataset
    if not not_replaced(SentencePredictionTask, "load_dataset"):
        return

    @functools.wraps(original)
    def load_dataset(self, split, combine=False, **kwargs):
        original(self, split, combine=combine, **kwargs)
        if getattr(self, "wants_segments", False):
            add_segments(self, split)
        return self.datasets[split]

    replace(SentencePredictionTask, "load_dataset", load_dataset)


class _ConfigAsArgs:
    """`task.args` is `task.cfg`; a subclass that sets its own `args` keeps it."""

    def __get__(self, task: Any, owner: type | None = None) -> Any:
        if task is None:
            return self
        return task.cfg


def mask_whole_words() -> None:
    """masked_lm asks the data which symbols begin a word."""
    from fairseq.tasks import masked_lm

    if not not_replaced(masked_lm, "get_whole_word_mask"):
        return
    if not hasattr(masked_lm.MaskedLMTask, "args"):
        masked_lm.MaskedLMTask.args = _ConfigAsArgs()

    def get_whole_word_mask(args, dictionary):
        from fairseq import utils

        return word_starts(utils.split_paths(args.data)[0], dictionary)

    replace(masked_lm, "get_whole_word_mask", get_whole_word_mask)
