"""Which units there are: counted by workers, ordered as fairseq orders them, `dict.txt`."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from relpos_fairseq.data.dictionary import NSPECIAL, SPECIAL, UNK
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import write_bytes
from relpos_fairseq.engine.lines import Part
from relpos_fairseq.engine.pool import ordered_map
from relpos_fairseq.engine.progress import progress
from relpos_fairseq.preparation.lm.reading import chunks
from relpos_fairseq.preparation.pieces import train_pieces

UNKNOWN = SPECIAL[UNK]
SPM_THREADS = 2  # fixed: the sums of sentencepiece's threads depend on their number


def count_symbols(texts: Sequence[Iterable[Part]], units, workers: int) -> tuple[Counter, int]:
    """Count the symbols of the first text, and note those that only later texts have.

    Returns:
        Every symbol and how often the first text has it, and the number of different symbols.
    """
    total: Counter = Counter()

    def count(chunk) -> tuple[Counter, int]:
        return units.count(part.text for part in chunk.parts), chunk.size

    with progress(description="count units", unit="B") as bar:
        for number, text in enumerate(texts):
            for counts, size in ordered_map(count, chunks(text), workers):
                total.update(counts if number == 0 else dict.fromkeys(counts, 0))
                bar.update(size)
    if not total:
        raise PreparationError("the training text has no unit at all: give it some text")
    return total, len(total)


def choose(counts: Counter, threshold: int, words: int | None, factor: int = 1) -> list[tuple]:
    """Order symbols by falling count, equal ones by the alphabet; rarer ones than `threshold` go.

    At most `words` are kept; the dictionary with its special symbols is filled up to a multiple of
    `factor`. Returns pairs of symbol and count.
    """
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    kept = [(symbol, n) for symbol, n in ordered if n >= threshold and symbol not in SPECIAL]
    kept = kept[:words]
    if not kept:
        raise PreparationError(f"no unit occurs {threshold} times: lower --threshold")
    missing = -(len(kept) + NSPECIAL) % factor
    return kept + [(f"madeupword{i:04d}", 0) for i in range(missing)]


def sample_lines(parts: Iterable[Part], size: int, seed: int) -> list[str]:
    """Choose lines evenly from a text of any length, in its order; bounded memory."""
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
        raise PreparationError("sentencepiece cannot be trained: the training text is empty")
    # WikiText's <unk> stays whole and becomes fairseq's; sentencepiece would leave it out of its
    # training and then spell it. Its own unknown piece gives up the name.
    literal = any(UNKNOWN in line for line in lines)
    names = {"unk_piece": "<unk piece>", "user_defined_symbols": [UNKNOWN]} if literal else {}
    model = train_pieces(
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
