"""sentencepiece's unigram and BPE models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from relpos_fairseq.data.tokenizers.base import MASK, SPECIAL, UNKNOWN, Tokenizer, is_unspaced
from relpos_fairseq.engine.files import write_bytes

FILE = "sentencepiece.model"
_SPACE = "▁"


def import_library() -> Any:
    """The `sentencepiece` module, which must be installed, and new enough to give offsets."""
    try:
        import sentencepiece
    except ImportError:
        raise ValueError("sentencepiece models need their library: pip install sentencepiece") from None
    if not hasattr(sentencepiece.SentencePieceProcessor, "EncodeAsOffsetMapping"):
        raise ValueError(
            f"sentencepiece {sentencepiece.__version__} gives no character offsets in the form "
            f"that is read here: pip install 'sentencepiece>=0.2.3'"
        )
    return sentencepiece


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model, out of its serialised form."""

    kind = "sentencepiece"

    def __init__(self, model: bytes):
        library = import_library()
        try:
            self.processor = library.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, OSError) as error:
            raise ValueError(f"no sentencepiece model: {error}") from None
        self._bytes = model
        self._unknown = self.processor.unk_id()
        numbers = range(self.processor.get_piece_size())
        self.symbols = [
            self.processor.id_to_piece(n)
            for n in numbers
            if not (self.processor.is_control(n) or self.processor.is_unknown(n))
        ]
        self.symbols = [one for one in self.symbols if one not in {*SPECIAL, MASK}]

    def raw(self, texts: Sequence[str]) -> list[tuple[list[str], list[tuple[int, int]]]]:
        found = [self.processor.encode(text, return_type="offset_mapping") for text in texts]
        return [
            (
                [
                    UNKNOWN if number == self._unknown else piece
                    for number, piece in zip(one["ids"], one["pieces"], strict=True)
                ],
                [tuple(pair) for pair in one["offsets"]],
            )
            for one in found
        ]

    def begins_word(self, piece: str) -> bool:
        """By the sign for a space, which stands alone before a word's unknown characters."""
        if piece == UNKNOWN:
            return False
        if piece in SPECIAL or piece == MASK:
            return True
        return piece.startswith(_SPACE) or is_unspaced(piece[0])

    def decode(self, pieces: Iterable[str]) -> str:
        return self.processor.decode_pieces(list(pieces))

    def write(self, folder: Path) -> None:
        write_bytes(folder / FILE, self._bytes)

    @classmethod
    def from_file(cls, path: Path) -> SentencePieceTokenizer:
        try:
            return cls(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
