"""Perplexity and bits a token of language models, on the same predictions.

    relpos evaluate lm CHECKPOINT... --data DATA_BIN [--split test] [--mem-len 640 | --context 256]

A model with memory reads segments of its trained length with --mem-len of memory (default: its
own); any other, or every model with --context, reads windows of that many tokens (default: as
trained) that move on by --stride (default: half a window), so that each prediction sees at least
the rest of a window.  fairseq-eval-lm and fairseq-validate score a checkpoint as it was trained.

--by-token OUT.jsonl writes every prediction ("index" in the stream, "token", "nats", its "place" in
the segment or window, the "memory" before it), and OUT.png draws loss by place, and by memory where
several lengths are given; several checkpoints are in one picture.  --dynamic RATE lets a model with
memory learn from each segment once it is scored (Krause et al. 2018): parameters move by RATE times
the gradient of the segment's mean loss, and by --decay of their way back to the trained ones.
--rms N is their variant whose steps are divided by the root mean square of the gradients over the
first N tokens of the split `train` (say --dynamic 0.0001 --rms 100000), plus --epsilon.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

HELP = "perplexity of language models at a chosen memory or context"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoints", type=Path, nargs="+", metavar="CHECKPOINT")
    add("--data", type=Path, required=True, help="folder of binarised text")
    add("--split", default="valid", help="default: %(default)s")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--mem-len", type=int, nargs="+", metavar="N", help="tokens of memory")
    which.add_argument("--context", type=int, metavar="N", help="tokens a window")
    add("--stride", type=int, metavar="N", help="tokens between windows (default: half of one)")
    add("--tokens", type=int, metavar="N", help="predictions scored: the last (default: all)")
    add("--by-token", type=Path, metavar="FILE", help="JSON lines, and a picture beside them")
    add("--dynamic", type=float, metavar="RATE", help="parameters follow the text (say 0.01)")
    add("--decay", type=float, metavar="D", help="with --dynamic: the way back (default: 0.001)")
    add("--rms", type=int, metavar="N", help="with --dynamic: scale by gradients of N tokens")
    add("--epsilon", type=float, metavar="E", help="with --rms: added to it (default: 0.001)")
    add("--rows", type=int, default=4, help="rows or windows evaluated together (%(default)s)")


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    from relpos_fairseq.evaluation.dynamic import Dynamic
    from relpos_fairseq.evaluation.perplexity import Reading, compare

    for flag, needs in (("decay", "dynamic RATE"), ("rms", "dynamic RATE"), ("epsilon", "rms N")):
        if getattr(args, flag) is not None and getattr(args, needs.split()[0]) is None:
            raise ValueError(f"--{flag} needs --{needs}")
    dynamic = None
    if args.dynamic is not None:
        given = {"decay": args.decay, "tokens": args.rms, "epsilon": args.epsilon}
        given = {name: value for name, value in given.items() if value is not None}
        training = None if args.rms is None else args.data / "train"
        dynamic = Dynamic(args.dynamic, training=training, **given)
    readings = [Reading(mem_len, args.context, args.stride, args.rows, dynamic) for mem_len in args.mem_len or [None]]
    print(compare(args.checkpoints, args.data, args.split, args.tokens, readings, args.by_token))
