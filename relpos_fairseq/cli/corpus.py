"""Write the built-in English-German corpus: tokenised text, one sentence a line.

relpos corpus --out corpus --train 24000
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

HELP = "write the built-in corpus of the quickstart"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, required=True, help="directory to write to")
    add("--seed", type=int, default=1, help="seed (default: %(default)s)")
    add("--train", type=int, default=24000, help="training pairs (default: %(default)s)")
    add("--valid", type=int, default=500, help="validation pairs (default: %(default)s)")
    add("--test", type=int, default=500, help="test pairs (default: %(default)s)")
    add("--test-long", type=int, default=300, help="long test pairs (default: %(default)s)")


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    from relpos_fairseq.data.grammar import build, describe, write

    for name, least in (("seed", 0), ("train", 1), ("valid", 1), ("test", 1), ("test_long", 1)):
        if getattr(args, name) < least:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must be >= {least}, got {getattr(args, name)}")
    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out must be a directory, and {args.out} is a file")
    corpus = build(args.seed, args.train, args.valid, args.test, args.test_long)
    write(corpus, args.out)
    print(describe(corpus))
