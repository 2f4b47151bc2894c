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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [path for path in (str(HERE), str(HERE.parent)) if path not in sys.path]
logging.basicConfig(level=logging.WARNING)

import torch  # noqa: E402
from _benchmark import layers as encoder_layers  # noqa: E402
from _benchmark.columns import cell, timed_rows, versions  # noqa: E402
from _benchmark.layers import FairseqLayer, Layer, OurLayer, layer_runner  # noqa: E402
from _benchmark.models_options import PARTS, parse  # noqa: E402
from _benchmark.peers import PEERS  # noqa: E402
from _benchmark.pictures import draw_ratios  # noqa: E402
from _benchmark.report import machine, write_csv, write_section  # noqa: E402
from _benchmark.timing import peak_mebibytes  # noqa: E402
from _benchmark.translation import (  # noqa: E402
    FAIRSEQ,
    Translation,
    generation,
    training_step,
)
from _prepare.command import run_command  # noqa: E402

INPUT_SCHEMES = {"sinusoidal", "learned", "sentence"}  # in a layer they are `none`
TOGETHER = 5  # models in memory beside the baseline: base ones take a gigabyte each


def timing(args: argparse.Namespace) -> tuple[torch.device, int, float]:
    """Where, how often and how long."""
    return torch.device(args.device), args.rounds, args.seconds


# --- translation ---------------------------------------------------------------------------------


def measure_translation(args: argparse.Namespace) -> Iterator[dict]:
    """Rows of whole models; the baseline is timed again with each handful of schemes."""
    setting = Translation(
        args.size, args.vocabulary, args.rows, args.length, args.beam, args.dropout,
        getattr(torch, args.dtype), torch.device(args.device),
    )  # fmt: skip
    makers = {"train": training_step, "generate": generation}
    for mode in (mode for mode in PARTS["translation"] if mode in args.modes):
        for start in range(0, len(args.schemes), TOGETHER):
            names = [FAIRSEQ, *args.schemes[start : start + TOGETHER]]
            runs = {name: makers[mode](name, setting) for name in names}
            rows = timed_rows(mode, FAIRSEQ, runs, *timing(args))
            yield from rows if start == 0 else rows[1:]


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
    schemes = [name for name in args.schemes if name not in INPUT_SCHEMES | {baseline}]
    makers = {baseline: (lambda setting: OurLayer(baseline, setting), True)}
    if "fairseq" in args.peers:
        makers["fairseq"] = (FairseqLayer, True)
    for name in schemes:
        makers[name] = (lambda setting, name=name: OurLayer(name, setting), True)
    for peer in PEERS:
        if peer.package in args.peers and peer.absence(torch.device(args.device)) is None:
            makers[peer.name] = (peer.build, peer.time_first)
    return makers


def measure_layers(args: argparse.Namespace) -> Iterator[dict]:
    """Rows of layers at every length."""
    device = torch.device(args.device)
    for length in args.lengths:
        setting, built = layer_setting(args, length), {}
        for name, (build, time_first) in layer_makers(args).items():
            torch.manual_seed(1)
            built[name] = (build(setting), time_first)
        for mode in (mode for mode in PARTS["layers"] if mode in args.modes):
            runs = {
                name: layer_runner(layer, setting, "train" if mode == "memory" else mode, first)
                for name, (layer, first) in built.items()
            }
            if mode != "memory":
                column = f"{mode} {length}"
                rows = timed_rows(column, encoder_layers.BASELINE, runs, *timing(args))
                weights = {name: count(layer) for name, (layer, _) in built.items()}
                yield from ({**row, "parameters": weights[row["name"]]} for row in rows)
                continue
            for name, run in runs.items():
                peak = peak_mebibytes(run, device)
                yield {"name": name, "column": f"memory {length}", "MiB": peak}


def count(layer: torch.nn.Module) -> int:
    """Parameters."""
    return sum(part.numel() for part in layer.parameters())


# --- the report ----------------------------------------------------------------------------------


def table(rows: list[dict], heading: str, baseline: str) -> str:
    """A markdown table: a row a candidate, a column a measurement."""
    cells = {(row["name"], row["column"]): row for row in rows}
    names = list(dict.fromkeys(row["name"] for row in rows))
    columns = list(dict.fromkeys(row["column"] for row in rows))
    counts = {row["name"]: row["parameters"] for row in rows if "parameters" in row}
    heads = [*columns, "parameters"] if counts else columns
    like = {peer.name: f"{peer.name}, as `{peer.like}`" for peer in PEERS}
    lines = [f"| {heading} | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name in names:
        parts = [cell(cells.get((name, column)), baseline) for column in columns]
        parts += [f"{counts[name]:,}"] if counts else []
        lines.append(f"| {like.get(name, f'`{name}`')} | {' | '.join(parts)} |")
    return "\n".join(lines)


def texts(args: argparse.Namespace, rows: dict[str, list[dict]], head: str) -> dict[str, str]:
    """Each part's description and table."""
    how = "Median relative to {}'s (in brackets: minimum to minimum) ± half the quartile distance."
    found = {}
    if rows.get("translation"):
        libraries = versions(["fairseq-fixed", "fairseq"])
        found["translation"] = (
            f"{head}; {libraries}; size {args.size}, {args.rows} sentences of "
            f"{args.length * 3 // 4}-{args.length} tokens, {args.vocabulary} words, {args.dtype}, "
            f"dropout {args.dropout:g}; generate: beam {args.beam}, {args.length} tokens. "
            f"{how.format('fairseq')}\n\n{table(rows['translation'], 'model', FAIRSEQ)}"
        )
    if rows.get("layers"):
        libraries = versions(["fairseq-fixed", "fairseq", *sorted({p.package for p in PEERS})])
        absent = dict.fromkeys(
            reason
            for peer in PEERS
            if (reason := peer.absence(torch.device(args.device))) is not None
        )
        found["layers"] = (
            f"{head}; {libraries}; {args.width} wide, {args.ffn} in the feed-forward layer, "
            f"{args.heads} heads, {args.tokens} tokens a batch, clip {args.clip}, {args.dtype}, "
            f"dropout {args.dropout:g}. {how.format('`none`')} Memory: peak of a training step "
            f"beyond weights.{' Not measured: ' if absent else ''}{'; '.join(absent)}"
            f"{'.' if absent else ''}\n\n{table(rows['layers'], 'layer', encoder_layers.BASELINE)}"
        )
    return found


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
    rows = {part: list(measures[part](args)) for part in args.parts}
    found = texts(args, rows, head)
    print("\n" + "\n\n".join(found.values()))
    if args.csv:
        write_csv(args.csv, [{"part": part, **row} for part in rows for row in rows[part]])
    if args.plot:
        picture(args.plot, rows, head)
    if args.write:
        for part, text in found.items():
            kind = f"size {args.size}" if part == "translation" else f"clip {args.clip}"
            write_section(args.write, f"models {part} {args.device} {args.dtype} {kind}", text)


if __name__ == "__main__":
    sys.exit(run_command(main))
