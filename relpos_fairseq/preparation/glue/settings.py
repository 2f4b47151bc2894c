"""What prepare glue may be asked for, and what does not go together."""

import argparse

from relpos_fairseq.engine.errors import PreparationError

PAIR_EXTRA, SINGLE_EXTRA = 4, 2  # <s> A </s> </s> B </s>, <s> A </s>


def check(args: argparse.Namespace) -> None:
    """Refuse a command line with wrong values."""
    least = 2 * PAIR_EXTRA
    if args.max_length and args.max_length < least:
        raise PreparationError(f"--max-length must be 0 or at least {least}, got {args.max_length}")
    if args.workers < 1:
        raise PreparationError(f"--workers must be at least 1, got {args.workers}")
    if not args.text and not (args.tokenizer and args.out):
        raise PreparationError("give --tokenizer and --out, or --text")
    if not args.glue.is_dir():
        raise PreparationError(f"there is no folder {args.glue}: give the one with GLUE's tasks")
