#!/usr/bin/env python
"""Draw what a checkpoint's positions have learned, and how it attends.

    python scripts/plot_positions.py CHECKPOINT --data DATA_BIN --out DIR

Writes a PNG and a CSV of the same numbers for every stack (encoder, decoder) and
- every table over distance: scalars by head; vectors by channel (000 Fig. 4) and by norm;
- attention probabilities on a sentence, averaged over heads (000 Fig. 5);
- position logits without content (004 Fig. 4), with segments (004 Fig. 6);
- ranks of content and position logits on the sentence (004 Fig. 2);
- cosine similarity of absolute positions (004 Fig. 5).
What the checkpoint's scheme does not have is left out, and a line says so.

000: Huang et al. 2020, Improve Transformer Models with Better Relative Position Embeddings.
004: Chen et al. 2021, Demystifying the Better Performance of Position Encoding Variants.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

from relpos_fairseq.pictures.logits import (
    attention_probabilities,
    cosines,
    input_logits,
    position_logits,
    ranks,
    segment_logits,
)
from relpos_fairseq.pictures.model import PlotError, Stack, find_stacks, load
from relpos_fairseq.pictures.plots import Absent, Picture, write
from relpos_fairseq.pictures.sentence import choose_sentence, token_names, watch
from relpos_fairseq.pictures.tables import scalar_tables, vector_tables

logging.basicConfig(level=logging.WARNING)  # fairseq reports its own loading otherwise

COSINE_POSITIONS = 64


class Parser(argparse.ArgumentParser):
    """A wrong command line is one line, too."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and leave."""
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def whole_number(least: int) -> Callable[[str], int]:
    """Reads an integer that is not below `least`."""

    def read(text: str) -> int:
        if not text.lstrip("-").isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number >= {least}, got {text}")
        return int(text)

    return read


def read_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a .pt file of fairseq-train")
    parser.add_argument("--out", type=Path, required=True, help="folder for PNG and CSV files")
    parser.add_argument(
        "--data",
        type=Path,
        help="folder of fairseq-preprocess: its first test sentence is read, in its dictionary",
    )
    parser.add_argument(
        "--sentence",
        help="words to read instead, tokenised as the training data; a decoder reads its own "
        "greedy translation",
    )
    parser.add_argument(
        "--length", type=whole_number(2), default=32, help="tokens of position logits (%(default)s)"
    )
    parser.add_argument(
        "--segments",
        type=whole_number(2),
        default=2,
        help="segments of equal length in segment logits (%(default)s)",
    )
    parser.add_argument(
        "--distance", type=whole_number(1), default=50, help="largest distance (%(default)s)"
    )
    return parser.parse_args(argv)


def pictures(
    model: Any, task: Any, stacks: list[Stack], args: argparse.Namespace
) -> Iterator[tuple[Stack, Iterator[Picture]]]:
    """Every kind of picture of every stack; taking one may raise Absent."""
    length = min(stack.at(args.length).src_len for stack in stacks)
    sentence = choose_sentence(model, task, args.sentence, length, args.data)
    print(f"attention and ranks on: {sentence.title}")
    calls = watch(model, stacks, sentence)
    for stack in stacks:
        tokens = token_names(model, task, stack, sentence)
        yield stack, scalar_tables(stack, args.distance)
        yield stack, vector_tables(stack, args.distance)
        yield stack, position_logits(stack, args.length)
        yield stack, segment_logits(stack, args.length, args.segments)
        yield stack, input_logits(stack, args.length)
        yield stack, cosines(stack, COSINE_POSITIONS)
        yield stack, attention_probabilities(stack, calls, tokens, sentence.title)
        yield stack, ranks(stack, calls)


@torch.no_grad()
def run(args: argparse.Namespace) -> list[Path]:
    """Draws everything; returns the files written.

    Raises:
        ValueError: one line that says what cannot be drawn and what to do.
    """
    if args.out.exists() and not args.out.is_dir():
        raise PlotError(f"--out {args.out} is a file: give a folder")
    if args.sentence is not None and not (args.data and args.sentence.split()):
        raise PlotError(
            f"--sentence {args.sentence!r}: give words, and --data for the checkpoint's dictionary"
        )
    model, task = load(args.checkpoint, args.data)
    ready = []
    for stack, found in pictures(model, task, find_stacks(model, args.checkpoint), args):
        try:
            ready += list(found)
        except Absent as reason:
            print(f"skipped ({stack.title}): {reason}")
    # Nothing is written before everything could be computed.
    args.out.mkdir(parents=True, exist_ok=True)
    return [path for picture in ready for path in write(picture, args.out)]


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    args = read_arguments(argv)
    try:
        files = run(args)
    except (ValueError, OSError) as error:
        print(f"plot_positions.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"wrote {len(files)} files to {args.out}:")
    for path in files:
        print(f"  {path.name}")
    return 0


if __name__ == "__main__":
    # fairseq's readers, torn open half-way, would complain again when they are collected.
    sys.unraisablehook = lambda _: None
    sys.exit(main())
