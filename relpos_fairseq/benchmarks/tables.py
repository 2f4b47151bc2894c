"""Rows of results as markdown."""

from __future__ import annotations

from relpos_fairseq.benchmarks.bar import reached, target
from relpos_fairseq.benchmarks.candidates import BASELINE
from relpos_fairseq.benchmarks.settings import scheme_and_backend

TITLES = {
    "train": "Forward and backward pass",
    "forward": "Forward pass",
    "decode": "One step of decoding",
    "memory": "Peak memory of training; of a forward pass",
}


def by_place(rows: list[dict]) -> dict[tuple, dict]:
    """Rows by (name, length, mode)."""
    return {(row["name"], row["length"], row["mode"]): row for row in rows}


def tables(rows: list[dict], bar: bool = False) -> str:
    """A table a mode: a row a candidate, a column a length.

    Args:
        rows: of one device, type, clip distance.
        bar: say beside each cell whether it meets what is known to be possible.
    """
    cells = by_place(rows)
    names, lengths, modes = (
        list(dict.fromkeys(row[key] for row in rows)) for key in ("name", "length", "mode")
    )
    texts = []
    for mode in [mode for mode in TITLES if mode in modes]:
        heads = [f"{length:,}" for length in sorted(lengths)]
        lines = [f"| {TITLES[mode]} | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
        for name in sorted(names, key=lambda name: _order(name, names)):
            found = [cells.get((name, length, mode)) for length in sorted(lengths)]
            if any(found):
                shown = " | ".join(_cell(row, cells, bar) for row in found)
                lines.append(f"| {name} | {shown} |")
        texts.append("\n".join(lines))
    return "\n\n".join(texts)


def _order(name: str, names: list[str]) -> tuple[int, str]:
    """Each scheme with its peers below it, schemes as they came."""
    scheme = name.split(",")[0]
    return names.index(scheme) if scheme in names else len(names), name


def _cell(row: dict | None, cells: dict[tuple, dict], bar: bool) -> str:
    if row is None:
        return "-"
    if row["mode"] == "memory":
        if "MiB" not in row or row["MiB"] != row["MiB"]:
            return "-"
        text = f"{_short(row['MiB'])}; {_short(row['forward_MiB'])} MiB"
        if row["name"] != BASELINE and "ratio" in row:
            text += f" ({row['ratio']:.2f})"
    elif row["name"] == BASELINE:
        return f"{row['ms']:.2f} ({row['least_ms']:.2f}) ms ±{row['spread']:.0%}"
    else:
        text = f"{row['ratio']:.2f} ({row['least_ratio']:.2f}) ±{row['spread']:.0%}"
    limit = target(row, cells) if bar else None
    if limit is None:
        return text
    return f"{text} {'PASS' if reached(row, cells) <= limit else 'OVER'} {limit:.2f}"


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"


def backends_used(rows: list[dict]) -> str:
    """Which backends `auto` took, in words: first the one that most rows have."""
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
    """How many rows exceed their target, and how many have one."""
    cells = by_place(rows)
    limits = [(row, target(row, cells)) for row in rows]
    known = [(row, limit) for row, limit in limits if limit is not None]
    return sum(reached(row, cells) > limit for row, limit in known), len(known)
