"""Export a translation checkpoint to CTranslate2, an engine that serves it fast on CPUs and GPUs.

    relpos export ct2 checkpoints/checkpoint_best.pt served [--quantization int8]

served is a new folder that `ctranslate2.Translator("served")` opens. Before it is there,
its logits and its translations of the validation set are compared with the checkpoint's, and what
differs is not written. A position scheme that the engine cannot hold is refused by name: relpos
export onnx holds every scheme. Needs pip install 'relpos_fairseq[ct2]'.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

HELP = "a translation checkpoint for CTranslate2, compared with the original"
QUANTIZATIONS = ("int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", type=Path, help="checkpoint of a relpos_transformer")
    add("out", type=Path, help="new folder")
    add("--quantization", choices=QUANTIZATIONS, help="smaller weights (default: fp32)")
    add("--data", type=Path, metavar="DIR", help="its data (the folder it was trained on; else text/ beside it)")
    add("--sentences", type=int, default=1000, help="how many to compare (%(default)s)")


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    from relpos_fairseq.export.ct2 import export

    if args.sentences < 1:
        raise ValueError(f"--sentences must be >= 1, got {args.sentences}")
    export(args.checkpoint, args.out, args.quantization, args.data, args.sentences)
    print(f"wrote {args.out}")
