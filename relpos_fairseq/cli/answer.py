"""Answer questions about a text by a model that was trained on question answering.

    relpos answer checkpoints/checkpoint_best.pt article.txt "Who wrote it?" "When?"
    relpos answer checkpoints/checkpoint_best.pt - --file questions.txt --jsonl < article.txt

CONTEXT is a file, - for standard input, or the text itself. Prints an answer a line; with --nbest
its probability as well; with --jsonl {"question", "answers": [{"text", "probability"}]}. An empty
answer means that there is none.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

HELP = "answers to questions about a text"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT")
    add("context", metavar="CONTEXT", help="a file, - or the text itself")
    add("questions", nargs="*", metavar="QUESTION")
    add("--file", type=Path, help="questions, one a line")
    add("--out", type=Path, help="write here, whole or not at all (standard output)")
    add("--data", type=Path, help="data folder, where the checkpoint has no text/ beside it")
    add("--nbest", type=int, default=1, metavar="N", help="answers to each question")
    add("--no-answer", action="store_true", help="'no answer' may win, as in SQuAD v2.0")
    add("--jsonl", action="store_true", help="print a JSON object a question")
    add("--cpu", action="store_true", help="no GPU")


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    from relpos_fairseq.inference.commands import answer_questions

    answer_questions(args)
