"""Measure what every position scheme adds to BERT: parameters, time, memory, and rows that fit a memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from relpos_fairseq.lab.benchmarks.measurement import (
    RowLog,
    add_each,
    add_times,
    machine,
    peak_mebibytes,
    table,
    time_cell,
    versions,
    write_section,
)
from relpos_fairseq.lab.benchmarks.whole_models import (
    MaskedLMSetting,
    count_parameters,
    masked_lm,
    masked_lm_inference,
    masked_lm_training_step,
    sizes_of,
)
from relpos_fairseq.lab.benchmarks.workload import (
    PLAIN,
    Options,
    clip_text,
    lengths_of,
    prepare_run,
    scheme_and_backend,
    set_labels,
    setting_of,
)
from relpos_fairseq.schemes import DEFAULT

BASELINE = DEFAULT["masked_lm"]  # BERT's own positions
BERT_WORDS, BERT_POSITIONS = 30522, 512
MODES = {"train": masked_lm_training_step, "inference": masked_lm_inference}
TOGETHER = 6  # models in memory beside the baseline


def benchmark(args: Options) -> None:
    """Count parameters, measure time and memory, print the tables, and write them where asked."""
    device = check_arguments(args)
    head = machine(device, args.threads)
    print(head, flush=True)
    words = describe(args, head)
    log, where = RowLog(args.csv, args.resume), {"setting": words}
    add_parameter_rows(args, log, where)
    measure(args, log, where)
    for length in args.lengths if args.fit else ():
        count_rows(args.labels, step_of(args, length), args.fit, log, where)
    text = report(args, log.those(where), words)
    print(f"\n{text}", flush=True)
    if args.write:
        write_section(args.write, f"costs {args.size} {args.device} {args.dtype}", text)


def check_arguments(args: Options) -> torch.device:
    """Turn texts into lists, refuse impossible values, and return the device."""
    args.lengths = lengths_of(args.lengths)
    most = sizes_of(args.size)["encoder_layers"]
    if args.layers > most:
        raise ValueError(f"--layers must be <= {most} with --size {args.size}, got {args.layers}")
    if not 0 <= args.dropout < 1:
        raise ValueError(f"--dropout must be in [0, 1), got {args.dropout}")
    set_labels(args)
    return prepare_run(args)


def step_of(args: Options, length: int) -> MaskedLMSetting:
    """Return what is measured at a length."""
    most = max(BERT_POSITIONS, length)
    return setting_of(MaskedLMSetting, args, positions=most, length=length, clip=args.position_clip_distance)


# ---------------------------------------------------------------------------------------------------------------------
# Measuring.


def add_parameter_rows(args: Options, log: RowLog, where: dict) -> None:
    """Add to a log how many parameters positions add to the whole model, a row for each scheme."""
    column = where | {"column": "parameters"}
    if not log.lacks(column, args.schemes):
        return
    whole = replace(step_of(args, args.lengths[0]), layers=0, vocab_size=BERT_WORDS)
    whole = replace(whole, positions=BERT_POSITIONS, device=torch.device("cpu"))
    without = count_parameters(masked_lm(PLAIN, whole))

    def parameters(scheme: str) -> dict:
        return {"parameters": count_parameters(masked_lm(scheme, whole)) - without, "without": without}

    add_each(log, column, args.schemes, parameters)


def measure(args: Options, log: RowLog, where: dict) -> None:
    """Add time and memory to a log; the baseline is timed again with each handful of schemes."""
    others = [label for label in args.labels if label != BASELINE]
    for length in args.lengths:
        what = step_of(args, length)
        for mode, make in MODES.items():
            column = where | {"column": f"{mode} {length}"}
            add_times(log, column, BASELINE, others, TOGETHER, partial(make, setting=what), args)
        column = where | {"column": f"memory {length}"}
        add_each(log, column, [BASELINE, *others], partial(memory_of_training, what=what))


def memory_of_training(scheme: str, what: MaskedLMSetting) -> dict[str, float]:
    """Return the peak memory of a training step beyond weights and Adam's state: its column of a row."""
    return {"MiB": peak_mebibytes(masked_lm_training_step(scheme, what), what.device)}


def count_rows(labels: Sequence[str], what: MaskedLMSetting, limit: int, log: RowLog, where: dict) -> None:
    """Add to a log how many rows a training step holds in `limit` MiB (Huang2020, section 3.6)."""

    def fitting(scheme: str) -> dict:
        own = weights(scheme, what)

        def needed(rows: int) -> float:
            return own + memory_of_training(scheme, replace(what, batch_size=rows))["MiB"]

        return {"rows": most_rows(needed, limit)}

    add_each(log, where | {"column": f"rows in {limit} MiB, {what.length}"}, labels, fitting)


def weights(scheme: str, what: MaskedLMSetting) -> float:
    """Return the MiB of weights, gradients and Adam's two moments."""
    return 4 * count_parameters(masked_lm(scheme, what)) * what.dtype.itemsize / 2**20


def most_rows(needed: Callable[[int], float], limit: float, most: int = 1 << 16) -> int:
    """Return the largest number of rows that needs no more than `limit` MiB, found by bisection.

    Out of memory counts as too much; the search ends at `most`.
    """

    def fits(rows: int) -> bool:
        try:
            return needed(rows) <= limit
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return False

    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# ---------------------------------------------------------------------------------------------------------------------
# The report.


def describe(args: Options, head: str) -> str:
    """Return machine, versions and sizes, in words."""
    size = sizes_of(args.size)
    whole = size["encoder_layers"]
    timed = args.layers or whole
    return (
        f"{head}; {versions(['fairseq-fixed', 'fairseq'])}. BERT-{args.size}: {whole} layers, "
        f"{size['encoder_embed_dim']} wide, {size['encoder_attention_heads']} heads. Parameters: "
        f"what positions add to the whole model, tables of {BERT_POSITIONS} positions. Timed are "
        f"**{timed} of {whole} layers** and {args.vocab_size:,} words, {args.batch_size} rows of "
        f"{', '.join(map(str, args.lengths))} tokens, {args.dtype}, {clip_text(args)}, dropout "
        f"{args.dropout:g}; relative to `{BASELINE}`: median (minimum to minimum) ± half the "
        f"quartile distance; memory: peak of a training step beyond weights and Adam's state."
    )


def report(args: Options, rows: list[dict], words: str) -> str:
    """Return description and tables."""
    without = next(row["without"] for row in rows if "without" in row)
    total = f"Without positions the model has {without:,} parameters ({BERT_WORDS:,} words)."
    parts = [f"{words} {total}", cost_table(rows, args.labels), steps_table(rows, args.labels)]
    return "\n\n".join(part for part in parts if part)


def cost_table(rows: list[dict], labels: Sequence[str]) -> str:
    """Return parameters and what was measured; a row for each label."""
    cells = {(row["name"], row["column"]): row for row in rows}
    columns = [c for c in dict.fromkeys(row["column"] for row in rows) if c != "parameters"]
    lines = []
    for label in labels:
        scheme, _ = scheme_and_backend(label)
        measured = (_measured(cells.get((label, c)), cells.get((BASELINE, c))) for c in columns)
        lines.append([f"`{label}`", f"{cells[scheme, 'parameters']['parameters']:,}", *measured])
    return table(["`--position-scheme`", "parameters", *columns], lines)


def _measured(row: dict | None, base: dict | None) -> str:
    if row is None:
        return "-"
    if "rows" in row:
        return str(row["rows"])
    if "MiB" in row:
        return f"{row['MiB']:.0f} MiB" if row is base else f"{row['MiB'] / base['MiB']:.2f}"
    return time_cell(row, BASELINE)


def steps_table(rows: list[dict], labels: Sequence[str]) -> str:
    """Return training steps a second beside those without positions; "" where none are timed.

    Shaw et al. 2018 report 7 % fewer, against absolute positions.
    """
    times = {(row["name"], row["column"]): row["ms"] for row in rows if "ms" in row}
    columns = sorted({column for name, column in times if name == PLAIN and "train" in column})
    if not columns:
        return ""
    lines = []
    for label in labels:
        cells = []
        for column in columns:
            own, plain = times.get((label, column)), times[PLAIN, column]
            cells.append("-" if own is None else f"{1000 / own:.2f} ({plain / own - 1:+.0%})")
        lines.append([f"`{label}`", *cells])
    heads = [f"steps/s, {column} (beside `{PLAIN}`)" for column in columns]
    return table(["`--position-scheme`", *heads], lines)
