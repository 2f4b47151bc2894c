"""`relpos convert` of models that generate: Marian, OpenNMT-py, and folders of our exports."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from relpos_fairseq.conversion.checkpoints import read_file
from relpos_fairseq.conversion.convert import Conversion
from relpos_fairseq.conversion.fidelity import EOS, FIRST, PADDING, Probe
from relpos_fairseq.conversion.huggingface.files import read_json
from relpos_fairseq.conversion.job import Job, Say, Writer, measure
from relpos_fairseq.conversion.report import ConversionError, ConversionReport
from relpos_fairseq.conversion.translation import exported, marian, opennmt
from relpos_fairseq.conversion.translation.adopt import adopt
from relpos_fairseq.conversion.translation.foreign import Foreign
from relpos_fairseq.conversion.translation.generating import Generating, check_rows, logits_of
from relpos_fairseq.conversion.writer import write_checkpoint

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


def convert_generating(job: Job, path: Path, say: Say) -> Writer | None:
    """Convert a model that generates; returns what writes it, None where `path` is another kind.

    Raises:
        ConversionError: it cannot be converted, or options that say nothing here.
    """
    length = job.given.get("max_positions")
    found = _read(path, length)
    if found is None:
        return None
    _check(job, isinstance(found, Foreign))
    report = ConversionReport("", "")
    if isinstance(found, Foreign):
        kind, notes = found.kind, found.notes
        reach = length or len(found.weights.get("encoder.positions", range(LENGTH)))
        made, words = adopt(found, reach, report), (found.source, found.target)
        sides = zip(found.languages, words, strict=True)
        dictionaries = {f"dict.{language}.txt": one.dictionary() for language, one in sides}
    else:
        kind, notes, made, dictionaries = "transformers, exported by relpos", [], found, {}
        check_rows(found.files, found.rows)
        if not found.files:
            notes = [f"no {path / exported.TEXT}: the result has no dictionary"]
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
    kept = torch.tensor([row >= 0 for row in found.target.rows]) if isinstance(found, Foreign) else slice(None)
    outputs = ({"logits": scores[..., kept]} for scores in (before, after))
    measured = measure(*outputs, Probe(pair.target, None), Conversion({}, report), say)
    about["differences"] = measured.largest

    return functools.partial(write_checkpoint, checkpoint=checkpoint, about=about, files=made.files, texts=dictionaries)


def _read(path: Path, length: int | None) -> Foreign | Generating | None:
    if path.is_dir():
        if not (path / "config.json").is_file():
            return None
        config = read_json(path / "config.json")
        if config.get("model_type") in exported.KINDS:
            return exported.read(path, config)
        if config.get("model_type") == marian.KIND:
            return marian.read(path, config, length)
    elif path.is_file() and opennmt.is_opennmt(checkpoint := read_file(path)):
        return opennmt.read(path, checkpoint, length or LENGTH)
    return None


def _check(job: Job, foreign: bool) -> None:
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


def _source_logits(found: Foreign | Generating, made: Generating, pair: Pair) -> Tensor:
    """Logits (B, T, V) of the source's own formula, in fairseq's order of rows."""
    if isinstance(found, Generating):
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
