"""The steps of relpos convert: read, convert, measure, and what to write."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from relpos_fairseq.conversion import exact
from relpos_fairseq.conversion.checkpoints import beside
from relpos_fairseq.conversion.convert import Conversion, convert
from relpos_fairseq.conversion.fidelity import Fidelity, Probe, compare, outputs_of
from relpos_fairseq.conversion.huggingface.export import export, save
from relpos_fairseq.conversion.huggingface.names import FAMILIES
from relpos_fairseq.conversion.huggingface.reference import Reference
from relpos_fairseq.conversion.huggingface.vocabulary import Vocabulary, of_checkpoint, of_sentencepiece
from relpos_fairseq.conversion.layouts import places
from relpos_fairseq.conversion.reading import read_source
from relpos_fairseq.conversion.report import ConversionError
from relpos_fairseq.conversion.source import SourceModel, plan_of, target_values
from relpos_fairseq.conversion.writer import build, checkpoint_of, write_checkpoint, write_texts
from relpos_fairseq.data.tokenizers import MODEL_FILES

EXACT = 1e-4  # of a model's own values; rounding stays below, a wrong conversion does not
# What transformers' BERT tokenizer reads.
BERT_FILES = {"vocab.txt", "tokenizer.json", "tokenizer_config.json"}
SENTENCEPIECE = "sentencepiece.bpe.model"
Say = Callable[[str], object]
Writer = Callable[[Path], None]


@dataclass(frozen=True)
class Job:
    """What is asked for.

    Args:
        to: position scheme, `same`, `hf-bert` or `hf-roberta`.
        given: position options of the result by the names of our config; None: not given.
        approximate: whether something may be lost.
        init: `neutral` or `own`.
        fill: `tile`, `interpolate` or None.
        head: the head that a Hugging Face folder gets, or None.
        seed: of new tables and random input.
    """

    to: str
    given: dict[str, Any]
    approximate: bool = False
    init: str = "neutral"
    fill: str | None = None
    head: str | None = None
    seed: int = 1

    def beyond(self, *allowed: str) -> list[str]:
        """Return the options given, as the command line has them, but for some of the result."""
        names = [n for n, value in self.given.items() if value is not None and n not in allowed]
        names += ["approximate"] * self.approximate + ["fill"] * bool(self.fill)
        names += ["head"] * bool(self.head) + [f"init {self.init}"] * (self.init != "neutral")
        return [name.replace("_", "-") for name in names]


def read_job_source(path: Path, data: Path | None) -> SourceModel:
    """Read the source; its dictionary and tokenizer from `data` where they are not beside it."""
    source = read_source(path)
    if data is not None:
        if source.vocabulary is not None:
            raise ConversionError(f"--data {data}: a Hugging Face folder has its own vocabulary")
        source.files = beside(data)
        if not source.files:
            raise ConversionError(f"--data {data} holds neither dict.txt nor a tokenizer")
    return source


def to_ours(job: Job, source: SourceModel, say: Say) -> Writer:
    """Convert to one of ours; returns what writes it.

    Raises:
        ValueError: it cannot be converted so.
    """
    torch.manual_seed(job.seed)
    values = target_values(source, job.to, job.given)
    _check_used(job, source, values)
    done = convert(
        source.state, source.plan, plan_of(values), allow_loss=job.approximate, start=job.init, fill=job.fill
    )
    probe = _probe(job, source, values)
    before = source.outputs(probe.tokens, probe.segments)
    for line in done.report.lines():
        say(line)
    after = outputs_of(build(values, done.state), probe.tokens, probe.segments)
    measured = measure(before, after, probe, done, say)
    return _checkpoint_writer(source, values, done, measured)


def _check_used(job: Job, source: SourceModel, values: dict[str, Any]) -> None:
    """Refuse options that would change nothing.

    Raises:
        ConversionError: one is given.
    """
    before, target = places(source.plan), places(plan_of(values))
    taken = exact.assign(before, target)
    known, wanted = int(source.values["max_positions"]), int(values["max_positions"])
    if job.fill and wanted <= known:
        raise ConversionError(
            f"--fill {job.fill}: the source has {known} positions, and {wanted} are asked for: "
            f"give more by --positions, or leave it out"
        )
    kept = [place.scheme for place in before if place.name in taken.values()]
    if job.fill and not any(scheme.reads_positions() for scheme in kept):
        raise ConversionError(f"--fill {job.fill}: no table over absolute positions is kept: leave it out")
    if job.init == "own" and all(place.name in taken for place in target):
        raise ConversionError("--init own: no table is new: leave it out")


def _probe(job: Job, source: SourceModel, values: dict[str, Any]) -> Probe:
    longest = min(int(source.values["max_positions"]), int(values["max_positions"]))
    segments = source.plan.segment_encoding != "none" and source.plan.num_segments > 1
    rows = source.rows
    if source.vocabulary is not None and source.vocabulary.rows[-1] < 0:
        rows -= 1  # <mask> is new
    return Probe.draw(rows, longest, segments, job.seed)


def measure(before: dict, after: dict, probe: Probe, done: Conversion, say: Say) -> Fidelity:
    """Compare the outputs of source and result, and say how far they are apart.

    Raises:
        ConversionError: they differ though the conversion should be exact.
    """
    measured = compare(before, after, probe)
    for line in measured.lines():
        say(line)
    if done.report.exact and not measured.relative <= EXACT:  # NaN is none
        raise ConversionError(
            f"the conversion should be exact, and differs by {measured.relative:.3g} of the "
            f"source's values: nothing is written; please report this"
        )
    return measured


def _checkpoint_writer(source: SourceModel, values: dict[str, Any], done: Conversion, measured: Fidelity) -> Writer:
    about = {
        "source": f"{source.kind}: {source.path.name}",
        "report": done.report.lines(),
        "differences": measured.largest,
    }
    if source.vocabulary is not None:
        about["rows"] = source.vocabulary.rows
    task = dict(source.task)
    if any(file.name in MODEL_FILES for file in source.files):
        task.pop("tokenizer_folder", None)  # the tokenizer goes along
    if source.labels:
        about["labels"] = source.labels
    checkpoint = checkpoint_of(values, done.state, about, task)
    files = {file.name: file for file in source.files}
    texts = {} if source.vocabulary is None else {"dict.txt": source.vocabulary.dictionary()}
    options = checkpoint["cfg"]["task"]
    if options["_name"] == "sentence_prediction":  # whose dictionaries have folders of their own
        for part in (files, texts):
            part |= {"input0/dict.txt": part["dict.txt"]} if "dict.txt" in part else {}
        if not options["regression_target"]:
            names = source.labels or [f"LABEL_{n}" for n in range(options["num_classes"])]
            texts["label/dict.txt"] = "".join(f"{name} 1\n" for name in names)
    return functools.partial(write_checkpoint, checkpoint=checkpoint, about=about, files=files, texts=texts)


def to_huggingface(job: Job, source: SourceModel, say: Say) -> Writer:
    """Convert to a Hugging Face folder; returns what writes it.

    Raises:
        ValueError: the architecture cannot express the model, or options of ours are given.
    """
    if source.vocabulary is not None:
        raise ConversionError(f"{source.path} is a Hugging Face folder already: give --to a scheme")
    if wrong := [option for option in job.beyond() if option != "head"]:
        raise ConversionError(f"--{wrong[0]}: convert to a scheme first, then --to {job.to}")
    family = FAMILIES[job.to.removeprefix("hf-")]
    vocabulary = _export_order(source)
    for line in _leave_unread(vocabulary, family.name):
        say(f"note      {line}")
    named = {file.name: file for file in vocabulary.files}
    if SENTENCEPIECE in named and "tokenizer.json" not in named:
        vocabulary.made |= of_sentencepiece(named[SENTENCEPIECE])
    config, weights, report = export(source, family.name, vocabulary, job.head)
    for line in report.lines():
        say(line)
    probe = _probe(job, source, source.values)
    before = source.outputs(probe.tokens, probe.segments)
    rows = torch.tensor(vocabulary.rows)
    types = torch.zeros_like(probe.tokens) if probe.segments is None else probe.segments
    if config["type_vocab_size"] == 1:
        types = torch.zeros_like(types)
    reference = Reference(config, weights, family.prefix)
    after = reference.outputs(rows[probe.tokens], ~probe.real, types)
    if "logits" in after:
        before["logits"] = before["logits"][..., rows >= 0]
        after["logits"] = after["logits"][..., rows[rows >= 0]]
    measure(before, _same_names(after, before), probe, Conversion({}, report), say)

    def write(folder: Path) -> None:
        save(folder, config, weights)
        write_texts(folder, {file.name: file for file in vocabulary.files}, vocabulary.made)

    return write


def _leave_unread(vocabulary: Vocabulary, family: str) -> list[str]:
    """Leave out a tokenizer that the family's own class does not read; returns what to say of it.

    A tokenizer_config.json that names its class makes transformers read whatever lies there.
    """
    texts = dict(vocabulary.made)
    for file in vocabulary.files:
        if file.name == "tokenizer_config.json":
            texts.setdefault(file.name, file.read_text(encoding="utf-8"))
    named = "tokenizer_class" in texts.get("tokenizer_config.json", "")
    names = sorted({*(file.name for file in vocabulary.files), *vocabulary.made})
    if family != "bert" or named or set(names) <= BERT_FILES:
        return []
    vocabulary.files, vocabulary.made = [], {}
    return [
        f"{', '.join(names)} left out: transformers' BERT tokenizer does not read them "
        f"(--to hf-roberta takes RoBERTa's along)"
    ]


def _export_order(source: SourceModel) -> Vocabulary:
    if source.source_rows is not None:
        files = [path for path in source.files if path.name != "dict.txt"]
        return Vocabulary([], source.source_rows, files)
    types = source.plan.segment_encoding == "input"
    return of_checkpoint(source.files, source.rows, types)


def _same_names(after: dict, before: dict) -> dict:
    """Return a head's output under the name that a model with several heads gives it."""
    renamed = {}
    for name, value in after.items():
        longer = [other for other in before if other.startswith(f"{name} ")]
        renamed[longer[0] if name not in before and longer else name] = value
    return renamed
