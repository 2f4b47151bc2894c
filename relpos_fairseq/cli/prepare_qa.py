"""Turns files of SQuAD's format into the folder that --task question_answering reads.

    python scripts/prepare_qa.py --train train-v1.1.json --valid dev-v1.1.json \
        --train-tokenizer wordpiece --vocab-size 30000 --out data-bin/squad
    python scripts/prepare_qa.py --train xquad.en.json --train-articles 36 \
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
import json
import logging
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from relpos_fairseq.data.question_answering.reading import (
    BAD_ANSWER,
    read_json,
    read_questions,
    split_name,
)
from relpos_fairseq.data.tokenizers import (
    FILES,
    KINDS,
    load_tokenizer,
    train_tokenizer,
)
from relpos_fairseq.engine.command import run_command
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import atomic_path, write_text
from relpos_fairseq.engine.manifest import table, write_manifest

VOCABULARY_SIZE = 8000
TOKENIZER_FILES = (*FILES, "dict.txt")


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", nargs="+", type=Path, required=True, help="training files")
    parser.add_argument("--valid", nargs="+", type=Path, default=[], help="validation files")
    parser.add_argument("--eval", nargs="+", type=Path, default=[], help="files to evaluate on")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument(
        "--train-articles", type=int, help="train on the first N articles, validate on the others"
    )
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
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Makes the folder.

    Raises:
        PreparationError: options that contradict each other, or wrong files.
    """
    args = make_parser().parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    check(args)
    args.out.mkdir(parents=True, exist_ok=True)
    splits = make_splits(args)
    rows = []
    for name, content in splits.items():
        path = args.out / f"{name}.json"
        write_text(path, json.dumps(content, ensure_ascii=False) + "\n")
        found = read_questions(path, args.on_bad_answer)
        answerable = sum(question.answerable for question in found.questions)
        rows.append(
            (name, found.articles, len(found.contexts), len(found.questions),
             len(found.questions) - answerable, len(found.bad_answers))
        )  # fmt: skip
    tokenizer = make_tokenizer(args, splits)
    headers = ("split", "articles", "contexts", "questions", "unanswerable", "bad answers")
    print(table(rows, headers))
    print(f"{tokenizer.kind} tokenizer, {len(tokenizer.symbols):,} pieces; {args.out}")
    outputs = sorted(path for path in args.out.iterdir() if path.name != "manifest.json")
    write_manifest(
        args.out / "manifest.json",
        command=["prepare_qa.py", *(sys.argv[1:] if argv is None else map(str, argv))],
        inputs=[*args.train, *args.valid, *args.eval],
        outputs=outputs,
        extra={"splits": {row[0]: dict(zip(headers[1:], row[1:], strict=True)) for row in rows}},
    )


def check(args: argparse.Namespace) -> None:
    """Refuses options that contradict each other."""
    if bool(args.tokenizer) == bool(args.train_tokenizer):
        raise PreparationError("give either --tokenizer FOLDER or --train-tokenizer KIND")
    if args.tokenizer and (args.lowercase or args.vocab_size is not None):
        option = "lowercase" if args.lowercase else "vocab-size"
        raise PreparationError(f"--{option} needs --train-tokenizer: --tokenizer is taken as it is")
    if bool(args.valid) == (args.train_articles is not None):
        raise PreparationError("give either --valid FILES or --train-articles N")
    if args.train_articles is not None and args.train_articles < 1:
        raise PreparationError(f"--train-articles must be 1 or more, got {args.train_articles}")
    if args.tokenizer and not (args.tokenizer / "dict.txt").is_file():
        raise PreparationError(
            f"no {args.tokenizer / 'dict.txt'}: put the dictionary of the model that will be "
            f"fine-tuned beside its tokenizer"
        )
    check_tokenizer_files(args)
    names = [split_name(path) for path in args.eval]
    twice = {name for name in names if names.count(name) > 1 or name in ("train", "valid")}
    if twice:
        raise PreparationError(
            f"--eval: {', '.join(sorted(twice))} would be written twice: rename the files"
        )


def check_tokenizer_files(args: argparse.Namespace) -> None:
    """Refuses a folder with another tokenizer's files, which the task would read."""
    if args.tokenizer:
        written = {name for name in TOKENIZER_FILES if (args.tokenizer / name).is_file()}
    else:
        model = (
            "sentencepiece.model" if args.train_tokenizer == "sentencepiece" else "tokenizer.json"
        )
        written = {model, "dict.txt"}
    foreign = [
        name for name in TOKENIZER_FILES if name not in written and (args.out / name).is_file()
    ]
    if foreign:
        raise PreparationError(
            f"--out {args.out} holds another tokenizer's {', '.join(foreign)}: remove it, or "
            f"choose another folder"
        )


def read_articles(paths: Sequence[Path], on_bad_answer: str) -> dict:
    """Several files as one, checked."""
    merged = {"version": "", "data": []}
    for path in paths:
        read_questions(path, on_bad_answer)
        content = read_json(path)
        merged["version"] = content.get("version", "") or merged["version"]
        merged["data"] += content["data"]
    return merged


def make_splits(args: argparse.Namespace) -> dict[str, dict]:
    """Every split's content, by its name."""
    train = read_articles(args.train, args.on_bad_answer)
    cut = args.train_articles
    if cut is None:
        splits = {"train": train, "valid": read_articles(args.valid, args.on_bad_answer)}
    else:
        if cut >= len(train["data"]):
            raise PreparationError(
                f"--train-articles {cut} leaves none of the {len(train['data'])} articles to "
                f"validate on"
            )
        splits = {
            "train": {**train, "data": train["data"][:cut]},
            "valid": {**train, "data": train["data"][cut:]},
        }
    for path in args.eval:
        content = read_articles([path], args.on_bad_answer)
        if cut is not None and args.eval_articles == "same":
            if len(content["data"]) != len(train["data"]):
                raise PreparationError(
                    f"{path} has {len(content['data'])} articles and --train "
                    f"{len(train['data'])}: it is no translation of it; use --eval-articles all"
                )
            content["data"] = content["data"][cut:]
        splits[split_name(path)] = content
    return splits


def contexts(splits: dict[str, dict]) -> Iterator[str]:
    """Every context and question of every split."""
    for content in splits.values():
        for article in content["data"]:
            for paragraph in article["paragraphs"]:
                yield paragraph["context"]
                yield from (entry["question"] for entry in paragraph["qas"])


def make_tokenizer(args: argparse.Namespace, splits: dict[str, dict]):
    """The tokenizer and its dictionary in the folder."""
    if args.train_tokenizer:
        texts = list(contexts(splits))
        return train_tokenizer(
            args.train_tokenizer,
            args.out,
            texts=texts,
            vocab_size=args.vocab_size or VOCABULARY_SIZE,
            lowercase=args.lowercase,
        )
    tokenizer = load_tokenizer(args.tokenizer)
    for name in TOKENIZER_FILES:
        if (args.tokenizer / name).is_file():
            with atomic_path(args.out / name) as temporary:
                shutil.copyfile(args.tokenizer / name, temporary)
    return tokenizer


if __name__ == "__main__":
    sys.exit(run_command(main))
