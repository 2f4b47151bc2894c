"""The names of all files that a preparation makes."""

from pathlib import Path

from relpos_fairseq.preparation.wmt.settings import SUBWORD_NMT, WmtSettings


class WmtFiles:
    """Where the stages put what they make.

    Args:
        settings: What is asked for.

    Attributes:
        pairs: The number of pairs of every text.
        folded: Sentences of validation and test sets, which are not trained on.
        train: The training text of both languages before it is cut into units.
        model: The units that were learned.
        sample: What they were learned on.
    """

    def __init__(self, settings: WmtSettings) -> None:
        self.settings, self.out = settings, settings.out
        self.pairs = self.out / "shards" / "pairs.json"
        self.folded = self.out / "text" / "held-out.txt"
        self.train = settings.sides(self.out / "text", "train")
        name = "bpe.codes" if settings.bpe == SUBWORD_NMT else "sentencepiece.model"
        self.model = self.out / "units" / name
        self.sample = self.out / "units" / "sample.txt"

    @property
    def tokenises(self) -> bool:
        """Whether words are cut from punctuation before units are learned."""
        return self.settings.tokenizer == "moses"

    def held_out(self, split: str) -> tuple[Path, Path]:
        """Return the files of a validation or test set, ready for units."""
        return self.settings.sides(self.out / "text", split)

    def references(self, split: str) -> tuple[Path, Path]:
        """Return the files of a held-out set as they were, which translations are scored on."""
        return self.settings.sides(self.out / "reference", split)

    def units(self, split: str) -> tuple[Path, Path]:
        """Return the files of a set in units."""
        return self.settings.sides(self.out / "units", split)

    def shard_folder(self, shard: int) -> Path:
        """Return the folder of a shard."""
        return self.out / "shards" / f"{shard}-of-{self.settings.shards}"

    def cleaned(self, shard: int) -> list[Path]:
        """Return a shard's source lines, target lines and records."""
        folder = self.shard_folder(shard)
        return [*self.settings.sides(folder, "clean"), folder / "clean.records"]

    def ready(self, shard: int) -> tuple[Path, Path]:
        """Return a shard's lines as units are learned on them."""
        name = "tokens" if self.tokenises else "clean"
        return self.settings.sides(self.shard_folder(shard), name)
