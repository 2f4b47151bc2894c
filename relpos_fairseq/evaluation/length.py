"""Measure a language model's perplexity by the length of its context and of its memory.

A function that takes `options` takes those of `relpos evaluate length`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

from relpos_fairseq.evaluation.language_model import (
    Score,
    Subject,
    last_targets,
    load_subject,
    score_with_memory,
    score_with_windows,
    show,
)
from relpos_fairseq.io.files import write_text
from relpos_fairseq.io.reading import Amount, Count, Number
from relpos_fairseq.io.stages import Stage, run_stages

TIMES = (0.5, 1, 2, 4, 8, 16)
WORSE = 1.05  # a model does not extrapolate where its perplexity is beyond so many times that at the trained length


COLUMNS = ("kind", "length", "tokens", "bits", "perplexity", "tokens_per_second", "status")


class _Point(TypedDict):
    kind: str
    length: Count
    tokens: Count
    status: str


class _Row(_Point, total=False):
    """A row of the table."""

    bits: Number
    perplexity: Number
    tokens_per_second: Amount


def evaluate(options: Any) -> None:
    """Evaluate every length; write the table and the plot.

    Raises:
        ValueError: an override without a value.
    """
    for text in options.override:
        if "=" not in text:
            raise ValueError(f"--override must be FIELD=VALUE, got {text}")
    overrides = dict(text.split("=", 1) for text in options.override)
    subject = load_subject(options.checkpoint, options.data, options.split, overrides, options.document_boundaries)
    if subject.trained_memory is None and options.mem_len:
        raise ValueError(f"--mem-len: {subject.name} has no memory; leave it out")
    lengths = chosen(options.lengths or None, "--lengths", 1, subject.trained_length)
    memories = []
    if subject.trained_memory is not None:
        default = [0, *multiples(subject.trained_memory or subject.trained_length)]
        memories = chosen(options.mem_len, "--mem-len", 0, subject.trained_memory, default)
    targets = last_targets(subject, min(options.tokens, len(subject.tokens) - 1))
    print(
        f"{subject.name}: {subject.parameters:,} parameters, trained with "
        f"{subject.trained_length} tokens a sample; {len(targets):,} predictions of {options.split}"
    )
    stages = [
        point(kind, length, work, subject, targets, options)
        for kind, values, work in (("context", lengths, context_point), ("memory", memories, memory_point))
        for length in values
    ]
    rows = judged(list(run_stages(stages, options.out).values()), subject)
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(options.out / "length.csv", text.getvalue())
    draw(rows, subject, options.out / "length.png")
    print(show(rows))
    print(f"wrote {options.out / 'length.csv'} and {options.out / 'length.png'}")


def point(
    kind: str,
    length: int,
    work: Callable[[Subject, range, int, Any], dict],
    subject: Subject,
    targets: range,
    options: Any,
) -> Stage:
    """Return the measurement at one length as a stage, whose counts are the row of the table."""
    return Stage(
        f"{kind}-{length}",
        lambda: {"kind": kind, "length": length, **work(subject, targets, length, options)},
        inputs=[options.checkpoint, options.data / f"{options.split}.bin"],
        outputs=[],
        counted=_Row,
        parameters={
            "split": options.split,
            "tokens": len(targets),
            "stride": options.stride,
            "rows": options.batch_size,
            "override": sorted(options.override),
        }
        | ({"documents": subject.boundaries} if subject.boundaries else {}),
    )


def multiples(trained: int) -> list[int]:
    """Return half to 16 times a trained length."""
    return sorted({max(1, int(trained * times)) for times in TIMES})


def chosen(given: list[int] | None, flag: str, least: int, trained: int, default: list[int] | None = None) -> list[int]:
    """Return the lengths to score in rising order, the trained length among them.

    Args:
        given: those of the command line; None: the default; empty: none at all.
        flag: the flag that gave them.
        least: the shortest possible length.
        trained: the length in training, with which the others are compared.
        default: the lengths where none are given; None: half to 16 times the trained one.

    Raises:
        ValueError: one is too short.
    """
    if given is None:
        given = multiples(trained) if default is None else default
    if any(value < least for value in given):
        raise ValueError(f"{flag} must be >= {least}, got {min(given)}")
    return sorted({*given, trained}) if given else []


def context_point(subject: Subject, targets: range, length: int, options: Any) -> dict:
    """Return the perplexity with windows of a length, or the reason why the model cannot read them."""
    if subject.longest is not None and length > subject.longest:
        reason = f"cannot: its table has {subject.longest} positions"
        return {"tokens": 0, "status": reason}
    if length > len(subject.tokens) - 1:
        return {"tokens": 0, "status": f"cannot: the split has {len(subject.tokens) - 1} tokens"}
    stride = min(options.stride or max(1, length // 2), length)
    return described(score_with_windows(subject, targets, length, stride, options.batch_size))


def memory_point(subject: Subject, targets: range, length: int, options: Any) -> dict:
    """Return the perplexity with a memory of a length, and segments of the trained length."""
    block = min(subject.trained_length, len(targets))
    return described(score_with_memory(subject, targets, block, length, options.batch_size))


def described(score: Score) -> dict:
    """Return a score as columns of the table."""
    return {
        "tokens": score.tokens,
        "bits": round(score.bits, 5),
        "perplexity": round(score.perplexity, 4),
        "tokens_per_second": round(score.speed, 1),
        "status": "ok",
    }


def judged(rows: list[dict], subject: Subject) -> list[dict]:
    """Return rows with all columns; the status says where more context than in training harms the model."""
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
    """Draw perplexity over length, a panel for context and one for memory."""
    from relpos_fairseq.plots.axes import panels, show_tokens

    kinds = [kind for kind in ("context", "memory") if any(row["kind"] == kind for row in rows)]
    trained = {"context": subject.trained_length, "memory": subject.trained_memory}
    with panels(path, len(kinds), 5, 3.6) as axes:
        for axis, kind in zip(axes, kinds, strict=True):
            points = [row for row in rows if row["kind"] == kind and row["tokens"]]
            missing = [row for row in rows if row["kind"] == kind and not row["tokens"]]
            lengths, values = ([row[name] for row in points] for name in ("length", "perplexity"))
            axis.plot(lengths, values, "o-")
            label = f"trained: {trained[kind]}"
            axis.axvline(trained[kind], color="grey", linestyle=":", label=label)
            for row in missing:
                axis.axvline(row["length"], color="tab:red", linestyle="--", linewidth=0.8)
            if missing:
                axis.plot([], [], color="tab:red", linestyle="--", label="cannot be read")
            show_tokens(axis, kind)
            axis.set(ylabel="perplexity per token", title=subject.name)
            axis.legend()
