#!/usr/bin/env python3
"""Writes the built-in English-German corpus: tokenised text, one sentence a line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relpos_fairseq.data.grammar import Corpus


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line."""

    def error(self, message: str) -> None:  # type: ignore[override]
        """Reports an error and exits with code 2."""
        print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(2)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = _Parser(prog="make_corpus.py", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    parser.add_argument("--seed", type=int, default=1, help="seed (default: %(default)s)")
    parser.add_argument("--train", type=int, default=24000, help="training pairs")
    parser.add_argument("--valid", type=int, default=500, help="validation pairs")
    parser.add_argument("--test", type=int, default=500, help="test pairs")
    parser.add_argument("--test-long", type=int, default=300, help="long test pairs")
    args = parser.parse_args(arguments)
    if args.seed < 0:
        parser.error(f"--seed must not be negative: {args.seed}")
    for name in ("train", "valid", "test", "test_long"):
        if getattr(args, name) < 1:
            option = "--" + name.replace("_", "-")
            parser.error(f"{option} must be at least 1: {getattr(args, name)}")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out is not a directory: {args.out}")
    return args


def _table(corpus: Corpus) -> str:
    """Describes the files of a corpus."""
    lines = [f"{'file':<14}{'pairs':>8}{'tokens':>10}{'longest':>9}{'words':>7}"]
    for split, pairs in corpus.items():
        for side, language in enumerate(("en", "de")):
            sentences = [pair[side].split() for pair in pairs]
            tokens = sum(map(len, sentences))
            longest = max(map(len, sentences))
            words = len({word for sentence in sentences for word in sentence})
            name = f"{split}.{language}"
            lines.append(f"{name:<14}{len(pairs):>8}{tokens:>10}{longest:>9}{words:>7}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Make the corpus.

    Args:
        arguments: command line; that of the process where missing.

    Returns:
        The exit code.
    """
    args = _parse(arguments)
    from relpos_fairseq.data.grammar import GrammarError, build, write

    try:
        corpus = build(args.seed, args.train, args.valid, args.test, args.test_long)
        write(corpus, args.out)
    except (GrammarError, OSError) as error:
        print(f"make_corpus.py: {error}", file=sys.stderr)
        return 2
    print(_table(corpus))
    return 0


if __name__ == "__main__":
    sys.exit(main())
