"""Read text for language models, count its vocabulary, and encode it as fairseq's binaries."""

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import numpy as np

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import open_together, write_bytes
from relpos_fairseq.io.lines import Part, read_byte_parts, read_lines, read_parts
from relpos_fairseq.io.processes import ordered_map
from relpos_fairseq.io.progress import progress
from relpos_fairseq.preparation.binarise import write_blocks
from relpos_fairseq.text.dictionary import EOS, NSPECIAL, SPECIAL, UNK
from relpos_fairseq.text.levels import Level
from relpos_fairseq.text.training import train_sentencepiece_model

CHUNK = 1 << 19  # characters of a chunk
HEADING = re.compile(r"= (?!= ).*(?<! =) =")  # WikiText: " = Title = ", but not " = = Section = = "


@dataclass
class Chunk:
    """Lines of one shard, for a worker."""

    shard: int = 0  # which shard it belongs to
    parts: list[Part] = field(default_factory=list)  # its lines
    starts: list[int] = field(default_factory=list)  # the places in `parts` where documents start
    size: int = 0  # its characters (or bytes)


def read_text(paths: Iterable[Path], level: str, on_bad_line: str, counts: dict | None = None) -> Iterator[Part]:
    """Stream the files' lines as a level needs them, and count dropped ones.

    "byte" has bytes, untouched, all others text; "byte" and "char" keep line feeds apart and cut
    long lines, others have whole lines. `on_bad_line` ("fail" or "drop") is for what is no UTF-8.
    """
    for path in paths:
        if level == "byte":
            yield from read_byte_parts(path)
        elif level == "char":
            yield from read_parts(path, on_bad_line, counts)
        else:
            # The line's own number: a dropped line counts too.
            seen = {} if counts is None else counts
            before = seen.get("lines", 0)
            for line in read_lines(path, on_bad_line, seen):
                yield Part(line, path, seen["lines"] - before)


def chunks(parts: Iterable[Part], documents: str = "none", shards: int = 1, total: int = 0) -> Iterator[Chunk]:
    """Collect lines into chunks, each of one shard.

    Args:
        parts: The lines of all files.
        documents: What starts a document: "none", "blank" (lines before it) or "heading"
            (WikiText's). A file starts one too.
        shards: Number of parts of about equal size; cut between documents, if there are any.
        total: The size of all parts as `size_of` gives it; needed with shards.
    """
    chunk, done = Chunk(), 0
    for part, starts in zip_starts(parts, documents):
        if shards > 1 and part.begins and (starts or documents == "none"):
            shard = min(done * shards // total, shards - 1)
            if shard != chunk.shard:
                if chunk.parts:
                    yield chunk
                chunk = Chunk(shard)
        if starts:
            chunk.starts.append(len(chunk.parts))
        chunk.parts.append(part)
        size = size_of(part)
        chunk.size += size
        done += size
        if chunk.size >= CHUNK:
            yield chunk
            chunk = Chunk(chunk.shard)
    if chunk.parts:
        yield chunk


def size_of(part: Part) -> int:
    """Return a part's characters or bytes with its line feed."""
    return len(part.text) + part.ends


def zip_starts(parts: Iterable[Part], documents: str) -> Iterator[tuple[Part, bool]]:
    """Pair every part with whether a document starts there."""
    path, blank = None, True
    for part in parts:
        new_file = part.path is not path
        path = part.path
        if documents == "none":
            yield part, False
            continue
        text = part.text if isinstance(part.text, str) else part.text.decode("latin-1")
        text = text.strip() if part.begins else ""
        starts = part.begins and bool(text) and (blank or new_file)
        if documents == "heading":
            starts = starts and bool(HEADING.fullmatch(text))
        yield part, starts or new_file
        if part.begins:
            blank = not text


def measure(paths: Sequence[Path], level: str, on_bad_line: str) -> Counter:
    """Count the lines and the characters (or bytes) of files."""
    counts = Counter()
    for part in read_text(paths, level, on_bad_line):
        counts["lines"] += part.begins
        counts["size"] += size_of(part)
    return counts


# Vocabulary

UNKNOWN = SPECIAL[UNK]
SPM_THREADS = 2  # fixed: the sums of sentencepiece's threads depend on their number


def count_symbols(texts: Sequence[Iterable[Part]], level: Level, workers: int) -> Counter[str]:
    """Return how often the first text has every symbol; symbols of later texts alone get 0."""
    total: Counter = Counter()

    def count(chunk) -> tuple[Counter, int]:
        return level.count(part.text for part in chunk.parts), chunk.size

    with progress(description="count units", unit="B") as bar:
        for number, text in enumerate(texts):
            for counts, size in ordered_map(count, chunks(text), workers):
                total.update(counts if number == 0 else dict.fromkeys(counts, 0))
                bar.update(size)
    if not total:
        raise UserError("the training text has no unit at all: give it some text")
    return total


def sample_lines(parts: Iterable[Part], size: int, seed: int) -> list[str]:
    """Sample lines evenly from a text of any length, in its order and in bounded memory."""
    chooser = random.Random(seed)
    kept: list[tuple[int, str]] = []
    for number, part in enumerate(part for part in parts if part.text.strip()):
        if len(kept) < size:
            kept.append((number, part.text))
        elif (place := chooser.randrange(number + 1)) < size:
            kept[place] = (number, part.text)
    return [line for _, line in sorted(kept)]


def train_sentencepiece(path: Path, parts: Iterable[Part], options: dict) -> dict[str, int]:
    """Train a sentencepiece model on a bounded sample of the training text's lines.

    `options`: model_type, vocab_size, character_coverage, byte_fallback, sample_lines, seed.
    """
    lines = sample_lines(parts, options["sample_lines"], options["seed"])
    if not lines:
        raise UserError("sentencepiece cannot be trained: the training text is empty")
    # WikiText's <unk> stays whole and becomes fairseq's; sentencepiece would leave it out of its
    # training and then spell it. Its own unknown piece gives up the name.
    literal = any(UNKNOWN in line for line in lines)
    names = {"unk_piece": "<unk piece>", "user_defined_symbols": [UNKNOWN]} if literal else {}
    model = train_sentencepiece_model(
        (" ".join(line.split()) for line in lines),
        options["vocab_size"],
        "--vocab-size",
        model_type=options["model_type"],
        character_coverage=options["character_coverage"],
        byte_fallback=options["byte_fallback"],
        normalization_rule_name="identity",  # the text stays what it is
        num_threads=SPM_THREADS,
        **names,
    )
    write_bytes(path, model)
    return {"sampled lines": len(lines)}


# Encoding


def encode_split(
    split: str,
    paths: Sequence[Path],
    folders: Sequence[Path],
    level: Level,
    symbols: list[str],
    options: dict,
    workers: int,
) -> list[dict]:
    """Write a split: `SPLIT.bin`, `SPLIT.idx` and, with documents, `SPLIT.documents.npy`.

    The last holds the offsets (int64) of the tokens that documents start with, in the order of the
    split's tokens.

    Args:
        split: Its name.
        paths: Its files.
        folders: One a shard.
        level: How text is cut into tokens.
        symbols: The dictionary without its special symbols.
        options: level, documents, on_bad_line, refuse_unknown.
        workers: How many processes.

    Returns:
        Counts of each shard.

    Raises:
        UserError: The split is empty, too short for the shards, or has what is refused.
    """
    reading, dropped = (options["level"], options["on_bad_line"]), {}
    parts = read_text(paths, *reading, dropped)
    total = measure(paths, *reading)["size"] if len(folders) > 1 else 0
    encode = make_encoder(level, symbols, options["refuse_unknown"])
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
        raise UserError(f"the split {split} is empty ({names}): give it some text")
    if len(counts) != len(folders):
        for folder in folders[: len(counts)]:
            for path in folder.glob(f"{split}.*"):
                path.unlink()
        whole = "" if options["documents"] == "none" else ", whose documents are not cut"
        raise UserError(f"the split {split} is too short for {len(folders)} shards ({names}){whole}")
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


def make_encoder(level: Level, symbols: list[str], refuse_unknown: bool):
    """Return the workers' function: chunk -> shard, ids, sizes, documents' places, counts."""
    encode = level.encoder(symbols)

    def encode_chunk(chunk: Chunk) -> tuple[int, np.ndarray, np.ndarray, np.ndarray, Counter]:
        flat: list[int] = []
        sizes = []
        for part in chunk.parts:
            ids = encode(part.text)
            if part.ends or not level.exact:
                ids.append(EOS)
            flat += ids
            sizes.append(len(ids))
        tokens, lengths = np.array(flat, dtype=np.uint32), np.array(sizes, dtype=np.int32)
        ends = np.cumsum(lengths, dtype=np.int64)
        unknown = tokens == UNK
        if refuse_unknown and unknown.any():
            raise UserError(name_unknown(chunk, ends, int(unknown.argmax())))
        starts = (ends - lengths)[np.array(chunk.starts, dtype=np.int64)]
        counts = count_text(chunk.parts)
        counts.update(tokens=len(tokens), unknown=int(unknown.sum()))
        return chunk.shard, tokens, lengths, starts, counts

    return encode_chunk


def count_text(parts: Sequence[Part]) -> Counter:
    """Count lines, words, characters and bytes, by which perplexities and bits per character are divided."""
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
    """Name the character at place `token` of a chunk, which the dictionary lacks, and its place in the file."""
    number = int(np.searchsorted(ends, token, side="right"))
    place = token - (int(ends[number - 1]) if number else 0)
    part = chunk.parts[number]
    char = part.text[place]
    return (
        f"{part.path}, line {part.number}, character {place + 1}: {char!r} (U+{ord(char):04X}) is "
        "not in the dictionary: add it, remove it from the text, or prepare without --dict"
    )


def count_progress(results: Iterator, description: str) -> Iterator:
    """Pass results on, and show the number of their tokens as progress."""
    with progress(description=description, unit="tokens") as bar:
        for result in results:
            bar.update(len(result[1]))
            yield result
