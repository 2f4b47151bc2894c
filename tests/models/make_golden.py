"""Train the checkpoints of golden.tar.xz, and keep the outputs that their version gives.

It is made anew when a release changes what checkpoints hold; until then newer code must read it:

    git worktree add --detach RELEASE TAG
    PYTHONPATH=RELEASE:tests python tests/models/make_golden.py RELEASE tests/models/golden.tar.xz

The commands run inside RELEASE and make folders there, so that no checkpoint holds a path.
"""

from __future__ import annotations

import importlib
import io
import json
import logging
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import torch

from helpers.golden_models import CASES, KINDS, RESUMED, flags_of, outputs_of

WORDS = [f"w{number}" for number in range(8)]


def call(tool: str, *arguments: str) -> str:
    """Run the entry point of a fairseq command in this process; return what it logged."""
    from fairseq import checkpoint_utils
    from fairseq.logging import metrics

    metrics.reset()
    if hasattr(checkpoint_utils.save_checkpoint, "best"):
        del checkpoint_utils.save_checkpoint.best
    module = importlib.import_module(f"fairseq_cli.{tool}")
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(name)s | %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        with mock.patch.object(sys, "argv", [f"fairseq-{tool}", *arguments]):
            with redirect_stdout(stream):
                module.cli_main()
    finally:
        logging.getLogger().removeHandler(handler)
    return stream.getvalue()


def losses(log: str) -> list[float]:
    """The losses of a training's updates, in order."""
    return [float(found) for found in re.findall(r"train_inner \|.*?\bloss=([\d.]+)", log)]


def write_data() -> None:
    """Write data/: a pair of languages, text, pairs of sentences, and questions."""
    draw = random.Random(1)
    raw = Path("raw")
    raw.mkdir()
    dictionary = raw / "dict.txt"
    dictionary.write_text("".join(f"{word} 1\n" for word in WORDS))
    for split, count in (("train", 60), ("valid", 4)):
        for name in ("src", "tgt", "text", "input0", "input1"):
            lines = (" ".join(draw.choices(WORDS, k=draw.randint(2, 8))) for _ in range(count))
            (raw / f"{split}.{name}").write_text("".join(f"{line}\n" for line in lines))
        labels = (draw.choice("01") for _ in range(count))
        (raw / f"{split}.label").write_text("".join(f"{label}\n" for label in labels))
    prefixes = ["--trainpref", "raw/train", "--validpref", "raw/valid", "--srcdict", str(dictionary)]
    pair = ["--source-lang", "src", "--target-lang", "tgt", "--joined-dictionary"]
    call("preprocess", *prefixes, *pair, "--destdir", "data/pair")
    folders = {name: f"data/pairs/{name}" for name in ("input0", "input1", "label")}
    for name, folder in {"text": "data/text", **folders}.items():
        given = ["--trainpref", f"raw/train.{name}", "--validpref", f"raw/valid.{name}"]
        given += [] if name == "label" else ["--srcdict", str(dictionary)]
        call("preprocess", "--only-source", *given, "--destdir", folder)
    for log in Path("data").rglob("preprocess.log"):
        log.unlink()
    write_questions(Path("data/questions"))


def write_questions(folder: Path) -> None:
    """Write questions whose answer is a word of their context, and a tokenizer."""
    from relpos_fairseq.text import train_tokenizer

    folder.mkdir(parents=True)
    draw = random.Random(2)
    names = ["red", "blue", "cat", "dog", "tree", "house"]
    for split, count in (("train", 12), ("valid", 2)):
        articles = []
        for number in range(count):
            chosen = draw.sample(names, 4)
            context = " ".join(chosen)
            answer = {"text": chosen[2], "answer_start": context.index(chosen[2])}
            asked = [{"id": f"{split}{number}", "question": chosen[0], "answers": [answer]}]
            paragraphs = [{"context": context, "qas": asked}]
            articles.append({"title": str(number), "paragraphs": paragraphs})
        file = folder / f"{split}.json"
        file.write_text(json.dumps({"version": "1.1", "data": articles}))
    train_tokenizer("wordpiece", folder, texts=[" ".join(names)] * 3, vocab_size=60)


def data_of(case: str) -> str:
    """The folder of data of a case's task."""
    return f"data/{KINDS[case][0]}"


def train(case: str, *more: str) -> str:
    """Train a case; its checkpoint is checkpoints/CASE/checkpoint_last.pt."""
    paths = ("--user-dir", "relpos_fairseq", "--save-dir", f"checkpoints/{case}")
    return call("train", data_of(case), *paths, *flags_of(case), *more)


def load(path: Path, data: str) -> torch.nn.Module:
    """The model that fairseq builds from a checkpoint."""
    from fairseq import checkpoint_utils

    found = checkpoint_utils.load_model_ensemble_and_task([str(path)], {"data": data})
    return found[0][0]


def main(release: Path, archive: Path) -> None:
    """Make the archive."""
    os.chdir(release)
    write_data()
    outputs, golden = {}, Path("golden")
    golden.mkdir()
    for case in CASES:
        train(case)
        kept = golden / f"{case}.pt"
        shutil.copy(f"checkpoints/{case}/checkpoint_last.pt", kept)
        outputs[case] = outputs_of(case, load(kept, data_of(case)))
        if case in RESUMED:
            # Two updates more, from the optimizer's state: the losses say that it was read.
            outputs[case]["resumed"] = torch.tensor(losses(train(case, "--max-update", "4")))
    source = golden / "masked_lm.pt"
    converted = golden / "converted"
    subprocess.run(
        [
            *(sys.executable, "-m", "relpos_fairseq.cli", "convert", source),
            *("--to", "learned+m4", "--data", "data/text", "--out", converted),
        ],
        check=True,
    )
    outputs["converted"] = outputs_of("masked_lm", load(converted / "model.pt", str(converted)))
    torch.save(outputs, golden / "outputs.pt")
    shutil.copytree("data", golden / "data")
    # xz finds what all checkpoints have in common: their options.
    with tarfile.open(archive, "w:xz", preset=9) as file:
        for path in sorted(golden.rglob("*")):
            if path.is_file():
                entry = tarfile.TarInfo(path.relative_to(golden).as_posix())
                entry.size = path.stat().st_size
                with path.open("rb") as content:
                    file.addfile(entry, content)


if __name__ == "__main__":
    main(*(Path(argument).absolute() for argument in sys.argv[1:]))
