"""Read and write fairseq's dict.txt, and name the special symbols and the marks of subword symbols.

A dict.txt has a line `SYMBOL COUNT` for every symbol after the four special ones, which it does not list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import count, islice
from pathlib import Path

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import write_text
from relpos_fairseq.io.lines import read_lines

FILE = "dict.txt"
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # every dictionary begins with these
BOS, PAD, EOS, UNK = range(len(SPECIAL))
NSPECIAL = len(SPECIAL)  # the id of the first symbol in the file
UNKNOWN = SPECIAL[UNK]
MASK = "<mask>"  # fairseq's masked_lm task appends it to the dictionary
OVERWRITE = " #fairseq:overwrite"  # ends a line that repeats an earlier line's symbol
WORD_START = "\u2581"  # sentencepiece's mark for a space, which begins the first subword of a word
ESCAPED = re.compile(r"\\*(?:<s>|<pad>|</s>)")  # words that have a backslash before them as symbols
CONTINUED = "@@"  # subword-nmt's mark at the end of every subword but the last of a word


def is_text(symbol: str) -> bool:
    """Return True if a symbol is never taken for another: not a special one, nor a last subword that seems to go on."""
    return symbol not in SPECIAL and not symbol.endswith(CONTINUED)


def symbol_of(word: str) -> str:
    """Return the symbol of a whole word: itself, a backslash before what would be `<s>`, `<pad>` or `</s>`.

    `<unk>` is the unknown word, as in WikiText.
    """
    return f"\\{word}" if ESCAPED.fullmatch(word) else word


def word_of(symbol: str) -> str:
    """Return the word of a symbol that `symbol_of` gave."""
    return symbol[1:] if symbol[:1] == "\\" and ESCAPED.fullmatch(symbol) else symbol


def choose_symbols(counts: Mapping[str, int], threshold: int, words: int | None, factor: int = 1) -> list[tuple]:
    """Return pairs of symbol and count, by falling count, equal counts by the alphabet, as fairseq orders them.

    Symbols rarer than `threshold` are left out, and at most `words` are kept; the dictionary with its special symbols
    is filled up to a multiple of `factor`.
    """
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    kept = [(symbol, n) for symbol, n in ordered if n >= threshold and symbol not in SPECIAL][:words]
    if not kept:
        raise UserError(f"no unit occurs {threshold} times: lower --threshold")
    names = {symbol for symbol, _ in kept}
    fillers = (name for name in map("madeupword{:04d}".format, count()) if name not in names)
    return kept + [(name, 0) for name in islice(fillers, -(len(kept) + NSPECIAL) % factor)]


def write_dictionary(path: Path, counts: Iterable[tuple[str, int]]) -> None:
    """Write symbols and their counts as a dict.txt."""
    write_text(path, "".join(f"{symbol} {count}\n" for symbol, count in counts))


def is_symbol(text: str) -> bool:
    """Return True if a line of dict.txt can hold a text as a symbol."""
    return bool(text) and not any(sign in "\n\r" or "\ud800" <= sign <= "\udfff" for sign in text)


def read_dictionary(path: Path) -> list[str]:
    """Return the symbols of a dict.txt in order, without the special ones.

    Raises:
        UserError: the file is missing, a line is not `SYMBOL COUNT`, or a symbol is repeated.
    """
    symbols: list[str] = []
    seen = set(SPECIAL)
    for number, line in enumerate(read_lines(path), start=1):
        entry = line.rstrip()
        symbol, _, count = entry.removesuffix(OVERWRITE).rpartition(" ")
        if not symbol or not count.isdigit():
            raise UserError(f"{path}, line {number}: not `SYMBOL COUNT`: {line[:80]!r}")
        if symbol in seen and not entry.endswith(OVERWRITE):
            raise UserError(f"{path}, line {number}: {symbol!r} is there twice")
        seen.add(symbol)
        symbols.append(symbol)
    return symbols


def symbols_of_rows(path: Path, rows: int, masked: bool = True) -> list[str]:
    """Return the symbols of all rows of a model's embedding, from its dict.txt.

    Args:
        path: the dictionary.
        rows: of the embedding.
        masked: whether the model's task may have added <mask> to the dictionary's symbols.

    Raises:
        UserError: as `read_dictionary`, or it is another model's.
    """
    symbols = [*SPECIAL, *read_dictionary(path)]
    if masked and rows == len(symbols) + 1 and MASK not in symbols:
        symbols.append(MASK)
    if len(symbols) != rows:
        raise UserError(
            f"{path} makes {len(symbols)} rows, and the model has {rows}: it is another model's; name its own data "
            f"folder with --data"
        )
    return symbols


def ids_of(symbols: Iterable[str]) -> dict[str, int]:
    """Return the ids of a text's symbols; a literal `<s>` in a text is an unknown word, not a special token."""
    return {symbol: number for number, symbol in enumerate(symbols, start=NSPECIAL) if symbol not in SPECIAL}
