#!/usr/bin/env python
"""Perplexity of a language model by the length of its context and of its memory.

    python scripts/evaluate_length.py CHECKPOINT DATA_BIN --out DIR
        [--lengths 64,128,256] [--mem-lens 0,128,512] [--split valid] [--tokens 20000]

For every length, windows of that many tokens, moved on by half a window (--stride), score the same
predictions: the last --tokens of the split.  For a model with memory, every memory length is
scored too, with segments of the trained length.  By default both go from half to 16 times what was
trained.  Writes length.csv and length.png; finished points are kept, so an interrupted run goes on.
A scheme that cannot read a length is reported so, and so is one that reads it badly, compared with
the trained length, which is always scored.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from relpos_fairseq.engine.command import run_command
from relpos_fairseq.engine.files import atomic_path, read_json, sha256_of, write_json, write_text
from relpos_fairseq.evaluation.language_model import (
    Subject,
    last_targets,
    load_subject,
    score_with_memory,
    score_with_windows,
    show,
)

logging.basicConfig(level=logging.WARNING)  # fairseq reports its own loading otherwise

TIMES = (0.5, 1, 2, 4, 8, 16)
WORSE = 1.05  # perplexity beyond this times that at the trained length: it does not extrapolate
COLUMNS = ("kind", "length", "tokens", "bits", "perplexity", "tokens_per_second", "status")


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate every point, write the table and the picture."""
    options = parse(argv)
    subject = load_subject(options.checkpoint, options.data, options.split)
    if subject.trained_memory is None and options.mem_lens:
        raise ValueError(f"--mem-lens: {subject.name} has no memory; leave it out")
    lengths = chosen(options.lengths or None, "--lengths", 1, subject.trained_length)
    memories = []
    if subject.trained_memory is not None:
        default = [0, *multiples(subject.trained_memory or subject.trained_length)]
        memories = chosen(options.mem_lens, "--mem-lens", 0, subject.trained_memory, default)
    targets = last_targets(subject, min(options.tokens, len(subject.tokens) - 1))
    print(
        f"{subject.name}: {subject.parameters:,} parameters, trained with "
        f"{subject.trained_length} tokens a sample; {len(targets):,} predictions of {options.split}"
    )
    options.out.mkdir(parents=True, exist_ok=True)
    points = Points(options, len(targets))
    for length in lengths:
        points.add("context", length, lambda n=length: context_point(subject, targets, n, options))
    for length in memories:
        points.add("memory", length, lambda n=length: memory_point(subject, targets, n, options))
    rows = judged(points.rows, subject)
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(options.out / "length.csv", text.getvalue())
    draw(rows, subject, options.out / "length.png")
    print(show(rows))
    print(f"wrote {options.out / 'length.csv'} and {options.out / 'length.png'}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("data", type=Path, help="folder of binarised text")
    parser.add_argument("--lengths", type=numbers, help="tokens of context, joined by commas")
    parser.add_argument("--mem-lens", type=numbers, help="memory lengths, joined by commas")
    parser.add_argument("--split", default="valid")
    parser.add_argument("--tokens", type=int, default=20000, help="predictions scored: the last")
    parser.add_argument("--stride", type=int, help="tokens between windows; default: half of each")
    parser.add_argument("--rows", type=int, default=4, help="rows or windows evaluated together")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    for name in ("tokens", "rows", "stride"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be >= 1, got {value}")
    return options


def numbers(text: str) -> list[int]:
    """`64,128` as numbers."""
    return [int(part) for part in text.split(",") if part.strip()]


def multiples(trained: int) -> list[int]:
    """Half to 16 times a trained length."""
    return sorted({max(1, int(trained * times)) for times in TIMES})


def chosen(
    given: list[int] | None, flag: str, least: int, trained: int, default: list[int] | None = None
) -> list[int]:
    """Lengths to score in rising order, the trained one, by which others are judged, among them.

    Args:
        given: those of the command line; None: the default; empty: none at all.
        flag: where they were given.
        least: the shortest that makes sense.
        trained: the length in training.
        default: where none are given; None: half to 16 times the trained one.

    Raises:
        ValueError: one is too short.
    """
    if given is None:
        given = multiples(trained) if default is None else default
    if any(value < least for value in given):
        raise ValueError(f"{flag} must be >= {least}, got {min(given)}")
    return sorted({*given, trained}) if given else []


class Points:
    """Finished points on disk, for one checkpoint, split and setting."""

    def __init__(self, options: argparse.Namespace, tokens: int) -> None:
        """Take up what a run with the same settings left."""
        settings = [sha256_of(options.checkpoint), sha256_of(options.data / f"{options.split}.bin")]
        settings += [options.split, tokens, options.stride, options.rows]
        self.key = hashlib.sha256(repr(settings).encode()).hexdigest()
        self.path = options.out / "points.json"
        old = read_json(self.path) if self.path.exists() else None
        self.done = {} if old is None or old.get("key") != self.key else old["points"]
        self.rows: list[dict] = []

    def add(self, kind: str, length: int, evaluate) -> None:
        """Evaluate a point unless it is there."""
        name = f"{kind} {length}"
        if name not in self.done:
            self.done[name] = {"kind": kind, "length": length, **evaluate()}
            write_json(self.path, {"key": self.key, "points": self.done})
        self.rows.append(dict(self.done[name]))


def context_point(
    subject: Subject, targets: range, length: int, options: argparse.Namespace
) -> dict:
    """Perplexity with windows of a length, or why there is none."""
    if subject.longest is not None and length > subject.longest:
        reason = f"cannot: its table has {subject.longest} positions"
        return {"tokens": 0, "status": reason}
    if length > len(subject.tokens) - 1:
        return {"tokens": 0, "status": f"cannot: the split has {len(subject.tokens) - 1} tokens"}
    stride = min(options.stride or max(1, length // 2), length)
    return described(score_with_windows(subject, targets, length, stride, options.rows))


def memory_point(
    subject: Subject, targets: range, length: int, options: argparse.Namespace
) -> dict:
    """Perplexity with a memory of a length and segments as trained."""
    block = min(subject.trained_length, len(targets))
    return described(score_with_memory(subject, targets, block, length, options.rows))


def described(score) -> dict:
    """A score as a row."""
    return {
        "tokens": score.tokens,
        "bits": round(score.bits, 5),
        "perplexity": round(score.perplexity, 4),
        "tokens_per_second": round(score.speed, 1),
        "status": "ok",
    }


def judged(rows: list[dict], subject: Subject) -> list[dict]:
    """Rows with a status that says where more context makes a model worse than its trained one."""
    trained = {"context": subject.trained_length, "memory": subject.trained_memory}
    for kind, length in trained.items():
        known = [row for row in rows if row["kind"] == kind and row["status"] == "ok"]
        reference = next((row for row in known if row["length"] == length), None)
        for row in known if reference else []:
            times = row["perplexity"] / reference["perplexity"]
            if row["length"] > length and times > WORSE:
                row["status"] = f"does not extrapolate: perplexity x{times:.2f}"
    return [{name: row.get(name, "") for name in COLUMNS} for row in rows]


def draw(rows: list[dict], subject: Subject, path: Path) -> None:
    """Perplexity over length, one panel a kind."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = [kind for kind in ("context", "memory") if any(row["kind"] == kind for row in rows)]
    figure, axes = pyplot.subplots(1, len(kinds), figsize=(5 * len(kinds), 3.6), squeeze=False)
    trained = {"context": subject.trained_length, "memory": subject.trained_memory}
    for axis, kind in zip(axes[0], kinds, strict=True):
        points = [row for row in rows if row["kind"] == kind and row["tokens"]]
        missing = [row for row in rows if row["kind"] == kind and not row["tokens"]]
        axis.plot([row["length"] for row in points], [row["perplexity"] for row in points], "o-")
        axis.axvline(trained[kind], color="grey", linestyle=":", label=f"trained: {trained[kind]}")
        for row in missing:
            axis.axvline(row["length"], color="tab:red", linestyle="--", linewidth=0.8)
        if missing:
            axis.plot([], [], color="tab:red", linestyle="--", label="cannot be read")
        axis.set_xscale("symlog", base=2, linthresh=1)
        axis.set(xlabel=f"{kind} (tokens)", ylabel="perplexity per token", title=subject.name)
        axis.legend()
    figure.tight_layout()
    with atomic_path(path) as partial:
        figure.savefig(partial, format="png", dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(run_command(main))
