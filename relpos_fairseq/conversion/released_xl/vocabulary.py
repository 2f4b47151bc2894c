"""The released code's vocabulary as fairseq's dictionary."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from relpos_fairseq.conversion.released_xl.inert import Inert, read_inert
from relpos_fairseq.conversion.report import ConversionError
from relpos_fairseq.conversion.vocabulary import Vocabulary
from relpos_fairseq.data.dictionary import SPECIAL

CACHE, TEXT = "cache.pt", "vocab.txt"
TAKEN = {"</s>": ("<eos>",), "<unk>": ("<unk>", "<UNK>")}  # the first that there is


def in_order(symbols: list[str], path: Path) -> Vocabulary:
    """Put the end of a line and the unknown word where fairseq has them.

    Raises:
        ConversionError: a symbol occurs twice, or is one of fairseq's own.
    """
    known = {
        special: next((symbols.index(name) for name in names if name in symbols), -1)
        for special, names in TAKEN.items()
    }
    own = [(n, symbol) for n, symbol in enumerate(symbols) if n not in known.values()]
    words = [symbol for _, symbol in own]
    often = Counter([*SPECIAL, *words])
    wrong = [word for word in words if often[word] > 1 or word.split() != [word]]
    if wrong:
        raise ConversionError(f"{path}: {wrong[0]!r} cannot be a word of fairseq's dictionary")
    first = [known.get(special, -1) for special in SPECIAL]
    return Vocabulary(words, first + [row for row, _ in own])


def read_vocabulary(folder: Path, types: int) -> Vocabulary:
    """Read `cache.pt`, the corpus that the released code keeps beside its data, or `vocab.txt`.

    Raises:
        ConversionError: there is none, or it has not as many types as the model.
    """
    path = next((folder / n for n in (CACHE, TEXT) if (folder / n).is_file()), None)
    if path is None:
        raise ConversionError(
            f"{folder} has neither {CACHE} nor {TEXT}: give --data, the folder of the data that "
            f"the model was trained on ({CACHE}: the released code's; {TEXT}: a type a line)"
        )
    if path.name == TEXT:
        symbols = path.read_text(encoding="utf-8").split("\n")
        symbols = symbols[:-1] if not symbols[-1] else symbols
    else:
        corpus = read_inert(path, "corpus of the released code")
        inner = getattr(corpus, "vocab", None)
        symbols = getattr(inner, "idx2sym", None) if isinstance(inner, Inert) else None
        if not isinstance(symbols, list):
            raise ConversionError(f"{path} holds no vocabulary of the released code")
    if len(symbols) != types:
        raise ConversionError(f"{path} has {len(symbols):,} types, and the model {types:,}")
    return in_order([str(symbol) for symbol in symbols], path)
