"""Convert a file or folder to a new one: read, convert, compare, write.

read (a reader per library) -> SourceModel or GeneratingSource
-> algebra.convert (encoders; models that generate are imported as they are)
-> compare outputs with the source's own library -> write a checkpoint or a Hugging Face folder
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from relpos_fairseq.conversion.algebra import convert, match_members
from relpos_fairseq.conversion.checkpoints import from_checkpoint, read_checkpoint, read_file
from relpos_fairseq.conversion.exported import (
    GENERATING_TYPES,
    ROBERTA_TYPE,
    read_exported_generating,
    read_exported_roberta,
)
from relpos_fairseq.conversion.huggingface_export import check_written, export_order, outputs_of_folder, save_hf, to_hf
from relpos_fairseq.conversion.huggingface_import import FAMILIES, read_huggingface, transformers_release
from relpos_fairseq.conversion.layouts import places
from relpos_fairseq.conversion.marian import MARIAN, read_marian
from relpos_fairseq.conversion.opennmt import is_opennmt, read_opennmt
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
from relpos_fairseq.conversion.source import GeneratingSource, SourceModel, plan_of, target_values
from relpos_fairseq.conversion.transformer_xl_original import is_original_xl, read_original_xl
from relpos_fairseq.conversion.weight_files import read_json
from relpos_fairseq.conversion.writer import checkpoint_of, write_checkpoint, write_texts
from relpos_fairseq.heads import MASKED_LM, head_of
from relpos_fairseq.io.files import atomic_folder, atomic_path
from relpos_fairseq.models.building import build_roberta, run_generating
from relpos_fairseq.text.assets import asset_files_of, find_assets, label_names, text_folders
from relpos_fairseq.text.dictionary import FILE as DICTIONARY

HUGGING_FACE = ("hf-bert", "hf-roberta")
LENGTH = 1024  # positions of a translation model that sets none
Writer = Callable[[Path], None]


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
        return [name.replace("_", "-") for name in names]


def convert_on_disk(job: Job, path: Path, out: Path, data: Path | None = None) -> None:
    """Convert a checkpoint or a Hugging Face folder, print what was lost and compared, and write the result.

    Args:
        job: the options.
        path: the source.
        out: a new folder, or a new file ending in `.pt`.
        data: where the source's dictionary and tokenizer are; None: beside it.

    Raises:
        ValueError: it cannot be converted so.
    """
    check_destination(out, path)
    if job.to in HUGGING_FACE and out.suffix == ".pt":
        raise ConversionError(f"--to {job.to} writes a folder: --out {out} must not end in .pt")
    with _quiet():
        source = read_generating(job, path, data) or read_encoder(path, data)
        print(
            f"source    {source.kind}: {source.path}", *(f"note      {n}" for n in source.notes), sep="\n", flush=True
        )
        if isinstance(source, GeneratingSource):
            write = keep_scheme(job, source, print)
        elif job.to in HUGGING_FACE:
            write = to_huggingface(job, source, print)
        else:
            write = to_relpos(job, source, print)
        whole = atomic_path if out.suffix == ".pt" else atomic_folder
        with whole(out) as making:
            write(making)
        print(f"wrote {out}")


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


def check_destination(out: Path, source: Path) -> None:
    """Raise an error if the destination exists, or if it is or lies in the source.

    Raises:
        ConversionError: the destination is the source, lies in it, or exists.
    """
    there, here = out.resolve(), source.resolve()
    if there == here or here in there.parents:
        raise ConversionError(f"--out {out} is or lies in the source {source}: name another place")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConversionError(f"--out {out} exists: remove it, or name another place")


def read_generating(job: Job, path: Path, data: Path | None) -> GeneratingSource | None:
    """Read a model that generates, in whichever library's format; None if `path` holds another kind of model.

    Raises:
        ConversionError: it cannot be converted, or an option has no meaning for it.
    """
    if path.is_dir():
        config = read_json(path / "config.json") if (path / "config.json").is_file() else {}
        if config.get("model_type") in GENERATING_TYPES:
            _check_same(job)
            return read_exported_generating(path, config)
        if config.get("model_type") == MARIAN:
            _check_same(job, "max_positions")
            return read_marian(path, config, job.length)
    elif is_original_xl(path):
        if job.to != "same" or job.beyond():
            raise ConversionError(
                f"{path} is a released Transformer-XL, which becomes the same model here: give --to "
                f"same and no other option; --finetune-from-model converts the result further"
            )
        return read_original_xl(path, data)
    elif path.is_file() and is_opennmt(checkpoint := read_file(path)):
        _check_same(job, "max_positions")
        return read_opennmt(path, checkpoint, job.length or LENGTH)
    return None


def _check_same(job: Job, *allowed: str) -> None:
    """Raise an error for options that would have no effect on a translation or language model.

    Raises:
        ConversionError: one is given.
    """
    if job.to != "same":
        raise ConversionError(
            f"--to {job.to}: a model that generates is converted with --to same alone; "
            f"fairseq-train --finetune-from-model then changes its scheme where that is exact"
        )
    if job.length is not None and job.length < SHORTEST:
        raise ConversionError(f"--positions {job.length}: the comparison needs {SHORTEST} at least")
    if wrong := job.beyond(*allowed):
        raise ConversionError(f"--{wrong[0].split()[0].removeprefix('max-')} says nothing here: leave it out")


def read_source(path: Path) -> SourceModel:
    """Read a BERT or RoBERTa: a checkpoint of fairseq's or ours, or a Hugging Face folder.

    Raises:
        ConversionError: it is absent, truncated, or no model that is converted here.
    """
    if path.is_dir():
        if (path / "config.json").is_file():
            config = read_json(path / "config.json")
            exported = config.get("model_type") == ROBERTA_TYPE
            return read_exported_roberta(path, config) if exported else read_huggingface(path)
        files = sorted(path.glob("*.pt"))
        if len(files) != 1:
            raise ConversionError(
                f"{path} has no config.json of a Hugging Face model, and {len(files)} .pt files: "
                f"give the checkpoint itself"
            )
        path = files[0]
    return from_checkpoint(read_checkpoint(path), path)


def read_encoder(path: Path, data: Path | None) -> SourceModel:
    """Read a BERT or RoBERTa, with dictionary and tokenizer from `data`, or from `text/` beside it.

    Raises:
        ConversionError: as `read_source`, or `data` holds neither.
    """
    source = read_source(path)
    if data is not None:
        if source.vocabulary is not None:
            raise ConversionError(f"--data {data}: a Hugging Face folder has its own vocabulary")
        source.files = asset_files_of(data)
        if not source.files:
            raise ConversionError(f"--data {data} holds neither dict.txt nor a tokenizer")
    elif source.path.is_file() and text_folders(source.path.parent):
        data = find_assets(source.path, None)
        source.files = asset_files_of(data)
    name = f"classification_heads.{source.task.get('classification_head_name')}.out_proj.weight"
    if not source.labels and name in source.state and not source.task.get("regression_target"):
        source.labels = label_names(data or source.path.parent, len(source.state[name]))
    return source


def keep_scheme(job: Job, source: GeneratingSource, log: Log) -> Writer:
    """Compare an imported model that generates with its source; return what writes it.

    Raises:
        ConversionError: outputs differ.
    """
    model, report = source.model, source.report
    about = {"source": f"{source.kind}: {source.path.name}", "done": report.steps}
    checkpoint = model.checkpoint(about)
    limits = (model.values.get(f"max_{side}_positions") for side in ("source", "target"))
    longest = min([n for n in limits if isinstance(n, int)], default=LENGTH)
    pair = PairProbe.draw(model.rows, longest, job.seed)
    known = slice(None) if source.known is None else torch.tensor(source.known)

    def run() -> tuple[Outputs, Outputs]:
        values = {name: v for name, v in checkpoint["cfg"]["model"].items() if name != "_name"}
        before = source.logits(pair)
        after = run_generating(model.kind, values, model.rows, checkpoint["model"], pair.source, pair.target)
        return {"logits": before[..., known]}, {"logits": after[..., known]}

    report.source = report.target = model.describe()
    report.compared = source.library
    about["differences"] = compare_and_log(report, run, Probe(pair.target, None), log)
    about["difference"] = about["differences"].get("logits")
    about["compared"] = report.compared or f"no: {report.not_compared}"
    return functools.partial(
        write_checkpoint, checkpoint=checkpoint, about=about, files=model.files, texts=source.texts
    )


def to_relpos(job: Job, source: SourceModel, log: Log) -> Writer:
    """Convert a BERT or RoBERTa to a relpos_roberta; return what writes it.

    Raises:
        ValueError: it cannot be converted so.
    """
    if job.head:
        raise ConversionError("--head chooses what goes into a Hugging Face folder alone")
    torch.manual_seed(job.seed)
    values = target_values(source, job.to, job.given)
    _check_used(job, source, values)
    done = convert(
        source.state, source.plan, plan_of(values), allow_loss=job.approximate, start=job.init, fill=job.fill
    )
    probe = _probe(job, source, values)

    def run() -> tuple[Outputs, Outputs]:
        before = source.outputs(probe.tokens, probe.segments)
        return before, outputs_of(build_roberta(values, done.state), probe.tokens, probe.segments)

    done.report.compared = source.library
    _enter(source, done.report, log)
    differences = compare_and_log(done.report, run, probe, log)
    about = _about(source, done.report, differences)
    if source.vocabulary is not None:
        about["rows"] = source.vocabulary.rows
    return _checkpoint_writer(source, checkpoint_of(values, done.state, about, _task(source)), about)


def _enter(source: SourceModel, report: ConversionReport, log: Log) -> None:
    """Log a source's ledger, and tell the report what is lost by it."""
    if source.ledger is not None:
        report.dropped = source.ledger.lost
        for line in source.ledger.lines():
            log(line)


def _about(source: SourceModel, report: ConversionReport, differences: dict[str, float]) -> dict[str, Any]:
    """Return what a converted checkpoint and conversion.json record of the conversion."""
    about = {"source": f"{source.kind}: {source.path.name}", "report": report.lines(), "differences": differences}
    more: dict[str, Any] = {"kept_files": sorted(source.kept_files)}
    more |= {"ledger": source.ledger.record()} if source.ledger else {}
    more |= {"labels": source.labels, "problem_type": source.problem, "head": source.head, "kept": source.kept}
    more |= {"family": source.family, "named": source.named}
    return about | {name: value for name, value in more.items() if value}


def _task(source: SourceModel) -> dict[str, Any]:
    """Return the source's task options for the result, beside which its tokenizer will lie."""
    carried = any(file.name != DICTIONARY for file in source.files)
    return {n: v for n, v in source.task.items() if not (carried and n == "tokenizer_folder")}


def _check_used(job: Job, source: SourceModel, values: dict[str, Any]) -> None:
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


def _probe(job: Job, source: SourceModel, values: dict[str, Any]) -> Probe:
    """Draw random input that source and result can both read."""
    longest = min(int(source.values["max_positions"]), int(values["max_positions"]))
    segments = source.plan.segment_encoding != "none" and source.plan.num_segments > 1
    rows = source.rows
    if source.vocabulary is not None and source.vocabulary.rows[-1] < 0:
        rows -= 1  # <mask> is new
    return Probe.draw(rows, longest, segments, job.seed)


def _checkpoint_writer(source: SourceModel, checkpoint: dict[str, Any], about: dict[str, Any]) -> Writer:
    """Return what writes a RoBERTa's checkpoint with its dictionaries and tokenizer."""
    files = {file.name: file for file in source.files} | source.kept_files
    texts = {} if source.vocabulary is None else source.vocabulary.made | {"dict.txt": source.vocabulary.dictionary()}
    options = checkpoint["cfg"]["task"]
    if options["_name"] == "sentence_prediction":  # whose dictionaries have folders of their own
        for part in (files, texts):
            part |= {"input0/dict.txt": part["dict.txt"]} if "dict.txt" in part else {}
        if not options["regression_target"]:
            names = source.labels or [f"LABEL_{n}" for n in range(options["num_classes"])]
            texts["label/dict.txt"] = "".join(f"{name} 1\n" for name in names)
    return functools.partial(write_checkpoint, checkpoint=checkpoint, about=about, files=files, texts=texts)


def to_huggingface(job: Job, source: SourceModel, log: Log) -> Writer:
    """Convert a relpos_roberta to a folder of Hugging Face's BERT or RoBERTa; return what writes it and compares.

    Raises:
        ValueError: the architecture cannot express the model, or options of ours are given.
    """
    if source.vocabulary is not None:
        raise ConversionError(f"{source.path} is a Hugging Face folder already: give --to a scheme")
    if wrong := [option for option in job.beyond() if option != "head"]:
        raise ConversionError(f"--{wrong[0]}: convert to a scheme first, then --to {job.to}")
    family = FAMILIES[job.to.removeprefix("hf-")]
    vocabulary = export_order(source)
    if not vocabulary.made:
        log(f"note      no tokenizer beside {source.path}: the folder gets none; --data names a folder that has it")
    named = {file.name: file for file in vocabulary.files}
    config, weights, report = to_hf(source, family.name, vocabulary, job.head)
    probe = _probe(job, source, source.values)

    def write(folder: Path) -> None:
        save_hf(folder, config, weights)
        write_texts(folder, named | source.kept_files, vocabulary.made)
        report.compared = transformers_release()
        run = functools.partial(outputs_of_folder, folder, family, weights, source, vocabulary, probe)
        compare_and_log(report, run, probe, log)
        head = head_of(config, str(folder)) or MASKED_LM
        longest = int(source.values["max_positions"])
        log(f"closing   {check_written(folder, source, head, config, vocabulary.rows, longest, job.head)}")

    return write
