"""Continue a text by a language model, as it is drawn.

    relpos sample checkpoints/checkpoint_best.pt --prompt "Once upon a time" --top-p 0.95
    relpos sample checkpoints/checkpoint_best.pt --prompt-file book.txt --mem-len 1600 --tokens 2000
    relpos sample checkpoints/checkpoint_best.pt --samples 8 --lines 1 --jsonl

The prompt is plain text; words, pieces, characters or bytes are made of it as in training. A model
with memory reads it whole, segment by segment, and draws with --mem-len of memory; a model without
sees --context symbols, and goes on from the newer half when they are full. One sample is printed
symbol by symbol, several when they are done; --jsonl prints {"sample", "prompt", "text", "nats",
"symbols"}. The same seed gives the same text.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

HELP = "continue a text by a language model, with memory of any length"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--prompt", default="", help="text to continue (default: none)")
    which.add_argument("--prompt-file", type=Path, metavar="FILE", help="its file; - standard input")
    add("--data", type=Path, help="data folder, where the checkpoint has no text/ beside it")
    add("--tokens", type=int, default=200, metavar="N", help="symbols to draw (%(default)s)")
    add("--lines", type=int, metavar="N", help="stop after so many ends of lines")
    add("--samples", type=int, default=1, metavar="N", help="texts to draw (%(default)s)")
    add("--top-k", type=int, default=0, help="of the k likeliest symbols (0: all)")
    add("--top-p", type=float, default=1.0, help="of the likeliest with this probability (1: all)")
    add("--temperature", type=float, default=1.0, help="0 takes the likeliest (%(default)s)")
    add("--seed", type=int, default=1, help="of the draws (%(default)s)")
    add("--mem-len", type=int, metavar="N", help="tokens of memory (as trained)")
    add("--context", type=int, metavar="N", help="tokens seen without memory (as trained)")
    add("--jsonl", action="store_true", help="print a JSON object a sample")
    add("--cpu", action="store_true", help="no GPU")


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    from relpos_fairseq.inference.commands import sample_text

    sample_text(args)
