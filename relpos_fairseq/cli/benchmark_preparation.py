#!/usr/bin/env python
"""Measures text preparation: pairs a second by workers, peak memory by size, beside the usual way.

    python scripts/benchmark_preparation.py --text my_text --pair en-de --pairs 100000 1000000

The text is real text replicated with variation: in every copy words are replaced by words drawn
from the same text, and some become compounds that were not there. Timed are prepare_wmt.py's own
stages on it: clean (normalise, filter), tokenise, merge (duplicates), sample and learn (units), and
apply. The usual way is one process doing the same to every line: sacremoses' normalizer and
tokenizer, then subword-nmt's apply-bpe with the same merges; it filters nothing. Pairs a second are
without learning, which is the same program in both. Memory is the proportional set size of the
whole process tree, sampled. The processor's seconds tell more where other programs run beside it.
"""

import argparse
import json
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

from relpos_fairseq.engine.command import run_command
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import open_text_out, write_json
from relpos_fairseq.engine.lines import read_lines
from relpos_fairseq.engine.manifest import table
from relpos_fairseq.preparation.wmt.local import find, parallel_files
from relpos_fairseq.preparation.wmt.pipeline import Pipeline
from relpos_fairseq.preparation.wmt.settings import Settings

REPLACED, COMPOUNDED = 0.15, 0.01  # shares of a copy's words
INTERVAL = 0.1  # seconds between two looks at memory
STAGES = ("clean", "tokenise", "merge", "sample", "learn", "apply")
LEARNING = ("sample", "learn")  # the same work in both ways


def parser() -> argparse.ArgumentParser:
    """Returns the command line's parser."""
    whole = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = whole.add_argument
    add("--text", type=Path, required=True, help="folder with train, valid and test")
    add("--pair", default="en-de")
    add("--pairs", type=int, nargs="+", default=[100_000, 1_000_000])
    add("--workers", type=int, nargs="+", default=[1, 2])
    add("--vocab-size", type=int, default=8000)
    add("--usual-pairs", type=int, help="for the usual way (default: the largest of --pairs)")
    add("--out", type=Path, required=True, help="folder for texts and results")
    return whole


def replicate(text: Path, languages: tuple[str, str], pairs: int, folder: Path) -> Path:
    """Writes train of so many pairs, and links the held-out sets.

    Raises:
        PreparationError: The text lacks a file.
    """
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
    """Replaces some of a line's words."""
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
    """Returns a process and all its descendants."""
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
    """Returns the proportional set size of a process tree in bytes."""
    total = 0
    for process in tree(pid):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total * 1024


class Watch:
    """Seconds, processor seconds and peak memory of what runs inside it.

    Attributes:
        seconds: By the clock.
        processor: Of this process and its children.
        peak: The largest memory seen, in bytes.
    """

    def __enter__(self) -> "Watch":
        """Starts to look."""
        self.peak, self.ended = 0, threading.Event()
        self.thread = threading.Thread(target=self.look, daemon=True)
        self.thread.start()
        self.start, self.before = time.monotonic(), used()
        return self

    def __exit__(self, *_: object) -> None:
        """Notes the times."""
        self.seconds, self.processor = time.monotonic() - self.start, used() - self.before
        self.ended.set()
        self.thread.join()

    def look(self) -> None:
        """Looks at memory until the end."""
        while not self.ended.wait(INTERVAL):
            self.peak = max(self.peak, memory(os.getpid()))


def used() -> float:
    """Returns the processor seconds of this process and of its ended children."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def timed(stages: Sequence[tuple[str, Callable[[], object]]]) -> dict[str, dict[str, float]]:
    """Runs stages one after the other and measures each."""
    results = {}
    for name, run in stages:
        with Watch() as watch:
            run()
        results[name] = {"seconds": watch.seconds, "processor": watch.processor, "peak": watch.peak}
    return results


def ours(folder: Path, languages: tuple[str, str], workers: int, vocab: int, out: Path) -> dict:
    """Measures prepare_wmt.py's stages; units that an earlier call has learned are kept."""
    settings = Settings("", *languages, out=out, from_dir=folder, workers=workers, vocab_size=vocab)
    pipeline = Pipeline(settings, parallel_files(folder, *languages))
    pipeline.counts = pipeline.run_count()
    pipeline.run_held_out()
    names = [name for name in STAGES if name not in LEARNING or not pipeline.model.exists()]
    stages = [*pipeline.shard_stages(1), *pipeline.last_stages()]
    return timed([(stage.name, stage.run) for stage in stages if stage.name in names])


def usual(folder: Path, languages: tuple[str, str], codes: Path, pairs: int, out: Path) -> dict:
    """Measures the usual way on the first pairs."""

    def tokenise() -> None:
        from sacremoses import MosesPunctNormalizer, MosesTokenizer

        for language in languages:
            normaliser, tokeniser = MosesPunctNormalizer(lang=language), MosesTokenizer(language)
            with open_text_out(out / f"tokens.{language}") as file:
                for line in islice(read_lines(find(folder, "train", language)), pairs):
                    line = normaliser.normalize(line)
                    tokens = tokeniser.tokenize(line, aggressive_dash_splits=True, return_str=True)
                    file.write(f"{tokens}\n")

    def apply() -> None:
        for language in languages:
            subprocess.run(
                [Path(sys.executable).with_name("subword-nmt"), "apply-bpe", "-c", codes,
                 "-i", out / f"tokens.{language}", "-o", out / f"units.{language}"],
                check=True,
            )  # fmt: skip

    return timed([("tokenise", tokenise), ("apply", apply)])


def apart(function: Callable[..., dict], *arguments: object) -> dict:
    """Calls a function in a process of its own, so that memory starts from nothing."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(read)
            result = function(*arguments)
            with os.fdopen(write, "w") as file:
                json.dump(result, file)
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as file:
        result = file.read()
    if os.waitpid(child, 0)[1] != 0:
        raise PreparationError(f"{function.__name__} failed; its error stands above")
    return json.loads(result)


def row(way: str, workers: int, pairs: int, stages: dict) -> list:
    """Returns a line of the table."""
    text = {name: value for name, value in stages.items() if name not in LEARNING}
    seconds = sum(stage["seconds"] for stage in text.values())
    processor = sum(stage["processor"] for stage in text.values())
    parts = ", ".join(f"{name} {stage['seconds']:.0f}" for name, stage in stages.items())
    peak = max(stage["peak"] for stage in stages.values()) / 1e6
    return [way, workers, pairs, parts, round(pairs / seconds), round(processor), round(peak)]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    args = parser().parse_args(argv)
    source, _, target = args.pair.partition("-")
    languages, out = (source, target), args.out.absolute()
    rows, measured = [], {}
    for pairs in args.pairs:
        folder = replicate(args.text, languages, pairs, out / f"text-{pairs}")
        for workers in args.workers:
            made = out / f"ours-{pairs}"
            result = apart(ours, folder, languages, workers, args.vocab_size, made)
            rows.append(row("prepare_wmt.py", workers, pairs, result))
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
    headers = ["way", "workers", "pairs", "seconds by stage", "pairs/s (without learning)",
               "processor s", "peak MB"]  # fmt: skip
    print(f"\n{table(rows, headers)}", flush=True)


if __name__ == "__main__":
    sys.exit(run_command(main))
