"""Sample parallel text that subwords are learned on, and apply subwords to parallel files."""

from collections.abc import Iterable, Iterator
from itertools import compress
from pathlib import Path

from relpos_fairseq.io.files import open_together
from relpos_fairseq.io.processes import ordered_map
from relpos_fairseq.io.progress import progress
from relpos_fairseq.preparation.cleaning import sampled
from relpos_fairseq.preparation.parallel_text import map_lines, read_blobs


def write_sample(paths: Iterable[Path], pairs: int, size: int, seed: int, output: Path) -> int:
    """Write the same lines of each side to one file, which the units are learned on.

    Of so many `pairs`, at most `size` are chosen; returns how many.
    """
    with open_together(output) as (file,):
        for path in paths:
            with path.open("rb") as lines:
                file.writelines(compress(lines, sampled(pairs, size, seed)))
    return min(size, pairs)


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
