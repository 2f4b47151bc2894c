"""All pictures of a checkpoint, with a CSV of the same numbers each."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from relpos_fairseq.pictures.cosines import cosines
from relpos_fairseq.pictures.distances import scalar_tables, vector_tables
from relpos_fairseq.pictures.drawing import Absent, Picture, write
from relpos_fairseq.pictures.logits import attention_probabilities, input_logits, position_logits, ranks, segment_logits
from relpos_fairseq.pictures.model import PlotError, Stack, find_stacks, load
from relpos_fairseq.pictures.sentence import choose_sentence, further_sentences, token_names, watch

COSINE_POSITIONS = 64


@torch.no_grad()
def draw_checkpoint(args: argparse.Namespace) -> None:
    """Draw all that `relpos plot` asks for; nothing is written before all could be computed.

    Raises:
        PlotError: one line that says what cannot be drawn and what to do.
    """
    if args.out.exists() and not args.out.is_dir():
        raise PlotError(f"--out {args.out} is a file: give a folder")
    if args.sentence is not None and not (args.data and args.sentence.split()):
        raise PlotError(f"--sentence {args.sentence!r}: give words, and --data for the checkpoint's dictionary")
    if args.checkpoint is None:
        raise PlotError("give a checkpoint, or logs of fairseq-train with --curves")
    model, task = load(args.checkpoint, args.data)
    ready = []
    for stack, found in pictures(model, task, find_stacks(model, args.checkpoint), args):
        try:
            ready += list(found)
        except Absent as reason:
            print(f"skipped ({stack.title}): {reason}")
    args.out.mkdir(parents=True, exist_ok=True)
    files = [path for picture in ready for path in write(picture, args.out)]
    print(f"wrote {len(files)} files to {args.out}:")
    print("\n".join(f"  {path.name}" for path in files), flush=True)


def pictures(
    model: Any, task: Any, stacks: list[Stack], args: argparse.Namespace
) -> Iterator[tuple[Stack, Iterator[Picture]]]:
    """Yield every kind of picture of every stack; taking one may raise Absent."""
    length = min(stack.at(args.length).src_len for stack in stacks)
    sentence = choose_sentence(model, task, args.sentence, length, args.data)
    print(f"attention and ranks on: {sentence.title}")
    watched = watch(model, stacks, sentence)
    more = further_sentences(task, args.sentences - 1) if args.sentences > 1 else []
    batch = [watched, *(watch(model, stacks, one) for one in more)]
    if more:
        print(f"ranks on {len(batch)} sentences")
    for stack in stacks:
        tokens = token_names(model, task, stack, sentence)
        yield stack, scalar_tables(stack, args.distance)
        yield stack, vector_tables(stack, args.distance)
        yield stack, position_logits(stack, args.length)
        yield stack, segment_logits(stack, args.length, args.segments)
        yield stack, input_logits(stack, args.length)
        yield stack, cosines(stack, COSINE_POSITIONS)
        title = sentence.title
        yield stack, attention_probabilities(stack, watched, tokens, title, args.tokens)
        yield stack, ranks(stack, batch)
