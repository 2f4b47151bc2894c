"""Conversion from a file or folder to a new one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from relpos_fairseq.conversion import ConversionError
from relpos_fairseq.conversion.job import Job, Writer, read_job_source, to_huggingface, to_ours
from relpos_fairseq.conversion.reading import check_destination
from relpos_fairseq.conversion.released_xl.job import convert_released
from relpos_fairseq.conversion.released_xl.model import is_released
from relpos_fairseq.conversion.translation.job import convert_generating
from relpos_fairseq.engine.files import atomic_folder, atomic_path

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
        write = convert_released(job, path, data, print) if is_released(path) else None
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
    return to_ours(job, source, print)


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
