"""Convert a file or folder to a new one, `relpos convert`: read, convert, compare, write.

read (`base`) -> a SavedModel
-> algebra.convert (encoders; models that generate are imported as they are) -> a Result
-> Result.write: compare its outputs with those of the source's own library, and write it (a folder of transformers
   is written first)
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from relpos_fairseq.conversion.algebra import convert, match_members
from relpos_fairseq.conversion.layouts import places
from relpos_fairseq.conversion.report import (
    SHORTEST,
    ConversionError,
    ConversionReport,
    Log,
    Outputs,
    Probe,
    compare_and_log,
    draw_pairs,
)
from relpos_fairseq.formats.base import read
from relpos_fairseq.formats.huggingface_export import (
    check_written,
    chosen_head,
    export_order,
    outputs_of_folder,
    save_hf,
    to_hf,
)
from relpos_fairseq.formats.huggingface_folder import FAMILIES
from relpos_fairseq.formats.in_transformers import transformers_release
from relpos_fairseq.formats.vocabulary import tokenizer_place
from relpos_fairseq.heads import MASKED_LM, RANKING, head_of
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import atomic_folder, atomic_path
from relpos_fairseq.io.progress import doing
from relpos_fairseq.io.tensor_files import check_finite
from relpos_fairseq.models.building import build_alone, run_ours
from relpos_fairseq.saved.checkpoint import ROBERTA, checkpoint_of, write_checkpoint, write_texts
from relpos_fairseq.saved.identity import POSITION_FIELDS, describe, plan_of
from relpos_fairseq.saved.ledger import LOST
from relpos_fairseq.saved.model import SavedModel, count_rows
from relpos_fairseq.schemes import parse_layers
from relpos_fairseq.text.dictionary import FILE as DICTIONARY
from relpos_fairseq.text.dictionary import SPECIAL

_OF_ANY = ("segment_encoding", "segment_share", "num_segments", "attention_backend")  # options that any scheme takes
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


def convert_source(job: Job, source: SavedModel, log: Log = print) -> Result:
    """Convert a model that was read; return what is compared with it and written.

    Raises:
        ValueError: it cannot be converted so.
    """
    if not source.is_encoder:
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
        begin: writes what the comparison needs into the folder; None: models are compared in memory.
        finish: writes the rest, told the largest difference of each output.
    """

    source: SavedModel
    report: ConversionReport
    probe: Probe
    run: Callable[[Path], tuple[Outputs, Outputs]]
    begin: Callable[[Path], None] | None
    finish: Callable[[Path, dict[str, float], Log], None]

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
        before = [f"what was lost before: {one}" for one in self.source.origin.lost]
        self.report.apart += [*self.source.apart, *before]
        if self.begin:
            self.begin(place)
        with doing("compare outputs"):
            differences = compare_and_log(self.report, lambda: self.run(place), self.probe, log)
        with doing("write"):
            self.finish(place, differences, log)


def _as_checkpoint(
    source: SavedModel,
    report: ConversionReport,
    probe: Probe,
    run: Callable[[], tuple[Outputs, Outputs]],
    made: SavedModel,
) -> Result:
    """Return the result that is a checkpoint of ours: `made`, whose model and source `run` runs.

    Raises:
        ConversionError: a tensor that is not finite.
    """
    check_finite(made.state, source.path)
    report.compared = source.library

    def finish(place: Path, differences: dict[str, float], log: Log) -> None:
        if report.not_compared:
            build_alone(made)  # which a comparison does: what is written must load
        about = made.origin.record() | {"source": f"{source.kind}: {source.path.name}"}
        about |= {"report": report.lines(), "differences": differences}
        about["lost"] = [*source.origin.lost, *report.lost, *report.dropped]
        about["compared"] = report.compared or f"no: {report.not_compared}"
        about |= {"ledger": source.ledger.record()} if source.ledger else {}
        write_checkpoint(place, made.checkpoint, about, made.files | made.kept_files, made.texts)

    return Result(source, report, probe, lambda _: run(), None, finish)


def keep_scheme(job: Job, source: SavedModel) -> Result:
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
    values = source.values
    criterion = source.checkpoint["cfg"].get("criterion") or {}
    whole = checkpoint_of(source.name, values, source.state, source.task, criterion)
    made = replace(source, checkpoint=whole)
    report = ConversionReport(describe(source.state), describe(source.state), steps=source.steps)
    if source.longest:
        report.limit(source.longest, "--positions")
    limits = map(values.get, ("max_source_positions", "max_target_positions", "tokens_per_sample"))
    longest = min([n for n in limits if isinstance(n, int)], default=LENGTH)
    rows = [*count_rows(source.state).values()]
    pair = draw_pairs((rows[0], rows[-1]), longest, job.seed)
    known = slice(None) if source.origin.rows is None else torch.tensor(source.origin.rows) >= 0

    def run() -> tuple[Outputs, Outputs]:
        before, after = source.outputs(*pair), run_ours(made, *pair)
        return {"logits": before["logits"][..., known]}, {"logits": after["logits"][..., known]}

    return _as_checkpoint(source, report, Probe(pair[1], None), run, made)


def to_relpos(job: Job, source: SavedModel) -> Result:
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
    carried = tokenizer_place(source.files) is not None  # its tokenizer will lie beside it
    task = {n: v for n, v in source.task.items() if not (carried and n == "tokenizer_folder")}
    made = replace(
        source,
        checkpoint=checkpoint_of(ROBERTA, values, done.state, task),
        origin=replace(source.origin, kept_files=sorted(source.kept_files)),
    )
    _add_texts_of_task(made)

    def run() -> tuple[Outputs, Outputs]:
        return source.outputs(probe.tokens, probe.segments), run_ours(made, probe.tokens, probe.segments)

    return _as_checkpoint(source, done.report, probe, run, made)


def _add_texts_of_task(made: SavedModel) -> None:
    """Put dictionaries where a RoBERTa's task looks for them: some have folders of their own."""
    task = made.task
    if task["_name"] not in ("sentence_prediction", RANKING):
        return
    for name in ("files", "texts"):
        part = getattr(made, name)
        setattr(made, name, part | ({f"input0/{DICTIONARY}": part[DICTIONARY]} if DICTIONARY in part else {}))
    if not task.get("regression_target", True):
        names = made.origin.labels
        if not names or any(len(name.split("\n")) > 1 or name in SPECIAL for name in names):
            names = [f"LABEL_{n}" for n in range(task["num_classes"])]  # the record has those that no line can hold
        made.texts[f"label/{DICTIONARY}"] = "".join(f"{name} 1\n" for name in names)


def target_values(source: SavedModel, scheme: str, given: dict[str, str | None]) -> dict[str, Any]:
    """Return the source's config with other positions.

    An option that is not given is the source's own where source and target have a member that takes
    it in common, and else the target's default.

    Args:
        source: what is converted.
        scheme: the target's position scheme, or `same`.
        given: options by the names of our config (`max_positions` included); None: not given.
    """
    values = dict(source.values)
    scheme = source.plan.name if scheme == "same" else scheme
    mine = {member.name for members in parse_layers(scheme) for member in members}
    common = [member for member in source.plan.members if member.scheme.name in mine]
    kept = {option.field for member in common for option in member.scheme.takes} | set(_OF_ANY)
    values |= {name: values.get(name) if name in kept else None for name in POSITION_FIELDS}
    values["position_scheme"] = scheme
    values |= {name: value for name, value in given.items() if value is not None}
    if values.get("segment_encoding") == "none" and given.get("num_segments") is None:
        values["num_segments"] = None
    return values


def _check_used(job: Job, source: SavedModel, values: dict[str, Any]) -> None:
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


def _probe(job: Job, source: SavedModel, values: dict[str, Any], within: int | None) -> Probe:
    """Draw random input that source and result can both read, of at most `within` tokens (None: any number)."""
    longest = min(int(source.values["max_positions"]), int(values["max_positions"]))
    longest = min(longest, within or longest)
    segments = source.plan.segment_encoding != "none" and source.plan.num_segments > 1
    new = bool(source.texts) and source.origin.rows[-1] < 0  # <mask>
    return Probe.draw(source.rows - new, longest, segments, job.seed)


def to_huggingface(job: Job, source: SavedModel, log: Log) -> Result:
    """Convert a relpos_roberta to a folder of Hugging Face's BERT or RoBERTa.

    Raises:
        ValueError: the architecture cannot express the model, or options of ours are given.
    """
    if source.texts:
        raise ConversionError(f"{source.path} is a Hugging Face folder already: give --to a scheme")
    if wrong := [option for option in job.beyond() if option != "head"]:
        raise ConversionError(f"--{wrong[0]}: convert to a scheme first, then --to {job.to}")
    vocabulary = export_order(source)
    if not vocabulary.made:
        log(f"note      no tokenizer beside {source.path}: the folder gets none; --data names a folder that has it")
    head = chosen_head(source, job.head)
    chosen = head.name if head else None
    config, weights, report = to_hf(source, FAMILIES[job.to.removeprefix("hf-")].name, vocabulary, head)
    report.compared = transformers_release()
    probe = _probe(job, source, source.values, report.longest)
    kind = head_of(config, str(source.path)) or MASKED_LM

    def begin(place: Path) -> None:
        save_hf(place, config, weights)
        write_texts(place, vocabulary.files | source.kept_files, vocabulary.made)

    def run(place: Path) -> tuple[Outputs, Outputs]:
        return outputs_of_folder(place, kind, weights, source, vocabulary, probe, chosen)

    def finish(place: Path, differences: dict[str, float], log: Log) -> None:
        longest = int(source.values["max_positions"])
        log(f"closing   {check_written(place, source, kind, config, vocabulary.rows, longest, chosen)}")

    return Result(source, report, probe, run, begin, finish)
