"""Speed and perplexity of evaluating a language model with memory and without, at equal context.

    relpos benchmark lm XL_CHECKPOINT DATA_BIN [--baseline LM_CHECKPOINT]
        [--context 256] [--tokens 4000] [--sliding-tokens 200] [--train-updates 20]

Every method scores the end of one split with --context tokens of context:
- memory: segments of the trained length T (a whole row where rows are shorter), memory of
  context - T; a prediction sees context - T + 1 to context tokens at its first layer, and
  recurrence reaches further, layer by layer;
- sliding window: no memory, the window moves by one token and gives one prediction: every
  prediction sees all of the context. This is what the paper compares with. It is slow, so it scores
  the last --sliding-tokens only, and memory is scored on those as well;
- strided window: no memory, the window moves by T and gives T predictions; as memory, a prediction
  sees context - T + 1 to context tokens.
--baseline adds both windows with a model that was trained without memory, and the speed of
training the two, which means something where their parameters are equal.
"""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

HELP = "speed and perplexity of a language model with memory and without"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", type=Path, help="of relpos_transformer_xl")
    add("data", type=Path, help="folder of binarised text")
    add("--baseline", type=Path, help="checkpoint of relpos_transformer_lm")
    add("--split", default="valid")
    add("--context", type=int, help="tokens; default: trained segment + memory")
    add("--tokens", type=int, default=4000, help="predictions scored")
    add("--sliding-tokens", type=int, default=200, help="of them by sliding")
    add("--batch", type=int, default=1, help="rows or windows at a time")
    add("--train-updates", type=int, default=20, help="0: training is not timed")
    add("--train-batch", type=int, default=16)
    add("--threads", type=int, help="of torch; default: its own choice")
    add("--out", type=Path, help="JSON of the numbers")


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    logging.basicConfig(level=logging.WARNING)  # before fairseq is imported, which reports more
    from relpos_fairseq.benchmarks.language_models import benchmark

    benchmark(args)
