#!/usr/bin/env python
"""Convert a pretrained RoBERTa or BERT to another position scheme.

    python scripts/convert_checkpoint.py SRC --to SCHEME --out DST

SRC: a checkpoint of fairseq's RoBERTa (argparse's or a dataclass's options) or of relpos_roberta,
or a Hugging Face folder of BERT, RoBERTa or XLM-R (config.json, safetensors or bin, in one file or
several).  SCHEME: a position scheme or hybrid, `same`, or `hf-bert`, `hf-roberta` for the way back.

The conversion is exact where the algebra nests, or refused; --approximate converts all the same.
Afterwards both models are run on random input, and the largest difference of their logits is
printed.  DST is a new folder with model.pt, dict.txt and the tokenizer's files (or, ending in .pt,
the checkpoint alone): --finetune-from-model DST/model.pt trains it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from relpos_fairseq.conversion import ConversionError
from relpos_fairseq.conversion.job import (
    Job,
    read_job_source,
    to_huggingface,
    to_ours,
)
from relpos_fairseq.conversion.reading import check_destination
from relpos_fairseq.conversion.source import POSITION_FIELDS
from relpos_fairseq.engine.command import run_command
from relpos_fairseq.engine.files import atomic_folder, atomic_path

HUGGING_FACE = ("hf-bert", "hf-roberta")


def read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("source", type=Path, metavar="SRC", help="checkpoint or Hugging Face folder")
    add("--to", required=True, metavar="SCHEME", help="position scheme, same, hf-bert, hf-roberta")
    add("--out", type=Path, required=True, metavar="DST", help="new folder, or new file ending .pt")
    add("--data", type=Path, metavar="DIR", help="dict.txt and tokenizer of SRC (beside it)")
    add("--approximate", action="store_true", help="convert what cannot be converted exactly")
    add(
        "--init",
        choices=("neutral", "own", "fit"),
        default="neutral",
        help="where new tables start: neutral (they change nothing, where that can be; default), "
        "own (the scheme's initial values), fit (least squares; implies --approximate)",
    )
    add("--positions", type=int, metavar="N", help="positions of the result (those of SRC)")
    add("--fill", choices=("tile", "interpolate"), help="how absolute positions beyond SRC's are")
    add("--head", metavar="NAME", help="head that goes into a Hugging Face folder (masked LM)")
    add("--seed", type=int, default=1, help="of new tables and random input (%(default)s)")
    group = parser.add_argument_group("positions of the result (SRC's, or auto)")
    for name in POSITION_FIELDS:
        if name not in ("position_scheme", "attention_backend"):
            group.add_argument(f"--{name.replace('_', '-')}", metavar="VALUE")
    args = parser.parse_args(argv)
    if args.positions is not None and args.positions < 2:
        parser.error(f"--positions must be >= 2, got {args.positions}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Convert, measure, write."""
    args = read_arguments(argv)
    with _quiet():
        convert(args)


def convert(args: argparse.Namespace) -> None:
    """What the command line asks for."""
    check_destination(args.out, args.source)
    given = {name: getattr(args, name, None) for name in POSITION_FIELDS}
    given |= {"position_scheme": None, "attention_backend": None, "max_positions": args.positions}
    job = Job(
        to=args.to,
        given=given,
        approximate=args.approximate or args.init == "fit",
        init=args.init,
        fill=args.fill,
        head=args.head,
        seed=args.seed,
    )
    source = read_job_source(args.source, args.data)
    for line in (
        f"source    {source.kind}: {source.path}",
        *(f"note      {n}" for n in source.notes),
    ):
        print(line, flush=True)
    if args.to in HUGGING_FACE:
        _check_folder(args.out, args.to)
        write = to_huggingface(job, source, print)
    else:
        if args.head:
            raise ConversionError("--head chooses what goes into a Hugging Face folder alone")
        write = to_ours(job, source, print)
    if args.out.suffix == ".pt":
        with atomic_path(args.out) as making:
            write(making)
    else:
        with atomic_folder(args.out) as making:
            write(making)
    print(f"wrote {args.out}")


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


def _check_folder(out: Path, to: str) -> None:
    if out.suffix == ".pt":
        raise ConversionError(f"--to {to} writes a folder: --out {out} must not end in .pt")


if __name__ == "__main__":
    sys.exit(run_command(main))
