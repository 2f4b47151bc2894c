"""What the benchmarks' command lines have in common."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from relpos_fairseq.attention import BACKENDS
from relpos_fairseq.benchmarks.settings import label_of
from relpos_fairseq.schemes import parse_hybrid, scheme_names


def lengths_of(text: str, more: str = "") -> list[int]:
    """Lengths separated by commas.

    Args:
        text: of --lengths.
        more: what else it may be, for the message.

    Raises:
        ValueError: one is not a whole number.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--lengths must be whole numbers separated by commas{more}, got {text}"
        ) from None


def backends_of(text: str, known: Sequence[str] = BACKENDS) -> list[str]:
    """Backends separated by commas.

    Raises:
        ValueError: one is unknown.
    """
    for backend in text.split(","):
        if backend not in known:
            raise ValueError(f"--backends must be of {', '.join(known)}, got {backend}")
    return text.split(",")


def set_labels(args: argparse.Namespace) -> None:
    """Make lists of `schemes` and `backends`, and `labels` of the rows that they have together.

    Raises:
        ValueError: an unknown scheme or backend.
    """
    args.schemes = scheme_names() if args.schemes == "all" else args.schemes.split(",")
    for name in args.schemes:
        parse_hybrid(name)
    args.backends = backends_of(args.backends)
    args.labels = [label_of(name, backend) for name in args.schemes for backend in args.backends]


def check_run(args: argparse.Namespace) -> None:
    """Check that there is a file to continue, and the device.

    Raises:
        ValueError: there is not.
    """
    if args.resume and args.csv is None:
        raise ValueError("--resume continues a file: add --csv FILE")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device; use --device cpu")
