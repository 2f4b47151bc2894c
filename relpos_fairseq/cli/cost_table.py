#!/usr/bin/env python
"""The papers' tables of costs, measured here: BERT with every position scheme.

    python scripts/cost_table.py                               # BERT-base, minutes on a CPU
    python scripts/cost_table.py --model small --layers 0      # BERT-small, all of its layers
    python scripts/cost_table.py --layers 0 --vocabulary 30522 --batch 16 --device cuda

Parameters are counted from the real model, whole, with BERT's 30,522 words and tables for 512
positions.  Time and memory are those of a model of `--layers` layers and `--vocabulary` words (few
by default, as the softmax over words costs the same with every scheme): a step of training
(forward, loss of 15 % masked tokens, backward, Adam), a forward pass, and the step's peak memory,
relative to `learned`.  Beside them stand the papers' numbers: 000 is Huang et al. 2020, 003
Multiplicative Position-aware Transformer Models, 004 Chen et al. 2021.  Tables are unclipped unless
--clip says otherwise, as the papers pre-train.  Candidates are timed in turns, each only once the
machine is idle otherwise.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from relpos_fairseq.attention import BACKENDS
from relpos_fairseq.benchmarks.columns import Rows, cell, timed_rows, versions
from relpos_fairseq.benchmarks.masked_lm import (
    MaskedLM,
    inference,
    masked_lm,
    parameters,
    sizes_of,
    training_step,
)
from relpos_fairseq.benchmarks.options import check_run, lengths_of, set_labels
from relpos_fairseq.benchmarks.published import (
    CHEN_TABLE_3,
    HUANG_TABLE_1,
    IN_WORDS,
    MULTIPLICATIVE_TABLE_5,
    Formula,
    Sizes,
)
from relpos_fairseq.benchmarks.report import INTERRUPTED, Log, machine, progress, write_section
from relpos_fairseq.benchmarks.settings import scheme_and_backend
from relpos_fairseq.benchmarks.timing import peak_mebibytes
from relpos_fairseq.engine.command import run_command

logging.basicConfig(level=logging.WARNING)

BASELINE = "learned"
BERT_WORDS, BERT_POSITIONS = 30522, 512
MODES = {"train": training_step, "inference": inference}
TOGETHER = 6  # models in memory beside the baseline
HEADS = ("`--position-scheme`", "parameters", "000 Table 1", "003 Table 5")


def count_parameters(args: argparse.Namespace, rows: Rows) -> None:
    """Parameters that positions add to the whole model, a row a scheme."""
    column = "parameters"
    if not rows.lacks(column, args.schemes):
        return
    whole = replace(setting(args, args.lengths[0]), layers=0, vocabulary=BERT_WORDS)
    whole = replace(whole, positions=BERT_POSITIONS, device=torch.device("cpu"))
    without = parameters(masked_lm("none", whole))
    with progress(len(args.schemes), column) as bar:
        for scheme in args.schemes:
            added = parameters(masked_lm(scheme, whole)) - without
            rows.add(column, [{"name": scheme, "parameters": added, "without": without}])
            bar.update()


def setting(args: argparse.Namespace, length: int) -> MaskedLM:
    """What is measured at a length."""
    return MaskedLM(
        args.model, args.layers, args.vocabulary, max(BERT_POSITIONS, length), args.clip,
        args.batch, length, args.dropout, getattr(torch, args.dtype), torch.device(args.device),
    )  # fmt: skip


def measure(args: argparse.Namespace, rows: Rows) -> None:
    """Time and memory; `learned` is timed again with each handful of schemes."""
    others = [label for label in args.labels if label != BASELINE]
    groups = [others[start : start + TOGETHER] for start in range(0, len(others), TOGETHER)]
    device = torch.device(args.device)
    for length in args.lengths:
        what = setting(args, length)
        for mode, make in MODES.items():
            column = f"{mode} {length}"
            for group in groups or [[]]:
                names = (BASELINE, *group)
                if rows.lacks(column, names):
                    runs = {scheme: make(scheme, what) for scheme in names}
                    timed = timed_rows(column, BASELINE, runs, device, args.rounds, args.seconds)
                    rows.add(column, timed)
        column, names = f"memory {length}", list(dict.fromkeys((BASELINE, *args.labels)))
        with progress(len(names), column) as bar:
            for scheme in names:
                if rows.lacks(column, [scheme]):
                    peak = peak_mebibytes(training_step(scheme, what), device)
                    rows.add(column, [{"name": scheme, "MiB": peak}])
                bar.update()


# --- the report ----------------------------------------------------------------------------------


def thousands(number: int) -> str:
    """As the papers print it: 393K, 9.4M."""
    return f"{number / 1e6:.1f}M" if number >= 10**6 else f"{number // 1000}K"


def cost_table(rows: list[dict], labels: Sequence[str], sizes: Sizes) -> str:
    """The markdown table, a row for each of `label_of`."""
    cells = {(row["name"], row["column"]): row for row in rows}
    columns = [c for c in dict.fromkeys(row["column"] for row in rows) if c != "parameters"]
    lines = [f"| {' | '.join((*HEADS, *columns))} |", "|---" * (len(HEADS) + len(columns)) + "|"]
    for label in labels:
        scheme, _ = scheme_and_backend(label)
        added = cells[scheme, "parameters"]["parameters"]
        parts = [f"`{label}`", f"{added:,}"]
        parts += [
            _published(paper, scheme, sizes) for paper in (HUANG_TABLE_1, MULTIPLICATIVE_TABLE_5)
        ]
        parts += [_measured(cells.get((label, c)), cells.get((BASELINE, c))) for c in columns]
        lines.append(f"| {' | '.join(parts)} |")
    return "\n".join(lines)


def _published(paper: dict[str, Formula], scheme: str, sizes: Sizes) -> str:
    return thousands(paper[scheme](sizes)) if scheme in paper else "-"


def _measured(row: dict | None, base: dict | None) -> str:
    if row is not None and "MiB" in row and row is not base:
        return f"{row['MiB'] / base['MiB']:.2f}"
    return cell(row, BASELINE)


def chen_table(rows: list[dict], size: str) -> str:
    """Chen's Table 3: time beyond rel_scalar's, published and here; empty without rel_scalar."""
    times = {(row["name"], row["column"]): row["ms"] for row in rows if "ms" in row}
    columns = [c for c in dict.fromkeys(row["column"] for row in rows) if c.split()[0] in MODES]
    if not any(("rel_scalar", column) in times for column in columns):
        return ""
    heads = [f"{column}: 004, here" for column in columns]
    lines = [f"| beyond `rel_scalar` | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for scheme, percents in CHEN_TABLE_3[size].items():
        parts = []
        for column in columns:
            published = f"+{percents[list(MODES).index(column.split()[0])]}%"
            if (scheme, column) not in times:
                parts.append(f"{published}, -")
                continue
            here = times[scheme, column] / times["rel_scalar", column] - 1
            parts.append(f"{published}, {here:+.0%}")
        lines.append(f"| `{scheme}` | {' | '.join(parts)} |")
    return "\n".join(lines)


def describe(args: argparse.Namespace, head: str) -> str:
    """Machine, versions, sizes: what the tables are of."""
    size = sizes_of(args.model)
    whole = size["encoder_layers"]
    clip = "unclipped" if args.clip in (None, 0) else f"clip {args.clip}"
    timed = args.layers or whole
    return (
        f"{head}; {versions(['fairseq-fixed', 'fairseq'])}. BERT-{args.model}: {whole} layers, "
        f"{size['encoder_embed_dim']} wide, {size['encoder_attention_heads']} heads. Parameters: "
        f"what positions add to the whole model, tables of {BERT_POSITIONS} positions; the "
        f"papers' by their formulas (000: a table a head; 003: one for all heads). Timed are "
        f"**{timed} of {whole} layers** and {args.vocabulary:,} words, {args.batch} rows of "
        f"{', '.join(map(str, args.lengths))} tokens, {args.dtype}, {clip}, dropout "
        f"{args.dropout:g}; relative to `{BASELINE}`: median (minimum to minimum) ± half the "
        f"quartile distance; memory: peak of a training step beyond weights and Adam's state."
    )


def report(args: argparse.Namespace, rows: list[dict], words: str) -> str:
    """Description and tables."""
    size = sizes_of(args.model)
    widths = (size[f"encoder_{name}"] for name in ("layers", "embed_dim", "attention_heads"))
    without = next(row["without"] for row in rows if "without" in row)
    total = f"Without positions the model has {without:,} parameters ({BERT_WORDS:,} words)."
    parts = [f"{words} {total} {IN_WORDS}"]
    parts += [cost_table(rows, args.labels, Sizes(*widths, BERT_POSITIONS))]
    parts += [chen_table(rows, args.model)]
    return "\n\n".join(part for part in parts if part)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line.

    Raises:
        ValueError: a wrong value.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="base", choices=list(CHEN_TABLE_3))
    parser.add_argument("--lengths", default="512", help="separated by commas")
    parser.add_argument("--batch", type=int, default=2, help="rows")
    parser.add_argument("--layers", type=int, default=2, help="layers that are timed; 0: all")
    parser.add_argument("--vocabulary", type=int, default=1000, help="words that are timed")
    parser.add_argument("--clip", type=int, help="clip distance; 0 (default): unclipped")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--schemes", default="all", help="names separated by commas, or all")
    parser.add_argument("--backends", default="auto", help=f"a row each: of {', '.join(BACKENDS)}")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=120.0, help="of some schemes, about")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--csv", type=Path, help="all rows, as they come")
    parser.add_argument("--resume", action="store_true", help="measure what --csv lacks")
    parser.add_argument("--write", type=Path, help="put the tables into this markdown file")
    args = parser.parse_args(argv)
    args.lengths = lengths_of(args.lengths)
    least = {"batch": 1, "layers": 0, "vocabulary": 8, "clip": 0, "rounds": 1, "threads": 1}
    for name, smallest in least.items():
        value = getattr(args, name)
        if value is not None and value < smallest:
            raise ValueError(f"--{name} must be >= {smallest}, got {value}")
    most = sizes_of(args.model)["encoder_layers"]
    if args.layers > most:
        raise ValueError(f"--layers must be <= {most} with --model {args.model}, got {args.layers}")
    if min(args.lengths) < 1 or not 0 <= args.dropout < 1:
        raise ValueError(
            f"--lengths must be >= 1 and --dropout in [0, 1), got {args.lengths}, {args.dropout}"
        )
    check_run(args)
    set_labels(args)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Count, time, print, write."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    head = machine(torch.device(args.device), args.threads)
    print(head, flush=True)
    words = describe(args, head)
    rows = Rows(Log(args.csv, args.resume), words)
    count_parameters(args, rows)
    measure(args, rows)
    text = report(args, rows.found, words)
    print(f"\n{text}")
    if args.write:
        write_section(args.write, f"costs {args.model} {args.device} {args.dtype}", text)


if __name__ == "__main__":
    sys.exit(run_command(main, interrupted=INTERRUPTED))
