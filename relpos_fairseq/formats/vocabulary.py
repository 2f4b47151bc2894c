"""Order a model's vocabulary as fairseq's dictionary does.

fairseq's Dictionary holds <s> <pad> </s> <unk>, then the symbols of dict.txt, and its masked_lm task adds <mask> at the
end. BERT's [CLS] [PAD] [SEP] [UNK] [MASK] become those; all others keep their order. RoBERTa's and XLM-R's
vocabularies have that order already.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relpos_fairseq.conversion.report import ConversionError
from relpos_fairseq.io.reading import read_json
from relpos_fairseq.text import MASK, SPECIAL, load_tokenizer
from relpos_fairseq.text.dictionary import FILE as DICTIONARY
from relpos_fairseq.text.dictionary import is_symbol, read_dictionary, symbols_of_rows
from relpos_fairseq.text.folders import SETTINGS, class_of, holds_tokenizer, tokenizer_paths
from relpos_fairseq.text.tokenizer import Pairs
from relpos_fairseq.text.transformers_files import transformers_files

# Google's BERT: [UNK] [CLS] [SEP] [MASK] where no vocabulary says otherwise.
_BERT_IDS = {"<pad>": 0, "<unk>": 100, "<s>": 101, "</s>": 102, MASK: 103}
_ROBERTA_IDS = {name: number for number, name in enumerate(SPECIAL)}
NEVER = -1e4  # the logit of a row that the source does not have: its probability is 0, and fp16 holds it


def take_rows(table: Tensor, rows: list[int], new: float = 0.0) -> Tensor:
    """Gather rows (V', ...) of a table (V, ...); the number -1 stands for a row filled with `new`."""
    order = torch.tensor(rows)
    taken = table[order.clamp(min=0)]
    taken[order < 0] = new
    return taken


@dataclass
class Vocabulary:
    """Map the rows of fairseq's dictionary to a source's ids.

    Args:
        symbols: symbols of dict.txt, which follow <s>, <pad>, </s> and <unk> and precede <mask>.
        rows: the source's id of each of fairseq's rows; -1 where the source has none.
        files: the tokenizer's files, by name.
        made: contents of files that replace some of those, by name.
        pairs: how the tokenizer joins two texts; None: there is none.
    """

    symbols: list[str]
    rows: list[int]
    files: dict[str, Path] = field(default_factory=dict)
    made: dict[str, str] = field(default_factory=dict)
    pairs: Pairs | None = None

    def take(self, table: Tensor) -> Tensor:
        """Return (V, ...) rows in the source's order as (V', ...) rows in fairseq's."""
        return take_rows(table, self.rows)

    def put(self, table: Tensor) -> Tensor:
        """Return (V', ...) rows in fairseq's order as (V, ...) in the source's."""
        rows = torch.tensor(self.rows)
        known = rows >= 0
        result = table.new_zeros(int(rows.max()) + 1, *table.shape[1:])
        result[rows[known]] = table[known]
        return result

    def dictionary(self) -> str:
        """Return the text of dict.txt; fairseq's tools read no counts of it."""
        return "".join(f"{symbol} 1\n" for symbol in self.symbols)


def symbols_of(files: Mapping[str, Path], rows: int) -> list[str]:
    """Return the symbols of our rows from the dictionary among a checkpoint's files; none without one."""
    return symbols_of_rows(files[DICTIONARY], rows) if DICTIONARY in files else []


def tokenizer_place(files: Mapping[str, Path]) -> Path | None:
    """Return the folder of the tokenizer among a checkpoint's files; None: it has none."""
    return next((path.parent for name, path in files.items() if name != DICTIONARY), None)


def order_words(
    symbols: list[str], rows: int, special: dict[str, str | None], where: str, cut_at_spaces: bool = False
) -> Vocabulary:
    """Put a translation or language model's vocabulary into the order of fairseq's dictionary.

    Args:
        symbols: the symbols by their ids.
        rows: of the model's embedding.
        special: the source's names of <s>, <pad>, </s> and <unk>, in that order; None: it has none.
        where: the file, for the error.
        cut_at_spaces: whether text is cut at spaces alone, so that no symbol may hold one.

    Raises:
        ConversionError: not as many symbols as rows, or one that dict.txt cannot hold, or that is there twice.
    """
    if len(symbols) != rows:
        raise ConversionError(f"{where} has {len(symbols):,} types, and the model {rows:,}")
    numbers: dict[str, int] = {}
    for number, symbol in enumerate(symbols):
        broken = not is_symbol(symbol) or (cut_at_spaces and symbol.split() != [symbol])
        taken = symbol in special and special[symbol] != symbol
        if symbol in numbers or broken or taken:
            why = (
                "is empty, or holds a space, line break or half a character"
                if broken
                else "is there twice or fairseq's own"
            )
            raise ConversionError(f"{where}: symbol {symbol!r} cannot be a word of fairseq's dictionary: it {why}")
        numbers[symbol] = number
    first = [numbers.get(name, -1) for name in special.values()]
    rest = [number for symbol, number in numbers.items() if symbol not in special.values()]
    return Vocabulary([symbols[number] for number in rest], first + rest)


def of_folder(folder: Path, config: dict[str, Any], notes: list[str]) -> Vocabulary:
    """Return the vocabulary of a Hugging Face folder, and append what is assumed to `notes`.

    Raises:
        ConversionError: the tokenizer has more symbols than the model rows, or lacks a special one.
    """
    size = config["vocab_size"]
    if not holds_tokenizer(folder):
        return _without_files(config, notes)
    tokenizer = load_tokenizer(folder)
    numbers = dict(tokenizer.numbers)
    if numbers.get(MASK, 0) >= size:  # transformers adds one to a vocabulary that has none
        del numbers[MASK]
    beyond = {symbol: number for symbol, number in numbers.items() if number >= size}
    if beyond:
        symbol, number = max(beyond.items(), key=lambda item: item[1])
        raise ConversionError(
            f"{folder}: the tokenizer numbers {len(beyond)} symbols beyond the model's {size} rows "
            f"({symbol!r} is {number}): vocabulary and config.json do not belong together"
        )
    lost = [name for name in SPECIAL if name not in numbers]
    if lost:
        raise ConversionError(
            f"{folder}: the tokenizer has no {lost[0]}, nor another name for it in tokenizer_config.json: "
            f"it is no vocabulary of BERT or RoBERTa"
        )
    bert = config["model_type"] == "bert" or "special_ids" in config
    if not bert and any(numbers[n] != _ROBERTA_IDS[n] for n in SPECIAL):
        notes.append("the special symbols are moved to fairseq's rows")
    found = _ordered(numbers, size, {path.name: path for path in tokenizer_paths(folder)}, notes)
    found.pairs = tokenizer.pairs
    settings = read_json(folder / SETTINGS, dict[str, object], {}, error=ConversionError)
    if "tokenizer_class" not in settings:  # config.json, which says it, stays behind
        settings["tokenizer_class"] = class_of(folder)
        found.made[SETTINGS] = json.dumps(settings, indent=2) + "\n"
    return found


def of_checkpoint(
    files: Mapping[str, Path],
    size: int,
    known: list[int] | None,
    separators: int | None,
    segments: bool,
    longest: int | None,
) -> Vocabulary:
    """Return the order of rows that a Hugging Face folder of one of our checkpoints shall have, and its tokenizer.

    Args:
        files: dict.txt and the tokenizer's files, as far as they lie beside the checkpoint.
        size: rows of its embedding.
        known: the numbers that its rows had in the folder that it was converted from.
        separators: `</s>` between two texts, beside the first text's own; None: as its tokenizer's library has it.
        segments: whether the second text of a pair has token type 1.
        longest: longest input in tokens; None: any.

    Returns:
        The numbers that its tokenizer has of itself, as one of transformers does; else fairseq's order.

    Raises:
        ConversionError: dict.txt or the tokenizer belong to another model.
    """
    dictionary, place = files.get(DICTIONARY), tokenizer_place(files)
    rows = known or list(range(size))
    if dictionary is None or place is None or not holds_tokenizer(place):
        return Vocabulary([], rows)
    ours = symbols_of(files, size)
    tokenizer = load_tokenizer(place)
    tokenizer.check_dictionary(set(ours), str(dictionary))
    numbers = tokenizer.numbers
    theirs = not tokenizer.ids_as_symbols and all(name in numbers for name in SPECIAL)
    if known is None and theirs:
        taken = {numbers[symbol] for symbol in ours if symbol in numbers}
        free = iter(number for number in range(size + len(numbers)) if number not in taken)
        rows = [numbers[symbol] if symbol in numbers else next(free) for symbol in ours]
    given = {symbol: row for symbol, row in zip(ours, rows, strict=True) if row >= 0}
    if separators is None:
        separators = tokenizer.pairs.separators
    made = transformers_files(tokenizer, given, separators, segments, longest)
    kept = {name: path for name, path in files.items() if theirs and name not in (DICTIONARY, *made)}
    return Vocabulary(read_dictionary(dictionary), rows, kept, made)


def _without_files(config: dict[str, Any], notes: list[str]) -> Vocabulary:
    """Return a vocabulary of stand-ins for a folder without a tokenizer, with the special ids of released models."""
    size = config["vocab_size"]
    if "special_ids" in config:
        numbers = dict(config["special_ids"])
    elif config["model_type"] != "bert":
        numbers = dict(_ROBERTA_IDS) | {MASK: size - 1}
    elif size > max(_BERT_IDS.values()):
        numbers = dict(_BERT_IDS)
    else:
        numbers = {"<pad>": 0, "<unk>": 1, "<s>": 2, "</s>": 3, MASK: size - 1}
    if size < len(SPECIAL) + 1:
        raise ConversionError(f"vocab_size {size} leaves no room for the special symbols")
    said = ", ".join(f"{name} {number}" for name, number in numbers.items())
    notes.append(f"no tokenizer in the folder: dict.txt holds stand-ins, and special rows are taken to be {said}")
    return _ordered(numbers, size, {}, notes)


def _ordered(numbers: dict[str, int], size: int, files: dict[str, Path], notes: list[str]) -> Vocabulary:
    """Order `size` ids as fairseq does, given the ids of symbols; ids without a symbol become madeupwords."""
    reserved = {numbers[name] for name in (*SPECIAL, MASK) if name in numbers}
    named = {number: symbol for symbol, number in numbers.items()}
    others = [number for number in range(size) if number not in reserved]
    unnamed = [number for number in others if number not in named]
    for count, number in enumerate(unnamed):
        named[number] = f"madeupword{count:04d}"
        while named[number] in numbers:  # RoBERTa's vocabulary has such symbols of its own
            named[number] += "_"
    if unnamed and files:
        notes.append(f"{len(unnamed)} rows without a symbol are madeupwords in dict.txt")
    if MASK not in numbers:
        notes.append("the vocabulary has no mask: a row of zeros is added for <mask>")
    rows = [numbers[name] for name in SPECIAL] + others + [numbers.get(MASK, -1)]
    return Vocabulary([named[number] for number in others], rows, files)
