"""`--bpe relpos --tokenizer-folder DIR`: our text where fairseq asks for a BPE.

fairseq's whole-word masking and fairseq-interactive use it.  DIR is the text/ beside a checkpoint,
a data folder, or a tokenizer's.
"""

from dataclasses import dataclass
from pathlib import Path

from fairseq.data.encoders import register_bpe
from fairseq.dataclass import FairseqDataclass

from relpos_fairseq.config import help_text
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import read_json
from relpos_fairseq.inference.text import SymbolText, TokenizerText, manifest_of, read_text


@dataclass
class TokenizerFolderConfig(FairseqDataclass):
    """Where the text's units are."""

    tokenizer_folder: str = help_text("", "folder with tokenizer.json, sentencepiece.model, ...")


@register_bpe("relpos", dataclass=TokenizerFolderConfig)
class FolderText:
    """The text of a folder as a fairseq BPE."""

    def __init__(self, cfg: TokenizerFolderConfig):
        """Read the folder.

        Raises:
            ValueError: nothing there says how text becomes symbols.
        """
        folder = Path(cfg.tokenizer_folder)
        manifest = manifest_of(folder)
        settings = (read_json(manifest) if manifest else {}).get("settings", {})
        source, target = settings.get("languages", (None, None))
        self.source, self.target = read_text(folder, source), read_text(folder, target)
        if isinstance(self.source, SymbolText):
            raise PreparationError(
                f"--tokenizer-folder {folder} has no tokenizer, and no manifest.json of `relpos "
                f"prepare`: name the text/ beside the checkpoint, or the data folder"
            )

    def encode(self, x: str) -> str:
        return " ".join(self.source.encode(x))

    def decode(self, x: str) -> str:
        return self.target.decode(x.split(" "))

    def is_beginning_of_word(self, x: str) -> bool:
        """Whether a symbol begins a word.

        Raises:
            ValueError: the text is of no tokenizer, which alone knows.
        """
        if not isinstance(self.source, TokenizerText):
            raise PreparationError("--mask-whole-words needs a tokenizer in --tokenizer-folder")
        return self.source.tokenizer.begins_word(x)
