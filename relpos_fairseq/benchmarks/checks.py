"""Checks of what the benchmarks' command lines have in common."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from relpos_fairseq.attention import BACKENDS
from relpos_fairseq.benchmarks.settings import label_of, schemes_for
from relpos_fairseq.schemes import parse_hybrid


def chosen_of(flag: str, text: str, known: Sequence[str]) -> list[str]:
    """Return words separated by commas; an unknown one is refused."""
    for word in text.split(","):
        if word not in known:
            raise ValueError(f"--{flag} must be of {', '.join(known)}, got {word}")
    return text.split(",")


def lengths_of(text: str, more: str = "") -> list[int]:
    """Return lengths separated by commas; `more` is what else they may be, for the message."""
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--lengths must be whole numbers separated by commas{more}, got {text}") from None
    if min(lengths) < 1:
        raise ValueError(f"--lengths must be >= 1, got {text}")
    return lengths


def check_least(args: argparse.Namespace, least: int, names: str) -> None:
    """Refuse numbers that are too small, by flag and value; None stands for a default."""
    for name in names.split():
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be >= {least}, got {value}")


def schemes_of(text: str, every: Sequence[str]) -> list[str]:
    """Return schemes separated by commas, or `every` for `all`; an unknown one is refused."""
    names = list(every) if text == "all" else text.split(",")
    for name in names:
        parse_hybrid(name)
    return names


def set_labels(args: argparse.Namespace) -> None:
    """Make lists of `schemes` and `backends`, and `labels` of the rows that they have together."""
    args.schemes = schemes_of(args.schemes, schemes_for())
    args.backends = chosen_of("backends", args.backends, BACKENDS)
    args.labels = [label_of(name, backend) for name in args.schemes for backend in args.backends]


def prepare_run(args: argparse.Namespace) -> torch.device:
    """Check device, threads and the file to continue; return the device."""
    check_least(args, 1, "rounds threads")
    if args.resume and args.csv is None:
        raise ValueError("--resume continues a file: add --csv FILE")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device; use --device cpu")
    args.threads = args.threads or torch.get_num_threads()
    torch.set_num_threads(args.threads)
    return torch.device(args.device)
