#!/usr/bin/env python
"""Speed and perplexity of evaluating a language model with memory and without, at equal context.

    python scripts/benchmark_lm.py XL_CHECKPOINT DATA_BIN [--baseline LM_CHECKPOINT]
        [--context 256] [--tokens 4000] [--sliding-tokens 200] [--train-updates 20]

Every method scores the end of one split with --context tokens of context:
- memory: segments of the trained length T (a whole row where rows are shorter), memory of
  context - T; a prediction sees context - T + 1 to context tokens at its first layer, and
  recurrence reaches further, layer by layer;
- sliding window: no memory, the window moves by one token and gives one prediction: every
  prediction sees all of the context. This is what the paper compares with. It is slow, so it scores
  the last --sliding-tokens only, and memory is scored on those as well;
- strided window: no memory, the window moves by T and gives T predictions; as memory, a prediction
  sees context - T + 1 to context tokens.
--baseline adds both windows with a model that was trained without memory, and the speed of
training the two, which means something where their parameters are equal.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from relpos_fairseq.data.streams.plan import StreamPlan, read_block
from relpos_fairseq.engine.command import run_command
from relpos_fairseq.engine.files import write_json
from relpos_fairseq.engine.progress import progress
from relpos_fairseq.evaluation.language_model import (
    Score,
    Subject,
    last_targets,
    load_subject,
    log_likelihood,
    score_with_memory,
    score_with_windows,
    show,
)

logging.basicConfig(level=logging.WARNING)

WARM_UP = 2  # updates that are not timed
HEADERS = ("model", "method", "context", "predictions", "tokens/s", "ratio", "perplexity", "bits")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    subject = load_subject(options.checkpoint, options.data, options.split)
    if subject.trained_memory is None:
        raise ValueError(f"{options.checkpoint} ({subject.name}) has no memory: give it as "
                         f"--baseline, and a relpos_transformer_xl first")  # fmt: skip
    context = options.context or subject.trained_length + subject.trained_memory
    if context < subject.trained_length:
        raise ValueError(f"--context must be >= the trained segment {subject.trained_length}, "
                         f"got {context}")  # fmt: skip
    other = (
        load_subject(options.baseline, options.data, options.split) if options.baseline else None
    )
    rows = evaluation(subject, other, context, options)
    print(f"\nevaluation on the end of {options.split}, {options.batch} row(s) or window(s) at a "
          f"time, {options.threads} thread(s); ratio: of the slowest method's speed")  # fmt: skip
    print(show([{name: row[name] for name in HEADERS} for row in rows]))
    trained = training([subject, *([other] if other else [])], options)
    if trained:
        print(f"\ntraining, {options.train_batch} rows of {subject.trained_length} tokens, Adam")
        print(show(trained))
    if options.out:
        write_json(options.out, {"evaluation": rows, "training": trained})


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="of relpos_transformer_xl")
    parser.add_argument("data", type=Path, help="folder of binarised text")
    parser.add_argument("--baseline", type=Path, help="checkpoint of relpos_transformer_lm")
    parser.add_argument("--split", default="valid")
    parser.add_argument("--context", type=int, help="tokens; default: trained segment + memory")
    parser.add_argument("--tokens", type=int, default=4000, help="predictions scored")
    parser.add_argument("--sliding-tokens", type=int, default=200, help="of them by sliding")
    parser.add_argument("--batch", type=int, default=1, help="rows or windows at a time")
    parser.add_argument("--train-updates", type=int, default=20, help="0: training is not timed")
    parser.add_argument("--train-batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="JSON of the numbers")
    options = parser.parse_args(argv)
    for name in ("context", "tokens", "sliding_tokens", "batch", "train_batch", "threads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be >= 1, got {value}")
    return options


def evaluation(
    subject: Subject,
    other: Subject | None,
    context: int,
    options: argparse.Namespace,
) -> list[dict]:
    """Every method's row; ratios are to the slowest."""
    segment, batch = subject.trained_length, options.batch
    many = last_targets(subject, min(options.tokens, len(subject.tokens) - 1))
    few = many[-min(options.sliding_tokens, len(many)) :]
    rows: list[dict] = []

    def add(model: Subject, method: str, targets: range, score: Callable[[], Score]) -> None:
        if method != "memory" and model.longest is not None and context > model.longest:
            rows.append(refused(model, method, context, model.longest))
            return
        rows.append(row_of(model, method, context, score()))

    for targets in (many, few):
        # Where a row is shorter than a segment, more memory makes up the context.
        block = min(segment, -(-len(targets) // batch))
        add(
            subject,
            "memory",
            targets,
            lambda t=targets, b=block: score_with_memory(subject, t, b, context - b, batch),
        )
    for model in (subject, other) if other else (subject,):
        add(model, "strided window", many,
            lambda m=model: score_with_windows(m, many, context, segment, batch))  # fmt: skip
        add(model, "sliding window", few,
            lambda m=model: score_with_windows(m, few, context, 1, batch))  # fmt: skip
    slowest = min(row["tokens/s"] for row in rows if row["predictions"])
    for row in rows:
        row["ratio"] = f"{row['tokens/s'] / slowest:.1f}" if row["predictions"] else ""
    return rows


def row_of(model: Subject, method: str, context: int, score: Score) -> dict:
    """A method's numbers."""
    return {
        "model": model.name,
        "method": method,
        "context": context,
        "predictions": score.tokens,
        "tokens/s": round(score.speed, 1),
        "perplexity": round(score.perplexity, 3),
        "bits": round(score.bits, 4),
    }


def refused(model: Subject, method: str, context: int, longest: int) -> dict:
    """A method that the model's table of positions does not reach."""
    words = f"cannot: table of {longest}"
    return {"model": model.name, "method": method, "context": context, "predictions": 0,
            "tokens/s": "", "perplexity": words, "bits": ""}  # fmt: skip


def training(subjects: list[Subject], options: argparse.Namespace) -> list[dict]:
    """Tokens a second of forward, backward and Adam, memory carried where there is one."""
    if options.train_updates < 1:
        return []
    rows = []
    for subject in subjects:
        speed = train_speed(subject, options)
        rows.append({"model": subject.name, "parameters": f"{subject.parameters:,}",
                     "tokens/s": round(speed, 1)})  # fmt: skip
    return rows


def train_speed(subject: Subject, options: argparse.Namespace) -> float:
    """Predictions a second in training."""
    model, updates = subject.model.train(), options.train_updates + WARM_UP
    has_memory = subject.trained_memory is not None
    if has_memory:
        model.mem_len = subject.trained_memory
    plan = StreamPlan(len(subject.tokens), options.train_batch, subject.trained_length)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    memory, began, counted = None, 0.0, 0
    for number in progress(range(updates), description=f"training {subject.name}"):
        if number == WARM_UP:
            began, counted = time.perf_counter(), 0
        block = read_block(subject.tokens, plan, number % plan.steps, range(plan.rows), subject.pad)
        more = {"memory": memory} if has_memory else {}
        features, extra = model.decoder.extract_features(block.inputs, None, **more)
        memory = extra.get("memory") if has_memory else None
        loss = -log_likelihood(subject, features, block.targets).sum()
        optimizer.zero_grad()
        (loss / int(block.lengths.sum())).backward()
        optimizer.step()
        counted += int(block.lengths.sum())
    model.eval()
    return counted / (time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(run_command(main))
