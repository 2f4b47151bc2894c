"""GLUE's and XNLI's folders in small, in their own layouts, and a tokenizer for them."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

from relpos_fairseq.text import train_tokenizer

WORDS = ["red", "blue", "old", "new", "cat", "dog", "sees", "likes", "a", "the", "house", "tree"]
NLI = ["contradiction", "entailment", "neutral"]
# Header, or None; then for a row: what stands in each column (1, 2: sentences; L: the label).
LAYOUTS = {
    "CoLA": (None, ["src", "L", "", "1"]),
    "MNLI": (
        ["index", "promptID", "genre", "sentence1", "sentence2", "label1", "gold_label"],
        ["0", "7", "fiction", "1", "2", "neutral", "L"],
    ),
    "MRPC": (["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"], ["L", "7", "8", "1", "2"]),
    "QNLI": (["index", "question", "sentence", "label"], ["0", "1", "2", "L"]),
    "QQP": (["id", "qid1", "qid2", "question1", "question2", "is_duplicate"], ["0", "7", "8", "1", "2", "L"]),
    "RTE": (["index", "sentence1", "sentence2", "label"], ["0", "1", "2", "L"]),
    "SST-2": (["sentence", "label"], ["1", "L"]),
    "STS-B": (["index", "genre", "sentence1", "sentence2", "score"], ["0", "g", "1", "2", "L"]),
    "WNLI": (["index", "sentence1", "sentence2", "label"], ["0", "1", "2", "L"]),
}
LABELS = {
    "MNLI": NLI,
    "QNLI": ["entailment", "not_entailment"],
    "RTE": ["entailment", "not_entailment"],
    "STS-B": ["0.000", "2.500", "5.000"],
}


def row(generator: random.Random, columns: list[str], labels: list[str]) -> str:
    first, second = (" ".join(generator.choices(WORDS, k=generator.randint(2, 6))) for _ in range(2))
    values = {"1": first, "2": second, "L": generator.choice(labels or [""])}
    return "\t".join(values.get(column, column) for column in columns)


def write_glue(root: Path, train: int = 20, valid: int = 9) -> Path:
    """Every task of GLUE: train, dev, and unlabelled tests for CoLA, RTE, STS-B and MNLI."""
    generator = random.Random(3)
    for task, (header, columns) in LAYOUTS.items():
        folder = root / task
        folder.mkdir(parents=True)
        labels = LABELS.get(task, ["0", "1"])
        dev = ["dev_matched", "dev_mismatched"] if task == "MNLI" else ["dev"]
        for stem, count in [("train", train), *((name, valid) for name in dev)]:
            lines = ["\t".join(header)] if header else []
            lines += [row(generator, columns, labels) for _ in range(count)]
            (folder / f"{stem}.tsv").write_text("\n".join(lines) + "\n")
    (root / "CoLA" / "test.tsv").write_text("index\tsentence\n0\ta red cat\n")
    (root / "RTE" / "test.tsv").write_text('index\tsentence1\tsentence2\n0\ta "red" cat\tcat\n')
    for name in ("STS-B/test", "MNLI/test_matched", "diagnostic/diagnostic"):
        (root / name).parent.mkdir(exist_ok=True)
        rows = [row(generator, [str(number), "1", "2"], []) for number in range(3)]
        (root / f"{name}.tsv").write_text("\n".join(["index\tsentence1\tsentence2", *rows]) + "\n")
    plain = root / "RTE" / "dev.tsv"
    plain.with_name("dev.tsv.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    return root


def write_xnli(root: Path, layout: str) -> Path:
    """XNLI of English and German, in the release's or in XTREME's layout."""
    generator = random.Random(4)
    folder = root / "XNLI"
    folder.mkdir(parents=True)
    if layout == "release":
        lines = ["premise\thypo\tlabel"]
        lines += [row(generator, ["1", "2", "L"], ["neutral", "contradictory"]) for _ in range(12)]
        files = {"multinli.train.en": lines}
        for split in ("dev", "test"):
            rows = [row(generator, [one, "L", "1", "2"], NLI) for one in ("en", "de", "de") for _ in range(4)]
            files[f"xnli.{split}"] = ["language\tgold_label\tsentence1\tsentence2", *rows]
    else:
        counts = {"train-en": 12, "dev-en": 4, "test-en": 4, "test-de": 8}
        files = {name: [row(generator, ["1", "2", "L"], NLI) for _ in range(n)] for name, n in counts.items()}
    for name, lines in files.items():
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return root


def write_tokenizer(folder: Path) -> Path:
    train_tokenizer("wordpiece", folder, vocab_size=80, texts=[" ".join(WORDS)] * 3)
    return folder
