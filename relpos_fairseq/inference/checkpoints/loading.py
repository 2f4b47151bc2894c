"""Load a checkpoint with its task and text for a command; translate, fill masks and answer questions with it."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from fairseq import utils

from relpos_fairseq.criterions.question_answering import predictions, span_logits
from relpos_fairseq.data.squad import Question, QuestionFile
from relpos_fairseq.inference.checkpoints.beam_search import attention_unread
from relpos_fairseq.inference.translator import Hypothesis, Search
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.models.roberta_hub import RelPosRobertaHub
from relpos_fairseq.nn.packed import prepare
from relpos_fairseq.patches.training import options_of
from relpos_fairseq.saved.identity import SavedOptions
from relpos_fairseq.saved.model import MULTILINGUAL, SavedModel
from relpos_fairseq.tasks.question_answering import QuestionDataset
from relpos_fairseq.text.assets import SymbolText, Text, TokenizerText, read_text

logger = logging.getLogger(__name__)
Languages = tuple[str | None, str | None]  # the source's and the target's
ENDLESS = 10**6  # positions: fairseq's own large numbers are above it


@dataclass(frozen=True)
class Trained:
    """A model ready for use.

    Attributes:
        model: in evaluation mode, on its device.
        cfg: the checkpoint's config.
        task: its task, whose data is `folder`.
        folder: of its dictionaries and subwords.
        source: the input's text, to symbols and back.
        target: the output's.
    """

    model: Any
    cfg: Any
    task: Any
    folder: Path
    source: Text
    target: Text

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def load(
    path: Path,
    data: Path | None,
    cpu: bool,
    command: str,
    quantization: str | None = None,
    languages: Languages = (None, None),
) -> Trained:
    """Load a checkpoint with its task and text, for a command that runs models of this task.

    Args:
        path: the checkpoint.
        data: its data folder; None: the text beside the checkpoint.
        cpu: use no GPU.
        command: a value of `saved.model.JOBS`.
        quantization: `int8`, `bf16`, or None.
        languages: the source's and the target's, of a checkpoint that translates between several.

    Raises:
        UserError: another command runs the model, dictionaries are missing, or the checkpoint
            does not translate between the languages.
    """
    saved = SavedModel.open(path)
    saved.require(command)
    folder, chosen = saved.find_text(data), _languages(path, saved.options, languages)
    overrides = {"data": str(folder), "tokenizer_folder": "", "eval_bleu": False}
    overrides |= {f"{side}_lang": one for side, one in zip(("source", "target"), chosen, strict=True) if one}
    model, cfg, task = saved.build(overrides)
    device = "cuda" if torch.cuda.is_available() and not cpu else "cpu"
    source, target = (read_text(folder, language) for language in chosen)
    if isinstance(source, SymbolText):
        logger.warning(
            "%s has neither a manifest of `relpos prepare` nor a tokenizer: text is taken as "
            "symbols of its dict.txt, joined by spaces",
            folder,
        )
    prepare(model.to(device), quantization)
    return Trained(model, cfg, task, folder, source, target)


def _languages(path: Path, saved: SavedOptions, asked: Languages) -> Languages:
    """Return the languages of a checkpoint: its own, or of one that has several those that are asked for.

    Raises:
        UserError: they are not named, or are none of the checkpoint's.
    """
    if saved.task_name != MULTILINGUAL:
        for own, one, option in zip(saved.languages, asked, ("--source-lang", "--target-lang"), strict=True):
            if one is not None and one != own:
                raise UserError(f"{option} {one}: {path} was trained with {own or 'one language'}")
        return saved.languages
    pairs = saved.task.get("lang_pairs") or []
    pairs = pairs.split(",") if isinstance(pairs, str) else pairs
    known = saved.task.get("langs") or sorted({one for pair in pairs for one in pair.split("-")})
    named = f"its languages are {', '.join(known)}, it was trained on {', '.join(pairs)}"
    if None in asked:
        raise UserError(f"{path} translates between several languages: give --source-lang and --target-lang ({named})")
    for one in asked:
        if one not in known:
            raise UserError(f"{path} has no language {one}: {named}")
    return asked


def longest(limit: Any) -> int | None:
    """Return a limit of positions as an integer; None for the large numbers by which fairseq says "no limit"."""
    return None if limit is None or limit >= ENDLESS or math.isinf(limit) else int(limit)


# Translation


def load_translator(
    path: Path, data: Path | None, cpu: bool, quantization: str | None = None, languages: Languages = (None, None)
) -> BeamSearch:
    """Load an encoder-decoder's checkpoint as a translator."""
    return BeamSearch(load(path, data, cpu, "relpos translate", quantization, languages))


class BeamSearch:
    """Translates batches of sentences in symbols by fairseq's SequenceGenerator, as fairseq-generate runs it."""

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
        # The task adds what it wants beside the text, such as a language's token.
        dataset = task.build_dataset_for_inference(rows, [len(row) for row in rows])
        dataset.left_pad_source = options_of(task).left_pad_source
        sample = dataset.collater([dataset[number] for number in range(len(rows))])
        sample = utils.move_to_cuda(sample) if self.trained.device.type == "cuda" else sample
        generator = self._generate_by(search)
        with attention_unread():
            found = task.inference_step(generator, [self.trained.model], sample)
        never = {words.bos(), words.eos(), *generator.symbols_to_strip_from_output}  # as in fairseq-generate
        hypotheses = [[self._hypothesis(one, never) for one in row[: search.nbest]] for row in found]
        return [one for _, one in sorted(zip(sample["id"].tolist(), hypotheses, strict=True), key=itemgetter(0))]

    def _generate_by(self, search: Search):
        """Return the generator of a search; the last one is kept."""
        if self._generator[0] != search:
            generator = self.trained.task.build_generator([self.trained.model], search)
            self._generator = (search, generator)
        return self._generator[1]

    def _hypothesis(self, found: dict, never: Collection[int]) -> Hypothesis:
        words = self.trained.task.target_dictionary
        ids = [number for number in found["tokens"].tolist() if number not in never]
        return Hypothesis([words[number] for number in ids], float(found["score"]))


# RoBERTa: masks and questions


def open_masked(path: Path, data: Path | None, cpu: bool, quantization: str | None = None) -> RelPosRobertaHub:
    """Load a masked language model's checkpoint as a hub interface."""
    trained = load(path, data, cpu, "relpos fill", quantization)
    text = trained.source
    tokenizer = text.tokenizer if isinstance(text, TokenizerText) else None
    return RelPosRobertaHub(trained.cfg, trained.task, trained.model, tokenizer)


def fill(hub: RelPosRobertaHub, line: str, number: int, count: int) -> list[dict]:
    """Return the `count` likeliest tokens for each <mask> of a line, best first; of several each names its `mask`.

    Raises:
        UserError: the line is too long or has no <mask>; the message names its `number`.
    """
    try:
        found = hub.fill_masks(line, count)
    except ValueError as error:
        raise UserError(f"line {number}: {error}") from None
    return [
        {"text": text, "probability": round(value, 6), "piece": piece} | ({"mask": mask} if len(found) > 1 else {})
        for mask, best in enumerate(found, start=1)
        for text, value, piece in best
    ]


@torch.no_grad()
def answer(trained: Trained, context: str, questions: Sequence[str], none: bool, count: int) -> Iterator[dict]:
    """Answer questions about a context, with at most `count` answers each.

    Args:
        trained: the model.
        context: a text of any length, read in windows as in training.
        questions: about the context.
        none: "no answer" may win, as a model of SQuAD v2.0 has learned.
        count: answers of each question.
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
