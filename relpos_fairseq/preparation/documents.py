"""Documents for masked language models: read as sentences, sampled by language, packed into blocks, encoded.

A document may be as long as its file, so that no document is held whole: a stream has a string for a sentence and
None for the end of a document. Encoded, a sentence is its ids and </s>, and </s> alone ends a document.

Sampling (Lample and Conneau 2019, section 3.1; mBERT: α = 0.7): with n_l sentences of language l and
p_l = n_l / Σ n, languages have the shares q_l = p_l^α / Σ p^α. Nothing is drawn: a document of language l occurs
q_l / p_l times, scaled so that the language with the most sentences occurs once. So no text is left out, rare
languages repeat, and a document's own hash decides a fractional part.

Packing: a block has at most `tokens - 1` tokens, as fairseq puts <s> in front.

- `document`: no block has two documents (RoBERTa's DOC-SENTENCES; Chen2021, section 4: full sentences from
  documents, packed up to the maximum length).
- `full`: blocks run on over the end of a document, with one more </s> there (RoBERTa's FULL-SENTENCES).

Both are read with `--sample-break-mode eos`. Not packed (`none`), an item is a sentence or the </s> that ends a
document: fairseq's `--sample-break-mode complete_doc` packs it on loading.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypedDict

import numpy as np

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.indexed import read_indexed
from relpos_fairseq.io.lines import read_lines
from relpos_fairseq.io.processes import ordered_map
from relpos_fairseq.io.progress import progress
from relpos_fairseq.io.reading import parse_json
from relpos_fairseq.preparation.binarise import count_unknown, write_blocks
from relpos_fairseq.preparation.settings import Reading
from relpos_fairseq.text.assets import Vocabulary
from relpos_fairseq.text.dictionary import EOS

CHUNK_CHARACTERS = 1 << 18  # of a chunk, which a worker is given
# Where a sentence may end: closing punctuation, what closes after it and space; the full stops of
# Chinese, Japanese, Hindi and Urdu need no space. No list of abbreviations: "Mr. Smith" is cut.
SENTENCE_END = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+|(?<=[。！？])[\"'”’」』）]*\s*|(?<=[।۔])\s*")
OPENING = "\"'“‘([「『（"
BEGINNINGS = {"blank": r"\A\s*\Z", "line": "", "file": "(?!)"}  # what stands where a document begins: all or no lines


# Reading


def read_stream(path: Path, reading: Reading, counts: Counter | None = None) -> Iterator[str | None]:
    """Yield the sentences of a file, plain or compressed, with None after the last of each document.

    A document without sentences is skipped. `counts` counts `documents`, `sentences`, `characters` and
    dropped lines.
    """
    counts = Counter() if counts is None else counts
    lines = read_lines(path, on_bad_line=reading.on_bad_line, counts=counts)
    parts = _lines_of_objects(path, lines) if reading.documents == "json" else _lines_of_text(lines, reading.documents)
    is_open = False
    for line in itertools.chain(parts, [None]):
        if line is not None:
            for sentence in _sentences(line.strip(), reading):
                counts["sentences"] += 1
                counts["characters"] += len(sentence)
                is_open = True
                yield sentence
        elif is_open:
            counts["documents"] += 1
            is_open = False
            yield None


def _lines_of_text(lines: Iterable[str], documents: str) -> Iterator[str | None]:
    """Yield lines, with None before each that begins or parts documents."""
    begins = re.compile(BEGINNINGS.get(documents, documents))
    for line in lines:
        if begins.search(line):
            yield None
        yield line


class _Document(TypedDict):
    """A line of JSON."""

    text: str


def _lines_of_objects(path: Path, lines: Iterable[str]) -> Iterator[str | None]:
    """Yield the lines of documents, of which each line of JSON has one as its `text`, with None after each document."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            document = parse_json(line, _Document)["text"]
        except (ValueError, RecursionError):
            raise UserError(
                f"{path}, line {number} is no JSON object with a text: {line.strip()[:60]!r}: give "
                f"files of JSON lines, or another --documents than json"
            ) from None
        yield from document.split("\n")
        yield None


def in_chunks(stream: Iterable[str | None], characters: int = CHUNK_CHARACTERS) -> Iterator[list[str | None]]:
    """Cut a stream into chunks between sentences; the places of the cuts change no result."""
    chunk, size = [], 0
    for item in stream:
        chunk.append(item)
        size += 1 if item is None else len(item)
        if size >= characters:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _sentences(text: str, reading: Reading) -> list[str]:
    """Return the sentences of a line."""
    if reading.sentences == "line":
        return [text] if text else []
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    # What goes on with a small letter is the same sentence.
    ends = [end for end in ends if not text[end:].lstrip(OPENING)[:1].islower()]
    parts = (text[i:j].strip() for i, j in itertools.pairwise([0, *ends, len(text)]))
    return [part for part in parts if part]


# Sampling


def shares(sentences: dict[str, int], alpha: float) -> dict[str, float]:
    """Return the share q_l of every language, from its number of sentences.

    `alpha` is the exponent: 1 keeps the shares, 0 makes them equal.
    """
    empty = [language for language, count in sentences.items() if count < 1]
    if empty or not sentences:
        raise UserError(f"there is no text in language {(empty or ['(none)'])[0]!r}")
    total = sum(sentences.values())
    weights = {language: (count / total) ** alpha for language, count in sentences.items()}
    return {language: weight / sum(weights.values()) for language, weight in weights.items()}


def repetitions(sentences: dict[str, int], alpha: float) -> dict[str, float]:
    """Return how often a document of each language occurs; 1 for the largest language."""
    wanted = shares(sentences, alpha)
    factors = {language: wanted[language] / count for language, count in sentences.items()}
    least = min(factors.values())
    return {language: factor / least for language, factor in factors.items()}


def uniform(seed: int, stream: str, indices: np.ndarray) -> np.ndarray:
    """Return random numbers in [0, 1) (N,) that depend on the arguments alone, one for each index (N,).

    SplitMix64's finaliser (Steele et al. 2014) over the index, a hash of the stream's name (what
    the numbers are for) and the seed: any subset can be asked for, in any process.
    """
    digest = hashlib.blake2b(f"{seed}:{stream}".encode(), digest_size=8).digest()
    start = np.uint64(int.from_bytes(digest, "little"))
    with np.errstate(over="ignore"):
        z = start + (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) / 2.0**53


def copies(factor: float, chance: np.ndarray) -> np.ndarray:
    """Return how often each document occurs (N,): `factor`, rounded up with the probability of its fraction."""
    whole = int(factor)
    return whole + (chance < factor - whole).astype(np.int64)


# Packing


def document_spans(sizes: np.ndarray) -> np.ndarray:
    """Return the first and the past-the-last sentence of every document (D, 2), without the item that ends it.

    `sizes` are the (N,) tokens of each item; an item of one token ends a document; empty documents
    are left out.
    """
    ends = np.flatnonzero(sizes == 1)
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    spans = np.stack([starts, ends], axis=1)
    return spans[spans[:, 0] < spans[:, 1]]


def pack(
    documents: Iterable[list[np.ndarray]], mode: str, tokens: int, eos: int, counts: Counter | None = None
) -> Iterator[np.ndarray]:
    """Yield the items of a data set, (L,) ids each, 1 <= L < tokens if packed.

    Args:
        documents: each the list of its sentences' tokens, every sentence ending with `eos`.
        mode: `document`, `full` or `none`.
        tokens: tokens of a block with <s>.
        eos: the token that ends a sentence.
        counts: counts `blocks`, `tokens`, and `split_sentences` (longer than a block).
    """
    counts = Counter() if counts is None else counts
    end = np.array([eos])
    if mode == "none":
        items = (item for document in documents for item in (*document, end))
    elif mode == "document":
        items = (block for document in documents for block in _blocks(document, tokens - 1, counts))
    else:
        items = _blocks(_run_on(documents, end), tokens - 1, counts)
    for item in items:
        counts["blocks"] += 1
        counts["tokens"] += len(item)
        yield item


def _run_on(documents: Iterable[list[np.ndarray]], end: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the sentences of all documents, the last of each document with one more end."""
    for document in documents:
        yield from document[:-1]
        yield np.concatenate([document[-1], end])


def _blocks(sentences: Iterable[np.ndarray], room: int, counts: Counter) -> Iterator[np.ndarray]:
    """Fill blocks with whole sentences in their order; a sentence without room begins the next.

    A sentence longer than a block is cut into whole blocks; its rest begins the next block.
    """
    block, used = [], 0
    for sentence in sentences:
        if len(sentence) > room - used and block:
            yield np.concatenate(block)
            block, used = [], 0
        if len(sentence) > room:
            counts["split_sentences"] += 1
            while len(sentence) > room:
                yield sentence[:room]
                sentence = sentence[room:]
        block.append(sentence)
        used += len(sentence)
    if block:
        yield np.concatenate(block)


# Encoding


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
        found = read_indexed(prefix)
        self.sizes, self.ids = found.sizes, found.ids
        self.starts = np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])
        self.spans = document_spans(self.sizes)

    def documents(self, numbers: np.ndarray) -> Iterator[list[np.ndarray]]:
        """Yield documents by number, in the given order: the sentences, each (L,) ids that end with </s>."""
        for first, last in self.spans[numbers]:
            yield [self.ids[self.starts[i] : self.starts[i + 1]] for i in range(first, last)]
