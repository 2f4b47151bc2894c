#!/usr/bin/env python
"""How much slower is attention with positions than attention without?

    python scripts/benchmark_attention.py                              # some minutes on a CPU
    python scripts/benchmark_attention.py --lengths 512,2048 --batch 4 --naive --bar
    python scripts/benchmark_attention.py --device cuda --dtype bfloat16 --lengths all
    python scripts/benchmark_attention.py --layer                      # a whole BERT layer

First every candidate is held against the papers' formula in fp64, values and gradients.  Then all
candidates are timed in one process, in turns, each only once the machine is idle otherwise.  The
tables have ratios of medians to torch's scaled_dot_product_attention without positions (in
brackets: of minima), and the spread.  Needs torch and relpos_fairseq's positions, schemes and
attention: no fairseq.  --plot needs matplotlib, and progress is shown where tqdm is installed.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from relpos_fairseq.attention import BACKENDS
from relpos_fairseq.benchmarks.bar import MEMORY, MEMORY_LENGTH
from relpos_fairseq.benchmarks.candidates import MODES
from relpos_fairseq.benchmarks.deberta_h200 import published_table, set_shape
from relpos_fairseq.benchmarks.options import backends_of, check_run, lengths_of
from relpos_fairseq.benchmarks.plots import check_plot, plot_ratios
from relpos_fairseq.benchmarks.report import INTERRUPTED, Log, machine, write_section
from relpos_fairseq.benchmarks.settings import EVERY_LENGTH, INPUT_SCHEMES, Setting
from relpos_fairseq.benchmarks.tables import backends_used, misses, tables
from relpos_fairseq.benchmarks.turns import Run, measure
from relpos_fairseq.engine.command import run_command
from relpos_fairseq.schemes import parse_hybrid, scheme_names

logging.basicConfig(level=logging.WARNING)

OURS = [name for name in BACKENDS if name != "reference"]  # which is --naive


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line.

    Raises:
        ValueError: a value that cannot be.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    what.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    what.add_argument("--schemes", default="all", help="names separated by commas, or all")
    what.add_argument("--lengths", default="128,512,2048", help="T = S, by commas, or all")
    what.add_argument("--tokens", type=int, help="batch = tokens / length; 2048, on a GPU 16384")
    what.add_argument("--batch", type=int, help="this batch at every length, whatever --tokens is")
    what.add_argument("--heads", type=int, default=12)
    what.add_argument("--head-dim", type=int, default=64)
    what.add_argument("--clip", type=int, default=16, help="clip distance; 0: as --unclipped")
    what.add_argument("--unclipped", action="store_true", help="tables as long as the input")
    what.add_argument("--causal", action="store_true")
    what.add_argument("--modes", default="train,forward", help=f"of {', '.join(MODES)}")
    what.add_argument("--layer", action="store_true", help="a whole BERT layer")
    beside = parser.add_argument_group("beside it")
    beside.add_argument("--naive", action="store_true", help="the papers' formula too")
    beside.add_argument("--backends", default="auto", help=f"a row each: of {', '.join(OURS)}")
    beside.add_argument("--flex", action="store_true", help="FlexAttention too; compiles long")
    beside.add_argument("--bar", action="store_true", help="say what is known to be possible")
    beside.add_argument("--published", action="store_true", help="DeBERTa as published on an H200")
    how = parser.add_argument_group("how")
    how.add_argument("--rounds", type=int, default=7, help="samples of each candidate")
    how.add_argument("--seconds", type=float, default=20.0, help="of a column, about")
    how.add_argument("--threads", type=int, default=torch.get_num_threads())
    out = parser.add_argument_group("what is written")
    out.add_argument("--csv", type=Path, help="all rows, as they come")
    out.add_argument("--resume", action="store_true", help="measure what --csv does not have yet")
    out.add_argument("--plot", type=Path, help="ratios over length: FILE.png or FILE.svg")
    out.add_argument("--write", type=Path, help="put the tables into this markdown file")
    args = parser.parse_args(argv)
    _check(args)
    return args


def _check(args: argparse.Namespace) -> None:
    """Turn lists into lists, and refuse what cannot be."""
    text = args.lengths
    args.lengths = list(EVERY_LENGTH) if text == "all" else lengths_of(text, ", or all")
    args.modes = args.modes.split(",")
    for mode in args.modes:
        if mode not in MODES:
            raise ValueError(f"--modes must be of {', '.join(MODES)}, got {mode}")
    args.backends = backends_of(args.backends, OURS)
    names = [name for name in scheme_names() if name not in INPUT_SCHEMES[1:]]
    args.schemes = names if args.schemes == "all" else args.schemes.split(",")
    for name in args.schemes:
        parse_hybrid(name)
    args.clip = 0 if args.unclipped else args.clip
    if args.tokens is None:
        args.tokens = 2048 if args.device == "cpu" else 16384
    if args.published:
        set_shape(args)
    for name in ("tokens", "batch", "heads", "head_dim", "rounds", "threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be >= 1, got {value}")
    if min(args.lengths) < 1 or args.clip < 0:
        raise ValueError(f"--lengths must be >= 1 and --clip >= 0, got {text} and {args.clip}")
    check_run(args)
    if args.layer and "decode" in args.modes:
        raise ValueError("--layer does not decode: leave decode out of --modes")
    if args.plot:
        check_plot(args.plot)


def settings_of(args: argparse.Namespace) -> list[Setting]:
    """One setting a length, shortest first."""
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    return [
        Setting(
            args.batch or max(args.tokens // length, 1), args.heads, length, args.head_dim,
            args.clip, args.causal, dtype, device,
        )
        for length in sorted(set(args.lengths))
    ]  # fmt: skip


def run(argv: Sequence[str] | None = None) -> None:
    """Check, time, print, write."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    settings = settings_of(args)
    device = settings[0].device
    words = machine(device, args.threads)
    where = {"machine": words.split(";")[0].replace(",", ""), "torch": torch.__version__}
    found = Run(args, where, Log(args.csv, args.resume), lambda text: print(text, flush=True))
    found.say(words)
    for setting in settings:
        measure(found, setting)
    if found.checked:
        found.say(
            f"{found.checked} candidates right against fp64, values and gradients; largest error "
            f"{found.worst[0]:.2f} of what the formula in {args.dtype} may err ({found.worst[1]})"
        )
    rows = [
        row
        for setting in settings
        for mode in args.modes
        for row in found.log.those(found.column(setting, mode))
    ]
    text = report(found, settings, rows, words)
    print(f"\n{text}")
    if args.plot:
        plot_ratios(args.plot, rows, text.split(". Median")[0])
    if args.write:
        write_section(args.write, key_of(args), text)


def report(run: Run, settings: list[Setting], rows: list[dict], words: str) -> str:
    """What was measured, the tables, and remarks."""
    args, first = run.args, settings[0]
    clip = f"clip {args.clip}" if args.clip else "unclipped"
    what = "a BERT layer" if args.layer else "attention"
    parts = [
        f"{words}; {what}, {size_of(args)}, {first.heads} heads of {first.head_dim}, {args.dtype}, "
        f"{clip}, {'causal' if args.causal else 'both directions'}. Median relative to the first "
        f"row's (in brackets: minimum to minimum) ± half the quartile distance."
        f"{backends_used(rows)}",
        tables(rows, args.bar),
    ]
    if args.bar:
        missed, known = misses(rows)
        parts.append(
            f"PASS and OVER: minima against what is known to be possible; {known - missed} of "
            f"{known} pass. Memory: {MEMORY} times at {MEMORY_LENGTH}, beside the tables and their "
            f"gradients."
        )
    if args.published:
        parts.append(published_table(rows, words.split(";")[0]))
    if run.notes:
        parts.append("\n".join(f"- {note}" for note in run.notes))
    return "\n\n".join(parts)


def size_of(args: argparse.Namespace) -> str:
    """How large a batch is."""
    return f"batch {args.batch}" if args.batch else f"{args.tokens} tokens a batch"


def key_of(args: argparse.Namespace) -> str:
    """The name of a command's section in a markdown file."""
    if args.published:
        return "published deberta"
    parts = [args.device, args.dtype, "causal" if args.causal else "both directions"]
    parts += [f"clip {args.clip}" if args.clip else "unclipped", "layer" if args.layer else ""]
    parts.append("FlexAttention" if args.flex else "")
    parts.append("by " + " ".join(args.backends) if args.backends != ["auto"] else "")
    if set(args.modes) & {"decode", "memory"}:
        parts.append(" ".join(args.modes))
    parts.append(f"lengths {','.join(str(length) for length in sorted(set(args.lengths)))}")
    parts.append(size_of(args))
    return " ".join(part for part in parts if part)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 after one line that says what is wrong."""
    return run_command(run, argv, INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
