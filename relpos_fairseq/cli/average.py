"""Average the parameters of checkpoints of one training, as Vaswani et al. 2017 do (section 6.1).

    relpos average --inputs checkpoints/wmt --last 5 --output avg.pt
    relpos average --inputs checkpoints/wmt --last-updates 5 --output avg.pt
    relpos average --inputs one.pt two.pt --output avg.pt

Checkpoints are loaded safely (weights_only). All must be of the same position scheme, which the
result keeps, and have the same tensors. Sums are made in double precision. The optimizer's state is
left out: the result is for translating and for starting anew, not for resuming.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

HELP = "average checkpoints of one training"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--inputs", type=Path, nargs="+", required=True, help="checkpoints, or their one folder")
    add("--last", type=int, metavar="N", help="of a folder: the last N epochs' checkpoints")
    add("--last-updates", type=int, metavar="N", help="of a folder: the last N by updates")
    add("--output", type=Path, required=True)


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    from relpos_fairseq.evaluation.averaging import choose, write_average

    paths = choose(args.inputs, args.last, args.last_updates)
    write_average(paths, args.output)
    print(f"averaged {len(paths)} checkpoints into {args.output}:")
    print("\n".join(f"  {path}" for path in paths), flush=True)
