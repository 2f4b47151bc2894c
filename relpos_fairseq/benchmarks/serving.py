"""Measure speed, memory and BLEU of one checkpoint: fairseq-generate, `relpos translate`, CTranslate2; fp32 and int8.

Each timing has a process of its own: in one process, threads of one translator that wait for work would take the
processor from another's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
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
from relpos_fairseq.io.errors import ToolError, UserError
from relpos_fairseq.io.progress import table

PACKAGE = Path(__file__).resolve().parent.parent
TIMED = re.compile(r"Translated .*?\(([\d.]+) sentences/s")
COMPARED = 64  # sentences on which an export is compared with the checkpoint
Lines = list[list[str]]  # symbols of each sentence


@dataclass(frozen=True)
class Served:
    """A test set, translated once.

    Args:
        seconds: without the start.
        start: seconds until the first batch.
        memory: peak of the process, in MiB.
        lines: the best translation of each sentence.
    """

    seconds: float
    start: float
    memory: float
    lines: Lines


def benchmark(checkpoint: Path, data: Path, split: str, beam: int, rounds: int) -> str:
    """Return a table of speed, memory and BLEU; translators take turns, and a row is the median of its rounds.

    All translate the same batches, those of `relpos translate`. BLEU is sacrebleu's, of detokenized text.
    """
    with tempfile.TemporaryDirectory() as name:
        folders = {kind: Path(name) / kind for kind in ("fp32", "int8")}
        sources, references = _apart(_read, checkpoint, data, split)
        refused = ""
        try:
            for kind, folder in folders.items():
                _apart(ct2.export, checkpoint, folder, None if kind == "fp32" else kind, data, COMPARED)
        except UserError as error:  # a scheme that the engine has not
            folders, refused = {}, f"\nCTranslate2: {error}"
        runs: dict[str, Callable[[], Served]] = {
            "fairseq-generate": partial(_fairseq, checkpoint, data, split, beam),
            "relpos translate": partial(_apart, _translated, checkpoint, data, sources, beam),
            "relpos translate int8": partial(_apart, _translated, checkpoint, data, sources, beam, "int8"),
        }
        for kind, folder in folders.items():
            runs[f"CTranslate2 {kind}"] = partial(_apart, _translated, folder, None, sources, beam)
        served: dict[str, list[Served]] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                served[name].append(run())
    bleu = _apart(_bleu, checkpoint, data, references, {name: each[-1].lines for name, each in served.items()})
    rows = []
    for name, each in served.items():
        seconds, start, memory = (median(getattr(one, part) for one in each) for part in ("seconds", "start", "memory"))
        tokens = sum(len(line) + 1 for line in each[-1].lines)  # </s>
        speed = [f"{len(sources) / seconds:.1f}", f"{tokens / seconds:.0f}"]
        rows.append([name, *speed, f"{memory:.0f}", f"{start:.1f}", f"{bleu[name]:.2f}"])
    return table(rows, ["search", "sentences/s", "tokens/s", "MiB", "start, s", "BLEU"]) + refused


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


def _translated(path: Path, data: Path | None, lines: Lines, beam: int, quantization: str | None = None) -> Served:
    """Translate with a checkpoint or an exported folder, in this process, which does nothing else."""
    entered = time.perf_counter()
    translator, found = open_translator(path, data, True, quantization), [[] for _ in lines]
    began = time.perf_counter()
    for batch in batches([len(line) for line in lines], Batching()):
        results = translator.translate([lines[number] for number in batch], Search(beam=beam))
        for number, (best, *_) in zip(batch, results, strict=True):
            found[number] = best.symbols
    seconds = time.perf_counter() - began
    return Served(seconds, began - entered, _peak(os.getpid()), found)


def _peak(process: int) -> float:
    """Return the peak memory of a process so far in MiB; NaN where the system does not tell it.

    What `getrusage` tells is, of a process that was begun by a larger one, the larger one's.
    """
    try:
        said = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return float("nan")
    return next((int(line.split()[1]) / 1024 for line in said.splitlines() if line.startswith("VmHWM")), float("nan"))


def _fairseq(checkpoint: Path, data: Path, split: str, beam: int) -> Served:
    """Run fairseq-generate; its seconds are those of its own clock, which leaves out its start."""
    command = [sys.executable, "-m", "fairseq_cli.generate", str(data), "--path", str(checkpoint)]
    command += ["--user-dir", str(PACKAGE), "--beam", str(beam), "--gen-subset", split, "--cpu"]
    command += ["--max-tokens", str(Batching.max_tokens), "--num-workers", "0"]
    command += ["--batch-size", str(Batching.max_sentences)]
    with tempfile.TemporaryFile("w+") as said:
        began = time.perf_counter()
        done = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        memory = float("nan")
        while done.poll() is None:
            now = _peak(done.pid)
            memory = memory if now != now else now  # the last that was told
            time.sleep(0.1)
        whole = time.perf_counter() - began
        said.seek(0)
        output = said.read()
    speed = TIMED.search(output)
    if done.returncode or speed is None:
        raise ToolError(f"fairseq-generate failed: {(output.strip().splitlines() or ['no output'])[-1]}")
    found = re.findall(r"^H-(\d+)\t\S+\t(.*)$", output, re.M)
    lines = [line.split() for _, line in sorted(found, key=lambda pair: int(pair[0]))]
    seconds = len(lines) / float(speed[1])
    return Served(seconds, whole - seconds, memory, lines)


def _bleu(checkpoint: Path, data: Path, references: Lines, found: dict[str, Lines]) -> dict[str, float]:
    text = loading.load(checkpoint, data, True, "relpos translate").target
    wanted = [[text.decode(line) for line in references]]
    return {
        name: BLEU(force=True).corpus_score([text.decode(line) for line in lines], wanted).score
        for name, lines in found.items()
    }
