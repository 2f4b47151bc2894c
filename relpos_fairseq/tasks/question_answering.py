"""The question_answering task: extractive answers, SQuAD's format, from raw JSON.

    fairseq-train DATA --user-dir relpos_fairseq --task question_answering \
        --criterion question_answering --arch relpos_roberta_tiny --finetune-from-model MODEL.pt

DATA holds dict.txt, a tokenizer, train.json and valid.json (relpos prepare qa makes such a
folder); `--valid-subset` takes the name of any other .json there.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from fairseq.data import Dictionary
from fairseq.tasks import FairseqTask, register_task

from relpos_fairseq.data.question_answering.encoding import QuestionEncoder, Shape
from relpos_fairseq.data.question_answering.prediction import PredictionOptions
from relpos_fairseq.data.question_answering.reading import read_questions, split_name
from relpos_fairseq.data.tokenizers import MASK, load_tokenizer
from relpos_fairseq.metrics.question_answering import normaliser
from relpos_fairseq.tasks.question_answering_config import QuestionAnsweringConfig
from relpos_fairseq.tasks.question_answering_dataset import QuestionDataset

logger = logging.getLogger(__name__)
SEGMENTS = 2  # of a sample: the question and its context
_SUFFIXES = (".json", ".json.gz")
_MLQA_NAME = re.compile(r"context-([a-z]{2})-question")
_DOTTED_NAME = re.compile(r"\.([a-z]{2})$")


@register_task("question_answering", dataclass=QuestionAnsweringConfig)
class QuestionAnsweringTask(FairseqTask):
    """Answers are spans of a context."""

    def __init__(self, cfg: Any, dictionary: Dictionary, tokenizer: Any) -> None:
        """Check the options.

        Raises:
            ValueError: an option that cannot be, or a tokenizer of another dictionary.
        """
        super().__init__(cfg)
        self.dictionary = dictionary
        separators = cfg.separators
        if separators == "auto":
            separators = 1 if tokenizer.kind == "wordpiece" else 2
        shape = Shape(
            tokens_per_sample=cfg.tokens_per_sample,
            doc_stride=cfg.doc_stride,
            max_query_length=cfg.max_query_length,
            separators=int(separators),
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
        """The normalisation of answers for a file.

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
        """A model with a span head.

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
    """Refuse a model that reads segments and has too few of them.

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
    """The language that a file's name tells: the context's in MLQA's names, or NAME.xx.json."""
    name = split_name(path)
    found = _MLQA_NAME.search(name) or _DOTTED_NAME.search(name)
    return found.group(1) if found else ""
