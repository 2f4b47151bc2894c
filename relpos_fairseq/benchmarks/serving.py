"""Sentences a second and BLEU of one checkpoint: fairseq-generate, our search, CTranslate2."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from sacrebleu.metrics import BLEU

from relpos_fairseq.engine.errors import ToolError
from relpos_fairseq.engine.tables import table
from relpos_fairseq.export import ct2
from relpos_fairseq.export.sentences import load_translation, translate

PACKAGE = Path(__file__).resolve().parent.parent
TIMED = re.compile(r"Translated .*?\(([\d.]+) sentences/s")


def benchmark(checkpoint: Path, data: Path, split: str, beam: int, rounds: int) -> str:
    """Return a table; engines take turns, and a row is the median of its rounds.

    BLEU is sacrebleu's of symbols joined to words, against the references of the data folder.

    Args:
        checkpoint: of a model that CTranslate2 holds.
        data: its binarised data.
        split: `test`, `valid`.
        beam: of every search.
        rounds: how often each is timed.
    """
    model, task = load_translation(checkpoint, data)
    task.load_dataset(split)
    pairs = [task.dataset(split)[number] for number in range(len(task.dataset(split)))]
    sources = [pair["source"] for pair in pairs]
    words, target = task.source_dictionary, task.target_dictionary
    symbols = [[words[index] for index in row[:-1]] for row in sources]
    references = [_words([target[i] for i in pair["target"][:-1]]) for pair in pairs]
    with tempfile.TemporaryDirectory() as folder:
        runs: dict[str, Callable[[], list[list[str]]]] = {
            "ours": lambda: translate(model, task, sources, beam)
        }
        for name, kind in (("CTranslate2 fp32", None), ("CTranslate2 int8", "int8")):
            runs[name] = _engine(model, task, Path(folder) / name, kind, symbols, beam)
        seconds, found = _timed(runs, rounds)
    rows = [_fairseq(checkpoint, data, split, beam, references)]
    for name, times in seconds.items():
        lines = [_words(line) for line in found[name]]
        rows.append(
            [name, f"{len(symbols) / median(times):.1f}", f"{_bleu(lines, references):.2f}"]
        )
    return table(rows, ["search", "sentences/s", "BLEU"])


def _engine(
    model: Any, task: Any, folder: Path, kind: str | None, symbols: list[list[str]], beam: int
) -> Callable[[], list[list[str]]]:
    folder.mkdir()
    ct2.write(model, task.source_dictionary, task.target_dictionary, folder, kind)
    threads = torch.get_num_threads()
    translator = ct2.engine().Translator(str(folder), device="cpu", intra_threads=threads)
    return lambda: ct2.search(translator, symbols, beam)


def _timed(
    runs: dict[str, Callable[[], list[list[str]]]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[list[str]]]]:
    """Return seconds of each round, and what each found."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    found = {}
    for _ in range(rounds):
        for name, run in runs.items():
            began = time.perf_counter()
            found[name] = run()
            seconds[name].append(time.perf_counter() - began)
    return seconds, found


def _fairseq(
    checkpoint: Path, data: Path, split: str, beam: int, references: list[str]
) -> list[str]:
    """Return the row of the real command, by its own clock, which leaves out its start."""
    command = [sys.executable, "-m", "fairseq_cli.generate", str(data), "--path", str(checkpoint)]
    command += ["--user-dir", str(PACKAGE), "--beam", str(beam), "--gen-subset", split, "--cpu"]
    command += ["--batch-size", "64", "--num-workers", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    speed = TIMED.search(done.stdout + done.stderr)
    if done.returncode or speed is None:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ToolError(f"fairseq-generate failed: {last}")
    hypotheses = re.findall(r"^H-(\d+)\t\S+\t(.*)$", done.stdout, re.M)
    lines = [_words(line.split()) for _, line in sorted(hypotheses, key=lambda h: int(h[0]))]
    return ["fairseq-generate", f"{float(speed[1]):.1f}", f"{_bleu(lines, references):.2f}"]


def _words(symbols: list[str]) -> str:
    """Join pieces of subword-nmt and of sentencepiece to words."""
    line = " ".join(symbols)
    if "\u2581" in line:
        return line.replace(" ", "").replace("\u2581", " ").strip()
    return (line + " ").replace("@@ ", "").strip()


def _bleu(lines: list[str], references: list[str]) -> float:
    return BLEU(tokenize="none", force=True).corpus_score(lines, [references]).score
