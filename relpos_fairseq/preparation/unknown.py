"""Unknown pieces (`<unk>`): counted in every data set, with a warning where they are many."""

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from relpos_fairseq.data.dictionary import UNK
from relpos_fairseq.preparation.binarise import id_type

MOST = 0.001  # of all pieces, above which text and vocabulary do not belong together
BLOCK = 1 << 22


def count_unknown(prefix: str | Path, vocab_size: int) -> int:
    """Count the unknown ids of `prefix.bin`, as fairseq or `write_indexed` wrote it."""
    path = Path(f"{prefix}.bin")
    if not path.stat().st_size:
        return 0
    ids = np.memmap(path, id_type(vocab_size), "r")
    return sum(int((ids[at : at + BLOCK] == UNK).sum()) for at in range(0, len(ids), BLOCK))


def warn_of_unknown(found: Mapping[str, tuple[int, int]]) -> None:
    """Say on stderr which data sets have many unknown ones among so many pieces."""
    for name, (unknown, pieces) in found.items():
        if unknown > MOST * pieces:
            print(
                f"warning: {unknown:,} of the {pieces:,} pieces of {name} ({unknown / pieces:.2%}) "
                f"are unknown (<unk>): its characters or words are not those that the vocabulary "
                f"was made of",
                file=sys.stderr,
            )
