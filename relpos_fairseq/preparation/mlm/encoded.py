"""Encoded text: every sentence's ids and </s>, and </s> alone behind each document."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from relpos_fairseq.data.dictionary import EOS
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.pool import ordered_map
from relpos_fairseq.engine.progress import progress
from relpos_fairseq.preparation.binarise import CODES, MAGIC, write_blocks
from relpos_fairseq.preparation.mlm.documents import Reading, in_chunks, read_stream
from relpos_fairseq.preparation.mlm.packing import document_spans
from relpos_fairseq.preparation.mlm.vocabulary import Vocabulary
from relpos_fairseq.preparation.unknown import count_unknown

HEADER = np.dtype([("magic", "S9"), ("version", "<i8"), ("code", "u1"), ("items", "<i8")])


def encode_file(source: Path, prefix: Path, vocabulary: Vocabulary, reading: Reading, workers: int) -> dict[str, int]:
    """Encode a text file into `prefix.bin` and `prefix.idx`; the same for any number of workers.

    Returns:
        Numbers of `items`, `tokens` and `unknown` tokens.
    """

    def encode(chunk: list[str | None]) -> tuple[np.ndarray, np.ndarray]:
        texts = [item for item in chunk if item is not None]
        found = iter(vocabulary.encode(texts))
        items = [np.empty(0, np.int64) if item is None else next(found) for item in chunk]
        # A text of nothing that the tokenizer knows must not look like the end of a document.
        kept = [ids for ids, item in zip(items, chunk, strict=True) if len(ids) or item is None]
        sizes = np.array([len(ids) + 1 for ids in kept], dtype=np.int32)
        flat = np.full(int(sizes.sum()), EOS, dtype=np.int64)
        is_end = np.zeros(len(flat), dtype=bool)
        is_end[np.cumsum(sizes) - 1] = True
        if kept:
            flat[~is_end] = np.concatenate(kept)
        return flat, sizes

    chunks = in_chunks(read_stream(source, reading))
    blocks = progress(ordered_map(encode, chunks, workers), description=f"encode {source.name}", unit="chunks")
    counts = write_blocks(prefix, iter(blocks), vocabulary.size)
    unknown = count_unknown(prefix, vocabulary.size)
    return {"items": counts["sequences"], "tokens": counts["tokens"], "unknown": unknown}


class Encoded:
    """An encoded file, mapped into memory.

    Attributes:
        sizes: (N,) tokens of each item.
        spans: (D, 2) first and past-the-last sentence of each document.
    """

    def __init__(self, prefix: Path) -> None:
        index = Path(f"{prefix}.idx")
        header = np.fromfile(index, dtype=HEADER, count=1)
        if not len(header) or header["magic"][0] != MAGIC.rstrip(b"\0"):
            raise PreparationError(f"{index} is no index of encoded text: delete it")
        kind = {code: kind for kind, code in CODES.items()}[int(header["code"][0])]
        count = int(header["items"][0])
        self.sizes = np.fromfile(index, np.int32, count, offset=HEADER.itemsize)
        self.starts = np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])
        data = f"{prefix}.bin"
        self.ids = np.memmap(data, kind, "r") if os.path.getsize(data) else np.empty(0, kind)
        self.spans = document_spans(self.sizes)

    def document(self, number: int) -> list[np.ndarray]:
        """The sentences of a document, each (L,) ids that end with </s>."""
        first, last = self.spans[number]
        return [self.ids[self.starts[i] : self.starts[i + 1]] for i in range(first, last)]

    def documents(self, numbers: np.ndarray) -> Iterator[list[np.ndarray]]:
        """Several documents, in the given order."""
        for number in numbers:
            yield self.document(int(number))
