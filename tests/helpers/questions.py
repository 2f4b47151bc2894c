"""Small files of questions for the tests of question answering."""

from __future__ import annotations

import json
import random
from pathlib import Path

from helpers.commands import QUIET, USER_DIR
from relpos_fairseq.text import train_tokenizer

COLOURS = ["red", "blue", "green", "white", "black"]
THINGS = ["cat", "dog", "house", "train", "river", "piano", "lamp", "coat"]
PLACES = ["Paris", "Rome", "Oslo", "Athens", "Cairo"]
MODEL = (
    "--arch relpos_roberta_tiny --position-scheme m4 --segment-encoding head --encoder-embed-dim 32 "
    "--encoder-ffn-embed-dim 32 --encoder-attention-heads 2 --dropout 0 --attention-dropout 0"
).split()
TASK = (
    "--task question_answering --criterion question_answering --tokens-per-sample 40 --doc-stride 8 "
    "--max-query-length 12"
).split()
TRAIN = (
    "--optimizer relpos_adam --lr 3e-3 --clip-norm 1 --batch-size 16 --log-interval 1 --no-epoch-checkpoints "
    "--distributed-world-size 1 --seed 1"
).split() + ["--adam-betas", "(0.9, 0.98)", "--user-dir", str(USER_DIR), *QUIET]


def training(data: Path, save_dir: Path, *more: object) -> list[object]:
    """Command line of a training on a data folder."""
    return [data, *MODEL, *TASK, *TRAIN, "--save-dir", save_dir, *more]


def squad(contexts: list[tuple[str, list[dict]]], version: str = "1.1") -> dict:
    """SQuAD's JSON, an article a context."""
    return {
        "version": version,
        "data": [
            {"title": str(number), "paragraphs": [{"context": context, "qas": asked}]}
            for number, (context, asked) in enumerate(contexts)
        ],
    }


def question(name: str, context: str, text: str, answer: str | None) -> dict:
    """An entry of `qas`; no answer: an unanswerable question."""
    if answer is None:
        return {"id": name, "question": text, "answers": [], "is_impossible": True}
    at = context.index(answer)
    return {"id": name, "question": text, "answers": [{"text": answer, "answer_start": at}]}


def make_file(path: Path, count: int, seed: int, unanswerable: bool = False) -> Path:
    """Write `count` contexts, each with two questions (and one without an answer)."""
    generator = random.Random(seed)
    contexts = []
    for number in range(count):
        things = generator.sample(THINGS, 4)
        facts = [(t, generator.choice(COLOURS), generator.choice(PLACES)) for t in things[:3]]
        context = " ".join(f"The {c} {t} is in {p} today." for t, c, p in facts)
        asked = [
            question(f"{number}-{n}", context, f"Where is the {t}?", f"{p}") for n, (t, _, p) in enumerate(facts[:2])
        ]
        for entry, (thing, _, place) in zip(asked, facts, strict=False):
            at = context.index(place, context.index(f" {thing} "))
            entry["answers"] = [{"text": place, "answer_start": at}]
        if unanswerable:
            asked.append(question(f"{number}-no", context, f"Where is the {things[3]}?", None))
        contexts.append((context, asked))
    path.write_text(json.dumps(squad(contexts, "v2.0" if unanswerable else "1.1")))
    return path


def make_data(folder: Path, kind: str = "wordpiece", unanswerable: bool = False) -> Path:
    """Write a data folder: tokenizer, dict.txt, train.json, valid.json."""
    folder.mkdir(parents=True, exist_ok=True)
    make_file(folder / "train.json", 40, 1, unanswerable)
    make_file(folder / "valid.json", 13, 2, unanswerable)
    words = [f"The {c} {t} is in {p} today. Where is the {t}?" for c in COLOURS for t in THINGS for p in PLACES]
    train_tokenizer(kind, folder, texts=words, vocab_size=300)
    return folder
