"""Measure what positions cost in whole models and layers, beside fairseq's own and other libraries'."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from relpos_fairseq.lab.benchmarks import layers
from relpos_fairseq.lab.benchmarks.layers import PACKAGES, PEERS, LayerSetting, OurLayer, fairseq_layer, layer_runner
from relpos_fairseq.lab.benchmarks.measurement import (
    HOW,
    RowLog,
    add_times,
    check_plot,
    draw_bars,
    machine,
    peak_mebibytes,
    table,
    time_cell,
    timed_rows,
    versions,
    write_section,
)
from relpos_fairseq.lab.benchmarks.whole_models import (
    FAIRSEQ,
    GAINS,
    TranslationSetting,
    count_parameters,
    generation,
    translation_training_step,
)
from relpos_fairseq.lab.benchmarks.workload import Options, chosen_of, lengths_of, prepare_run, set_labels, setting_of
from relpos_fairseq.schemes import in_attention

TOGETHER = 5  # models in memory beside the baseline: base ones take a gigabyte each
PARTS = {"translation": ("train", "generate"), "layers": ("train", "forward", "memory")}
MODES = ("train", "generate", "forward", "memory")
BASELINES = {"translation": FAIRSEQ, "layers": layers.BASELINE}


def benchmark(args: Options) -> None:
    """Measure each part, print its table, and write it where asked."""
    device = check_arguments(args)
    head = machine(device, args.threads)
    print(head, flush=True)
    measures = {"translation": measure_translation, "layers": measure_layers}
    log, found, texts = RowLog(args.csv, args.resume), {}, {}
    for part in args.parts:
        words = describe(part, args, head)
        where = {"setting": f"{part}: {words}"}
        measures[part](args, log, where)
        # A continued file may have more modes than this command line asks for.
        rows = [row for row in log.those(where) if row["column"].split()[0] in args.modes]
        found[part] = rows
        texts[part] = f"{words}\n\n{part_table(rows, part)}"
        print(f"\n{texts[part]}\n", flush=True)
    if args.plot:
        plot_ratios(args.plot, found, head)
    if args.write:
        for part, text in texts.items():
            batch = f"size {args.size} {args.batch_size} x {args.length}"
            kind = batch if part == "translation" else f"clip {args.position_clip_distance}"
            write_section(args.write, f"models {part} {args.device} {args.dtype} {kind}", text)


def check_arguments(args: Options) -> torch.device:
    """Turn texts into lists, refuse impossible values, and return the device."""
    packages = [FAIRSEQ, *PACKAGES]
    args.parts = chosen_of("parts", args.parts, list(PARTS))
    args.modes = chosen_of("modes", args.modes, MODES)
    words = {"all": packages, "none": []}
    args.peers = words[args.peers] if args.peers in words else chosen_of("peers", args.peers, packages)
    for part in args.parts:
        if not set(PARTS[part]) & set(args.modes):
            raise ValueError(
                f"--parts {part} has the modes {', '.join(PARTS[part])}, got --modes {','.join(args.modes)}"
            )
    args.lengths = lengths_of(args.lengths)
    if args.width % args.heads:
        raise ValueError(f"--width {args.width} must be a multiple of --heads {args.heads}")
    if not 0 <= args.dropout < 1:
        raise ValueError(f"--dropout must be in [0, 1), got {args.dropout}")
    set_labels(args)
    check_plot(args.plot)
    return prepare_run(args)


# ---------------------------------------------------------------------------------------------------------------------
# Translation.


def measure_translation(args: Options, log: RowLog, where: dict) -> None:
    """Add times of whole models to a log; the baseline is timed again with each handful of others."""
    setting = setting_of(TranslationSetting, args)
    makers = {"train": translation_training_step, "generate": generation}
    for mode in (mode for mode in PARTS["translation"] if mode in args.modes):
        labels = [*(GAINS if mode == "train" else ()), *args.labels]
        make = partial(makers[mode], setting=setting)
        add_times(log, where | {"column": mode}, FAIRSEQ, labels, TOGETHER, make, args)


# ---------------------------------------------------------------------------------------------------------------------
# Layers.


def layer_makers(args: Options) -> dict[str, tuple[Callable[[LayerSetting], object], bool]]:
    """Return for each row's name a function that builds its layer, and whether the layer takes (T, B, E)."""
    names = [label for label in args.labels if in_attention(label.split(", ")[0])]
    names = dict.fromkeys([layers.BASELINE, *names])
    ours = {name: (lambda setting, name=name: OurLayer(name, setting), True) for name in names}
    baseline = {layers.BASELINE: ours.pop(layers.BASELINE)}
    fairseqs = {FAIRSEQ: (fairseq_layer, True)} if FAIRSEQ in args.peers else {}
    device = torch.device(args.device)
    peers = {
        peer.name: (peer.layer, peer.time_first)
        for peer in PEERS
        if peer.package in args.peers and peer.absence(device) is None
    }
    return baseline | fairseqs | ours | peers


def measure_layers(args: Options, log: RowLog, where: dict) -> None:
    """Add times and memory of layers to a log, at every length."""
    makers = layer_makers(args)
    modes = [mode for mode in PARTS["layers"] if mode in args.modes]
    for length in args.lengths:
        columns = {mode: where | {"column": f"{mode} {length}"} for mode in modes}
        missing = [mode for mode in modes if log.lacks(columns[mode], makers)]
        batch, built = max(args.max_tokens // length, 1), {}
        setting = setting_of(LayerSetting, args, batch=batch, length=length, clip=args.position_clip_distance)
        for name, (build, time_first) in makers.items() if missing else ():
            torch.manual_seed(1)
            built[name] = (build(setting), time_first)
        for mode in missing:
            log.add(columns[mode], layer_rows(args, setting, built, mode))


def layer_rows(args: Options, setting: LayerSetting, built: dict[str, tuple], mode: str) -> list[dict]:
    """Return a row for each layer: its peak memory, or its times and parameters."""
    runs = {
        name: layer_runner(layer, setting, "train" if mode == "memory" else mode, time_first)
        for name, (layer, time_first) in built.items()
    }
    if mode == "memory":
        return [{"name": n, "MiB": peak_mebibytes(run, setting.device)} for n, run in runs.items()]
    baseline, column = layers.BASELINE, f"{mode} {setting.length}"
    timed = timed_rows(column, baseline, runs, args.rounds, args.seconds)
    return [{**row, "parameters": count_parameters(built[row["name"]][0])} for row in timed]


# ---------------------------------------------------------------------------------------------------------------------
# The report.


def part_table(rows: list[dict], part: str) -> str:
    """Return a part's table: a row for each candidate, a column for each measurement."""
    cells = {(row["name"], row["column"]): row for row in rows}
    columns = list(dict.fromkeys(row["column"] for row in rows))
    counts = {row["name"]: row["parameters"] for row in rows if "parameters" in row}
    like = {peer.name: f"{peer.name}, as `{peer.like}`" for peer in PEERS}
    lines = []
    for name in dict.fromkeys(row["name"] for row in rows):
        texts = [_cell(cells.get((name, column)), part) for column in columns]
        texts += [f"{counts[name]:,}"] if counts else []
        lines.append([like.get(name, f"`{name}`"), *texts])
    return table([part, *columns, *(["parameters"] if counts else [])], lines)


def _cell(row: dict | None, part: str) -> str:
    if row is None:
        return "-"
    return f"{row['MiB']:.0f} MiB" if "MiB" in row else time_cell(row, BASELINES[part])


def describe(part: str, args: Options, head: str) -> str:
    """Return machine, versions and sizes of a part, in words."""
    libraries = versions(["fairseq-fixed", "fairseq"])
    if part == "translation":
        return (
            f"{head}; {libraries}; size {args.size}, {args.batch_size} sentences of "
            f"{args.length * 3 // 4}-{args.length} tokens, {args.vocab_size} words, {args.dtype}, "
            f"dropout {args.dropout:g}; train: fairseq's adam and label_smoothed_cross_entropy in "
            f"every row that names no other; generate: beam {args.beam}, {args.length} tokens. "
            f"{HOW.format('fairseq')}"
        )
    packages = versions(sorted(PACKAGES))
    reasons = (peer.absence(torch.device(args.device)) for peer in PEERS)
    absent = "; ".join(dict.fromkeys(reason for reason in reasons if reason is not None))
    return (
        f"{head}; {libraries}{', ' if packages else ''}{packages}; {args.width} wide, {args.ffn} "
        f"in the feed-forward layer, {args.heads} heads, {args.max_tokens} tokens a batch, clip "
        f"{args.position_clip_distance}, {args.dtype}, dropout {args.dropout:g}. {HOW.format('`none`')} Memory: "
        f"peak of a training step beyond weights.{' Not measured: ' if absent else ''}{absent}"
        f"{'.' if absent else ''}"
    )


def plot_ratios(path: Path, rows: dict[str, list[dict]], head: str) -> None:
    """Draw the ratios of all parts as bars."""
    panels: dict[str, dict[str, float]] = {}
    for part, found in rows.items():
        for row in found:
            if "ratio" in row:
                panels.setdefault(f"{part}: {row['column']}", {})[row["name"]] = row["ratio"]
    draw_bars(path, panels, head)
