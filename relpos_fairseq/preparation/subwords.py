"""Learns subword units on a seeded sample and applies them.

subword-nmt: Sennrich et al. 2016, joint merges over both languages. sentencepiece: Kudo and
Richardson 2018, one model (BPE or unigram) for both languages.
"""

import io
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import redirect_stderr
from functools import lru_cache
from itertools import compress
from pathlib import Path

import sentencepiece
from subword_nmt.apply_bpe import BPE

from relpos_fairseq.io.command import error_line
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import atomic_path, open_together, write_bytes
from relpos_fairseq.io.processes import ordered_map
from relpos_fairseq.io.progress import progress
from relpos_fairseq.preparation.cleaning import sampled
from relpos_fairseq.preparation.parallel_text import map_lines, read_blobs
from relpos_fairseq.preparation.settings import SUBWORD_NMT
from relpos_fairseq.text.training import train_sentencepiece_model

REMEMBERED = 24_000  # words


def write_sample(paths: Iterable[Path], pairs: int, size: int, seed: int, output: Path) -> int:
    """Write the same lines of each side to one file, which the units are learned on.

    Of so many `pairs`, at most `size` are chosen; returns how many.
    """
    with open_together(output) as (file,):
        for path in paths:
            with path.open("rb") as lines:
                file.writelines(compress(lines, sampled(pairs, size, seed)))
    return min(size, pairs)


def learn_subword_nmt(sample: Path, merges: int, output: Path) -> None:
    """Learn merges by subword-nmt's own learner, in a process of its own for its memory's sake."""
    with atomic_path(output) as temporary:
        run_learner(
            [
                sys.executable,
                "-m",
                "subword_nmt.learn_bpe",
                "--input",
                str(sample),
                "--output",
                str(temporary),
                "--symbols",
                str(merges),
            ],
            "fewer words than --vocab-size asks for, or none?",
        )
        if temporary.stat().st_size <= len("#version: 0.2\n"):
            raise UserError(f"no merges were learned on {sample}: is there enough text?")


def learn_sentencepiece(sample: Path, size: int, kind: str, output: Path) -> None:
    """Train a sentencepiece model, with one thread: more may change the order of sums.

    `size` is of pieces, fewer where the text has not as many; `kind` is "bpe" or "unigram".
    """

    def train(sample: Path) -> bytes:
        with sample.open(encoding="utf-8", newline="\n") as lines:
            return train_sentencepiece_model(
                (line.removesuffix("\n") for line in lines),
                size,
                "--vocab-size",
                model_type=kind,
                num_threads=1,
                input_sentence_size=0,
                hard_vocab_limit=False,
                shuffle_input_sentence=False,
            )

    # In a process of its own for its memory's sake, which workers=1 would not be.
    [model] = ordered_map(train, [sample], workers=2)
    write_bytes(output, model)


def run_learner(command: list[str], remedy: str) -> None:
    """Run a learner; its last words become the error's."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        said = error_line(done.stderr.decode("utf-8", "replace").splitlines())
        raise UserError(f"subword units could not be learned ({said}): {remedy}")


class SubwordNmt:
    """Cuts words as subword-nmt does with a file of merges; remembers words' units."""

    def __init__(self, codes: Path):
        with redirect_stderr(io.StringIO()), codes.open(encoding="utf-8") as file:
            self.library = BPE(file)
        self.units = lru_cache(REMEMBERED)(self.cut)

    def cut(self, word: str) -> str:
        """Cut a word; the library's own memory, which is not bounded, is not used."""
        self.library.cache.clear()
        return self.library.segment(word)

    def __call__(self, line: str) -> str:
        """Return a line's units, separated by spaces."""
        return " ".join(map(self.units, line.split(" ")))


class SentencePiece:
    """Cuts lines by a sentencepiece model."""

    def __init__(self, model: Path):
        self.library = sentencepiece.SentencePieceProcessor(model_file=str(model))

    def __call__(self, line: str) -> str:
        return " ".join(self.library.encode(line, out_type=str))


def load_units(kind: str, path: Path) -> SubwordNmt | SentencePiece:
    """Load what was learned."""
    return SubwordNmt(path) if kind == SUBWORD_NMT else SentencePiece(path)


def apply_to_files(
    functions: tuple, files: tuple[Path, Path], outputs: tuple[Path, Path], workers: int, name: str
) -> list[int]:
    """Apply a function each to every line of the source and the target; as many lines come out.

    Returns:
        The number of lines, and of words or units of each side.
    """
    counts = [0, 0, 0]

    def convert(task: tuple[int, bytes]) -> tuple[int, bytes, int, int]:
        side, blob = task
        converted = map_lines(functions[side], blob)
        return side, converted, converted.count(b"\n"), len(converted.split())

    with open_together(*outputs) as written, progress(description=name, unit="lines") as bar:
        for side, converted, lines, words in ordered_map(convert, tasks(files), workers):
            written[side].write(converted)
            counts[0] += lines if side == 0 else 0
            counts[1 + side] += words
            bar.update(lines)
    return counts


def tasks(files: tuple[Path, Path]) -> Iterator[tuple[int, bytes]]:
    """Stream blocks of lines with their side, source and target in turn."""
    streams = [read_blobs([path]) for path in files]
    for blobs in zip(*streams, strict=True):
        yield from enumerate(blobs)
