"""Export any checkpoint as ONNX graphs: any scheme, batches and inputs of any size.

    relpos export onnx checkpoints/checkpoint_best.pt graphs

graphs is a new folder: encoder.onnx and step.onnx (one step of decoding) of a translation model,
step.onnx of a language model, segment.onnx of one with memory, model.onnx of a RoBERTa with all its
heads; relpos.json names inputs, outputs and their sizes. Before the folder is there, onnxruntime
runs the graphs at sizes that were not traced, and what differs from the checkpoint is not written.
Needs pip install 'relpos_fairseq[onnx]'.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

HELP = "any checkpoint as ONNX graphs, compared with the original"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="checkpoint of a relpos model")
    parser.add_argument("out", type=Path, help="new folder")
    parser.add_argument("--data", type=Path, metavar="DIR", help="its dictionaries, if they matter")


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    from relpos_fairseq.export.onnx import export

    export(args.checkpoint, args.out, args.data)
    print(f"wrote {args.out}")
