"""Export a model of any position scheme as a folder of Hugging Face's transformers.

    relpos export transformers checkpoints/checkpoint_best.pt folder

AutoTokenizer, AutoModel, AutoModelForMaskedLM, ...SequenceClassification and ...QuestionAnswering
load a RoBERTa, AutoModelForSeq2SeqLM a translation model and AutoModelForCausalLM a language model
(both have generate()), with trust_remote_code=True; this package must be installed. A fine-tuned
head goes along. Outputs and token ids are compared before the folder is there. The way back, for
RoBERTa, is relpos convert FOLDER --to same --out DST.
Needs pip install 'relpos_fairseq[transformers]'.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

HELP = "a model of any scheme for transformers' Auto classes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="checkpoint of a RoBERTa, translation or language model")
    parser.add_argument("out", type=Path, help="new folder")
    parser.add_argument("--data", type=Path, help="folder of its data (what lies beside it)")
    parser.add_argument("--head", help="which head goes along, of several")


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    from relpos_fairseq.export.extras import require

    for package in ("transformers", "safetensors"):
        require(package, "transformers")
    from relpos_fairseq.export import transformers_decoders, transformers_folder

    if transformers_decoders.generates(args.checkpoint):
        if args.head:
            raise ValueError(f"--head {args.head}: only a RoBERTa has heads: leave it out")
        done = transformers_decoders.export(args.checkpoint, args.out, args.data)
    else:
        done = transformers_folder.export(args.checkpoint, args.out, args.data, args.head)
    print(f"wrote {args.out}: {done.line()}")
