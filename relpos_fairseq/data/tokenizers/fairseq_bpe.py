"""`--bpe relpos --tokenizer-folder DIR`: our tokenizers where fairseq asks for a BPE.

fairseq's whole-word masking, its hub interface and fairseq-interactive use it.
"""

from dataclasses import dataclass, field

from fairseq.data.encoders import register_bpe
from fairseq.dataclass import FairseqDataclass

from relpos_fairseq.data.tokenizers.loading import load_tokenizer


@dataclass
class TokenizerFolderConfig(FairseqDataclass):
    """Where the tokenizer is."""

    tokenizer_folder: str = field(
        default="", metadata={"help": "folder with tokenizer.json, sentencepiece.model, ..."}
    )


@register_bpe("relpos", dataclass=TokenizerFolderConfig)
class FolderTokenizer:
    """A tokenizer of this package as a fairseq BPE."""

    def __init__(self, cfg: TokenizerFolderConfig):
        """Read the folder."""
        self.tokenizer = load_tokenizer(cfg.tokenizer_folder)

    def encode(self, x: str) -> str:
        """Pieces of a text, joined by spaces."""
        return " ".join(self.tokenizer.encode(x).pieces)

    def decode(self, x: str) -> str:
        """The text of pieces joined by spaces."""
        return self.tokenizer.decode(x.split(" "))

    def is_beginning_of_word(self, x: str) -> bool:
        """Whether a symbol begins a word."""
        return self.tokenizer.begins_word(x)
