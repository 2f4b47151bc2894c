r"""Task `question_answering`: extractive answers, SQuAD's format, from raw JSON.

    fairseq-train DATA --user-dir relpos_fairseq --task question_answering \
        --criterion question_answering --arch relpos_roberta_tiny --finetune-from-model MODEL.pt

DATA holds dict.txt, a tokenizer, train.json and valid.json (relpos prepare qa makes such a folder);
`--valid-subset` takes the name of any other .json there.  A window is a sample in training, a question in
evaluation: all windows of a question stand in one batch, so that its answer is known at once and every
metric is a sum over questions, whatever the batches and the number of processes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq.data import Dictionary, FairseqDataset, data_utils
from fairseq.tasks import FairseqTask, register_task

from relpos_fairseq.data.answer_spans import (
    NULL,
    Context,
    EncodedFile,
    PredictionOptions,
    QuestionEncoder,
    Shape,
    Window,
    targets,
)
from relpos_fairseq.data.squad import Question, read_questions, split_name
from relpos_fairseq.metrics.answer_scores import normalise, normaliser
from relpos_fairseq.tasks.question_answering_config import QuestionAnsweringConfig
from relpos_fairseq.text import MASK, load_tokenizer

logger = logging.getLogger(__name__)
SEGMENTS = 2  # of a sample: the question and its context
_SUFFIXES = (".json", ".json.gz")
_MLQA_NAME = re.compile(r"context-([a-z]{2})-question")
_DOTTED_NAME = re.compile(r"\.([a-z]{2})$")


@dataclass(frozen=True)
class Asked:
    """A question of a batch: everything that its prediction needs beside the logits.

    Attributes:
        question: the question.
        text: its context's characters.
        context: its tokenised context.
        spans: its windows, W of them, rows `row` to `row + W` of the batch.
        row: the first of them.
        offset: position of a window's first context piece.
        index: the question's number in its data set.
        total: how many questions the data set has.
        unanswerable: whether "no answer" may be predicted.
        normalised: normalisation of answers.
    """

    question: Question
    text: str
    context: Context
    spans: tuple[Window, ...]
    row: int
    offset: int
    index: int
    total: int
    unanswerable: bool
    normalised: Callable[[str], str]


class QuestionDataset(FairseqDataset):
    """The samples of a tokenised file: windows in training, questions in evaluation.

    Args:
        encoded: the file.
        dictionary: fairseq's.
        training: samples are windows in random order; else questions with all their windows.
        unanswerable: whether "no answer" may be predicted.
        normalised: normalisation of answers, of `metrics.question_answering`.
    """

    def __init__(
        self,
        encoded: EncodedFile,
        dictionary: Any,
        training: bool,
        unanswerable: bool,
        normalised: Callable[[str], str] = normalise,
    ) -> None:
        self.encoded = encoded
        self.dictionary = dictionary
        self.training = training
        self.unanswerable = unanswerable
        self.normalised = normalised
        shape = encoded.shape
        count = [len(spans) for spans in encoded.spans]
        around = [shape.offset(asked) + 1 for asked in encoded.asked]
        longest = [max(one.length for one in spans) for spans in encoded.spans]
        if training:
            self.items = [(n, w) for n, spans in enumerate(encoded.spans) for w in range(len(spans))]
            self.sizes = np.array([around[n] + encoded.spans[n][w].length for n, w in self.items], dtype=np.int64)
            self.costs = self.sizes
        else:
            self.items = [(n, -1) for n in range(len(count))]
            self.sizes = np.array(around, dtype=np.int64) + np.array(longest, dtype=np.int64)
            self.costs = self.sizes * np.array(count, dtype=np.int64)

    def __len__(self) -> int:
        """Return the number of windows in training, else of questions."""
        return len(self.items)

    def size(self, index: int) -> int:
        """Return the number of tokens of the longest window."""
        return int(self.sizes[index])

    def num_tokens(self, index: int) -> int:
        """Return the number of tokens of all windows, with padding."""
        return int(self.costs[index])

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        return self.costs[indices]

    def batch_by_size(
        self,
        indices: np.ndarray,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        required_batch_size_multiple: int = 1,
    ) -> list[np.ndarray]:
        """Make batches as fairseq does; a question whose windows exceed `max_tokens` is a batch of its own.

        fairseq asserts that no sample does, and a question's windows cannot be parted here.
        """
        if self.training or not max_tokens:
            return super().batch_by_size(indices, max_tokens, max_sentences, required_batch_size_multiple)
        costs = np.minimum(self.costs, max_tokens)
        return data_utils.batch_by_size(
            indices,
            num_tokens_fn=lambda index: int(costs[index]),
            num_tokens_vec=costs[indices],
            max_tokens=max_tokens,
            max_sentences=max_sentences,
            required_batch_size_multiple=required_batch_size_multiple,
        )

    def ordered_indices(self) -> np.ndarray:
        """Return indices at random in training (fairseq seeds numpy), else by length."""
        if self.training:
            return np.random.permutation(len(self))
        return np.argsort(self.costs, kind="stable")

    @property
    def supports_prefetch(self) -> bool:
        return False

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a sample's windows as rows of (tokens, start, end)."""
        number, window = self.items[index]
        encoded = self.encoded
        spans = encoded.spans[number]
        offset = encoded.shape.offset(encoded.asked[number])
        wanted = targets(spans, encoded.answer(number), offset)
        chosen = range(len(spans)) if window < 0 else [window]
        rows = [(self._tokens(number, spans[n]), *wanted[n]) for n in chosen]
        return {"id": index, "rows": rows, "offset": offset, "number": number}

    def _tokens(self, number: int, span: Window) -> torch.Tensor:
        bos, eos = self.dictionary.bos(), self.dictionary.eos()
        question = self.encoded.questions[number]
        part = self.encoded.contexts[question.context].ids[span.start : span.end]
        between = [eos] * self.encoded.shape.separators
        pieces = [[bos], self.encoded.asked[number], between, part, [eos]]
        return torch.from_numpy(np.concatenate(pieces).astype(np.int64))

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Make a batch of B windows with T tokens at most.

        Returns:
            `net_input`: src_tokens (B, T), src_lengths (B,), segments (B, T): 0 up to
            the question's `</s>`, 1 from there on; `allowed` (B, T): where an answer may begin
            or end, and `<s>`; `start`, `end` (B,): targets; `asked`: the questions, in evaluation.
        """
        if not samples:
            return {}
        rows = [row for sample in samples for row in sample["rows"]]
        offsets = [sample["offset"] for sample in samples for _ in sample["rows"]]
        tokens = data_utils.collate_tokens([row[0] for row in rows], self.dictionary.pad(), left_pad=False)
        lengths = torch.tensor([len(row[0]) for row in rows])
        first = torch.tensor(offsets)[:, None]
        column = torch.arange(tokens.size(1))[None, :]
        in_context = (column >= first) & (column < lengths[:, None] - 1)
        question_end = first - self.encoded.shape.separators
        batch = {
            "id": torch.tensor([sample["id"] for sample in samples]),
            "net_input": {
                "src_tokens": tokens,
                "src_lengths": lengths,
                "segments": ((column > question_end) & (column < lengths[:, None])).long(),
            },
            "allowed": in_context | (column == NULL),
            "start": torch.tensor([row[1] for row in rows]),
            "end": torch.tensor([row[2] for row in rows]),
            "nsentences": len(rows),
            "ntokens": int(lengths.sum()),
        }
        if not self.training:
            batch["asked"] = self._asked(samples)
        return batch

    def _asked(self, samples: list[dict[str, Any]]) -> list[Asked]:
        asked, row = [], 0
        for sample in samples:
            number = sample["number"]
            question = self.encoded.questions[number]
            asked.append(
                Asked(
                    question=question,
                    text=self.encoded.source.contexts[question.context],
                    context=self.encoded.contexts[question.context],
                    spans=self.encoded.spans[number],
                    row=row,
                    offset=sample["offset"],
                    index=number,
                    total=len(self.encoded.questions),
                    unanswerable=self.unanswerable,
                    normalised=self.normalised,
                )
            )
            row += len(sample["rows"])
        return asked


@register_task("question_answering", dataclass=QuestionAnsweringConfig)
class QuestionAnsweringTask(FairseqTask):
    """The task of answers that are spans of a context."""

    def __init__(self, cfg: Any, dictionary: Dictionary, tokenizer: Any) -> None:
        """Check the options.

        Raises:
            ValueError: an option that cannot be, or a tokenizer of another dictionary.
        """
        super().__init__(cfg)
        self.dictionary = dictionary
        separators = cfg.separators
        if separators == "auto":
            separators = 1 + tokenizer.pairs.separators
        shape = Shape(
            tokens_per_sample=cfg.tokens_per_sample,
            doc_stride=cfg.doc_stride,
            max_query_length=cfg.max_query_length,
            separators=int(str(separators)),
            on_long_question=cfg.on_long_question,
        )
        self.encoder = QuestionEncoder(tokenizer, dictionary, shape, str(dict_path(cfg.data)))
        for name in ("n_best", "max_answer_length"):
            if getattr(cfg, name) < 1:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} must be 1 or more, got {getattr(cfg, name)}")
        self.options = PredictionOptions(cfg.n_best, cfg.max_answer_length, cfg.null_threshold)

    @classmethod
    def setup_task(cls, cfg: Any, **kwargs: Any) -> QuestionAnsweringTask:
        """Read the dictionary and the tokenizer.

        Raises:
            ValueError: one of them is absent or broken.
        """
        path = dict_path(cfg.data)
        if not path.is_file():
            raise ValueError(
                f"no dictionary {path}: --task question_answering needs a folder with dict.txt, "
                f"the tokenizer and .json files; relpos prepare qa makes one"
            )
        dictionary = Dictionary.load(str(path))
        dictionary.add_symbol(MASK)  # as masked_lm, whose embedding this model has
        tokenizer = load_tokenizer(cfg.tokenizer_folder or cfg.data)
        logger.info("dictionary of %d symbols, %s tokenizer", len(dictionary), tokenizer.kind)
        return cls(cfg, dictionary, tokenizer)

    def load_dataset(self, split: str, combine: bool = False, **kwargs: Any) -> None:
        """Read and tokenise SPLIT.json or .json.gz of the data folder; `combine`: for training.

        Raises:
            ValueError: absent or wrong.
        """
        paths = [Path(self.cfg.data) / f"{split}{suffix}" for suffix in _SUFFIXES]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            raise ValueError(f"no split {split!r}: expected {' or '.join(map(str, paths))}")
        self.datasets[split] = self.read_dataset(path, combine)

    def read_dataset(self, path: str | Path, training: bool = False) -> QuestionDataset:
        """Read and tokenise any file of SQuAD's format.

        Raises:
            ValueError: it is none, or holds what the options refuse.
        """
        source = read_questions(path, self.cfg.on_bad_answer)
        encoded = self.encoder.encode(source, training)
        choice = self.cfg.unanswerable
        unanswerable = source.unanswerable if choice == "auto" else choice == "yes"
        dataset = QuestionDataset(encoded, self.dictionary, training, unanswerable, self.normaliser(path))
        logger.info(
            "%s: %d questions, %d windows%s",
            path,
            len(encoded.questions),
            sum(map(len, encoded.spans)),
            ", some unanswerable" if source.unanswerable else "",
        )
        return dataset

    def normaliser(self, path: str | Path) -> Any:
        """Return the function that normalises the answers of a file.

        Raises:
            ValueError: --metric mlqa and no language is known.
        """
        language = self.cfg.language
        if language == "auto":
            language = language_of(path)
        if self.cfg.metric == "mlqa" and not language:
            raise ValueError(f"--metric mlqa: {Path(path).name} does not name its language: give --language")
        return normaliser(self.cfg.metric, language)

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """Build a model with a span head.

        Raises:
            ValueError: the architecture has no span head, or too few segments.
        """
        model = super().build_model(cfg, from_checkpoint)
        if not hasattr(model, "register_question_answering_head"):
            raise ValueError(
                f"--task question_answering needs an --arch relpos_roberta..., which has a span "
                f"head; {type(model).__name__} has none"
            )
        _check_segments(model)
        model.register_question_answering_head(self.cfg.span_head_name)
        return model

    def max_positions(self) -> int:
        return self.cfg.tokens_per_sample

    @property
    def source_dictionary(self) -> Dictionary:
        return self.dictionary

    @property
    def target_dictionary(self) -> Dictionary:
        return self.dictionary


def _check_segments(model: Any) -> None:
    """Raise an error for a model that reads segments and has too few of them.

    Raises:
        ValueError: question and context do not fit.
    """
    plan = model.encoder.sentence_encoder.positions.plan
    if plan.segment_encoding != "none" and plan.num_segments < SEGMENTS:
        raise ValueError(
            f"--num-segments {plan.num_segments}: question and context are {SEGMENTS} segments: "
            f"give --num-segments {SEGMENTS}, or --segment-encoding none"
        )


def dict_path(data: str) -> Path:
    return Path(data) / "dict.txt"


def language_of(path: str | Path) -> str:
    """Return the language in a file's name: the context's in MLQA's names, or xx of NAME.xx.json."""
    name = split_name(path)
    found = _MLQA_NAME.search(name) or _DOTTED_NAME.search(name)
    return found.group(1) if found else ""
