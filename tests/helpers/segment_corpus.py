"""A tiny character corpus and the command lines that train and evaluate language models on it."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from helpers.commands import QUIET, USER_DIR, call, child_environment
from helpers.folders import prepare

# --init-std: so that what is remembered matters from the first update
MODEL = """--arch relpos_transformer_xl_tiny --position-scheme transformer_xl --decoder-layers 2 --decoder-embed-dim 16
    --decoder-ffn-embed-dim 16 --decoder-attention-heads 2 --mem-len 10 --dropout 0.1 --init-std 0.3""".split()
TASK = ["--task", "segment_language_modeling", "--tokens-per-sample", "8"]
TRAIN = """--optimizer relpos_adam --lr 3e-3 --batch-size 2 --criterion relpos_cross_entropy --log-interval 1
    --no-epoch-checkpoints --disable-validation --distributed-world-size 1""".split()


def write_lines(path: Path, count: int, seed: int, words: bool = False) -> None:
    """Lines of a small language: letters of a word follow each other in the alphabet."""
    generator = random.Random(seed)
    lines = []
    for _ in range(count):
        starts = generator.choices(range(6), k=generator.randint(1, 4))
        text = ["".join("abcdefgh"[start : start + 3]) for start in starts]
        lines.append(" ".join(text) if words else " ".join("_".join(text)))
    path.write_text("\n".join(lines) + "\n")


def binarise(raw: Path, binary: Path, *more: str | Path) -> Path:
    """Run fairseq-preprocess on `train` and `valid`."""
    paths = ("--trainpref", raw / "train", "--validpref", raw / "valid", "--destdir", binary)
    call("preprocess", "--only-source", *paths, *more)
    return binary


def write_corpus(folder: Path) -> Path:
    """A data folder of characters; about 190 predictions in train and 110 in valid."""
    raw = folder / "raw"
    raw.mkdir(parents=True)
    write_lines(raw / "train", 20, 1)
    write_lines(raw / "valid", 12, 2)
    return binarise(raw, folder / "bin")


def arguments(data: Path, save_dir: Path, *more: str | Path) -> list[str]:
    """Command line of a training."""
    paths = [str(data), "--user-dir", str(USER_DIR), "--save-dir", str(save_dir)]
    return [*paths, *MODEL, *TASK, *TRAIN, *QUIET, *map(str, more)]


def train(data: Path, save_dir: Path, *more: str | Path) -> str:
    """Train in this process."""
    return call("train", *arguments(data, save_dir, *more))


def character_model(folder: Path) -> tuple[Path, Path]:
    """(a checkpoint with memory of 10 and segments of 8, its prepared characters)."""
    write_lines(folder / "text.txt", 30, 1)
    options = ["--shares", "0.8,0.2", "--level", "char", "--workers", "1"]
    prepare("lm", ["--text", folder / "text.txt", "--out", folder / "data", *options])
    train(folder / "data", folder / "checkpoints", "--max-update", "20")
    return folder / "checkpoints" / "checkpoint_last.pt", folder / "data"


def evaluate(data: Path, checkpoint: Path, *more: str | Path) -> str:
    """Run fairseq-validate in this process."""
    paths = [str(data), "--user-dir", str(USER_DIR), "--path", str(checkpoint)]
    return call("validate", *paths, *TASK, *QUIET, *map(str, more))


def killed_after(update: int, data: Path, save_dir: Path, *more: str | Path) -> int:
    """Train in another process, killed as soon as its log shows an update; its status, -9 where it was killed."""
    script, environment = Path(sys.executable).parent / "fairseq-train", child_environment() | {"PYTHONUNBUFFERED": "1"}
    how = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8"}
    with subprocess.Popen([script, *arguments(data, save_dir, *more)], **how) as process:
        for line in process.stdout:  # ends with the process
            if f"num_updates={update}," in line:
                process.kill()
    return process.returncode
