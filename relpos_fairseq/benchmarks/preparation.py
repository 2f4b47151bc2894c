"""Measure text preparation: pairs a second by workers, peak memory by size, beside the usual way."""

import os
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from relpos_fairseq.io.files import open_text_out, write_json
from relpos_fairseq.io.lines import read_lines
from relpos_fairseq.io.processes import ordered_map
from relpos_fairseq.io.progress import table
from relpos_fairseq.preparation.parallel_text import find_parallel_file, parallel_files
from relpos_fairseq.preparation.wmt import WmtPreparation
from relpos_fairseq.preparation.wmt_settings import WmtOptions, WmtSettings

REPLACED, COMPOUNDED = 0.15, 0.01  # shares of a copy's words
INTERVAL = 0.1  # seconds between two looks at memory
STAGES = ("clean", "tokenise", "merge", "sample", "learn", "apply")
LEARNING = ("sample", "learn")  # the same work in this package and in the usual way


def replicate(text: Path, languages: tuple[str, str], pairs: int, folder: Path) -> Path:
    """Write a training set of so many pairs into a folder, link the held-out sets, and return the folder."""
    texts = parallel_files(text, *languages)
    folder.mkdir(parents=True, exist_ok=True)
    for held_out in texts.held_out.values():
        for path in held_out.paths:
            link = folder / path.name
            if not link.exists():
                link.symlink_to(path.resolve())
    for side, language in enumerate(languages):
        target = folder / f"train.{language}"
        if target.exists():
            continue
        lines = list(read_lines(texts.training[0].paths[side]))
        words = [word for line in lines for word in line.split()]
        draw = random.Random(side)
        with open_text_out(target) as file:
            for number, line in enumerate(islice(cycle(lines), pairs)):
                file.write(f"{line if number < len(lines) else varied(line, words, draw)}\n")
    return folder


def varied(line: str, words: list[str], draw: random.Random) -> str:
    """Return a line with some of its words replaced by words drawn from the text."""
    changed = []
    for word in line.split():
        chance = draw.random()
        if chance < COMPOUNDED:
            word = f"{draw.choice(words)}{draw.choice(words).lower()}"
        elif chance < REPLACED:
            word = draw.choice(words)
        changed.append(word)
    return " ".join(changed)


def tree(pid: int) -> list[int]:
    """Return the ids of a process and of all its descendants."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:
            continue  # it has just ended
        for child in children:
            found += tree(int(child))
    return found


def memory(pid: int) -> int:
    """Return the proportional set size of a process tree in bytes."""
    total = 0
    for process in tree(pid):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total * 1024


class Watch:
    """Seconds, processor seconds (with children's) and peak memory in bytes of what runs inside."""

    def __enter__(self) -> "Watch":
        self.peak, self.ended = 0, threading.Event()
        self.thread = threading.Thread(target=self.look, daemon=True)
        self.thread.start()
        self.start, self.before = time.monotonic(), used()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds, self.processor = time.monotonic() - self.start, used() - self.before
        self.ended.set()
        self.thread.join()

    def look(self) -> None:
        """Record the peak of memory until the end."""
        while not self.ended.wait(INTERVAL):
            self.peak = max(self.peak, memory(os.getpid()))


def used() -> float:
    """Return the processor seconds of this process and of its ended children."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def timed(stages: Sequence[tuple[str, Callable[[], object]]]) -> dict[str, dict[str, float]]:
    """Run stages one after the other; return seconds, processor seconds and peak memory of each."""
    results = {}
    for name, run in stages:
        with Watch() as watch:
            run()
        results[name] = {"seconds": watch.seconds, "processor": watch.processor, "peak": watch.peak}
    return results


def ours(folder: Path, languages: tuple[str, str], workers: int, vocab: int, out: Path) -> dict:
    """Measure the stages of `relpos prepare wmt`; subwords learned before are kept."""
    settings = WmtSettings(
        WmtOptions(pair=["-".join(languages)], out=out, from_dir=folder, workers=workers, vocab_size=vocab)
    )
    preparation = WmtPreparation(settings)
    preparation.run_count()
    preparation.run_held_out()
    names = [name for name in STAGES if name not in LEARNING or not settings.model.exists()]
    made = [(stage.name, stage.run) for stage in preparation.stages() if stage.name in names]
    return timed(made)


def usual(folder: Path, languages: tuple[str, str], codes: Path, pairs: int, out: Path) -> dict:
    """Measure sacremoses and subword-nmt in one process, on the first pairs."""

    def tokenise() -> None:
        from sacremoses import MosesPunctNormalizer, MosesTokenizer

        for language in languages:
            normaliser, tokeniser = MosesPunctNormalizer(lang=language), MosesTokenizer(language)
            with open_text_out(out / f"tokens.{language}") as file:
                for line in islice(read_lines(find_parallel_file(folder, "train", language)), pairs):
                    line = normaliser.normalize(line)
                    tokens = tokeniser.tokenize(line, aggressive_dash_splits=True, return_str=True)
                    file.write(f"{tokens}\n")

    def apply() -> None:
        for language in languages:
            program = [Path(sys.executable).with_name("subword-nmt"), "apply-bpe", "-c", codes]
            files = ["-i", out / f"tokens.{language}", "-o", out / f"units.{language}"]
            subprocess.run([*program, *files], check=True)

    return timed([("tokenise", tokenise), ("apply", apply)])


def apart(function: Callable[..., dict], *arguments: object) -> dict:
    """Call a function in a process of its own, so that memory starts from nothing."""
    [result] = ordered_map(lambda given: function(*given), [arguments], workers=2)
    return result


def row(way: str, workers: int, pairs: int, stages: dict) -> list:
    """Return a line of the table."""
    text = {name: value for name, value in stages.items() if name not in LEARNING}
    seconds = sum(stage["seconds"] for stage in text.values())
    processor = sum(stage["processor"] for stage in text.values())
    parts = ", ".join(f"{name} {stage['seconds']:.0f}" for name, stage in stages.items())
    peak = max(stage["peak"] for stage in stages.values()) / 1e6
    return [way, workers, pairs, parts, round(pairs / seconds), round(processor), round(peak)]


def measure(args: Any) -> None:
    """Measure each number of pairs with each number of workers, then the usual way."""
    source, _, target = args.pair.partition("-")
    languages, out = (source, target), args.out.absolute()
    rows, measured = [], {}
    for pairs in args.pairs:
        folder = replicate(args.from_dir, languages, pairs, out / f"text-{pairs}")
        for workers in args.workers:
            made = out / f"ours-{pairs}"
            result = apart(ours, folder, languages, workers, args.vocab_size, made)
            rows.append(row("relpos prepare wmt", workers, pairs, result))
            measured[f"ours {pairs} {workers}"] = result
            print(rows[-1], flush=True)
    pairs = min(args.usual_pairs or max(args.pairs), max(args.pairs))
    (out / "usual").mkdir(exist_ok=True)
    codes = out / f"ours-{max(args.pairs)}" / "units" / "bpe.codes"
    folder = out / f"text-{max(args.pairs)}"
    result = apart(usual, folder, languages, codes, pairs, out / "usual")
    rows.append(row("the usual way", 1, pairs, result))
    measured[f"usual {pairs}"] = result
    write_json(out / "benchmark.json", measured)
    headers = ["way", "workers", "pairs", "seconds by stage", "pairs/s (without learning)", "processor s", "peak MB"]
    print(f"\n{table(rows, headers)}", flush=True)
