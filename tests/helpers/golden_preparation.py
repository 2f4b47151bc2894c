"""What the five preparations write for small text, byte for byte.

tests/preparation/golden_preparation.json (below: FILE) holds the SHA-256 of every file as version
7983f42 wrote it.  It is not made anew when the code changes: the same text must go on giving the
same bytes.  It was made with the packages of scripts/requirements.txt by

    PYTHONPATH=OLD python tests/helpers/golden_preparation.py OLD > FILE

where OLD is a worktree of that version.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

WORDS = "the house a tree sees old man red dog new day walks ähnlich Größe don't 日本 naïve C++".split()
NLI = ("entailment", "not_entailment")
# Name of a run: the command and its arguments; IN is the text's folder, MADE that of all runs.
RUNS = {
    "wmt-subword-nmt": "prepare wmt en-de --from-dir IN/wmt --vocab-size 60 --workers 2",
    "wmt-sentencepiece": "prepare wmt en-de --from-dir IN/wmt --bpe sentencepiece "
    "--vocab-size 80 --max-words 8 --sample 100 --seed 3",
    "lm-word": "prepare lm --train IN/a.txt IN/b.txt.gz --valid IN/v.txt --documents blank "
    "--shards 2 --workers 2 --padding-factor 8",
    "lm-char": "prepare lm --text IN/a.txt --shares 0.8,0.1,0.1 --level char --documents heading",
    "lm-byte": "prepare lm --text IN/a.txt --shares 0.9,0.1 --level byte --documents blank --shards 3",
    "lm-sentencepiece": "prepare lm --train IN/a.txt --test IN/v.txt --level sentencepiece "
    "--vocab-size 330 --byte-fallback --model-type bpe",
    "mlm-bpe": "prepare mlm --train x=IN/a.txt y=IN/v.txt --hold-out 0.2 --alpha 0.5 "
    "--tokens-per-sample 40 --vocab-size 320 --workers 2",
    "mlm-wordpiece": "prepare mlm --train IN/a.txt --valid IN/v.txt --train-tokenizer wordpiece "
    "--lowercase --vocab-size 90 --pack full --tokens-per-sample 30 --shards 2 --documents line",
    "mlm-sentencepiece": "prepare mlm --train IN/a.txt --train-tokenizer sentencepiece --pack none "
    "--vocab-size 70 --character-coverage 1.0 --sentences split --hold-out 0.1",
    "qa": "prepare qa --train IN/qa.json --train-articles 6 --eval IN/qa.json "
    "--train-tokenizer wordpiece --vocab-size 90",
    "glue": "prepare glue IN/glue --tokenizer-folder MADE/mlm-wordpiece/tokenizer --max-length 20 --workers 2",
    "glue-text": "prepare glue IN/glue --tasks RTE,CoLA",
}
# What a run keeps for its own continuation; the manifest, which holds versions, is looked at apart.
OWN = ("work", "shards", "manifest.json", "held-out.txt", "sample.txt")
COUNTED = ("</s>", "languages", "level", "sets", "splits", "vocabulary")


def write_text(folder: Path) -> None:
    """Write the input of all runs."""
    draw = random.Random(7)

    def sentence() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(3, 9)))

    (folder / "wmt").mkdir(parents=True)
    for split, count in (("train", 150), ("valid", 7), ("test", 9)):
        for language in ("en", "de"):
            lines = "".join(f"{sentence().capitalize()}.\n" for _ in range(count))
            (folder / "wmt" / f"{split}.{language}").write_text(lines, encoding="utf-8")
    for name, count in (("a.txt", 120), ("b.txt.gz", 40), ("v.txt", 30)):
        lines = [
            f" = Title {number} = \n" if number % 12 == 0 else f"{sentence()}\n" * (number % 5 > 0) or "\n"
            for number in range(count)
        ]
        text = "".join(lines).encode()
        (folder / name).write_bytes(gzip.compress(text, mtime=0) if name[-2:] == "gz" else text)
    articles = []
    for number in range(10):
        context = sentence()
        word = context.split()[1]
        answer = {"text": word, "answer_start": context.index(f" {word}") + 1}
        asked = [{"id": str(number), "question": sentence(), "answers": [answer]}]
        paragraphs = [{"context": context, "qas": asked}]
        articles.append({"title": str(number), "paragraphs": paragraphs})
    (folder / "qa.json").write_text(json.dumps({"version": "1.1", "data": articles}))
    tables = {
        "RTE": ("index\tsentence1\tsentence2\tlabel\n", lambda: f"1\t{{}}\t{{}}\t{draw.choice(NLI)}"),
        "CoLA": ("", lambda: f"s\t{draw.choice('01')}\t\t{{}}"),
        "STS-B": (
            "index\tgenre\tsentence1\tsentence2\tscore\n",
            lambda: f"1\tg\t{{}}\t{{}}\t{draw.choice(('0.000', '2.500', '5.000'))}",
        ),
    }
    for task, (header, row) in tables.items():
        (folder / "glue" / task).mkdir(parents=True)
        for split, count in (("train", 20), ("dev", 9)):
            rows = "".join(f"{row().format(sentence(), sentence())}\n" for _ in range(count))
            (folder / "glue" / task / f"{split}.tsv").write_text(header + rows, encoding="utf-8")


def words_of(name: str, text: Path, made: Path) -> list[str]:
    """The command line of a preparation, after `relpos`; its result is made/NAME."""
    arguments = RUNS[name].replace("IN", str(text)).replace("MADE", str(made)).split()
    return [*arguments, *(["--text", f"{made / name}.txt"] if name == "glue-text" else ["--out", str(made / name)])]


def run(root: Path, name: str, text: Path, made: Path) -> None:
    """Run one preparation as a user does, by a version."""
    done = subprocess.run(
        [sys.executable, "-m", "relpos_fairseq.cli", *words_of(name, text, made)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{name} ended with {done.returncode}: {done.stderr[-2000:]}")


def run_all(folder: Path, run: Callable[[str, Path, Path], None]) -> dict[str, dict[str, dict]]:
    """Run every preparation; its name to the files' hashes, and to what the manifest counts."""
    text, made = folder / "text", folder / "made"
    write_text(text)
    made.mkdir()
    for name in RUNS:
        run(name, text, made)
    return {name: {"files": hashes(made, name), "counts": counts(made / name)} for name in RUNS}


def hashes(made: Path, name: str) -> dict[str, str]:
    """SHA-256 of each file that a run leaves for later programs, by its path."""
    found = {}
    for path in sorted([*(made / name).rglob("*"), *made.glob(f"{name}.txt")]):
        parts = path.relative_to(made).parts
        if path.is_file() and not any(part in OWN or part[0] == "." for part in parts):
            found["/".join(parts[1:]) or path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def counts(folder: Path) -> dict:
    """What a manifest says of the data; its other keys hold paths, versions and settings."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {key: manifest[key] for key in COUNTED if key in manifest}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        print(json.dumps(run_all(Path(temporary), partial(run, Path(sys.argv[1]))), indent=1, sort_keys=True))
