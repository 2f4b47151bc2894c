"""A language model scores texts: the log-probability of each symbol, and whether it is likeliest.

A text is read as `relpos evaluate lm` reads a stream that begins with it: by segments of the
trained length with memory, or by windows that move on by half of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from relpos_fairseq.inference.checkpoints.loading import Trained
from relpos_fairseq.inference.checkpoints.sampling import Continuation


class Scorer:
    """Scores of symbols after others.

    Args:
        trained: the model and its task.
        mem_len: slots of memory; None: as trained.
        context: tokens that a model without memory sees; None: as trained.
        rows: texts that are read together, where they fit into one segment or window.

    Raises:
        ValueError: a length that does not go with the model.
    """

    def __init__(
        self, trained: Trained, mem_len: int | None = None, context: int | None = None, rows: int = 16
    ) -> None:
        if mem_len is not None and mem_len < 0:
            raise ValueError(f"mem_len must be >= 0, got {mem_len}")
        if rows < 1:
            raise ValueError(f"rows must be >= 1, got {rows}")
        reading = Continuation(trained, 1, mem_len, context)
        self.segment, self.recurrent = reading.segment, reading.recurrent
        self.trained, self.rows = trained, rows
        self.words, self.decoder = trained.task.source_dictionary, trained.model.decoder

    def pair(self, context: str, continuation: str) -> tuple[list[int], int]:
        """Return the ids of </s> and both texts, and the place of the first that is scored.

        Both are cut into symbols as one text; a symbol that reaches over their border is scored.
        """
        before, whole = map(self.trained.source.encode, (context, context + continuation))
        shared = 0
        while shared < min(len(before), len(whole)) and before[shared] == whole[shared]:
            shared += 1
        return [self.words.eos(), *map(self.words.index, whole)], 1 + shared

    @torch.no_grad()
    def score(self, texts: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """Score the ends of texts.

        Args:
            texts: ids, the first of which is </s>, and the place of the first that is scored.

        Returns:
            Of each text the log-probability of what is scored (0 of nothing), and whether greedy
            decoding would have drawn it.
        """
        found: list[tuple[float, bool]] = [(0.0, True)] * len(texts)
        short = [n for n, (ids, _) in enumerate(texts) if len(ids) - 1 <= self.segment]
        short.sort(key=lambda number: -len(texts[number][0]))
        for start in range(0, len(short), self.rows):
            group = short[start : start + self.rows]
            tokens = torch.full((len(group), len(texts[group[0]][0])), self.words.pad())
            for row, number in zip(tokens, group, strict=True):
                row[: len(texts[number][0])] = torch.tensor(texts[number][0])
            if tokens.size(1) < 2:  # none has anything to predict
                continue
            tokens = tokens.to(self.trained.device)
            features = self.decoder.extract_features(tokens[:, :-1], None)[0]
            scores, best = self._picked(features, tokens[:, 1:])
            for row, number in enumerate(group):
                ids, first = texts[number]
                part = slice(first - 1, len(ids) - 1)
                found[number] = float(scores[row, part].sum()), bool(best[row, part].all())
        for number in set(range(len(texts))) - set(short):
            ids, first = texts[number]
            total, greedy = [], True
            for start, scores, best in self._pieces(ids, first):
                skipped = max(0, first - start)
                total += scores[0, skipped:].tolist()
                greedy = greedy and bool(best[0, skipped:].all())
            found[number] = math.fsum(total), greedy
        return found

    def _pieces(self, ids: list[int], first: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Read one long text: the place of a piece's first target, and what `_picked` returns."""
        tokens, memory = torch.tensor([ids], device=self.trained.device), None
        if self.recurrent:
            for start in range(0, len(ids) - 1, self.segment):
                stop = min(start + self.segment, len(ids) - 1)
                features, extra = self.decoder.extract_features(tokens[:, start:stop], None, memory=memory)
                memory = extra["memory"]
                yield start + 1, *self._picked(features, tokens[:, start + 1 : stop + 1])
            return
        stride = max(1, self.segment // 2)
        for start in range(first, len(ids), stride):
            stop = min(start + stride, len(ids))
            window = tokens[:, max(0, stop - 1 - self.segment) : stop - 1]
            features = self.decoder.extract_features(window, None)[0][:, start - stop :]
            yield start, *self._picked(features, tokens[:, start:stop])

    def _picked(self, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T) log-probabilities of targets, in fp64, and whether each is the likeliest."""
        output = self.decoder.output_layer(features)
        scores = self.decoder.get_normalized_probs((output, None), True, {"target": targets})
        picked = scores.gather(-1, targets[..., None]).squeeze(-1).double()
        return picked, scores.argmax(dim=-1) == targets
