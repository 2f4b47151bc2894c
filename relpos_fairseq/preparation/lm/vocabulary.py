"""Which units there are: counted by workers, ordered as fairseq orders them, `dict.txt`."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import atomic_path, write_text
from relpos_fairseq.engine.pool import ordered_map
from relpos_fairseq.engine.progress import progress
from relpos_fairseq.preparation.lm.reading import Piece, chunks
from relpos_fairseq.preparation.lm.units import SPECIALS, UNKNOWN
from relpos_fairseq.preparation.pieces import train_pieces

UNK = SPECIALS[UNKNOWN]
SPM_THREADS = 2  # fixed: the sums of sentencepiece's threads depend on their number


def count_symbols(texts: Sequence[Iterable[Piece]], units, workers: int) -> tuple[Counter, int]:
    """Counts the symbols of the first text, and notes those that only later texts have.

    Returns:
        Every symbol and how often the first text has it, and the number of different symbols.

    Raises:
        PreparationError: There is none at all.
    """
    total: Counter = Counter()

    def count(chunk) -> tuple[Counter, int]:
        return units.count(piece.text for piece in chunk.pieces), chunk.size

    with progress(description="count units", unit="B") as bar:
        for number, text in enumerate(texts):
            for counts, size in ordered_map(count, chunks(text), workers):
                total.update(counts if number == 0 else dict.fromkeys(counts, 0))
                bar.update(size)
    if not total:
        raise PreparationError("the training text has no unit at all: give it some text")
    return total, len(total)


def choose(counts: Counter, threshold: int, words: int | None, factor: int = 1) -> list[tuple]:
    """Orders symbols by falling count, equal ones by the alphabet, and cuts the rare ones.

    Args:
        counts: Symbols and how often they occur.
        threshold: Rarer symbols are unknown.
        words: The most symbols kept.
        factor: The dictionary with its special symbols is filled up to a multiple of this.

    Returns:
        Pairs of symbol and count.

    Raises:
        PreparationError: None is left.
    """
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    kept = [(symbol, n) for symbol, n in ordered if n >= threshold and symbol not in SPECIALS]
    kept = kept[:words]
    if not kept:
        raise PreparationError(f"no unit occurs {threshold} times: lower --threshold")
    missing = -(len(kept) + len(SPECIALS)) % factor
    return kept + [(f"madeupword{i:04d}", 0) for i in range(missing)]


def save_dictionary(path: Path, symbols: Iterable[tuple[str, int]]) -> None:
    """Writes `dict.txt` in fairseq's format."""
    write_text(path, "".join(f"{symbol} {count}\n" for symbol, count in symbols))


def load_dictionary(path: Path) -> list[str]:
    """Reads the symbols of a `dict.txt`, in order.

    Raises:
        PreparationError: It is missing, a line is not `SYMBOL COUNT`, or a symbol is there twice.
    """
    if not path.is_file():
        raise PreparationError(f"the dictionary {path} is not a file")
    symbols, seen = [], set()
    try:
        # As fairseq reads it: lines end at \n, \r\n and \r.
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise PreparationError(f"the dictionary {path} is not UTF-8: {error}") from error
    for number, line in enumerate(lines[:-1] if lines[-1] == "" else lines, start=1):
        symbol, _, count = line.rstrip().removesuffix(" #fairseq:overwrite").rpartition(" ")
        if not symbol or not count.isdigit():
            raise PreparationError(f"{path}, line {number}: not `SYMBOL COUNT`: {line!r}")
        if symbol in seen:
            raise PreparationError(f"{path}, line {number}: {symbol!r} is there twice")
        seen.add(symbol)
        symbols.append(symbol)
    return symbols


def sample_lines(pieces: Iterable[Piece], size: int, seed: int) -> list[str]:
    """Chooses lines evenly from a text of any length, in its order; bounded memory."""
    chooser = random.Random(seed)
    kept: list[tuple[int, str]] = []
    for number, piece in enumerate(piece for piece in pieces if piece.text.strip()):
        if len(kept) < size:
            kept.append((number, piece.text))
        elif (place := chooser.randrange(number + 1)) < size:
            kept[place] = (number, piece.text)
    return [line for _, line in sorted(kept)]


def train_sentencepiece(path: Path, pieces: Iterable[Piece], options: dict) -> dict[str, int]:
    """Trains a sentencepiece model on a bounded sample.

    Args:
        path: Where the model goes.
        pieces: The lines of the training text.
        options: model_type, vocab_size, character_coverage, byte_fallback, sample_lines, seed.

    Raises:
        PreparationError: The text is too short for so many pieces, has more characters, or none.
    """
    lines = sample_lines(pieces, options["sample_lines"], options["seed"])
    if not lines:
        raise PreparationError("sentencepiece cannot be trained: the training text is empty")
    # WikiText's <unk> stays whole and becomes fairseq's; sentencepiece would leave it out of its
    # training and then spell it. Its own unknown piece gives up the name.
    literal = any(UNK in line for line in lines)
    names = {"unk_piece": "<unk piece>", "user_defined_symbols": [UNK]} if literal else {}
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
    with atomic_path(path) as temporary:
        temporary.write_bytes(model)
    return {"sampled lines": len(lines)}
