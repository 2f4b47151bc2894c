"""Convert a file or folder to a new one: read, convert, compare, write.

read (`reading`) -> EncoderSource or GeneratingSource
-> algebra.convert (encoders; models that generate are imported as they are) -> a Result
-> Result.write: compare its outputs with those of the source's own library, and write it
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from relpos_fairseq.checkpoint_files import check_finite
from relpos_fairseq.conversion.algebra import convert, match_members
from relpos_fairseq.conversion.huggingface_export import (
    check_written,
    export_order,
    outputs_of_folder,
    own_head,
    save_hf,
    to_hf,
)
from relpos_fairseq.conversion.huggingface_folder import FAMILIES
from relpos_fairseq.conversion.in_transformers import transformers_release
from relpos_fairseq.conversion.layouts import places
from relpos_fairseq.conversion.ledger import LOST
from relpos_fairseq.conversion.reading import read
from relpos_fairseq.conversion.report import (
    SHORTEST,
    ConversionError,
    ConversionReport,
    Log,
    Outputs,
    PairProbe,
    Probe,
    compare_and_log,
    outputs_of,
)
from relpos_fairseq.conversion.source import EncoderSource, GeneratingSource, Source, plan_of, target_values
from relpos_fairseq.conversion.vocabulary import Vocabulary
from relpos_fairseq.conversion.writer import checkpoint_of, write_checkpoint, write_texts
from relpos_fairseq.heads import MASKED_LM, RANKING, Head, head_of
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import atomic_folder, atomic_path
from relpos_fairseq.io.progress import doing
from relpos_fairseq.models.building import build_generating, build_roberta, load_tensors, run_generating
from relpos_fairseq.text.dictionary import FILE as DICTIONARY
from relpos_fairseq.text.dictionary import SPECIAL

HUGGING_FACE = ("hf-bert", "hf-roberta")
LENGTH = 1024  # positions of a translation model that sets none


@dataclass(frozen=True)
class Job:
    """The options of `relpos convert`.

    Args:
        to: position scheme, `same`, `hf-bert` or `hf-roberta`.
        given: position options of the result by the names of our config; None: not given.
        approximate: whether something may be lost.
        init: `neutral` or `own`: initial values of new tables.
        fill: `tile`, `interpolate` or None.
        head: the head that goes into a Hugging Face folder, or None.
        seed: of new tables and random input.
    """

    to: str
    given: dict[str, Any]
    approximate: bool = False
    init: str = "neutral"
    fill: str | None = None
    head: str | None = None
    seed: int = 1

    @property
    def length(self) -> int | None:
        """Positions that are asked for by --positions."""
        return self.given.get("max_positions")

    def beyond(self, *allowed: str) -> list[str]:
        """Return the options given, as the command line has them, but for those of the result that are allowed."""
        names = [n for n, value in self.given.items() if value is not None and n not in allowed]
        names += ["approximate"] * self.approximate + ["fill"] * bool(self.fill)
        names += ["head"] * bool(self.head) + [f"init {self.init}"] * (self.init != "neutral")
        return [name.removeprefix("max_").replace("_", "-") for name in names]


def convert_on_disk(job: Job, path: Path, out: Path, data: Path | None = None) -> None:
    """Convert a checkpoint or a Hugging Face folder, print what was lost and compared, and write the result.

    Args:
        job: the options.
        path: the source.
        out: a new folder, or a new file ending in `.pt`.
        data: where the source's dictionary and tokenizer are; None: beside it.

    Raises:
        ValueError: it cannot be converted so, or the destination is the source, lies in it, or exists.
    """
    there, here = out.resolve(), path.resolve()
    if there == here or here in there.parents:
        raise ConversionError(f"--out {out} is or lies in the source {path}: name another place")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConversionError(f"--out {out} exists: remove it, or name another place")
    if job.to in HUGGING_FACE and out.suffix == ".pt":
        raise ConversionError(f"--to {job.to} writes a folder: --out {out} must not end in .pt")
    with _quiet(), _named(path):
        with doing("read"):
            source = read(path, data, job.length)
        notes = (f"note      {note}" for note in source.notes)
        print(f"source    {source.kind}: {source.path}", *notes, sep="\n", flush=True)
        with doing("convert tensors"):
            result = convert_source(job, source, print)
        whole = atomic_path if out.suffix == ".pt" else atomic_folder
        with whole(out) as making:
            result.write(making, print)
        print(f"wrote {out}")


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn whatever a foreign file's content leads to into one line that names the file.

    Raises:
        ConversionError: instead of any exception that is no UserError; RELPOS_TRACEBACK=1 lets it through.
    """
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:
        if os.environ.get("RELPOS_TRACEBACK"):
            raise
        said = " ".join(str(error).split())[:200]
        raise ConversionError(
            f"{path} holds what a model of its kind has not ({type(error).__name__}: {said}): compare its config and "
            f"tensors with a released model's (RELPOS_TRACEBACK=1 shows where)"
        ) from error


def convert_source(job: Job, source: Source, log: Log = print) -> Result:
    """Convert a model that was read; return what is compared with it and written.

    Raises:
        ValueError: it cannot be converted so.
    """
    if isinstance(source, GeneratingSource):
        return keep_scheme(job, source)
    return to_huggingface(job, source, log) if job.to in HUGGING_FACE else to_relpos(job, source)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the log lines of models that are built to be compared."""
    logger = logging.getLogger("relpos_fairseq")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@dataclass
class Result:
    """A converted model that is not written yet.

    Args:
        source: what it was converted from.
        report: of the conversion.
        probe: the input on which both are run.
        run: returns the outputs of the source and of the result, whose folder is given.
    """

    source: Source
    report: ConversionReport
    probe: Probe
    run: Callable[[Path], tuple[Outputs, Outputs]]

    def write(self, place: Path, log: Log) -> None:
        """Compare the result with the source, log what was found, and write it as a file or into a folder.

        Raises:
            ConversionError: outputs differ though the rules lose nothing, or what was written differs.
        """
        if ledger := self.source.ledger:
            if not place.is_dir():
                ledger.mark("files", LOST, list(self.source.kept_files), "a file alone has none beside it")
            self.report.dropped += ledger.lost
            for line in ledger.lines():
                log(line)
        self.begin(place)
        with doing("compare outputs"):
            differences = compare_and_log(self.report, lambda: self.run(place), self.probe, log)
        with doing("write"):
            self.finish(place, differences, log)

    def begin(self, place: Path) -> None:
        """Write what the comparison needs; nothing, where models are compared in memory."""

    def finish(self, place: Path, differences: dict[str, float], log: Log) -> None:
        """Write the rest."""
        raise NotImplementedError


@dataclass
class CheckpointResult(Result):
    """A checkpoint of fairseq with its text.

    Args:
        checkpoint: what is saved; `conversion` in it records the conversion.
        build: builds its model; raises an error where the tensors do not fit.
        files: files to copy, by their places in the folder.
        texts: contents of further files.
    """

    checkpoint: dict[str, Any]
    build: Callable[[], nn.Module]
    files: dict[str, Path] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def begin(self, place: Path) -> None:
        """Refuse tensors that are not finite.

        Raises:
            ConversionError: names one.
        """
        check_finite(self.checkpoint["model"], self.source.path)

    def finish(self, place: Path, differences: dict[str, float], log: Log) -> None:
        source, report, about = self.source, self.report, self.checkpoint["conversion"]
        if report.not_compared:
            self.build()  # which a comparison does: what is written must load
        about |= {"source": f"{source.kind}: {source.path.name}", "report": report.lines(), "differences": differences}
        about["compared"] = report.compared or f"no: {report.not_compared}"
        about |= {"ledger": source.ledger.record()} if source.ledger else {}
        write_checkpoint(place, self.checkpoint, about, self.files, self.texts)


@dataclass
class FolderResult(Result):
    """A folder of Hugging Face's BERT or RoBERTa.

    Args:
        config: its config.json.
        weights: its tensors.
        vocabulary: its order of rows, and its tokenizer.
        kind: its head.
        head: our name of it; None: the masked LM's.
    """

    config: dict[str, Any]
    weights: dict[str, Tensor]
    vocabulary: Vocabulary
    kind: Head
    head: str | None = None

    def begin(self, place: Path) -> None:
        save_hf(place, self.config, self.weights)
        write_texts(place, {f.name: f for f in self.vocabulary.files} | self.source.kept_files, self.vocabulary.made)

    def finish(self, place: Path, differences: dict[str, float], log: Log) -> None:
        longest, rows = int(self.source.values["max_positions"]), self.vocabulary.rows
        log(f"closing   {check_written(place, self.source, self.kind, self.config, rows, longest, self.head)}")


def keep_scheme(job: Job, source: GeneratingSource) -> CheckpointResult:
    """Return the result of a model that generates, which has been imported as it is.

    Raises:
        ConversionError: an option has no meaning for it.
    """
    if job.to != "same":
        raise ConversionError(
            f"--to {job.to}: a model that generates is converted with --to same alone; "
            f"fairseq-train --finetune-from-model then changes its scheme where that is exact"
        )
    if job.length is not None and job.length < SHORTEST:
        raise ConversionError(f"--positions {job.length}: the comparison needs {SHORTEST} at least")
    if wrong := job.beyond(*source.takes):
        raise ConversionError(f"--{wrong[0].split()[0]} says nothing here: leave it out")
    model, report = source.model, source.report
    checkpoint = model.checkpoint({})
    limits = map(model.values.get, ("max_source_positions", "max_target_positions", "tokens_per_sample"))
    longest = min([n for n in limits if isinstance(n, int)], default=LENGTH)
    pair = PairProbe.draw(model.rows, longest, job.seed)
    known = slice(None) if source.known is None else torch.tensor(source.known)

    def run(_: Path) -> tuple[Outputs, Outputs]:
        values = {name: v for name, v in checkpoint["cfg"]["model"].items() if name != "_name"}
        before = source.logits(pair)
        after = run_generating(model.kind, values, model.rows, checkpoint["model"], pair.source, pair.target)
        return {"logits": before[..., known]}, {"logits": after[..., known]}

    def build() -> nn.Module:
        made = build_generating(model.kind, model.values, model.rows)
        return load_tensors(made, model.state, torch.float32)

    report.source = report.target = model.describe()
    report.compared = source.library
    return CheckpointResult(source, report, Probe(pair.target, None), run, checkpoint, build, model.files, source.texts)


def to_relpos(job: Job, source: EncoderSource) -> CheckpointResult:
    """Convert a BERT or RoBERTa to a relpos_roberta.

    Raises:
        ValueError: it cannot be converted so.
    """
    if job.head:
        raise ConversionError("--head chooses what goes into a Hugging Face folder alone")
    torch.manual_seed(job.seed)
    try:
        values = target_values(source, job.to, job.given)
        plan = plan_of(values)
    except ValueError as error:  # of the options, and not of the source
        raise ConversionError(str(error)) from error
    _check_used(job, source, values)
    given = {"allow_loss": job.approximate, "start": job.init, "fill": job.fill}
    done = convert(source.state, source.plan, plan, **given)
    probe = _probe(job, source, values, done.report.longest)

    def run(_: Path) -> tuple[Outputs, Outputs]:
        before = source.outputs(probe.tokens, probe.segments)
        return before, outputs_of(build(), probe.tokens, probe.segments)

    def build() -> nn.Module:
        return build_roberta(values, done.state)

    done.report.compared = source.library
    carried = any(file.name != DICTIONARY for file in source.files)  # its tokenizer will lie beside it
    task = {n: v for n, v in source.task.items() if not (carried and n == "tokenizer_folder")}
    checkpoint = checkpoint_of(values, done.state, _way_back(source), task)
    text = _text(source, checkpoint["cfg"]["task"])
    return CheckpointResult(source, done.report, probe, run, checkpoint, build, *text)


def _way_back(source: EncoderSource) -> dict[str, Any]:
    """Return what a checkpoint records of a folder that it was, for `--to hf-*`."""
    known = {
        **{"kept_files": sorted(source.kept_files), "labels": source.labels, "problem_type": source.problem},
        **{"head": source.head, "kept": source.kept, "family": source.family, "named": source.named},
        "rows": source.vocabulary.rows if source.vocabulary else source.source_rows,
    }
    return {name: value for name, value in known.items() if value}


def _text(source: EncoderSource, task: dict[str, Any]) -> tuple[dict[str, Path], dict[str, str]]:
    """Return the files and further texts beside a RoBERTa's checkpoint: dictionaries, tokenizer, what is kept."""
    files = {file.name: file for file in source.files} | source.kept_files
    texts = {} if source.vocabulary is None else source.vocabulary.made | {DICTIONARY: source.vocabulary.dictionary()}
    if task["_name"] in ("sentence_prediction", RANKING):  # whose dictionaries have folders of their own
        for part in (files, texts):
            part |= {f"input0/{DICTIONARY}": part[DICTIONARY]} if DICTIONARY in part else {}
        if not task.get("regression_target", True):
            names = source.labels
            if not names or any(len(name.split("\n")) > 1 or name in SPECIAL for name in names):
                names = [f"LABEL_{n}" for n in range(task["num_classes"])]  # the record has those that no line can hold
            texts[f"label/{DICTIONARY}"] = "".join(f"{name} 1\n" for name in names)
    return files, texts


def _check_used(job: Job, source: EncoderSource, values: dict[str, Any]) -> None:
    """Raise an error for options that would have no effect.

    Raises:
        ConversionError: one is given.
    """
    before, target = places(source.plan), places(plan_of(values))
    taken = match_members(before, target)
    known, wanted = int(source.values["max_positions"]), int(values["max_positions"])
    if job.fill and wanted <= known:
        raise ConversionError(
            f"--fill {job.fill}: the source has {known} positions, and {wanted} are asked for: "
            f"give more by --positions, or leave it out"
        )
    kept = [place.scheme for place in before if place.name in taken.values()]
    if job.fill and not any(scheme.has_position_table() for scheme in kept):
        raise ConversionError(f"--fill {job.fill}: no table over absolute positions is kept: leave it out")
    if job.init == "own" and all(place.name in taken for place in target):
        raise ConversionError("--init own: no table is new: leave it out")


def _probe(job: Job, source: EncoderSource, values: dict[str, Any], within: int | None) -> Probe:
    """Draw random input that source and result can both read, of at most `within` tokens (None: any number)."""
    longest = min(int(source.values["max_positions"]), int(values["max_positions"]))
    longest = min(longest, within or longest)
    segments = source.plan.segment_encoding != "none" and source.plan.num_segments > 1
    new = source.vocabulary is not None and source.vocabulary.rows[-1] < 0  # <mask>
    return Probe.draw(source.rows - new, longest, segments, job.seed)


def to_huggingface(job: Job, source: EncoderSource, log: Log) -> FolderResult:
    """Convert a relpos_roberta to a folder of Hugging Face's BERT or RoBERTa.

    Raises:
        ValueError: the architecture cannot express the model, or options of ours are given.
    """
    if source.vocabulary is not None:
        raise ConversionError(f"{source.path} is a Hugging Face folder already: give --to a scheme")
    if wrong := [option for option in job.beyond() if option != "head"]:
        raise ConversionError(f"--{wrong[0]}: convert to a scheme first, then --to {job.to}")
    vocabulary = export_order(source)
    if not vocabulary.made:
        log(f"note      no tokenizer beside {source.path}: the folder gets none; --data names a folder that has it")
    head = job.head or own_head(source)
    config, weights, report = to_hf(source, FAMILIES[job.to.removeprefix("hf-")].name, vocabulary, head)
    report.compared = transformers_release()
    probe = _probe(job, source, source.values, report.longest)
    kind = head_of(config, str(source.path)) or MASKED_LM

    def run(folder: Path) -> tuple[Outputs, Outputs]:
        return outputs_of_folder(folder, kind, weights, source, vocabulary, probe, head)

    return FolderResult(source, report, probe, run, config, weights, vocabulary, kind, head)
