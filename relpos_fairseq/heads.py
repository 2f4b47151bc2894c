"""The heads of transformers' classes, one row each: what reads them, writes them, and computes their losses here.

A classifier's problem is transformers' `problem_type`; where config.json names none, one output is a regression, whole
labels are classes, and other labels are of several classes each, as there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from relpos_fairseq.io.errors import UserError

HEAD = "sentence_classification_head"  # fairseq's name of the head of sentence_prediction
SPAN_HEAD = "question_answering"  # the default of --span-head-name, so that it is loaded
TOKEN_HEAD = "token_classification"
REGRESSION, SINGLE, SEVERAL = "regression", "single_label_classification", "multi_label_classification"


@dataclass(frozen=True)
class Head:
    """A kind of head."""

    suffix: str  # of the name of transformers' class, after that of the family
    kind: str  # the output that is compared: logits, classification, spans, tokens, choices, next; none without a head
    pipeline: str  # of transformers, that runs it on text
    place: str = ""  # of such heads in a relpos_roberta
    name: str = ""  # there, of the one of a folder of transformers

    @property
    def auto(self) -> str:
        """The name of transformers' Auto class."""
        return f"AutoModel{self.suffix.removeprefix('Model')}"

    @property
    def prefix(self) -> str:
        """What names of its tensors in a relpos_roberta begin with."""
        return f"{self.place}.{self.name}."

    @property
    def shown(self) -> str:
        """The tensor that has a row for each output."""
        return f"{self.prefix}out_proj.weight"


MODEL = Head("Model", "", "feature-extraction")
MASKED_LM = Head("ForMaskedLM", "logits", "fill-mask")
PRE_TRAINING = Head("ForPreTraining", "logits", "")
_TEXTS = ("classification_heads", HEAD)
CLASSIFIER = Head("ForSequenceClassification", "classification", "text-classification", *_TEXTS)
SPANS = Head("ForQuestionAnswering", "spans", "question-answering", "span_heads", SPAN_HEAD)
TOKENS = Head("ForTokenClassification", "tokens", "token-classification", "token_heads", TOKEN_HEAD)
CHOICES = Head("ForMultipleChoice", "choices", "", *_TEXTS)  # fairseq's sentence_ranking: a classifier of one output
HEADS = (MODEL, MASKED_LM, PRE_TRAINING, CLASSIFIER, SPANS, TOKENS, CHOICES)
CAUSAL_LM = Head("ForCausalLM", "next", "text-generation")
TRANSLATION = Head("ForSeq2SeqLM", "next", "")  # transformers 5 has no pipeline of it
RANKING = "sentence_ranking"  # fairseq's task of multiple choice


def head_of(config: dict[str, Any], where: str) -> Head | None:
    """Return the head that a config.json names; None: none, or its library's old class with an LM head.

    Raises:
        UserError: a head that is not converted.
    """
    named = config.get("architectures") or [""]
    if not isinstance(named, list) or not isinstance(named[0], str):
        raise UserError(f"{where}/config.json: architectures must be a list of names, got {named!r}")
    named = named[0]
    for head in HEADS:
        if named.endswith(head.suffix):
            return head
    if "For" not in named:
        return None
    raise UserError(
        f"{where} is a {named}, whose head no model here has: {', '.join(head.suffix for head in HEADS)} are converted"
    )


def classifier_of(task: Mapping[str, Any]) -> str | None:
    """Return the name of the head that a sentence_prediction or sentence_ranking trained, None of another task."""
    named = task.get("classification_head_name")
    if task.get("_name") == RANKING:
        return named or task.get("ranking_head_name", HEAD)
    return named if task.get("_name") == "sentence_prediction" else None


@dataclass(frozen=True)
class OwnHead:
    """A head of a relpos_roberta."""

    head: Head  # its kind
    name: str
    outputs: int
    trained: bool  # whether the model's task trained it, and it reads that task's input
    called: str  # its name for `--head`, with its place before it where another kind has the name too

    @property
    def prefix(self) -> str:
        """What names of its tensors begin with."""
        return f"{self.head.place}.{self.name}."


_OUTPUTS = re.compile(r"(\w+_heads)\.([^.]+)\.out_proj\.weight")


def heads_in(state: Mapping[str, Tensor], task: Mapping[str, Any]) -> list[OwnHead]:
    """Return the heads of a relpos_roberta by kind and name, from its tensors and the options of its task."""
    classifier, found = classifier_of(task), []
    places = sorted(match.groups() for key in state if (match := _OUTPUTS.fullmatch(key)))
    names = [name for _, name in places]
    for place, name in places:
        head = {SPANS.place: SPANS, TOKENS.place: TOKENS}.get(place, CLASSIFIER)
        trained = head is CLASSIFIER and name == classifier
        head = CHOICES if trained and task.get("_name") == RANKING else head
        called = name if names.count(name) == 1 else f"{place}.{name}"
        found.append(OwnHead(head, name, len(state[f"{place}.{name}.out_proj.weight"]), trained, called))
    return found


def is_regression(config: Mapping[str, Any], classes: int) -> bool:
    """Tell by its config.json whether a classifier gives numbers: one output does, unless it is a label."""
    problem = config.get("problem_type")
    return problem == REGRESSION or (classes == 1 and problem != SEVERAL)


def problem_named(config: dict[str, Any], where: str) -> str | None:
    """Return the problem_type that a config.json names, or None.

    Raises:
        UserError: it names none that transformers has.
    """
    problem = config.get("problem_type")
    if problem not in (None, SINGLE, SEVERAL, REGRESSION):
        raise UserError(f"{where}/config.json: problem_type {problem!r} is none of {SINGLE}, {SEVERAL}, {REGRESSION}")
    return problem


def problem_of(problem: str | None, classes: int, labels: Tensor | None = None) -> str:
    """Return the problem_type of a classifier with so many outputs; `labels` decide where none is named."""
    if problem:
        return problem
    if classes == 1:
        return REGRESSION
    return SEVERAL if labels is not None and labels.is_floating_point() else SINGLE


def loss_of(problem: str | None, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of a classifier's logits (B, C).

    Args:
        problem: transformers' problem_type, or None.
        logits: (B, C).
        labels: (B,) classes; (B, C) 0 or 1 of several labels each; (B,) or (B, C) values of a regression.
    """
    kind = problem_of(problem, logits.size(1), labels)
    if kind == REGRESSION:
        return nn.functional.mse_loss(logits, labels.to(logits.dtype).view_as(logits))
    if kind == SEVERAL:
        return nn.functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
    return nn.functional.cross_entropy(logits, labels.flatten())


def class_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of logits (..., C) of the labels (...) other than -100, of tokens or of choices."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
