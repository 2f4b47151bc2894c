"""Tables of attention's rows as markdown, beside what is known to be possible and was published."""

from __future__ import annotations

import argparse

from relpos_fairseq.benchmarks.bar import MEMORY, MEMORY_LENGTH, reached, target
from relpos_fairseq.benchmarks.candidates import BASELINE
from relpos_fairseq.benchmarks.published import LAYER
from relpos_fairseq.benchmarks.report import HOW, table, time_cell, verdict
from relpos_fairseq.benchmarks.settings import scheme_and_backend

TITLES = {
    "train": "Forward and backward pass",
    "forward": "Forward pass",
    "decode": "One step of decoding",
    "memory": "Peak memory of training; of a forward pass",
}


def report(args: argparse.Namespace, rows: list[dict], notes: list[str], machine: str) -> str:
    """Return what was measured, the tables of all settings and modes, and remarks for the foot."""
    clip = f"clip {args.clip}" if args.clip else "unclipped"
    what = "a BERT layer" if args.layer else "attention"
    parts = [
        f"{machine}; {what}, {size_of(args)}, {args.heads} heads of {args.head_dim}, {args.dtype}, "
        f"{clip}, {'causal' if args.causal else 'both directions'}. "
        f"{HOW.format('the first row')}{backends_used(rows)}",
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
        parts.append(published_table(rows, machine.split(";")[0]))
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts)


def size_of(args: argparse.Namespace) -> str:
    """Return how large a batch is, in words."""
    return f"batch {args.batch}" if args.batch else f"{args.tokens} tokens a batch"


def key_of(args: argparse.Namespace) -> str:
    """Return the name of a command's section in a markdown file."""
    if args.published:
        return "published"
    parts = [args.device, args.dtype, "causal" if args.causal else "both directions"]
    parts += [f"clip {args.clip}" if args.clip else "unclipped", "layer" if args.layer else ""]
    parts.append("FlexAttention" if args.flex else "")
    parts.append(args.isa or "")
    parts.append("by " + " ".join(args.backends) if args.backends != ["auto"] else "")
    if set(args.modes) & {"decode", "memory"}:
        parts.append(" ".join(args.modes))
    parts.append(f"lengths {','.join(str(length) for length in sorted(set(args.lengths)))}")
    parts.append(size_of(args))
    return " ".join(part for part in parts if part)


def by_place(rows: list[dict]) -> dict[tuple, dict]:
    """Return rows by (name, length, mode)."""
    return {(row["name"], row["length"], row["mode"]): row for row in rows}


def tables(rows: list[dict], bar: bool = False) -> str:
    """Return a table a mode: a row a candidate, a column a length; with `bar`, what is possible."""
    cells = by_place(rows)
    names, modes = (list(dict.fromkeys(row[key] for row in rows)) for key in ("name", "mode"))
    lengths = sorted({row["length"] for row in rows})
    texts = []
    for mode in [mode for mode in TITLES if mode in modes]:
        lines = []
        for name in sorted(names, key=lambda name: _order(name, names)):
            found = [cells.get((name, length, mode)) for length in lengths]
            if any(found):
                lines.append([name, *(_cell(row, cells, bar) for row in found)])
        texts.append(table([TITLES[mode], *(f"{length:,}" for length in lengths)], lines))
    return "\n\n".join(texts)


def _order(name: str, names: list[str]) -> tuple[int, str]:
    """Each scheme with its peers below it, schemes as they came."""
    scheme = name.split(",")[0]
    return names.index(scheme) if scheme in names else len(names), name


def _cell(row: dict | None, cells: dict[tuple, dict], bar: bool) -> str:
    if row is None:
        return "-"
    if row["mode"] != "memory":
        text = time_cell(row, BASELINE, digits=2)
    elif "MiB" not in row or row["MiB"] != row["MiB"]:
        return "-"
    else:
        text = f"{_short(row['MiB'])}; {_short(row['forward_MiB'])} MiB"
        if row["name"] != BASELINE and "ratio" in row:
            text += f" ({row['ratio']:.2f})"
    limit = target(row, cells) if bar else None
    return text if limit is None else text + verdict(reached(row, cells), limit)


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"


def backends_used(rows: list[dict]) -> str:
    """Return which backends `auto` took, in words: first the one that most rows have."""
    found: dict[str, dict[str, list[int]]] = {}
    for row in rows:
        if row.get("backend") and scheme_and_backend(row["name"])[1] == "auto":
            lengths = found.setdefault(row["backend"], {}).setdefault(row["name"], [])
            lengths += [row["length"]] * (row["length"] not in lengths)
    by_size = sorted(found, key=lambda name: -sum(map(len, found[name].values())))
    words = []
    for number, backend in enumerate(by_size):
        names: dict[str, list[str]] = {}
        for name, lengths in found[backend].items():
            names.setdefault(", ".join(map(str, sorted(lengths))), []).append(name)
        where = "; ".join(f"{', '.join(these)} at {lengths}" for lengths, these in names.items())
        words.append(f"`{backend}`" if number == 0 else f"`{backend}` ({where})")
    return f" Evaluated by {', '.join(words)}." if words else ""


def misses(rows: list[dict]) -> tuple[int, int]:
    """Return how many rows exceed their target, and how many have one."""
    cells = by_place(rows)
    limits = [(row, target(row, cells)) for row in rows]
    known = [(row, limit) for row, limit in limits if limit is not None]
    return sum(reached(row, cells) > limit for row, limit in known), len(known)


def published_table(rows: list[dict], machine: str) -> str:
    """Return what others published of a layer, then what `rows` say of ours at that length."""
    length, scheme = LAYER["length"], LAYER["scheme"]
    heads = [f"{LAYER['source']}, length {length}, 16k tokens, bf16"]
    heads += ["forward, ms", "forward + backward, ms", "GiB"]
    theirs = f"published, on {LAYER['machine']}; not measured here"
    lines = [[f"{name}: {theirs}", *(f"{number:g}" for number in numbers)] for name, numbers in LAYER["rows"].items()]
    found = {
        (row["name"], row["mode"]): row
        for row in rows
        if row["length"] == length and row["view"] == "layer" and row["device"] == "cuda"
    }
    for name in (scheme, f"{scheme}, naive", BASELINE):
        forward, train, memory = (found.get((name, mode), {}) for mode in ("forward", "train", "memory"))
        gibibytes = memory["MiB"] / 1024 if "MiB" in memory else None
        numbers = (forward.get("ms"), train.get("ms"), gibibytes)
        cells = ["-" if number is None else f"{number:.3g}" for number in numbers]
        lines.append([f"{name}: measured here, on {machine}", *cells])
    return table(heads, lines)
