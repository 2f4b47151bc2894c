"""Prepare questions of SQuAD's format for the task question_answering."""

import json
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from relpos_fairseq.data.squad import read_questions, read_squad, split_name
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import copy_file, write_text
from relpos_fairseq.io.progress import table
from relpos_fairseq.io.stages import Stage
from relpos_fairseq.preparation.pipeline import Preparation, Report, TextLines
from relpos_fairseq.preparation.settings import QaOptions
from relpos_fairseq.text import load_tokenizer, train_tokenizer
from relpos_fairseq.text.assets import TokenizerText, tokenizer_files
from relpos_fairseq.text.dictionary import SPECIAL, UNK

VOCABULARY_SIZE = 8000


def check_qa(args: QaOptions) -> None:
    """Raise an error for options that contradict each other."""
    if bool(args.tokenizer_folder) == bool(args.train_tokenizer):
        raise UserError("give either --tokenizer-folder FOLDER or --train-tokenizer KIND")
    if args.tokenizer_folder and (args.lowercase or args.vocab_size is not None):
        option = "lowercase" if args.lowercase else "vocab-size"
        raise UserError(f"--{option} needs --train-tokenizer: --tokenizer-folder is taken as it is")
    if bool(args.valid) == (args.train_articles is not None):
        raise UserError("give either --valid FILES or --train-articles N")
    if args.tokenizer_folder and not (args.tokenizer_folder / "dict.txt").is_file():
        raise UserError(
            f"no {args.tokenizer_folder / 'dict.txt'}: put the dictionary of the model that will be "
            f"fine-tuned beside its tokenizer"
        )
    made = tokenizer_names(args)
    if foreign := [path.name for path in tokenizer_files(args.out) if path.name not in made]:
        raise UserError(  # the task would read them
            f"--out {args.out} holds another tokenizer's {', '.join(foreign)}: remove it, or choose another folder"
        )
    names = [split_name(path) for path in args.eval]
    twice = {name for name in names if names.count(name) > 1 or name in ("train", "valid")}
    if twice:
        raise UserError(f"--eval: {', '.join(sorted(twice))} would be written twice: rename the files")


def tokenizer_names(args: QaOptions) -> list[str]:
    """Return the names of the tokenizer's files that will be copied or trained."""
    if args.tokenizer_folder:
        return [path.name for path in tokenizer_files(args.tokenizer_folder)]
    pieces = args.train_tokenizer == "sentencepiece"
    return ["sentencepiece.model" if pieces else "tokenizer.json", "dict.txt"]


ROLES = ("train", "valid", "eval")
COLUMNS = ("articles", "contexts", "questions", "unanswerable", "bad answers")


class QaPreparation(Preparation):
    """Questions, their contexts and a tokenizer in one folder."""

    def __init__(self, args: QaOptions) -> None:
        super().__init__(args.out)
        self.args = args
        logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
        names = ["train", "valid", *map(split_name, args.eval)]
        self.splits = {name: args.out / f"{name}.json" for name in names}
        self.given = [path for role in ROLES for path in getattr(args, role)]

    def stages(self) -> list[Stage]:
        args = self.args
        options = ("train_articles", "eval_articles", "on_bad_answer")
        chosen = {name: getattr(args, name) for name in options}
        chosen |= {role: [str(path) for path in getattr(args, role)] for role in ROLES}
        splits = list(self.splits.values())
        names = tokenizer_names(args)
        made = [args.out / name for name in names]
        if args.tokenizer_folder:
            given = [args.tokenizer_folder / name for name in names]
            tokenizer = Stage("tokenizer", lambda: self.copy_tokenizer(given), given, made, keeps=True)
        else:
            size = args.vocab_size or VOCABULARY_SIZE
            how = {"kind": args.train_tokenizer, "vocab_size": size, "lowercase": args.lowercase}
            tokenizer = Stage("tokenizer", self.train_tokenizer, splits, made, how)
        return [
            Stage("splits", self.write_splits, self.given, splits, chosen, keeps=True),
            tokenizer,
            Stage("pieces", self.count_pieces, [*splits, *made], []),
        ]

    def write_splits(self) -> dict[str, dict[str, int]]:
        """Write every split's file, and count what it holds."""
        counts = {}
        for name, content in make_splits(self.args).items():
            path = self.splits[name]
            write_text(path, json.dumps(content, ensure_ascii=False) + "\n")
            found = read_questions(path, self.args.on_bad_answer)
            answerable = sum(question.answerable for question in found.questions)
            asked = len(found.questions)
            values = (found.articles, len(found.contexts), asked, asked - answerable)
            counts[name] = dict(zip(COLUMNS, (*values, len(found.bad_answers)), strict=True))
        return counts

    def copy_tokenizer(self, files: Sequence[Path]) -> dict:
        """Copy the user's tokenizer, once it is known to be one."""
        tokenizer = load_tokenizer(self.args.tokenizer_folder)
        for path in files:
            copy_file(path, self.out / path.name)
        return {"kind": tokenizer.kind, "pieces": len(tokenizer.symbols)}

    def train_tokenizer(self) -> dict:
        """Train a tokenizer on every context and question of every split."""
        args = self.args
        tokenizer = train_tokenizer(
            args.train_tokenizer,
            args.out,
            texts=list(texts_of(self.splits.values())),
            vocab_size=args.vocab_size or VOCABULARY_SIZE,
            lowercase=args.lowercase,
        )
        return {"kind": tokenizer.kind, "pieces": len(tokenizer.symbols)}

    def count_pieces(self) -> dict[str, dict[str, int]]:
        """Count every split's pieces and those that the tokenizer does not know."""
        tokenizer, counts = load_tokenizer(self.out), {}
        for name, path in self.splits.items():
            found = [one for pieces, _ in tokenizer.raw(list(texts_of([path]))) for one in pieces]
            counts[name] = {"pieces": len(found), "unknown": found.count(SPECIAL[UNK])}
        return counts

    def report(self, counts: dict[str, Mapping]) -> list[Report]:
        splits, tokenizer, pieces = counts["splits"], counts["tokenizer"], counts["pieces"]
        rows = [(name, *(splits[name][column] for column in COLUMNS), *pieces[name].values()) for name in self.splits]
        # Files that a kill left half-written begin with a full stop.
        made = [p for p in self.out.iterdir() if p.is_file() and not p.name.startswith(".")]
        return [
            Report(
                self.given,
                sorted(path for path in made if path.name != "manifest.json"),
                [
                    table(rows, ("split", *COLUMNS, "pieces", "unknown")),
                    f"{tokenizer['kind']} tokenizer, {tokenizer['pieces']:,} pieces; {self.out}",
                ],
                extra={"splits": {name: splits[name] for name in self.splits}},
                unknown={name: (one["unknown"], one["pieces"]) for name, one in pieces.items()},
                texts={
                    name: TextLines(TokenizerText(self.out), texts_of([path])) for name, path in self.splits.items()
                },
            )
        ]


def read_articles(paths: Sequence[Path], on_bad_answer: str) -> dict:
    """Return several files as one, checked."""
    merged: dict[str, Any] = {"version": "", "data": []}
    for path in paths:
        read_questions(path, on_bad_answer)
        content = read_squad(path)
        merged["version"] = content.get("version", "") or merged["version"]
        merged["data"] += content["data"]
    return merged


def make_splits(args: QaOptions) -> dict[str, dict]:
    """Return every split's content, by its name."""
    train = read_articles(args.train, args.on_bad_answer)
    cut = args.train_articles
    if cut is None:
        splits = {"train": train, "valid": read_articles(args.valid, args.on_bad_answer)}
    else:
        if cut >= len(train["data"]):
            raise UserError(f"--train-articles {cut} leaves none of the {len(train['data'])} articles to validate on")
        splits = {"train": {**train, "data": train["data"][:cut]}, "valid": {**train, "data": train["data"][cut:]}}
    for path in args.eval:
        content = read_articles([path], args.on_bad_answer)
        if cut is not None and args.eval_articles == "same":
            if len(content["data"]) != len(train["data"]):
                raise UserError(
                    f"{path} has {len(content['data'])} articles and --train "
                    f"{len(train['data'])}: it is no translation of it; use --eval-articles all"
                )
            content["data"] = content["data"][cut:]
        splits[split_name(path)] = content
    return splits


def texts_of(paths: Iterable[Path]) -> Iterator[str]:
    """Stream every context and question of some files."""
    for path in paths:
        for article in read_squad(path)["data"]:
            for paragraph in article["paragraphs"]:
                yield paragraph["context"]
                yield from (entry["question"] for entry in paragraph["qas"])
