"""A checkpoint as a translator: fairseq's own beam search over sentences in symbols."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from fairseq import utils
from fairseq.data.data_utils import collate_tokens

from relpos_fairseq.inference.checkpoints.loading import Trained, longest
from relpos_fairseq.inference.checkpoints.loading import load as load_trained
from relpos_fairseq.inference.translator import Hypothesis, Search


def load(path: Path, data: Path | None, cpu: bool) -> BeamSearch:
    return BeamSearch(load_trained(path, data, cpu, "relpos translate"))


class BeamSearch:
    """fairseq's SequenceGenerator, as fairseq-generate runs it.

    Args:
        trained: an encoder-decoder.
    """

    def __init__(self, trained: Trained) -> None:
        self.trained, self.source, self.target = trained, trained.source, trained.target
        trained.model.prepare_for_inference_(trained.cfg)
        limit = longest(trained.model.encoder.max_positions())
        self.longest = None if limit is None else limit - 1
        self._generator = (None, None)

    def translate(self, batch: Sequence[list[str]], search: Search) -> list[list[Hypothesis]]:
        task = self.trained.task
        words = task.source_dictionary
        rows = [torch.tensor([*map(words.index, symbols), words.eos()]) for symbols in batch]
        sample = {
            "net_input": {
                "src_tokens": collate_tokens(
                    rows, words.pad(), words.eos(), left_pad=self.trained.cfg.task.left_pad_source
                ),
                "src_lengths": torch.tensor([len(row) for row in rows]),
            }
        }
        sample = utils.move_to_cuda(sample) if self.trained.device.type == "cuda" else sample
        found = task.inference_step(self._generate_by(search), [self.trained.model], sample)
        return [[self._hypothesis(one) for one in row[: search.nbest]] for row in found]

    def _generate_by(self, search: Search):
        """The generator of a search, made once."""
        if self._generator[0] != search:
            generator = self.trained.task.build_generator([self.trained.model], search)
            self._generator = (search, generator)
        return self._generator[1]

    def _hypothesis(self, found: dict) -> Hypothesis:
        words = self.trained.task.target_dictionary
        never = (words.bos(), words.eos())  # what fairseq-generate leaves out
        ids = [number for number in found["tokens"].tolist() if number not in never]
        return Hypothesis([words[number] for number in ids], float(found["score"]))
