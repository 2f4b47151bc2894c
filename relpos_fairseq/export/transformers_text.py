"""Write a tokenizer that AutoTokenizer loads and that gives the ids of the checkpoint's own dictionary.

The tokenizer of a RoBERTa becomes a tokenizer.json whose pieces are numbered as dict.txt numbers them.  All other text
(Moses with subwords, words, characters, bytes, symbols) is read by this package's own code, through `RelPosTokenizer`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, TypedDict

from transformers import PreTrainedTokenizer

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import write_json, write_text
from relpos_fairseq.io.reading import read_json
from relpos_fairseq.text import MASK
from relpos_fairseq.text.assets import DATA_PARTS, TEXT_FOLDER, TokenizerText, read_text
from relpos_fairseq.text.dictionary import EOS, UNK, symbols_of_rows
from relpos_fairseq.text.folders import SETTINGS, TOKENIZER_JSON
from relpos_fairseq.text.transformers_files import TRIED, transformers_files

FACTS = "relpos_text.json"
CODE = "relpos_code"  # the module of a folder that its `auto_map` names; it imports from here
NAMES = {"bos": "<s>", "cls": "<s>", "pad": "<pad>", "eos": "</s>", "sep": "</s>", "unk": "<unk>"}


def symbols_of(text: Path, rows: int, language: str | None = None) -> list[str]:
    """Return the symbols of a model's embedding rows, from the dictionary of a text folder.

    Raises:
        UserError: there is no dictionary, or it belongs to another model.
    """
    name = f"dict.{language}.txt" if language else "dict.txt"
    path = next((text / p / name for p in DATA_PARTS[:2] if (text / p / name).is_file()), None)
    if path is None:
        raise UserError(f"{text} has no {name}: name the model's data folder with --data")
    return symbols_of_rows(path, rows)


def _masks(sides: list[list[str]]) -> bool:
    """Return whether the symbols of every side have <mask>, as the same id: it is one id of a tokenizer."""
    return all(MASK in side for side in sides) and len({side.index(MASK) for side in sides}) == 1


class Facts(TypedDict):
    """What an export's relpos_text.json says; that of older versions says no more."""

    languages: list[str | None]
    rows: list[int]
    segments: bool


class RelPosTokenizer(PreTrainedTokenizer):
    """Split text as the checkpoint's training data was split, by the files in the folder's `text/`.

    Args:
        facts_file: relpos_text.json; `text/` lies beside it.
        rest: options of transformers.
    """

    vocab_files_names = {"facts_file": FACTS}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, facts_file: str, **rest: Any) -> None:
        self.facts = read_json(facts_file, Facts)
        self.folder = Path(facts_file).parent / TEXT_FOLDER
        sides = list(zip(self.facts["languages"], self.facts["rows"], strict=True))
        self.texts = [read_text(self.folder, language) for language, _ in sides]
        self.symbols = [symbols_of(self.folder, rows, language) for language, rows in sides]
        self.numbers = [{symbol: n for n, symbol in enumerate(own)} for own in self.symbols]
        self.side = 0  # of input; the last one is the output's
        for name, symbol in NAMES.items():
            rest.setdefault(f"{name}_token", symbol)
        if _masks(self.symbols):
            rest.setdefault("mask_token", MASK)
        if self.facts["segments"]:
            self.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
        super().__init__(**rest)

    @property
    def vocab_size(self) -> int:
        return len(self.symbols[0])

    def get_vocab(self) -> dict[str, int]:
        return dict(self.numbers[self.side])

    def _tokenize(self, text: str, **unused: Any) -> list[str]:
        return self.texts[self.side].encode(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self.numbers[self.side].get(token, UNK)

    def _convert_id_to_token(self, index: int) -> str:
        return self.symbols[-1][index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Join symbols of the output's language to text."""
        return self.texts[-1].decode(tokens)

    def _switch_to_input_mode(self) -> None:
        self.side = 0

    def _switch_to_target_mode(self) -> None:
        self.side = len(self.texts) - 1

    def build_inputs_with_special_tokens(self, first, second=None) -> list[int]:
        """Add special ids as in the model's training data."""
        if self.facts["form"] == "translation":
            return [*first, *(second or []), EOS]
        if self.facts["form"] == "language model":
            return [EOS, *first, *(second or [])]
        ids = [0, *first, EOS]
        return ids if second is None else [*ids, *[EOS] * self.facts["separators"], *second, EOS]

    def create_token_type_ids_from_sequences(self, first, second=None) -> list[int]:
        """Return segments; a separator belongs to the text that follows it."""
        length = len(self.build_inputs_with_special_tokens(first))
        whole = len(self.build_inputs_with_special_tokens(first, second))
        return [0] * length + [1] * (whole - length)

    def get_special_tokens_mask(self, first, second=None, already_has_special_tokens=False):
        ids = first if already_has_special_tokens else self.build_inputs_with_special_tokens(first, second)
        return [int(number in self.all_special_ids) for number in ids]

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple:
        path = Path(save_directory, FACTS)
        write_json(path, self.facts)
        if path.parent.resolve() != self.folder.parent.resolve():
            shutil.copytree(self.folder, path.parent / TEXT_FOLDER, dirs_exist_ok=True)
        return (str(path),)


def write_tokenizer(
    folder: Path,
    form: str,
    sides: list[tuple[str | None, int]],
    separators: int = 0,
    segments: bool = False,
    longest: int | None = None,
) -> str:
    """Write the tokenizer files of an exported folder that has its `text/`.

    Args:
        folder: the exported folder.
        form: `roberta`, `translation`, `denoising` or `language model`.
        sides: language (None: one dict.txt) and rows of input and output.
        separators: number of further </s> between the texts of a pair.
        segments: whether the model reads token types.
        longest: longest input of the model, or None.

    Returns:
        A description of the tokenizer.

    Raises:
        UserError: dictionaries of another model.
    """
    text = folder / TEXT_FOLDER
    symbols, own = symbols_of(text, sides[0][1], sides[0][0]), read_text(text, sides[0][0])
    if form == "roberta" and isinstance(own, TokenizerText):
        numbers = {symbol: number for number, symbol in enumerate(symbols)}
        made = transformers_files(own.tokenizer, numbers, separators, segments, longest)
        for name, content in made.items():
            write_text(folder / name, content)
        kind = TOKENIZER_JSON
    else:
        languages, rows = zip(*sides, strict=True)
        facts = {"form": form, "languages": languages, "rows": rows}
        write_json(folder / FACTS, facts | {"separators": separators, "segments": segments})
        settings: dict[str, Any] = {f"{name}_token": symbol for name, symbol in NAMES.items()}
        every = [symbols_of(text, count, language) for language, count in sides]
        settings |= {"mask_token": MASK} if _masks(every) else {}
        settings |= {} if longest is None else {"model_max_length": longest}
        settings |= {"padding_side": "left"} if form == "language model" else {}  # a text goes on at its end
        settings["tokenizer_class"] = RelPosTokenizer.__name__
        settings["auto_map"] = {"AutoTokenizer": [f"{CODE}.{RelPosTokenizer.__name__}", None]}
        settings["clean_up_tokenization_spaces"] = False
        write_json(folder / SETTINGS, settings)
        kind = f"{type(own).__name__} of this package"
    return f"{kind}, ids of {len(TRIED)} sentences equal the checkpoint's"  # by the closing check
