"""How much slower is attention with positions than attention without?

    relpos benchmark attention                              # some minutes on a CPU
    relpos benchmark attention --lengths 512,2048 --batch 4 --naive --bar
    relpos benchmark attention --device cuda --dtype bfloat16 --lengths all
    relpos benchmark attention --layer                      # a whole BERT layer
    relpos benchmark attention --isa avx2                   # as on a processor without AVX-512

First every candidate is held against the papers' formula in fp64, values and gradients.  Then all
candidates are timed in one process, in turns, each only once the machine is idle otherwise.  The
tables have ratios of medians to torch's scaled_dot_product_attention without positions (in
brackets: of minima), and the spread.  Needs torch and relpos_fairseq's positions, schemes and
attention: no fairseq, save to decode.  --plot needs matplotlib, and progress is shown where tqdm is
installed.
"""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from relpos_fairseq.cli.measuring import INTERRUPTED, add_device, add_output  # noqa: F401

HELP = "cost of attention with positions, beside attention without"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is measured")
    add_device(what)
    what.add_argument(
        "--isa",
        choices=["native", "avx2", "sse2"],
        help="instruction set of the C kernel and of torch; default: as the environment says",
    )
    what.add_argument("--schemes", default="all", help="names separated by commas, or all")
    what.add_argument("--lengths", default="128,512,2048", help="T = S, by commas, or all")
    what.add_argument("--tokens", type=int, help="batch = tokens / length; 2048, on a GPU 16384")
    what.add_argument("--batch", type=int, help="this batch at every length, whatever --tokens is")
    what.add_argument("--heads", type=int, default=12)
    what.add_argument("--head-dim", type=int, default=64)
    what.add_argument("--clip", type=int, default=16, help="clip distance; 0: as --unclipped")
    what.add_argument("--unclipped", action="store_true", help="tables as long as the input")
    what.add_argument("--causal", action="store_true")
    what.add_argument("--modes", default="train,forward", help="of train, forward, decode, memory")
    what.add_argument("--layer", action="store_true", help="a whole BERT layer")
    beside = parser.add_argument_group("beside it")
    beside.add_argument("--naive", action="store_true", help="the papers' formula too")
    beside.add_argument("--backends", default="auto", help="a row each: of auto, sdpa, blocked, native, triton")
    beside.add_argument("--flex", action="store_true", help="FlexAttention too; compiles long")
    beside.add_argument("--bar", action="store_true", help="say what is known to be possible")
    beside.add_argument("--published", action="store_true", help="DeBERTa as published on an H200")
    add_output(parser, rounds=7, seconds=20.0)
    parser.add_argument("--plot", type=Path, help="ratios over length: FILE.png, .svg or .pdf")


def run(args: argparse.Namespace, argv: Sequence[str]) -> int | None:
    logging.basicConfig(level=logging.WARNING)  # before fairseq is imported, which reports more
    from relpos_fairseq.benchmarks.instructions import run_with

    status = run_with(args.isa, "benchmark attention", argv)
    if status is not None:
        return status
    from relpos_fairseq.benchmarks.attention import benchmark

    return benchmark(args)
