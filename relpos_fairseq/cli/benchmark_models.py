#!/usr/bin/env python
"""What do positions cost in whole models, and what do other libraries charge for them?

    python scripts/benchmark_models.py                       # both parts, minutes on a CPU
    python scripts/benchmark_models.py --parts translation --size base --schemes shaw,m4
    python scripts/benchmark_models.py --parts layers --device cuda --dtype bfloat16

translation: a step of training (forward, label-smoothed cross entropy, backward, Adam) and beam
search of `relpos_transformer` with every scheme, relative to fairseq's own `transformer` of the
same sizes.  layers: BERT's layer, training, forward pass and peak memory, relative to our layer
without positions: every scheme, fairseq's own layer, and layers of equal sizes of other libraries
where installed.

All candidates of a column are timed in one process, in turns, each only once the machine is idle
otherwise.  Medians, minima and spreads are printed.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from relpos_fairseq.benchmarks import layers as encoder_layers
from relpos_fairseq.benchmarks.bar import model_target
from relpos_fairseq.benchmarks.columns import Rows, cell, timed_rows, versions
from relpos_fairseq.benchmarks.layers import FairseqLayer, Layer, OurLayer, layer_runner
from relpos_fairseq.benchmarks.models_options import PARTS, parse
from relpos_fairseq.benchmarks.peers import PEERS
from relpos_fairseq.benchmarks.pictures import draw_ratios
from relpos_fairseq.benchmarks.report import INTERRUPTED, Log, machine, write_section
from relpos_fairseq.benchmarks.timing import peak_mebibytes
from relpos_fairseq.benchmarks.translation import (
    FAIRSEQ,
    Translation,
    generation,
    training_step,
)
from relpos_fairseq.engine.command import run_command

logging.basicConfig(level=logging.WARNING)

INPUT_SCHEMES = {"sinusoidal", "learned", "sentence"}  # in a layer they are `none`
TOGETHER = 5  # models in memory beside the baseline: base ones take a gigabyte each


def timing(args: argparse.Namespace) -> tuple[torch.device, int, float]:
    """Where, how often and how long."""
    return torch.device(args.device), args.rounds, args.seconds


# --- translation ---------------------------------------------------------------------------------


def measure_translation(args: argparse.Namespace, rows: Rows) -> None:
    """Rows of whole models; the baseline is timed again with each handful of schemes."""
    setting = Translation(
        args.size, args.vocabulary, args.rows, args.length, args.beam, args.dropout,
        getattr(torch, args.dtype), torch.device(args.device),
    )  # fmt: skip
    makers = {"train": training_step, "generate": generation}
    for mode in (mode for mode in PARTS["translation"] if mode in args.modes):
        for start in range(0, len(args.labels), TOGETHER):
            names = [FAIRSEQ, *args.labels[start : start + TOGETHER]]
            if rows.lacks(mode, names):
                runs = {name: makers[mode](name, setting) for name in names}
                rows.add(mode, timed_rows(mode, FAIRSEQ, runs, *timing(args)))


# --- layers --------------------------------------------------------------------------------------


def layer_setting(args: argparse.Namespace, length: int) -> Layer:
    """What is measured at a length."""
    return Layer(
        args.width, args.ffn, args.heads, max(args.tokens // length, 1), length, args.clip,
        args.dropout, getattr(torch, args.dtype), torch.device(args.device),
    )  # fmt: skip


def layer_makers(args: argparse.Namespace) -> dict[str, tuple[Callable[[Layer], object], bool]]:
    """By name: what builds a layer, and whether it takes (T, B, E)."""
    baseline = encoder_layers.BASELINE
    left_out = INPUT_SCHEMES | {baseline}
    labels = [name for name in args.labels if name not in left_out]
    makers = {baseline: (lambda setting: OurLayer(baseline, setting), True)}
    if "fairseq" in args.peers:
        makers["fairseq"] = (FairseqLayer, True)
    for name in labels:
        makers[name] = (lambda setting, name=name: OurLayer(name, setting), True)
    for peer in PEERS:
        if peer.package in args.peers and peer.absence(torch.device(args.device)) is None:
            makers[peer.name] = (peer.build, peer.time_first)
    return makers


def measure_layers(args: argparse.Namespace, rows: Rows) -> None:
    """Rows of layers at every length."""
    makers = layer_makers(args)
    modes = [mode for mode in PARTS["layers"] if mode in args.modes]
    for length in args.lengths:
        missing = [mode for mode in modes if rows.lacks(f"{mode} {length}", makers)]
        setting, built = layer_setting(args, length), {}
        for name, (build, time_first) in makers.items() if missing else ():
            torch.manual_seed(1)
            built[name] = (build(setting), time_first)
        for mode in missing:
            runs = {
                name: layer_runner(layer, setting, "train" if mode == "memory" else mode, first)
                for name, (layer, first) in built.items()
            }
            column = f"{mode} {length}"
            if mode == "memory":
                device = torch.device(args.device)
                peaks = {name: peak_mebibytes(run, device) for name, run in runs.items()}
                rows.add(column, ({"name": name, "MiB": peak} for name, peak in peaks.items()))
                continue
            timed = timed_rows(column, encoder_layers.BASELINE, runs, *timing(args))
            weights = {name: count(layer) for name, (layer, _) in built.items()}
            rows.add(column, ({**row, "parameters": weights[row["name"]]} for row in timed))


def count(layer: torch.nn.Module) -> int:
    """Parameters."""
    return sum(part.numel() for part in layer.parameters())


# --- the report ----------------------------------------------------------------------------------


def chosen(rows: list[dict], args: argparse.Namespace) -> list[dict]:
    """Those of this command line's modes; a continued file may have more."""
    return [row for row in rows if row["column"].split()[0] in args.modes]


def table(rows: list[dict], part: str, baseline: str, clip: int | None = None) -> str:
    """A markdown table: a row a candidate, a column a measurement.

    Args:
        rows: of results.
        part: `translation` or `layers`.
        baseline: the candidate that ratios are relative to.
        clip: the clip distance, where cells say what is known to be possible; None: they do not.
    """
    cells = {(row["name"], row["column"]): row for row in rows}
    names = list(dict.fromkeys(row["name"] for row in rows))
    columns = list(dict.fromkeys(row["column"] for row in rows))
    counts = {row["name"]: row["parameters"] for row in rows if "parameters" in row}
    heads = [*columns, "parameters"] if counts else columns
    like = {peer.name: f"{peer.name}, as `{peer.like}`" for peer in PEERS}
    lines = [f"| {part} | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name in names:
        texts = [
            cell(cells.get((name, column)), baseline)
            + verdict(cells.get((name, column)), part, clip)
            for column in columns
        ]
        texts += [f"{counts[name]:,}"] if counts else []
        lines.append(f"| {like.get(name, f'`{name}`')} | {' | '.join(texts)} |")
    return "\n".join(lines)


def verdict(row: dict | None, part: str, clip: int | None) -> str:
    """PASS or OVER, with the ratio that minima should not exceed; empty where none is known."""
    if row is None or clip is None or "least" not in row:
        return ""
    limit = model_target(part, row["name"], row["column"], clip)
    if limit is None:
        return ""
    return f" {'PASS' if row['least'] <= limit else 'OVER'} {limit:.2f}"


HOW = "Median relative to {}'s (in brackets: minimum to minimum) ± half the quartile distance."


def describe(part: str, args: argparse.Namespace, head: str) -> str:
    """Machine, versions, sizes: what a part's table is of."""
    libraries = versions(["fairseq-fixed", "fairseq"])
    if part == "translation":
        return (
            f"{head}; {libraries}; size {args.size}, {args.rows} sentences of "
            f"{args.length * 3 // 4}-{args.length} tokens, {args.vocabulary} words, {args.dtype}, "
            f"dropout {args.dropout:g}; generate: beam {args.beam}, {args.length} tokens. "
            f"{HOW.format('fairseq')}"
        )
    packages = versions(sorted({peer.package for peer in PEERS}))
    reasons = (peer.absence(torch.device(args.device)) for peer in PEERS)
    absent = "; ".join(dict.fromkeys(reason for reason in reasons if reason is not None))
    return (
        f"{head}; {libraries}{', ' if packages else ''}{packages}; {args.width} wide, {args.ffn} "
        f"in the feed-forward layer, {args.heads} heads, {args.tokens} tokens a batch, clip "
        f"{args.clip}, {args.dtype}, dropout {args.dropout:g}. {HOW.format('`none`')} Memory: "
        f"peak of a training step beyond weights.{' Not measured: ' if absent else ''}{absent}"
        f"{'.' if absent else ''}"
    )


def picture(path: Path, rows: dict[str, list[dict]], head: str) -> None:
    """Draw all ratios."""
    panels: dict[str, dict[str, float]] = {}
    for part, found in rows.items():
        for row in found:
            if "ratio" in row:
                panels.setdefault(f"{part}: {row['column']}", {})[row["name"]] = row["ratio"]
    draw_ratios(path, panels, head)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    args = parse(argv, __doc__)
    torch.set_num_threads(args.threads)
    head = machine(torch.device(args.device), args.threads)
    print(head, flush=True)
    measures = {"translation": measure_translation, "layers": measure_layers}
    baselines = {"translation": FAIRSEQ, "layers": encoder_layers.BASELINE}
    log, found, texts = Log(args.csv, args.resume), {}, {}
    for part in args.parts:
        words = describe(part, args, head)
        rows = Rows(log, f"{part}: {words}")
        measures[part](args, rows)
        found[part] = chosen(rows.found, args)
        clip = args.clip if args.bar else None
        texts[part] = f"{words}\n\n{table(found[part], part, baselines[part], clip)}"
        print(f"\n{texts[part]}\n", flush=True)
    if args.plot:
        picture(args.plot, found, head)
    if args.write:
        for part, text in texts.items():
            kind = f"size {args.size}" if part == "translation" else f"clip {args.clip}"
            write_section(args.write, f"models {part} {args.device} {args.dtype} {kind}", text)


if __name__ == "__main__":
    sys.exit(run_command(main, interrupted=INTERRUPTED))
