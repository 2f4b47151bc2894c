"""Order a model's vocabulary as fairseq's dictionary does.

fairseq's Dictionary holds <s> <pad> </s> <unk>, then the symbols of dict.txt, and its masked_lm task adds <mask> at the
end. BERT's [CLS] [PAD] [SEP] [UNK] [MASK] become those; all others keep their order. RoBERTa's and XLM-R's
vocabularies have that order already.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relpos_fairseq.conversion.report import ConversionError
from relpos_fairseq.text import FILES, MASK, MODEL_FILES, SPECIAL, load_tokenizer
from relpos_fairseq.text.tokenizer import FROM_BERT, UNKNOWN, import_tokenizers, single_and_pair

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
        files: the tokenizer's files.
        made: contents of files that replace some of those, by name.
    """

    symbols: list[str]
    rows: list[int]
    files: list[Path] = field(default_factory=list)
    made: dict[str, str] = field(default_factory=dict)

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


def order_words(
    symbols: list[str], special: dict[str, str | None], where: str, cut_at_spaces: bool = False
) -> Vocabulary:
    """Put a translation or language model's vocabulary into the order of fairseq's dictionary.

    Args:
        symbols: the symbols by their ids.
        special: the source's names of <s>, <pad>, </s> and <unk>, in that order; None: it has none.
        where: the file, for the error.
        cut_at_spaces: whether text is cut at spaces alone, so that no symbol may hold one.

    Raises:
        ConversionError: a symbol that a line of dict.txt cannot hold, or that occurs twice.
    """
    numbers: dict[str, int] = {}
    for number, symbol in enumerate(symbols):
        broken = "\n" in symbol or "\r" in symbol or (cut_at_spaces and symbol.split() != [symbol])
        taken = symbol in special and special[symbol] != symbol
        if symbol in numbers or broken or taken:
            why = "holds a space or line break" if broken else "is there twice or fairseq's own"
            raise ConversionError(f"{where}: symbol {symbol!r} cannot be a word of fairseq's dictionary: it {why}")
        numbers[symbol] = number
    first = [numbers.get(name, -1) for name in special.values()]
    rest = [number for symbol, number in numbers.items() if symbol not in special.values()]
    return Vocabulary([symbols[number] for number in rest], first + rest)


# Google's BERT: [UNK] [CLS] [SEP] [MASK] where no vocabulary says otherwise.
_BERT_IDS = {"<pad>": 0, "<unk>": 100, "<s>": 101, "</s>": 102, MASK: 103}
_ROBERTA_IDS = {name: number for number, name in enumerate(SPECIAL)}


def of_folder(folder: Path, config: dict[str, Any], notes: list[str]) -> Vocabulary:
    """Return the vocabulary of a Hugging Face folder, and append what is assumed to `notes`.

    Raises:
        ConversionError: the tokenizer has more symbols than the model rows, or lacks a special one.
    """
    size = config["vocab_size"]
    files = [folder / name for name in FILES if (folder / name).is_file()]
    if not any(path.name in MODEL_FILES for path in files):
        return _without_files(config, notes)
    numbers = symbol_numbers(folder)
    beyond = {symbol: number for symbol, number in numbers.items() if number >= size}
    if beyond:
        symbol, number = max(beyond.items(), key=lambda item: item[1])
        raise ConversionError(
            f"{folder}: the tokenizer numbers {len(beyond)} symbols beyond the model's {size} rows "
            f"({symbol!r} is {number}): vocabulary and config.json do not belong together"
        )
    lost = [name for name in SPECIAL if name not in numbers]
    if lost:
        bert = next(bert for bert, ours in FROM_BERT.items() if ours == lost[0])
        raise ConversionError(
            f"{folder}: the tokenizer has no {lost[0]} (BERT's {bert}): it is no vocabulary of BERT or RoBERTa"
        )
    bert = config["model_type"] == "bert" or "special_ids" in config
    if not bert and any(numbers[n] != _ROBERTA_IDS[n] for n in SPECIAL):
        notes.append("the special symbols are moved to fairseq's rows")
    return _ordered(numbers, size, files, notes)


def of_checkpoint(files: list[Path], size: int, token_types: bool = False) -> Vocabulary:
    """Return the order of rows that a Hugging Face folder of one of our checkpoints shall have.

    Args:
        files: dict.txt and the tokenizer's files, as far as they lie beside the checkpoint.
        size: rows of its embedding.
        token_types: whether the second text of a pair has token type 1.

    Returns:
        The tokenizer's own numbers, so that its files serve both; without them fairseq's order.
        A tokenizer.json without special symbols (ours) gets them behind its pieces.

    Raises:
        ConversionError: dict.txt or the tokenizer belong to another model.
    """
    named = {path.name: path for path in files}
    model = [path for path in files if path.name in MODEL_FILES]
    if "dict.txt" not in named or not model:
        return Vocabulary([], list(range(size)))
    text = named["dict.txt"].read_text(encoding="utf-8")
    lines = text.removesuffix("\n").split("\n")  # only \n: U+2028 may be a symbol
    symbols = [line.rsplit(" ", 1)[0] for line in lines]
    rows = [*SPECIAL, *symbols, MASK]
    if len(rows) != size:
        raise ConversionError(
            f"{named['dict.txt']} has {len(symbols)} symbols, and the model {size} rows where "
            f"{len(rows)} are needed: it belongs to another model"
        )
    if "encoder.json" in named and getattr(load_tokenizer(model[0].parent), "ids_as_symbols", False):
        return _of_gpt2(symbols, rows, named)
    numbers = symbol_numbers(model[0].parent)
    made = {}
    if "tokenizer.json" in named and "<s>" not in numbers:
        made = _with_specials(model[0].parent, numbers, token_types)
    taken = {numbers[symbol] for symbol in rows if symbol in numbers}
    free = iter(number for number in range(size + len(numbers)) if number not in taken)
    order = [numbers[symbol] if symbol in numbers else next(free) for symbol in rows]
    kept = [path for path in files if path.name != "dict.txt" and path.name not in made]
    return Vocabulary(symbols, order, kept, made)


def _with_specials(folder: Path, numbers: dict[str, int], token_types: bool) -> dict[str, str]:
    """Return our tokenizer's files with special symbols, as transformers reads them; add their ids to `numbers`."""
    tokenizer = load_tokenizer(folder)
    model, library = tokenizer.model, import_tokenizers()
    added = [name for name in (*SPECIAL, MASK) if name not in numbers]
    model.add_special_tokens([library.AddedToken(name, normalized=False) for name in added])
    numbers |= {name: model.token_to_id(name) for name in added}
    second = int(token_types)
    model.post_processor = single_and_pair(numbers, int(tokenizer.kind != "wordpiece"), second)
    unknown = next(name for name in ("[UNK]", UNKNOWN) if model.token_to_id(name) is not None)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict.fromkeys(("bos_token", "cls_token"), "<s>"),
        **dict.fromkeys(("eos_token", "sep_token"), "</s>"),
        **{"pad_token": "<pad>", "unk_token": unknown, "mask_token": MASK},
        "model_input_names": ["input_ids", *["token_type_ids"] * second, "attention_mask"],
    }
    return {"tokenizer.json": model.to_str(pretty=True), "tokenizer_config.json": json.dumps(settings, indent=2) + "\n"}


def of_sentencepiece(model: Path) -> dict[str, str]:
    """Return the files by which transformers' fast tokenizer reads a model of sentencepiece.

    The conversion is transformers' own, of XLM-R's tokenizer.

    Raises:
        ConversionError: transformers is absent, or numbers the model's pieces otherwise.
    """
    try:
        from transformers import XLMRobertaTokenizerFast

        tokenizer = XLMRobertaTokenizerFast(str(model), clean_up_tokenization_spaces=False)
    except ImportError as error:
        raise ConversionError(
            f"{model}: transformers makes tokenizer.json of it and does not import here "
            f"({' '.join(str(error).split())[:99]}): "
            "pip install transformers sentencepiece protobuf"
        ) from error
    if tokenizer.get_vocab() != symbol_numbers(model.parent):
        raise ConversionError(
            f"{model}: transformers does not number its pieces as XLM-R's: train it with <unk>, "
            "<s> and </s> as its first three, which is sentencepiece's default"
        )
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        names = ("tokenizer.json", "tokenizer_config.json")
        return {name: (Path(folder) / name).read_text(encoding="utf-8") for name in names}


def _of_gpt2(symbols: list[str], rows: list[str], named: dict[str, Path]) -> Vocabulary:
    """Return GPT-2's files, whose pieces dict.txt names by number, as vocab.json and merges.txt.

    fairseq's order of rows is that of Hugging Face's RoBERTa, so no row moves.
    """
    numbers = json.loads(named["encoder.json"].read_text(encoding="utf-8"))
    pieces = {str(number): piece for piece, number in numbers.items()}
    vocabulary = {pieces.get(symbol, symbol): row for row, symbol in enumerate(rows)}
    made = {
        "vocab.json": json.dumps(vocabulary, ensure_ascii=False),
        "merges.txt": named["vocab.bpe"].read_text(encoding="utf-8"),
    }
    return Vocabulary(symbols, list(range(len(rows))), [], made)


def symbol_numbers(folder: Path) -> dict[str, int]:
    """Return the number of every symbol of a folder's tokenizer, under fairseq's names."""
    tokenizer = load_tokenizer(folder)
    if hasattr(tokenizer, "processor"):  # XLM-R counts sentencepiece's pieces after fairseq's own
        numbers = {name: number for number, name in enumerate(SPECIAL)}
        numbers |= {name: number for number, name in enumerate(tokenizer.symbols, len(SPECIAL))}
        return numbers | {MASK: len(numbers)}
    found = tokenizer.model.get_vocab()
    return {FROM_BERT.get(piece, piece): number for piece, number in found.items()}


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
    return _ordered(numbers, size, [], notes)


def _ordered(numbers: dict[str, int], size: int, files: list[Path], notes: list[str]) -> Vocabulary:
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
