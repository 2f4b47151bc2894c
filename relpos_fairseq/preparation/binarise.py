"""Write fairseq's binary format: by fairseq-preprocess, or streamed from ids; count unknown ids."""

import array
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from relpos_fairseq.io.command import error_line
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import atomic_folder, atomic_path, write_text
from relpos_fairseq.text.dictionary import UNK

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
MOST_UNKNOWN = 0.001  # of all tokens, above which text and vocabulary do not belong together
BLOCK = 1 << 22  # ids counted at a time
# The codes of fairseq's indexed_dataset and the types that its best_fitting_int_dtype chooses.
CODES = {np.dtype(np.int64): 5, np.dtype(np.uint16): 8, np.dtype(np.uint32): 9}


def preprocess(arguments: Sequence[str], workers: int) -> Path:
    """Run fairseq-preprocess with `--destdir FOLDER`, which appears whole or not at all.

    The result does not depend on the workers. The command's log, which has clock times, is removed;
    of one that failed it stays, and the error names it.
    """
    arguments = [str(argument) for argument in arguments]
    if "--destdir" not in arguments:
        raise UserError("fairseq-preprocess needs --destdir")
    place = arguments.index("--destdir") + 1
    folder = Path(arguments[place])
    log = folder.with_name(f"{folder.name}.preprocess.log")
    with atomic_folder(folder) as temporary:
        arguments[place] = str(temporary)
        command = [sys.executable, "-m", "fairseq_cli.preprocess", *arguments]
        output = subprocess.run(
            [*command, "--workers", str(workers)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        if output.returncode != 0:
            write_text(log, output.stdout)
            reason = error_line(output.stdout.splitlines()) or f"status {output.returncode}"
            raise UserError(f"fairseq-preprocess: {reason} (its output: {log})")
        (temporary / "preprocess.log").unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    return folder


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


def write_index(file, lengths: np.ndarray, dtype: np.dtype) -> None:
    """Write the index: header, sizes (int32), byte offsets (int64)."""
    file.write(MAGIC)
    file.write(VERSION.to_bytes(8, "little"))
    file.write(CODES[dtype].to_bytes(1, "little"))
    file.write(len(lengths).to_bytes(8, "little"))
    file.write(lengths.tobytes())
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    file.write((ends - lengths.astype(np.int64) * dtype.itemsize).tobytes())


def id_type(vocab_size: int) -> np.dtype:
    """Return the integer type that fairseq chooses for a vocabulary's ids."""
    if vocab_size < 65500:
        return np.dtype(np.uint16)
    return np.dtype(np.uint32 if vocab_size < 4294967295 else np.int64)


def count_unknown(prefix: str | Path, vocab_size: int) -> int:
    """Count the unknown ids of `prefix.bin`, as fairseq or `write_indexed` wrote it."""
    path = Path(f"{prefix}.bin")
    if not path.stat().st_size:
        return 0
    ids = np.memmap(path, id_type(vocab_size), "r")
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
