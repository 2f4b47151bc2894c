"""The hub interface of `relpos_roberta`: encode, extract_features, fill_mask and predict, all offline.

As fairseq's RobertaHubInterface, with a tokenizer of this package (`data.tokenizers`), which is
looked for in the folders of the data and the checkpoint, and with the segments of sentence pairs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from fairseq import hub_utils, utils
from torch import Tensor, nn

from relpos_fairseq.tasks.sentence_pairs import segments_of_parts
from relpos_fairseq.text import MASK, Tokenizer, load_tokenizer
from relpos_fairseq.text.assets import tokenizer_folder

logger = logging.getLogger(__name__)


class RelPosRobertaHub(nn.Module):
    """A trained model with its dictionary and, where there is one, its tokenizer."""

    def __init__(self, cfg: Any, task: Any, model: Any, tokenizer: Tokenizer | None) -> None:
        """Keep model, dictionary and tokenizer; without a tokenizer text is symbols joined by spaces.

        Raises:
            ValueError: a tokenizer of another dictionary.
        """
        super().__init__()
        self.cfg, self.task, self.model, self.tokenizer = cfg, task, model, tokenizer
        self.dictionary = task.source_dictionary
        if tokenizer is not None:
            tokenizer.check_dictionary(self.dictionary.indices, "the model's dictionary")

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def encode(self, sentence: str, *more: str, no_separator: bool | None = None) -> Tensor:
        """Return the ids (T,) of `<s> a </s>`, or of a pair `<s> a </s> </s> b </s>`.

        Args:
            sentence: text.
            more: further sentences.
            no_separator: one </s> between sentences, as BERT has it, not RoBERTa's two; None: as
                the model's own task has it, or (masked_lm) its tokenizer's library.
        """
        return self.encode_with_segments(sentence, *more, no_separator=no_separator)[0]

    def encode_with_segments(
        self, sentence: str, *more: str, no_separator: bool | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the ids of `encode`, and segment numbers (T,): each sentence is a segment.

        A separator belongs to the sentence that follows it, as in sentence_prediction.
        """
        if no_separator is None:
            no_separator = self._is_like_bert
        end, separator = self.dictionary.eos(), [] if no_separator else [self.dictionary.eos()]
        parts = [[self.dictionary.bos(), *self._ids(sentence), end]]
        parts += [[*separator, *self._ids(text), end] for text in more]
        ids = torch.tensor([number for part in parts for number in part])
        return ids, segments_of_parts([len(part) for part in parts])

    @property
    def _is_like_bert(self) -> bool:
        """True if the model's task, or else its tokenizer, puts one </s> between sentences."""
        task = self.task.cfg
        if "separator_token" in task:
            return task.separator_token is None
        if task.get("separators") in ("1", "2"):
            return task.separators == "1"
        return self.tokenizer is not None and self.tokenizer.pairs.separators == 0

    def _pieces(self, text: str, masked: bool = False) -> list[str]:
        if self.tokenizer is None:
            return (text.replace(MASK, f" {MASK} ") if masked else text).split()
        return self.tokenizer.encode_masked(text) if masked else self.tokenizer.encode(text).pieces

    def _ids(self, text: str) -> list[int]:
        return [self.dictionary.index(piece) for piece in self._pieces(text)]

    def decode(self, tokens: Tensor) -> str | list[str]:
        """Return the text of ids (T,), or a list of texts for several sentences."""
        ids = tokens.tolist()
        if ids and ids[0] == self.dictionary.bos():
            ids = ids[1:]
        sentences: list[list[int]] = [[]]
        for number in ids:
            if number == self.dictionary.eos():
                sentences.append([])
            elif number != self.dictionary.pad():
                sentences[-1].append(number)
        texts = [self._text([self.dictionary[number] for number in part]) for part in sentences if part]
        return texts[0] if len(texts) == 1 else texts

    def _text(self, pieces: Sequence[str]) -> str:
        return " ".join(pieces) if self.tokenizer is None else self.tokenizer.decode(pieces)

    def extract_features(
        self, tokens: Tensor, return_all_hiddens: bool = False, segments: Tensor | None = None
    ) -> Tensor | list[Tensor]:
        """Return the features (B, T, E) of the last layer, or a list of every layer's.

        Args:
            tokens: (T,) or (B, T) ids.
            return_all_hiddens: every layer's output, the embedding's first.
            segments: as `tokens`, of `encode_with_segments`.

        Raises:
            ValueError: too many tokens, or no segments though the model reads them.
        """
        inputs = self._inputs(tokens, segments)
        features, extra = self.model(**inputs, features_only=True, return_all_hiddens=return_all_hiddens)
        if return_all_hiddens:
            return [state.transpose(0, 1) for state in extra["inner_states"]]
        return features

    def _inputs(self, tokens: Tensor, segments: Tensor | None) -> dict[str, Tensor | None]:
        encoding = self.model.encoder.sentence_encoder.positions.plan.segment_encoding
        if encoding != "none" and segments is None:
            raise ValueError(
                f"this model reads segments (--segment-encoding {encoding}): give segments=, which "
                f"encode_with_segments returns beside the tokens"
            )
        tokens, segments = (part if part is None or part.dim() == 2 else part[None] for part in (tokens, segments))
        longest = self.model.max_positions()
        if tokens.size(1) > longest:
            raise ValueError(
                f"the input has {tokens.size(1)} tokens and the model takes {longest}: shorten it, "
                f"or train with a relative scheme, which takes any length"
            )
        segments = None if segments is None else segments.to(self.device)
        return {"src_tokens": tokens.to(self.device), "segments": segments}

    def register_classification_head(self, name: str, num_classes: int, **kwargs: Any) -> None:
        self.model.register_classification_head(name, num_classes=num_classes, **kwargs)

    def predict(self, head: str, tokens: Tensor, return_logits: bool = False, segments: Tensor | None = None) -> Tensor:
        """Return log-probabilities (B, classes), or logits, of a classification head."""
        inputs = self._inputs(tokens, segments)
        logits, _ = self.model(**inputs, classification_head_name=head)
        return logits if return_logits else F.log_softmax(logits, dim=-1)

    def fill_mask(self, masked_input: str, topk: int = 5) -> list[tuple[str, float, str]]:
        """Return the `topk` likeliest words for the one `<mask>` of a text, as `fill_masks` does for several.

        Raises:
            ValueError: not exactly one <mask>, or a model without one.
        """
        if (count := masked_input.count(MASK)) != 1:
            raise ValueError(f"give one {MASK} in the text, got {count}: {masked_input!r}")
        return self.fill_masks(masked_input, topk)[0]

    def fill_masks(self, masked_input: str, topk: int = 5) -> list[list[tuple[str, float, str]]]:
        """Return the `topk` likeliest words, or all, for each `<mask>` of a text, the others left as they are.

        Returns:
            For each mask (filled text, probability, the piece's text), best first; special symbols, which
            masked_lm masks and predicts too, are left out.

        Raises:
            ValueError: no <mask>, a model without one, or a `topk` below 1.
        """
        if topk < 1:
            raise ValueError(f"topk must be >= 1, got {topk}")
        if MASK not in masked_input:
            raise ValueError(f"the text has no {MASK}: {masked_input!r}")
        mask = self.dictionary.index(MASK)
        if mask == self.dictionary.unk():
            raise ValueError(f"the model's dictionary has no {MASK}: it was not pre-trained")
        pieces = self._pieces(masked_input, masked=True)
        ids = [self.dictionary.index(piece) for piece in pieces]
        tokens = torch.tensor([self.dictionary.bos(), *ids, self.dictionary.eos()])
        masked = tokens.eq(mask)
        with utils.model_eval(self.model), torch.no_grad():
            inputs = self._inputs(tokens, torch.zeros_like(tokens))
            logits, _ = self.model(**inputs, masked_tokens=masked[None].to(self.device))
        probabilities = logits.float().softmax(dim=-1)
        probabilities[:, : self.dictionary.nspecial] = probabilities[:, mask] = 0.0
        found = []
        for place, row in zip(masked[1:-1].nonzero()[:, 0].tolist(), probabilities, strict=True):
            values, numbers = row.topk(min(topk, len(row) - self.dictionary.nspecial - 1))  # <mask> is no word either
            pairs = zip(numbers.tolist(), values.tolist(), strict=True)
            found.append([self._filled(pieces, place, number, value) for number, value in pairs])
        return found

    def _filled(self, pieces: list[str], place: int, number: int, value: float) -> tuple[str, float, str]:
        """Return one answer; the tokens of the text and the new one are decoded together."""
        new = self.dictionary[number]
        whole = self._text([*pieces[:place], new, *pieces[place + 1 :]])
        return whole.strip(), value, self._text([new]).strip()


def from_pretrained(
    model_name_or_path: str,
    checkpoint_file: str,
    data_name_or_path: str,
    bpe: Tokenizer | str | Path | None,
    **overrides: Any,
) -> RelPosRobertaHub:
    """Load a checkpoint of this package; see `RelPosRobertaModel.from_pretrained`."""
    loaded = hub_utils.from_pretrained(
        model_name_or_path, checkpoint_file, data_name_or_path, load_checkpoint_heads=True, **overrides
    )
    tokenizer = bpe
    if not isinstance(bpe, Tokenizer):
        data = Path(loaded["task"].cfg.data.split(":")[0])
        if bpe is None and (bpe := tokenizer_folder(data, Path(model_name_or_path))) is None:
            logger.warning(
                "no tokenizer beside the data or the checkpoint: text is taken as symbols of dict.txt, "
                "joined by spaces (or give bpe=FOLDER)"
            )
        tokenizer = load_tokenizer(bpe) if bpe else None
    return RelPosRobertaHub(loaded["args"], loaded["task"], loaded["models"][0], tokenizer)
