"""Theorems 1 and 2 of Chen et al. 2021 (section 2.3) with numbers: why positions leave the input.

    relpos theorems --width 768 --head-dim 64 --rank 128 --length 256

Theorem 1: a loss has the same gradient at token and at position embeddings that are added.
Theorem 2: attention logits of such a sum have at most the rank of a head; positions that are added
to the logits add theirs.
"""

import argparse
from collections.abc import Sequence

HELP = "004's theorems: the ranks of attention with positions on the input and in each head"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--width", type=int, default=768, help="d of the model (default: %(default)s)")
    add("--head-dim", type=int, default=64, help="d_h of a head (default: %(default)s)")
    add("--rank", type=int, default=128, help="d_p of positions (default: %(default)s)")
    add("--length", type=int, default=256, help="n tokens (default: %(default)s)")
    add("--seed", type=int, default=1, help="of the random matrices (default: %(default)s)")


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    from relpos_fairseq.pictures.theorems import Sizes, report

    print(report(Sizes(args.width, args.head_dim, args.rank, args.length), args.seed))
