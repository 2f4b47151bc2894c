"""Translate raw text: lines in, lines out, in their order.

    relpos translate checkpoints/checkpoint_best.pt < in.txt > out.txt
    relpos translate checkpoints/checkpoint_best.pt in.txt --out out.txt --beam 4 --nbest 4
    relpos translate checkpoints/checkpoint_best.pt in.txt --jsonl

Units, Moses' normalisation and dictionaries are those of training, which lie in text/ beside the
checkpoint; of an older checkpoint --data names the data folder. Options of the search are
fairseq-generate's, and so are the translations. With --scores or --nbest a line is its number, the
score (log-probability in nats, divided by length to the power of --lenpen) and the text, parted by
tabs; with --jsonl it is {"line", "source", "hypotheses": [{"text", "score"}]}.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

HELP = "raw text through a trained model: lines in, lines out"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=Path, metavar="CHECKPOINT", help="or the folder of an export")
    add("file", type=Path, nargs="?", metavar="FILE", help="a sentence a line (standard input)")
    add("--out", type=Path, help="write here, whole or not at all (standard output)")
    add("--data", type=Path, help="data folder, where the checkpoint has no text/ beside it")
    add("--beam", type=int, default=5, help="default: %(default)s")
    add("--nbest", type=int, default=1, metavar="N", help="translations of each line")
    add("--lenpen", type=float, default=1.0, help="above 1 favours longer ones (%(default)s)")
    add("--unkpen", type=float, default=0.0, help="above 0 makes <unk> rarer (%(default)s)")
    add("--max-len-a", type=float, default=0.0, help="a of the length limit ax + b (%(default)s)")
    add("--max-len-b", type=int, default=200, help="b of it (%(default)s)")
    add("--no-repeat-ngram-size", type=int, default=0, metavar="N", help="no N-gram twice")
    add("--scores", action="store_true", help="print numbers and scores as well")
    add("--jsonl", action="store_true", help="print a JSON object a line")
    add("--on-long-line", choices=("fail", "cut"), default="fail", help="default: %(default)s")
    add("--max-tokens", type=int, default=4096, help="symbols of a batch (%(default)s)")
    add("--buffer", type=int, metavar="N", help="lines sorted together (8192; 1 on a terminal)")
    add("--cpu", action="store_true", help="no GPU")


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    from relpos_fairseq.export.engines import open_translator
    from relpos_fairseq.inference.commands import translate_file

    translate_file(args, open_translator)
