"""Draw what a checkpoint's positions have learned, and how it attends.

    relpos plot CHECKPOINT --data DATA_BIN --out DIR
    relpos plot --curves LOG... --out DIR
    relpos plot --scores runs/glue/chen.json runs/xtreme/medians.json --out DIR

Writes a PNG and a CSV of the same numbers for every stack (encoder, decoder) and
- every table over distance: scalars by head; vectors by head and channel (000 Fig. 4), and norm;
- attention probabilities on a sentence, averaged over heads, to 50 tokens (000 Fig. 5);
- position logits without content (004 Fig. 4), with segments, and their softmax (004 Fig. 6);
- ranks of content and position logits on the sentence, or on a batch (004 Fig. 2);
- cosine similarity of absolute positions, and its distribution (004 Fig. 5).
What the checkpoint's scheme does not have is left out, and a line says so.

With --curves, learning curves of what fairseq-train printed (--log-format json or simple): the
training and validation loss by update, a line a log. With --scores, bars of the models' scores on
natural language inference (004 Fig. 1: MNLI and XNLI; or others, by --on), out of what `relpos
finetune glue` and `relpos finetune xtreme` write.

000: Huang et al. 2020, Improve Transformer Models with Better Relative Position Embeddings.
004: Chen et al. 2021, Demystifying the Better Performance of Position Encoding Variants.
"""

import argparse
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

HELP = "pictures of what a checkpoint's positions have learned"


def whole_number(least: int) -> Callable[[str], int]:
    """Return a reader of integers that are not below `least`."""

    def read(text: str) -> int:
        if not text.lstrip("-").isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number >= {least}, got {text}")
        return int(text)

    return read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    data = "folder of fairseq-preprocess: its first test sentence is read, in its dictionary"
    words = "words to read instead, tokenised as the training data are (or by the tokenizer that "
    words += "lies in --data, which then takes plain text); a decoder reads its own "
    words += "greedy translation"
    count = "segments of equal length in segment logits (%(default)s)"
    add("checkpoint", nargs="?", type=Path, help="a .pt file of fairseq-train")
    add("--curves", nargs="+", type=Path, metavar="LOG", help="draw these logs' curves instead")
    add("--scores", nargs="+", type=Path, metavar="JSON", help="draw these tables' bars instead")
    add("--on", default="MNLI,XNLI", help="with --scores: data sets, by commas (%(default)s)")
    add("--measure", default="loss", help="with --curves: loss, nll_loss, ppl, ... (%(default)s)")
    add("--out", type=Path, required=True, help="folder for PNG and CSV files")
    add("--data", type=Path, help=data)
    add("--sentence", help=words)
    add("--length", type=whole_number(2), default=32, help="tokens of position logits (%(default)s)")
    add("--segments", type=whole_number(2), default=2, help=count)
    add("--sentences", type=whole_number(1), default=1, help="of --data, in ranks (%(default)s)")
    add("--tokens", type=whole_number(1), default=50, help="first queries drawn (%(default)s)")
    add("--distance", type=whole_number(1), default=50, help="largest distance (%(default)s)")


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    logging.basicConfig(level=logging.WARNING)  # before fairseq is imported, which reports more
    if args.curves:
        from relpos_fairseq.pictures.curves import draw_curves

        return draw_curves(args.curves, args.measure, args.out)
    if args.scores:
        from relpos_fairseq.pictures.bars import draw_bars

        return draw_bars(args.scores, args.on.split(","), args.out)
    from relpos_fairseq.pictures.checkpoint import draw_checkpoint

    draw_checkpoint(args)
