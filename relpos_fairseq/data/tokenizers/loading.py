"""Read a tokenizer from a folder: ours, a Hugging Face model's, or fairseq's GPT-2 files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relpos_fairseq.data.tokenizers import library, pieces
from relpos_fairseq.data.tokenizers.base import Tokenizer
from relpos_fairseq.data.tokenizers.library import LibraryTokenizer
from relpos_fairseq.data.tokenizers.pieces import SentencePieceTokenizer

_EXPECTED = (
    "sentencepiece.model, sentencepiece.bpe.model, tokenizer.json, encoder.json and vocab.bpe, "
    "vocab.json and merges.txt, or vocab.txt"
)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Read the tokenizer that a folder holds.

    Looked for in this order: sentencepiece's model (ours, XLM-R's name, ALBERT's), tokenizer.json
    (ours, or a Hugging Face folder's), GPT-2's encoder.json and vocab.bpe (as fairseq's RoBERTa
    uses them: dict.txt then names pieces by number), vocab.json and merges.txt, and BERT's
    vocab.txt (lower case as tokenizer_config.json's do_lower_case says; BERT's default, true,
    without it).

    Raises:
        ValueError: the folder is absent or holds none of them, or a file is broken.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"no tokenizer folder {folder}: give a folder that holds {_EXPECTED}")
    for names, read in _READERS:
        paths = [folder / name for name in names]
        if all(path.is_file() for path in paths):
            return read(*paths)
    raise ValueError(f"no tokenizer in {folder}: expected {_EXPECTED}")


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None


def _vocabulary(path: Path) -> dict[str, int]:
    found = _json(path)
    if not isinstance(found, dict) or not all(isinstance(n, int) for n in found.values()):
        raise ValueError(f"{path} is no vocabulary: expected an object of piece to number")
    return found


def _byte_bpe(vocabulary: Path, merges: Path, ids_as_symbols: bool) -> LibraryTokenizer:
    lines = merges.read_text(encoding="utf-8").split("\n")
    pairs = [tuple(line.split(" ")) for line in lines if line.strip() and not line.startswith("#version")]
    wrong = next((pair for pair in pairs if len(pair) != 2), None)
    if wrong is not None:
        raise ValueError(f"{merges}: {' '.join(wrong)!r} is no pair of pieces")
    try:
        model = library.byte_bpe(_vocabulary(vocabulary), pairs)
    except ValueError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{merges} does not belong to {vocabulary.name}: {error}") from None
    return LibraryTokenizer(model, ids_as_symbols)


def _wordpiece(path: Path) -> LibraryTokenizer:
    lines = path.read_text(encoding="utf-8").split("\n")
    while lines and not lines[-1]:
        lines.pop()
    vocabulary = {line.rstrip("\r"): number for number, line in enumerate(lines)}
    if len(vocabulary) != len(lines):
        raise ValueError(f"{path} names {len(lines) - len(vocabulary)} pieces twice")
    if "[UNK]" not in vocabulary:
        raise ValueError(f"{path} is no BERT vocabulary: it lacks [UNK]")
    settings = path.with_name("tokenizer_config.json")
    lowercase = not settings.is_file() or bool(_json(settings).get("do_lower_case", True))
    return LibraryTokenizer(library.wordpiece(vocabulary, lowercase))


_READERS: tuple[tuple[tuple[str, ...], Callable[..., Tokenizer]], ...] = (
    *(((name,), SentencePieceTokenizer.from_file) for name in (pieces.FILE, "sentencepiece.bpe.model", "spiece.model")),
    ((library.FILE,), LibraryTokenizer.from_json),
    (("encoder.json", "vocab.bpe"), lambda v, m: _byte_bpe(v, m, ids_as_symbols=True)),
    (("vocab.json", "merges.txt"), lambda v, m: _byte_bpe(v, m, ids_as_symbols=False)),
    (("vocab.txt",), _wordpiece),
)

# All files that a tokenizer may consist of, and those of them that say more than settings.
MODEL_FILES = tuple(dict.fromkeys(name for names, _ in _READERS for name in names))
FILES = (*MODEL_FILES, "tokenizer_config.json")
