"""RoBERTa on raw text: masks are filled, questions answered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from fairseq import utils

from relpos_fairseq.criterions.question_answering import predictions, span_logits
from relpos_fairseq.data.question_answering.reading import Question, QuestionFile
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.inference.checkpoints.loading import Trained, load
from relpos_fairseq.inference.text import TokenizerText
from relpos_fairseq.models.roberta.hub import RelPosRobertaHub
from relpos_fairseq.tasks.question_answering_dataset import QuestionDataset


def open_masked(path: Path, data: Path | None, cpu: bool) -> RelPosRobertaHub:
    """Return a masked language model's hub."""
    trained = load(path, data, cpu, "relpos fill")
    text = trained.source
    tokenizer = text.tokenizer if isinstance(text, TokenizerText) else None
    return RelPosRobertaHub(trained.cfg, trained.task, trained.model, tokenizer)


def fill(hub: RelPosRobertaHub, line: str, number: int, count: int) -> list[dict]:
    """Return the likeliest pieces for the one <mask> of a line, best first.

    Raises:
        PreparationError: not one <mask>, or too long a line; the message has its number.
    """
    try:
        found = hub.fill_mask(line, count)
    except ValueError as error:
        raise PreparationError(f"line {number}: {error}") from None
    return [{"text": t, "probability": round(p, 6), "piece": piece} for t, p, piece in found]


@torch.no_grad()
def answer(trained: Trained, context: str, questions: Sequence[str], none: bool, count: int) -> Iterator[dict]:
    """Answer questions about a context.

    Args:
        trained: the model.
        context: a text of any length: it is read in windows, as in training.
        questions: about it.
        none: whether "no answer" may win, as a model of SQuAD v2.0 has learned.
        count: answers of each question, at most.
    """
    asked = [Question(str(n), text, 0, (), ()) for n, text in enumerate(questions, start=1)]
    encoded = trained.task.encoder.encode(QuestionFile(Path("questions"), [context], asked), False)
    unanswerable = none or trained.cfg.task.unanswerable == "yes"
    dataset = QuestionDataset(encoded, trained.task.dictionary, False, unanswerable)
    for number, text in enumerate(questions):
        sample = dataset.collater([dataset[number]])
        sample = utils.move_to_cuda(sample) if trained.device.type == "cuda" else sample
        logits = span_logits(trained.model, sample, trained.cfg.task.span_head_name)
        [found] = predictions(sample, logits, trained.task.options)
        best = sorted(found.n_best, key=lambda one: one.text != found.text)  # the prediction first
        answers = [{"text": one.text, "probability": round(one.probability, 6)} for one in best]
        yield {"question": text, "answers": answers[:count]}
