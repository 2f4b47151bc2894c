"""The command line of benchmark_models.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from relpos_fairseq.attention import BACKENDS
from relpos_fairseq.benchmarks.options import check_run, lengths_of, set_labels
from relpos_fairseq.benchmarks.peers import PEERS
from relpos_fairseq.benchmarks.translation import MODEL_SIZES

PARTS = {"translation": ("train", "generate"), "layers": ("train", "forward", "memory")}
MODES = ("train", "generate", "forward", "memory")


def parse(argv: Sequence[str] | None, description: str) -> argparse.Namespace:
    """The command line.

    Raises:
        ValueError: a wrong value.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="of translation, layers")
    parser.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join(MODES)}")
    parser.add_argument("--schemes", default="all", help="names separated by commas, or all")
    parser.add_argument("--backends", default="auto", help=f"a row each: of {', '.join(BACKENDS)}")
    parser.add_argument("--bar", action="store_true", help="say what is known to be possible")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--dropout", type=float, default=0.0)
    models = parser.add_argument_group("translation")
    models.add_argument("--size", default="multi30k", choices=list(MODEL_SIZES))
    models.add_argument("--vocabulary", type=int, default=8000)
    models.add_argument("--rows", type=int, default=32, help="sentences of a batch")
    models.add_argument("--length", type=int, default=24, help="tokens of the longest sentence")
    models.add_argument("--beam", type=int, default=5)
    ours = parser.add_argument_group("layers")
    ours.add_argument("--lengths", default="128,512", help="separated by commas")
    ours.add_argument("--tokens", type=int, default=1024, help="batch = tokens / length, >= 1")
    ours.add_argument("--width", type=int, default=768)
    ours.add_argument("--ffn", type=int, default=3072)
    ours.add_argument("--heads", type=int, default=12)
    ours.add_argument("--clip", type=int, default=16, help="clip distance; 0: unclipped")
    packages = list(dict.fromkeys(["fairseq", *(peer.package for peer in PEERS)]))
    ours.add_argument("--peers", default="all", help=f"of {', '.join(packages)}; all, or none")
    timing = parser.add_argument_group("timing and output")
    timing.add_argument("--rounds", type=int, default=5)
    timing.add_argument("--seconds", type=float, default=60.0, help="of a column, about")
    timing.add_argument("--threads", type=int, default=torch.get_num_threads())
    timing.add_argument("--csv", type=Path, help="all rows, as they come")
    timing.add_argument("--resume", action="store_true", help="measure what --csv lacks")
    timing.add_argument("--plot", type=Path, help="draw all ratios into this file (.png, .svg)")
    timing.add_argument("--write", type=Path, help="put the tables into this markdown file")
    args = parser.parse_args(argv)
    args.peers = {"all": ",".join(packages), "none": ""}.get(args.peers, args.peers)
    for name, known in (("parts", list(PARTS)), ("modes", MODES), ("peers", packages)):
        chosen = [part for part in getattr(args, name).split(",") if part]
        unknown = [part for part in chosen if part not in known]
        if unknown or not (chosen or name == "peers"):
            raise ValueError(f"--{name} must be of {', '.join(known)}, got {', '.join(unknown)!r}")
        setattr(args, name, chosen)
    for part in args.parts:
        if not set(PARTS[part]) & set(args.modes):
            raise ValueError(
                f"--parts {part} has the modes {', '.join(PARTS[part])}, got --modes "
                f"{','.join(args.modes)}"
            )
    check_numbers(args)
    check_run(args)
    set_labels(args)
    return args


def check_numbers(args: argparse.Namespace) -> None:
    """Check ranges.

    Raises:
        ValueError: a wrong value.
    """
    args.lengths = lengths_of(args.lengths)
    at_least_1 = "vocabulary rows beam tokens width ffn heads rounds threads".split()
    for name in at_least_1:
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be >= 1, got {getattr(args, name)}")
    if min(args.lengths) < 1 or args.clip < 0 or args.length < 2:
        raise ValueError(
            f"--lengths must be >= 1, --clip >= 0 and --length >= 2, got {args.lengths}, "
            f"{args.clip} and {args.length}"
        )
    if args.width % args.heads:
        raise ValueError(f"--width {args.width} must be a multiple of --heads {args.heads}")
    if not 0 <= args.dropout < 1:
        raise ValueError(f"--dropout must be in [0, 1), got {args.dropout}")
