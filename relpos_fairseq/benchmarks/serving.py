"""Measure sentences a second and BLEU of one checkpoint: fairseq-generate, `relpos translate`, CTranslate2.

Each timing has a process of its own: in one process, threads of one translator that wait for work would take the
processor from another's.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from sacrebleu.metrics import BLEU

from relpos_fairseq.export import ct2
from relpos_fairseq.export.ct2 import load_translation
from relpos_fairseq.export.translators import open_translator
from relpos_fairseq.inference.checkpoints import loading
from relpos_fairseq.inference.translator import Batching, Search, batches
from relpos_fairseq.io.errors import ToolError
from relpos_fairseq.io.progress import table

PACKAGE = Path(__file__).resolve().parent.parent
TIMED = re.compile(r"Translated .*?\(([\d.]+) sentences/s")
COMPARED = 64  # sentences on which an export is compared with the checkpoint
Lines = list[list[str]]  # symbols of each sentence


def benchmark(checkpoint: Path, data: Path, split: str, beam: int, rounds: int) -> str:
    """Return a table of speed and BLEU; translators take turns, and a row is the median of its rounds.

    All translate the same batches, those of `relpos translate`. BLEU is sacrebleu's, of detokenized text.
    """
    with tempfile.TemporaryDirectory() as name:
        folders = {kind: Path(name) / kind for kind in ("fp32", "int8")}
        sources, references = _apart(_read, checkpoint, data, split)
        for kind, folder in folders.items():
            quantization = None if kind == "fp32" else kind
            _apart(ct2.export, checkpoint, folder, quantization, data, COMPARED)
        runs: dict[str, Callable[[], tuple[float, Lines]]] = {
            "fairseq-generate": partial(_fairseq, checkpoint, data, split, beam),
            "relpos translate": partial(_apart, _translated, checkpoint, data, sources, beam),
        }
        for kind, folder in folders.items():
            runs[f"CTranslate2 {kind}"] = partial(_apart, _translated, folder, None, sources, beam)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        found = {}
        for _ in range(rounds):
            for name, run in runs.items():
                passed, found[name] = run()
                seconds[name].append(passed)
    bleu = _apart(_bleu, checkpoint, data, references, found)
    rows = [[name, f"{len(sources) / median(times):.1f}", f"{bleu[name]:.2f}"] for name, times in seconds.items()]
    return table(rows, ["search", "sentences/s", "BLEU"])


def _apart(function: Callable, *arguments: object) -> Any:
    """Call a function in a new process, which shares no threads with this one."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        return executor.submit(function, *arguments).result()


def _read(checkpoint: Path, data: Path, split: str) -> tuple[Lines, Lines]:
    """Return the sources and references of a split, as symbols."""
    task = load_translation(checkpoint, data)[1]
    task.load_dataset(split)
    pairs = [task.dataset(split)[number] for number in range(len(task.dataset(split)))]
    words, target = task.source_dictionary, task.target_dictionary
    sources = [[words[index] for index in pair["source"][:-1]] for pair in pairs]
    return sources, [[target[index] for index in pair["target"][:-1]] for pair in pairs]


def _translated(path: Path, data: Path | None, lines: Lines, beam: int) -> tuple[float, Lines]:
    """Translate with a checkpoint or an exported folder; return the seconds and the best translations."""
    translator, found = open_translator(path, data, cpu=True), [[] for _ in lines]
    began = time.perf_counter()
    for batch in batches([len(line) for line in lines], Batching()):
        results = translator.translate([lines[number] for number in batch], Search(beam=beam))
        for number, (best, *_) in zip(batch, results, strict=True):
            found[number] = best.symbols
    return time.perf_counter() - began, found


def _fairseq(checkpoint: Path, data: Path, split: str, beam: int) -> tuple[float, Lines]:
    """Run fairseq-generate; return the seconds by its own clock, which leaves out its start, and the translations."""
    command = [sys.executable, "-m", "fairseq_cli.generate", str(data), "--path", str(checkpoint)]
    command += ["--user-dir", str(PACKAGE), "--beam", str(beam), "--gen-subset", split, "--cpu"]
    command += ["--max-tokens", str(Batching.max_tokens), "--num-workers", "0"]
    command += ["--batch-size", str(Batching.max_sentences)]
    done = subprocess.run(command, capture_output=True, text=True)
    speed = TIMED.search(done.stdout + done.stderr)
    if done.returncode or speed is None:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ToolError(f"fairseq-generate failed: {last}")
    found = re.findall(r"^H-(\d+)\t\S+\t(.*)$", done.stdout, re.M)
    lines = [line.split() for _, line in sorted(found, key=lambda pair: int(pair[0]))]
    return len(lines) / float(speed[1]), lines


def _bleu(checkpoint: Path, data: Path, references: Lines, found: dict[str, Lines]) -> dict[str, float]:
    text = loading.load(checkpoint, data, True, "relpos translate").target
    wanted = [[text.decode(line) for line in references]]
    return {
        name: BLEU(force=True).corpus_score([text.decode(line) for line in lines], wanted).score
        for name, lines in found.items()
    }
