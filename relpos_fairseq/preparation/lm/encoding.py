"""Text to fairseq's binaries: ids by workers, documents' starts, counts of everything."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from relpos_fairseq.data.dictionary import EOS, NSPECIAL, UNK
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import open_together
from relpos_fairseq.engine.lines import Part
from relpos_fairseq.engine.pool import ordered_map
from relpos_fairseq.engine.progress import progress
from relpos_fairseq.preparation.binarise import write_blocks
from relpos_fairseq.preparation.lm.reading import Chunk, chunks, measure, read_text


def encode_split(
    split: str, paths: Sequence[Path], folders: Sequence[Path], units, symbols: list[str], options: dict, workers: int
) -> list[dict]:
    """Write a split: `SPLIT.bin`, `SPLIT.idx` and, with documents, `SPLIT.documents.npy`.

    The last holds the offsets (int64) of the tokens that documents start with, in the order of the
    split's tokens.

    Args:
        split: Its name.
        paths: Its files.
        folders: One a shard.
        units: The level's units.
        symbols: The dictionary without its special symbols.
        options: level, documents, on_bad_line, refuse_unknown.
        workers: How many processes.

    Returns:
        Counts of each shard.

    Raises:
        PreparationError: The split is empty, too short for the shards, or has what is refused.
    """
    level, dropped = options["level"], {}
    parts = read_text(paths, level, options["on_bad_line"], dropped)
    total = measure(paths, level, options["on_bad_line"])["size"] if len(folders) > 1 else 0
    encode = make_encoder(units, symbols, options["refuse_unknown"])
    work = chunks(parts, options["documents"], len(folders), total)
    results = count_progress(ordered_map(encode, work, workers), f"encode {split}")
    counts = []
    for shard, blocks in groupby(results, key=lambda result: result[0]):
        if shard != len(counts):
            break  # a document is longer than a shard
        with_documents = options["documents"] != "none"
        prefix = folders[shard] / split
        counts.append(write_shard(prefix, blocks, NSPECIAL + len(symbols), with_documents))
    names = ", ".join(str(path) for path in paths)
    if not counts or not counts[0]["tokens"]:
        raise PreparationError(f"the split {split} is empty ({names}): give it some text")
    if len(counts) != len(folders):
        for folder in folders[: len(counts)]:
            for path in folder.glob(f"{split}.*"):
                path.unlink()
        whole = "" if options["documents"] == "none" else ", whose documents are not cut"
        raise PreparationError(f"the split {split} is too short for {len(folders)} shards ({names}){whole}")
    for key in ("invalid_utf8", "too_long"):
        counts[0][f"dropped: {key}"] = dropped.get(key, 0)
    return counts


def write_shard(prefix: Path, results: Iterator, vocab_size: int, with_documents: bool) -> dict:
    """Write the files of one shard; return its counts."""
    counts, starts = Counter(tokens=0), []

    def blocks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for _, ids, sizes, places, more in results:
            starts.append(places + counts["tokens"])
            counts.update(more)
            yield ids, sizes

    write_blocks(prefix, blocks(), vocab_size)
    if with_documents:
        offsets = np.concatenate(starts).astype(np.int64)
        with open_together(Path(f"{prefix}.documents.npy")) as (file,):
            np.save(file, offsets)
        counts["documents"] = len(offsets)
    else:
        Path(f"{prefix}.documents.npy").unlink(missing_ok=True)  # of an earlier preparation
    return dict(counts)


def make_encoder(units, symbols: list[str], refuse_unknown: bool):
    """Return the workers' function: chunk -> shard, ids, sizes, documents' places, counts."""
    encode = units.encoder(symbols)

    def encode_chunk(chunk: Chunk) -> tuple[int, np.ndarray, np.ndarray, np.ndarray, Counter]:
        flat: list[int] = []
        sizes = []
        for part in chunk.parts:
            ids = encode(part.text)
            if part.ends or not units.exact:
                ids.append(EOS)
            flat += ids
            sizes.append(len(ids))
        tokens, lengths = np.array(flat, dtype=np.uint32), np.array(sizes, dtype=np.int32)
        ends = np.cumsum(lengths, dtype=np.int64)
        unknown = tokens == UNK
        if refuse_unknown and unknown.any():
            raise PreparationError(name_unknown(chunk, ends, int(unknown.argmax())))
        starts = (ends - lengths)[np.array(chunk.starts, dtype=np.int64)]
        counts = count_text(chunk.parts)
        counts.update(tokens=len(tokens), unknown=int(unknown.sum()))
        return chunk.shard, tokens, lengths, starts, counts

    return encode_chunk


def count_text(parts: Sequence[Part]) -> Counter:
    """Count what perplexities per word and bits per character are divided by."""
    line_feeds = sum(part.ends for part in parts)
    if isinstance(parts[0].text, str):
        text = "\n".join(part.text for part in parts)
        characters, size = len(text), len(text.encode("utf-8"))
    else:
        text = b"\n".join(part.text for part in parts)
        raw = np.frombuffer(text, dtype=np.uint8)
        size = len(raw)
        characters = size - int(np.count_nonzero((raw & 0xC0) == 0x80))  # those that continue one
    feeds = line_feeds - (len(parts) - 1)  # those joined in are counted
    return Counter(
        lines=sum(part.begins for part in parts),
        words=len(text.split()),
        characters=characters + feeds,
        bytes=size + feeds,
    )


def name_unknown(chunk: Chunk, ends: np.ndarray, token: int) -> str:
    """Say which character is not in the dictionary, and where: `token` is its place."""
    number = int(np.searchsorted(ends, token, side="right"))
    place = token - (int(ends[number - 1]) if number else 0)
    part = chunk.parts[number]
    char = part.text[place]
    return (
        f"{part.path}, line {part.number}, character {place + 1}: {char!r} (U+{ord(char):04X}) is "
        "not in the dictionary: add it, remove it from the text, or prepare without --dict"
    )


def count_progress(results: Iterator, description: str) -> Iterator:
    """Pass results on and shows how many tokens they have."""
    with progress(description=description, unit="tokens") as bar:
        for result in results:
            bar.update(len(result[1]))
            yield result
