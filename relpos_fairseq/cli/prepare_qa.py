"""Turn files of SQuAD's format into the folder that --task question_answering reads.

    relpos prepare qa --train train-v1.1.json --valid dev-v1.1.json \
        --train-tokenizer wordpiece --vocab-size 30000 --out data-bin/squad
    relpos prepare qa --train xquad.en.json --train-articles 36 \
        --eval xquad.de.json xquad.zh.json --tokenizer TOKENIZER --out data-bin/xquad

The folder holds train.json, valid.json, one .json for every file of --eval under its own name, the
tokenizer, dict.txt, and manifest.json with counts and hashes. A tokenizer comes from a folder
(--tokenizer: ours, a Hugging Face model's with its dict.txt, or fairseq's GPT-2 files) or is
trained on the contexts (--train-tokenizer). With --train-articles N the first N articles of --train
are train.json and the others valid.json; the files of --eval, where they are translations of it as
XQuAD's are, are cut in the same way (--eval-articles all takes them whole). Every file is read and
checked; what is wrong is named with its file and id.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from relpos_fairseq.data.question_answering.reading import BAD_ANSWER
from relpos_fairseq.data.tokenizers import KINDS

HELP = "files of SQuAD's format, for question answering"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--train", nargs="+", type=Path, required=True, help="training files")
    parser.add_argument("--valid", nargs="+", type=Path, default=[], help="validation files")
    parser.add_argument("--eval", nargs="+", type=Path, default=[], help="files to evaluate on")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--train-articles", type=int, help="train on the first N articles, validate on the others")
    parser.add_argument(
        "--eval-articles",
        choices=("same", "all"),
        default="same",
        help="with --train-articles: cut --eval files in the same way, or take them whole",
    )
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer")
    parser.add_argument("--train-tokenizer", choices=KINDS, help="train one on all contexts")
    parser.add_argument("--vocab-size", type=int, help="its size (default 8000)")
    parser.add_argument("--lowercase", action="store_true", help="wordpiece: uncased")
    parser.add_argument(
        "--on-bad-answer",
        choices=BAD_ANSWER,
        default="drop",
        help="answers that are not at their offset: fail here, or leave them to the task",
    )


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    from relpos_fairseq.preparation.qa.settings import check
    from relpos_fairseq.preparation.qa.stages import QaPreparation

    check(args)
    QaPreparation(args).run(["prepare_qa.py", *argv])
