"""Measure speed and perplexity of a language model with memory and without, at equal context."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from relpos_fairseq.data.streams.dataset import StreamPlan, read_block
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
from relpos_fairseq.io.files import write_json
from relpos_fairseq.io.progress import progress
from relpos_fairseq.lab.benchmarks.workload import Options

WARM_UP = 2  # updates that are not timed
HEADERS = ("model", "method", "context", "predictions", "tokens/s", "ratio", "perplexity", "bits")


def benchmark(options: Options) -> None:
    """Measure evaluation and training, print the tables, and write the numbers where asked."""
    options.threads = options.threads or torch.get_num_threads()
    torch.set_num_threads(options.threads)
    subject = load_subject(options.checkpoint, options.data, options.split)
    if subject.trained_memory is None:
        raise ValueError(
            f"{options.checkpoint} ({subject.name}) has no memory: give it as --baseline, and a "
            f"relpos_transformer_xl first"
        )
    context = options.context or subject.trained_length + subject.trained_memory
    if context < subject.trained_length:
        raise ValueError(f"--context must be >= the trained segment {subject.trained_length}, got {context}")
    other = None
    if options.baseline:
        other = load_subject(options.baseline, options.data, options.split)
    rows = evaluation(subject, other, context, options)
    print(
        f"\nevaluation on the end of {options.split}, {options.batch_size} row(s) or window(s) at a "
        f"time, {options.threads} thread(s); ratio: of the slowest method's speed"
    )
    print(show([{name: row[name] for name in HEADERS} for row in rows]))
    trained = training([subject, *([other] if other else [])], options)
    if trained:
        print(f"\ntraining, {options.train_batch_size} rows of {subject.trained_length} tokens, Adam")
        print(show(trained))
    if options.out:
        write_json(options.out, {"evaluation": rows, "training": trained})


def evaluation(subject: Subject, other: Subject | None, context: int, options: Options) -> list[dict]:
    """Return a row for each method; ratios are to the slowest method's speed."""
    segment, batch = subject.trained_length, options.batch_size
    many = last_targets(subject, min(options.tokens, len(subject.tokens) - 1))
    few = many[-min(options.sliding_tokens, len(many)) :]
    rows: list[dict] = []

    def add(model: Subject, method: str, score: Callable[[], Score]) -> None:
        if method != "memory" and model.longest is not None and context > model.longest:
            rows.append(refused(model, method, context, model.longest))
            return
        rows.append(row_of(model, method, context, score()))

    for targets in (many, few):
        # Where a row is shorter than a segment, more memory makes up the context.
        block = min(segment, -(-len(targets) // batch))
        score = partial(score_with_memory, subject, targets, block, context - block, batch)
        add(subject, "memory", score)
    for model in (subject, other) if other else (subject,):
        for method, targets, stride in (("strided window", many, segment), ("sliding window", few, 1)):
            score = partial(score_with_windows, model, targets, context, stride, batch)
            add(model, method, score)
    slowest = min(row["tokens/s"] for row in rows if row["predictions"])
    for row in rows:
        row["ratio"] = f"{row['tokens/s'] / slowest:.1f}" if row["predictions"] else ""
    return rows


def row_of(model: Subject, method: str, context: int, score: Score) -> dict:
    """Return the row of a method that was measured."""
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
    """Return the row of a method whose context is longer than the model's table of positions."""
    row = {"model": model.name, "method": method, "context": context, "predictions": 0}
    return row | {"tokens/s": "", "perplexity": f"cannot: table of {longest}", "bits": ""}


def training(subjects: list[Subject], options: Options) -> list[dict]:
    """Return for each model the tokens per second of training: forward, backward, Adam, memory carried on."""
    if options.train_updates < 1:
        return []
    rows = []
    for subject in subjects:
        speed = round(train_speed(subject, options), 1)
        size = f"{subject.parameters:,}"
        rows.append({"model": subject.name, "parameters": size, "tokens/s": speed})
    return rows


def train_speed(subject: Subject, options: Options) -> float:
    """Return predictions a second in training."""
    model, updates = subject.model.train(), options.train_updates + WARM_UP
    has_memory = subject.trained_memory is not None
    if has_memory:
        model.mem_len = subject.trained_memory
    plan = StreamPlan(len(subject.tokens), options.train_batch_size, subject.trained_length)
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
