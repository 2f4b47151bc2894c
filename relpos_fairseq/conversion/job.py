"""Convert a file or folder to a new one: read, convert, compare, write."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from relpos_fairseq.conversion import algebra, checkpoints, layouts, marian, opennmt
from relpos_fairseq.conversion.algebra import Conversion, convert
from relpos_fairseq.conversion.checkpoints import beside, check, from_checkpoint, read_checkpoint, read_file
from relpos_fairseq.conversion.external_model import ExternalModel, import_weights
from relpos_fairseq.conversion.hf_reference import Reference
from relpos_fairseq.conversion.huggingface_export import save_hf, to_hf
from relpos_fairseq.conversion.huggingface_import import (
    FAMILIES,
    HuggingFaceModel,
    classes_of,
    from_hf,
    hf_task,
    labels_of,
    read_folder,
)
from relpos_fairseq.conversion.layouts import places
from relpos_fairseq.conversion.report import (
    EOS,
    FIRST,
    PADDING,
    ConversionError,
    ConversionReport,
    Fidelity,
    Probe,
    compare,
    outputs_of,
)
from relpos_fairseq.conversion.source import DEFAULTS, Outputs, SourceModel, plan_of, target_values
from relpos_fairseq.conversion.transformer_xl_original import (
    OriginalXL,
    is_original_xl,
    read_original_xl,
    read_vocabulary,
    xl_state,
    xl_values,
)
from relpos_fairseq.conversion.vocabulary import Vocabulary, of_checkpoint, of_sentencepiece
from relpos_fairseq.conversion.weight_files import read_json
from relpos_fairseq.conversion.writer import (
    GeneratingModel,
    build_generating,
    build_roberta,
    check_rows,
    checkpoint_of,
    load_tensors,
    logits_of,
    write_checkpoint,
    write_texts,
)
from relpos_fairseq.conversion.xl_reference import log_probs
from relpos_fairseq.io.files import atomic_folder, atomic_path
from relpos_fairseq.text import MODEL_FILES

# ---- Read what is converted: a fairseq RoBERTa, one of ours, or a Hugging Face folder.
# All become a `SourceModel`: tensors under our names, the values of our config that they need, and a
# function that runs the original as its own library does.


def read_source(path: Path) -> SourceModel:
    """Read a checkpoint or a folder.

    Raises:
        ConversionError: it is absent, truncated, or no model that is converted here.
    """
    if path.is_dir():
        if (path / "config.json").is_file():
            config = read_json(path / "config.json")
            ours = config.get("model_type") == checkpoints.ROBERTA_TYPE
            return _from_relpos(path, config) if ours else _from_huggingface(path)
        files = sorted(path.glob("*.pt"))
        if len(files) != 1:
            raise ConversionError(
                f"{path} has no config.json of a Hugging Face model, and {len(files)} .pt files: "
                f"give the checkpoint itself"
            )
        path = files[0]
    return from_checkpoint(read_checkpoint(path), path)


def _from_relpos(folder: Path, config: dict) -> SourceModel:
    state, values = checkpoints.roberta_state(folder), config["values"]
    text = folder / "text"
    source = SourceModel(
        kind=f"{checkpoints.ROBERTA_TYPE} of transformers",
        path=folder,
        state=state,
        values=values,
        files=beside(text),
        task=checkpoints.roberta_task(config, state),
        labels=labels_of(config, len(config.get("id2label") or ())),
    )
    if not source.files:
        source.notes.append(f"no {text}: the result has no dictionary and no tokenizer")
    check(source)
    source.outputs = lambda tokens, segments: outputs_of(build_roberta(values, state), tokens, segments)
    return source


def _from_huggingface(folder: Path) -> SourceModel:
    model = read_folder(folder)
    state, values = from_hf(model)
    source = SourceModel(
        kind=f"Hugging Face's {model.family.name}",
        path=folder,
        state=state,
        values=DEFAULTS | values,
        vocabulary=model.vocabulary,
        files=model.vocabulary.files,
        notes=model.notes,
        task=hf_task(model),
        labels=labels_of(model.config, classes_of(model)),
    )
    plan = source.plan
    source.state[layouts.VERSION] = layouts.encode_text(plan.describe())
    source.outputs = lambda tokens, segments: _run_huggingface(model, tokens, segments)
    return source


def _run_huggingface(model: HuggingFaceModel, tokens: Tensor, segments: Tensor | None) -> Outputs:
    rows = torch.tensor(model.vocabulary.rows)
    prefix = model.family.prefix
    types = torch.zeros_like(tokens) if segments is None else segments
    if len(model.encoder("embeddings.token_type_embeddings.weight")) == 1:
        types = torch.zeros_like(tokens)
    found = Reference(model.config, model.weights, prefix).outputs(rows[tokens], tokens == 1, types)
    if "logits" in found:
        logits = found["logits"][..., rows.clamp(min=0)]
        logits[..., rows < 0] = 0
        found["logits"] = logits
    return found


def check_destination(out: Path, source: Path) -> None:
    """Refuse to write over anything, the source above all.

    Raises:
        ConversionError: the destination is the source, lies in it, or exists.
    """
    there, here = out.resolve(), source.resolve()
    if there == here or here in there.parents:
        raise ConversionError(f"--out {out} is or lies in the source {source}: name another place")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConversionError(f"--out {out} exists: remove it, or name another place")


# ---- The steps of relpos convert: read, convert, measure, and what to write.


EXACT = 1e-4  # of a model's own values; rounding stays below, a wrong conversion does not
# What transformers' BERT tokenizer reads.
BERT_FILES = {"vocab.txt", "tokenizer.json", "tokenizer_config.json"}
SENTENCEPIECE = "sentencepiece.bpe.model"
Log = Callable[[str], object]
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


def to_relpos(job: Job, source: SourceModel, say: Log) -> Writer:
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
    after = outputs_of(build_roberta(values, done.state), probe.tokens, probe.segments)
    measured = measure(before, after, probe, done, say)
    return _checkpoint_writer(source, values, done, measured)


def _check_used(job: Job, source: SourceModel, values: dict[str, Any]) -> None:
    """Refuse options that would change nothing.

    Raises:
        ConversionError: one is given.
    """
    before, target = places(source.plan), places(plan_of(values))
    taken = algebra.match_members(before, target)
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
    longest = min(int(source.values["max_positions"]), int(values["max_positions"]))
    segments = source.plan.segment_encoding != "none" and source.plan.num_segments > 1
    rows = source.rows
    if source.vocabulary is not None and source.vocabulary.rows[-1] < 0:
        rows -= 1  # <mask> is new
    return Probe.draw(rows, longest, segments, job.seed)


def measure(before: dict, after: dict, probe: Probe, done: Conversion, say: Log) -> Fidelity:
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


def to_huggingface(job: Job, source: SourceModel, say: Log) -> Writer:
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
    config, weights, report = to_hf(source, family.name, vocabulary, job.head)
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
        save_hf(folder, config, weights)
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


# ---- `relpos convert` of models that generate: Marian, OpenNMT-py, and folders of our exports.


LENGTH = 1024  # positions where the source sets none
SHORTEST = 4  # tokens that are compared


@dataclass(frozen=True)
class Pair:
    """Random input, in fairseq's rows.

    Args:
        source: (B, S) sentences of different lengths that end in </s>, padded on the right.
        target: (B, T) beginnings of targets after </s>.
    """

    source: Tensor
    target: Tensor

    @classmethod
    def draw(cls, rows: tuple[int, int], longest: int, seed: int, batch: int = 3) -> Pair:
        random = torch.Generator().manual_seed(seed)
        length = max(min(longest, 40), SHORTEST)
        source, target = (
            torch.randint(FIRST, max(count, FIRST + 1), (batch, length), generator=random) for count in rows
        )
        for row in range(batch):
            end = length - row * (length // 4)
            source[row, end - 1], source[row, end:] = EOS, PADDING
        target[:, 0] = EOS
        return cls(source, target)


def convert_generating(job: Job, path: Path, say: Log) -> Writer | None:
    """Convert a model that generates; returns what writes it, None where `path` is another kind.

    Raises:
        ConversionError: it cannot be converted, or options that say nothing here.
    """
    length = job.given.get("max_positions")
    found = _read_generating(path, length)
    if found is None:
        return None
    _check_generating(job, isinstance(found, ExternalModel))
    report = ConversionReport("", "")
    if isinstance(found, ExternalModel):
        kind, notes = found.kind, found.notes
        reach = length or len(found.weights.get("encoder.positions", range(LENGTH)))
        made, words = import_weights(found, reach, report), (found.source, found.target)
        sides = zip(found.languages, words, strict=True)
        dictionaries = {f"dict.{language}.txt": one.dictionary() for language, one in sides}
    else:
        kind, notes, made, dictionaries = "transformers, exported by relpos", [], found, {}
        check_rows(found.files, found.rows)
        if not found.files:
            notes = [f"no {path / checkpoints.TEXT_FOLDER}: the result has no dictionary"]
    for line in (f"source    {kind}: {path}", *(f"note      {note}" for note in notes)):
        say(line)
    about = {"source": f"{kind}: {path.name}", "done": report.steps}
    checkpoint = made.checkpoint(about)
    limits = (made.values.get(f"max_{side}_positions") for side in ("source", "target"))
    longest = min([n for n in limits if isinstance(n, int)], default=LENGTH)
    pair = Pair.draw(made.rows, longest, job.seed)
    before = _source_logits(found, made, pair)
    after = logits_of(checkpoint, made.kind, made.rows, pair.source, pair.target)
    report.source = report.target = made.describe()
    for line in report.lines():
        say(line)
    kept = torch.tensor([row >= 0 for row in found.target.rows]) if isinstance(found, ExternalModel) else slice(None)
    outputs = ({"logits": scores[..., kept]} for scores in (before, after))
    measured = measure(*outputs, Probe(pair.target, None), Conversion({}, report), say)
    about["differences"] = measured.largest

    return functools.partial(write_checkpoint, checkpoint=checkpoint, about=about, files=made.files, texts=dictionaries)


def _read_generating(path: Path, length: int | None) -> ExternalModel | GeneratingModel | None:
    if path.is_dir():
        if not (path / "config.json").is_file():
            return None
        config = read_json(path / "config.json")
        if config.get("model_type") in checkpoints.GENERATING_TYPES:
            return checkpoints.read_generating(path, config)
        if config.get("model_type") == marian.MARIAN:
            return marian.read(path, config, length)
    elif path.is_file() and opennmt.is_opennmt(checkpoint := read_file(path)):
        return opennmt.read(path, checkpoint, length or LENGTH)
    return None


def _check_generating(job: Job, foreign: bool) -> None:
    """Refuse what would change nothing."""
    if job.to != "same":
        raise ConversionError(
            f"--to {job.to}: a model that generates is converted with --to same alone; "
            f"fairseq-train --finetune-from-model then changes its scheme where that is exact"
        )
    wrong = job.beyond("max_positions") if foreign else job.beyond()
    length = job.given.get("max_positions")
    if length is not None and length < SHORTEST:
        raise ConversionError(f"--positions {length}: the comparison needs {SHORTEST} at least")
    if wrong:
        raise ConversionError(f"--{wrong[0].split()[0].removeprefix('max-')} says nothing here: leave it out")


def _source_logits(found: ExternalModel | GeneratingModel, made: GeneratingModel, pair: Pair) -> Tensor:
    """Logits (B, T, V) of the source's own formula, in fairseq's order of rows."""
    if isinstance(found, GeneratingModel):
        own = found.checkpoint({}) | {"model": found.state}
        return logits_of(own, made.kind, made.rows, pair.source, pair.target)
    form = found.form
    source = torch.tensor(found.source.rows)[pair.source]
    unread = pair.source == PADDING
    if not form.source_ends:
        unread |= pair.source == EOS
    source = source.masked_fill(unread, form.pad)
    target = torch.tensor(found.target.rows)[pair.target]
    target[:, 0] = form.start
    rows = torch.tensor(found.target.rows)
    return found.logits(source, target)[..., rows.clamp(min=0)]


# ---- The steps of `relpos convert` for a released Transformer-XL.


XL_PROBE = (2, 3, 16)  # rows, segments, tokens of a segment
XL_KIND = "segment_language_modeling"
BUFFERS = ("version", "_float_tensor")


def convert_original_xl(job: Job, path: Path, data: Path | None, say: Log) -> Writer:
    """Convert a released Transformer-XL to one of ours; returns what writes it.

    Raises:
        ConversionError: it cannot be converted, or more is asked for than the same model.
    """
    if job.to != "same" or job.beyond():
        raise ConversionError(
            f"{path} is a released Transformer-XL, which becomes the same model here: give --to "
            f"same and no other option; --finetune-from-model converts the result further"
        )
    released = read_original_xl(path)
    vocabulary = read_vocabulary(data or path.parent, released.types)
    for line in (f"source    released Transformer-XL: {path}", *released.notes):
        say(line)
    values, rows = xl_values(released, vocabulary), (len(vocabulary.rows),) * 2
    model = build_generating(XL_KIND, values, rows)
    state = {name: part for name, part in model.state_dict().items() if name.endswith(BUFFERS)}
    load_tensors(model, state | xl_state(released, vocabulary), torch.float64)
    difference, size = compare_original_xl(released, model, vocabulary, job.seed)
    say(f"Maximum difference of log-probabilities: {difference:.3g} (values up to {size:.3g})")
    if not difference <= EXACT * size:  # NaN is no small difference
        raise ConversionError(
            f"{path}: the conversion should be exact, and differs by {difference:.3g}: nothing is "
            f"written; please report this"
        )
    state = model.to(released.state["layers.0.dec_attn.o_net.weight"].dtype).state_dict()
    task = {"tokens_per_sample": values["tokens_per_sample"]}
    loss = "adaptive_loss" if values.get("adaptive_input") else "cross_entropy"
    criterion = {"_name": loss, "sentence_avg": False}
    about = {"source": f"released Transformer-XL: {path.name}", "difference": difference}
    made = GeneratingModel(XL_KIND, values, rows, state, task, criterion=criterion)
    return functools.partial(
        write_checkpoint, checkpoint=made.checkpoint(about), about=about, texts={"dict.txt": vocabulary.dictionary()}
    )


@torch.no_grad()
def compare_original_xl(
    released: OriginalXL, model: nn.Module, vocabulary: Vocabulary, seed: int
) -> tuple[float, float]:
    """Return how far log-probabilities are apart on random segments with memory, and their size."""
    rows, count, length = XL_PROBE
    if released.absolute:  # shorter segments would count from another end
        length = released.segment or length
    random = torch.Generator().manual_seed(seed)
    shape = (rows, count * length)
    segments = torch.randint(released.types, shape, generator=random).split(length, 1)
    added = vocabulary.rows.count(-1)
    places = torch.tensor(vocabulary.rows).argsort(stable=True)[added:]
    memory, worst, sizes = None, [], []
    for types, wanted in zip(segments, log_probs(released, list(segments)), strict=True):
        output = model(places[types], memory=memory)
        memory = output[1]["memory"]
        found: Tensor = model.get_normalized_probs(output, log_probs=True)[..., places]
        worst.append((found - wanted).abs().max())
        sizes.append(wanted.abs().max())
    return float(torch.stack(worst).max()), float(torch.stack(sizes).max())


# ---- Conversion from a file or folder to a new one.


HUGGING_FACE = ("hf-bert", "hf-roberta")


def convert_on_disk(job: Job, path: Path, out: Path, data: Path | None = None) -> None:
    """Convert a checkpoint or a Hugging Face folder, and say what is lost.

    Args:
        job: what is asked for.
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
        write = convert_original_xl(job, path, data, print) if is_original_xl(path) else None
        _write(write or _convert(job, path, data), out)


def _convert(job: Job, path: Path, data: Path | None) -> Writer:
    generating = convert_generating(job, path, print)
    if generating is not None:
        return generating
    source = read_job_source(path, data)
    notes = (f"note      {note}" for note in source.notes)
    print(f"source    {source.kind}: {source.path}", *notes, sep="\n", flush=True)
    if job.to in HUGGING_FACE:
        return to_huggingface(job, source, print)
    if job.head:
        raise ConversionError("--head chooses what goes into a Hugging Face folder alone")
    return to_relpos(job, source, print)


def _write(write: Writer, out: Path) -> None:
    whole = atomic_path if out.suffix == ".pt" else atomic_folder
    with whole(out) as making:
        write(making)
    print(f"wrote {out}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Models that are built to be measured say nothing of themselves."""
    logger = logging.getLogger("relpos_fairseq")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
