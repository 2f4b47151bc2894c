"""Write fairseq's binary format: of parallel text in units, or streamed from ids; count unknown ids."""

import array
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from relpos_fairseq.io.files import atomic_folder, atomic_path, copy_file
from relpos_fairseq.io.indexed import read_indexed, write_index
from relpos_fairseq.io.lines import in_blocks, plain_lines
from relpos_fairseq.io.processes import ordered_map
from relpos_fairseq.io.progress import progress
from relpos_fairseq.text.dictionary import EOS, NSPECIAL, UNK, choose_symbols, ids_of, read_dictionary, write_dictionary
from relpos_fairseq.text.dictionary import FILE as DICTIONARY
from relpos_fairseq.text.subwords import smallest

MOST_UNKNOWN = 0.001  # of all tokens, above which text and vocabulary do not belong together
BLOCK = 1 << 22  # ids counted at a time
LINES = 10_000  # of parallel text, encoded at a time
FACTOR = 8  # fairseq-preprocess fills a dictionary up to a multiple of it


def count_dictionary(paths: tuple[Path, Path], kind: str, dictionary: Path, workers: int) -> list[str]:
    """Write the dictionary of both sides of parallel text in subwords; return its symbols.

    It is fairseq-preprocess's, with the subwords of single characters that the text lacks: no text of its characters
    has an unknown subword.

    Args:
        paths: the training text's.
        kind: of the subwords, "subword-nmt" or "sentencepiece".
        dictionary: what is written.
        workers: processes; the result does not depend on them.
    """
    counts: Counter[str] = Counter()
    with progress(description="count units", unit="lines") as bar:
        for found, lines in ordered_map(_count_units, in_blocks(plain_lines(*paths), LINES), workers):
            counts.update(found)
            bar.update(lines)
    counts.update(dict.fromkeys(smallest(kind, counts), 0))
    kept = choose_symbols(counts, 0, None, FACTOR)
    write_dictionary(dictionary, kept)
    return [symbol for symbol, _ in kept]


def binarise_pairs(
    sets: Mapping[str, tuple[Path, Path]], languages: tuple[str, str], dictionary: Path, folder: Path, workers: int
) -> dict[str, Any]:
    """Write parallel text in units, one space between two, as fairseq reads it, with one dictionary of both sides.

    The folder appears whole or not at all; it has what fairseq-preprocess makes with `--joined-dictionary`, and the
    dictionary by the name dict.txt too.

    Args:
        sets: the source's and the target's file by split.
        languages: of both sides.
        dictionary: of "train".
        folder: where it is written.
        workers: processes; the result does not depend on them.

    Returns:
        The dictionary's entries, and the number of unknown units by split and language.
    """
    pair, kept = "-".join(languages), read_dictionary(dictionary)
    with atomic_folder(folder) as temporary:
        for name in (DICTIONARY, *(f"dict.{language}.txt" for language in languages)):
            copy_file(dictionary, temporary / name)
        encode = partial(_encode_block, ids_of(kept))
        unknown: dict[str, dict[str, int]] = {}
        with progress(description="binarise", unit="lines") as bar:
            for split, paths in sets.items():
                unknown[split] = {}
                for language, path in zip(languages, paths, strict=True):
                    prefix = temporary / f"{split}.{pair}.{language}"
                    blocks = _advance(bar, ordered_map(encode, in_blocks(plain_lines(path), LINES), workers))
                    write_blocks(prefix, blocks, len(kept) + NSPECIAL)
                    unknown[split][language] = count_unknown(prefix, len(kept) + NSPECIAL)
    return {"dictionary": len(kept), "unknown": unknown}


def _lines(block: bytes) -> list[list[str]]:
    return [line.split(" ") if line else [] for line in block.decode().removesuffix("\n").split("\n")]


def _count_units(block: bytes) -> tuple[Counter[str], int]:
    lines = _lines(block)
    return Counter(unit for line in lines for unit in line), len(lines)


def _encode_block(index: Mapping[str, int], block: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids (N,) of a block's lines, each ended by `</s>`, and the lines' lengths (n,)."""
    rows = [[*(index.get(unit, UNK) for unit in line), EOS] for line in _lines(block)]
    flat = np.fromiter((number for row in rows for number in row), np.int64)
    return flat, np.fromiter(map(len, rows), np.int64, len(rows))


def _advance(bar: Any, blocks: Iterable[tuple[np.ndarray, np.ndarray]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for ids, lengths in blocks:
        bar.update(len(lengths))
        yield ids, lengths


def write_indexed(path_prefix: str | Path, items: Iterable[Sequence[int]], vocab_size: int) -> dict[str, int]:
    """Write token ids as fairseq's memory-mapped dataset, streaming.

    Args:
        path_prefix: The files' path without `.bin` and `.idx`.
        items: One-dimensional tensors, arrays or lists.
        vocab_size: Decides the width of the integers, as in fairseq.

    Returns:
        How many items ("sequences") and ids ("tokens") were written.
    """
    flat = ((np.asarray(item), np.array([len(item)])) for item in items)
    return write_blocks(path_prefix, flat, vocab_size)


def write_blocks(
    path_prefix: str | Path, blocks: Iterable[tuple[np.ndarray, np.ndarray]], vocab_size: int
) -> dict[str, int]:
    """Write token ids as `write_indexed` does, many items at a time: the `.bin`, then the `.idx`, each whole.

    `blocks` are pairs of the ids of some items (N,) and the items' sizes (n,), sum(sizes) = N.
    """
    dtype = id_type(vocab_size)
    prefix = str(path_prefix)
    sizes = array.array("i")
    Path(prefix + ".idx").unlink(missing_ok=True)  # never an old index beside new ids
    with atomic_path(prefix + ".bin") as temporary, temporary.open("wb") as file:
        for ids, lengths in blocks:
            if int(lengths.sum()) != len(ids):
                raise ValueError(f"sizes sum up to {lengths.sum()}, there are {len(ids)} ids")
            file.write(np.ascontiguousarray(ids, dtype=dtype).tobytes())
            sizes.frombytes(np.ascontiguousarray(lengths, dtype=np.int32).tobytes())
    lengths = np.frombuffer(sizes, dtype=np.int32) if sizes else np.zeros(0, np.int32)
    with atomic_path(prefix + ".idx") as temporary, temporary.open("wb") as file:
        write_index(file, lengths, dtype)
    return {"sequences": len(lengths), "tokens": int(lengths.sum(dtype=np.int64))}


def id_type(vocab_size: int) -> np.dtype:
    """Return the integer type that fairseq chooses for a vocabulary's ids."""
    if vocab_size < 65500:
        return np.dtype(np.uint16)
    return np.dtype(np.uint32 if vocab_size < 4294967295 else np.int64)


def count_unknown(prefix: str | Path, vocab_size: int) -> int:
    """Count the unknown ids of `prefix.bin`, as fairseq or `write_indexed` wrote it."""
    ids = read_indexed(prefix).ids
    return sum(int((ids[at : at + BLOCK] == UNK).sum()) for at in range(0, len(ids), BLOCK))


def warn_of_unknown(found: Mapping[str, tuple[int, int]]) -> None:
    """Warn on stderr of data sets with many unknown tokens, from the numbers of unknown and of all tokens."""
    for name, (unknown, pieces) in found.items():
        if unknown > MOST_UNKNOWN * pieces:
            print(
                f"warning: {unknown:,} of the {pieces:,} pieces of {name} ({unknown / pieces:.2%}) "
                f"are unknown (<unk>): its characters or words are not those that the vocabulary "
                f"was made of",
                file=sys.stderr,
            )
