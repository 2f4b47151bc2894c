"""What do positions cost in whole models, and what do other libraries charge for them?

    relpos benchmark models                       # both parts, minutes on a CPU
    relpos benchmark models --parts translation --size base --schemes shaw,m4
    relpos benchmark models --parts layers --device cuda --dtype bfloat16

translation: a step of training (forward, label-smoothed cross entropy, backward, Adam) and beam
search of `relpos_transformer` with every scheme, relative to fairseq's own `transformer` of the
same sizes.  Optimizer and loss are fairseq's own on both sides; further rows say what relpos_adam
and relpos_label_smoothed_cross_entropy gain on fairseq's model, each by itself and both.
layers: BERT's layer, training, forward pass and peak memory, relative to our layer without
positions: every scheme, fairseq's own layer, and layers of equal sizes of other libraries where
installed.

All candidates of a column are timed in one process, in turns, each only once the machine is idle
otherwise.  Medians, minima and spreads are printed.
"""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from relpos_fairseq.cli.measuring import INTERRUPTED, add_device, add_output  # noqa: F401

HELP = "cost of positions in whole models and layers, beside fairseq's own"
SIZES = ("multi30k", "base", "tiny", "iwslt_de_en", "wmt_en_de", "wmt_en_de_big")
BACKENDS = "auto, reference, sdpa, blocked, native, triton"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", default="translation,layers", help="of translation, layers")
    modes = "train,generate,forward,memory"
    parser.add_argument("--modes", default=modes, help="of train, generate, forward, memory")
    parser.add_argument("--schemes", default="all", help="names separated by commas, or all")
    parser.add_argument("--backends", default="auto", help=f"a row each: of {BACKENDS}")
    parser.add_argument("--bar", action="store_true", help="say what is known to be possible")
    add_device(parser)
    parser.add_argument("--dropout", type=float, default=0.0)
    models = parser.add_argument_group("translation")
    models.add_argument("--size", default="multi30k", choices=SIZES)
    models.add_argument("--vocabulary", type=int, default=8000)
    models.add_argument("--rows", type=int, default=32, help="sentences of a batch")
    models.add_argument("--length", type=int, default=24, help="tokens of the longest sentence")
    models.add_argument("--beam", type=int, default=5)
    layers = parser.add_argument_group("layers")
    layers.add_argument("--lengths", default="128,512", help="separated by commas")
    layers.add_argument("--tokens", type=int, default=1024, help="batch = tokens / length, >= 1")
    layers.add_argument("--width", type=int, default=768)
    layers.add_argument("--ffn", type=int, default=3072)
    layers.add_argument("--heads", type=int, default=12)
    layers.add_argument("--clip", type=int, default=16, help="clip distance; 0: unclipped")
    packages = "fairseq, transformers, flashdeberta, x-transformers"
    layers.add_argument("--peers", default="all", help=f"of {packages}; all, or none")
    add_output(parser, rounds=5, seconds=60.0)
    parser.add_argument("--plot", type=Path, help="draw all ratios: FILE.png, .svg or .pdf")


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    logging.basicConfig(level=logging.WARNING)  # before fairseq is imported, which reports more
    from relpos_fairseq.benchmarks.models import benchmark

    benchmark(args)
