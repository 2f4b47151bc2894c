"""How fast one checkpoint translates, and how well: fairseq-generate, this package, CTranslate2.

    relpos benchmark serving checkpoints/checkpoint_best.pt data-bin/multi30k

One table: sentences a second and BLEU of fairseq-generate, of `relpos translate`, and of
CTranslate2 in fp32 and int8, on the CPU with OMP_NUM_THREADS threads. Each timing has a process of
its own, whose start is not counted. BLEU is of text.
Needs pip install 'relpos_fairseq[ct2]'.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

HELP = "sentences a second and BLEU of fairseq-generate, relpos translate and CTranslate2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", type=Path, help="checkpoint of a relpos_transformer")
    add("data", type=Path, help="its binarised data")
    add("--set", default="test", help="test or valid (default: test)")
    add("--beam", type=int, default=4, help="of every search (default: 4)")
    add("--rounds", type=int, default=3, help="times of each; the median counts (default: 3)")


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    from relpos_fairseq.benchmarks.serving import benchmark

    if args.beam < 1 or args.rounds < 1:
        raise ValueError(f"--beam and --rounds must be >= 1, got {args.beam} and {args.rounds}")
    print(benchmark(args.checkpoint, args.data, args.set, args.beam, args.rounds))
