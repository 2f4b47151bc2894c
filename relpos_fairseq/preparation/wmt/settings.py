"""What a preparation is asked to do."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

SUBWORD_NMT, SENTENCEPIECE = "subword-nmt", "sentencepiece"
DEFAULT_YEAR = {"de": "wmt15", "cs": "wmt18", "fr": "wmt14"}
DEFAULT_TESTS = {"wmt14": ("newstest2014",)}  # of a year, where not newstest2015


@dataclass(frozen=True)
class Limits:
    """What a pair must keep within.

    Attributes:
        max_words: Words of each side.
        max_ratio: Words of the longer side to those of the shorter.
        min_script: The least share of a side's letters that are of its language's script.
    """

    max_words: int = 250
    max_ratio: float = 3.0
    min_script: float = 0.5


@dataclass(frozen=True)
class WmtSettings:
    """All that decides the result, and how it is made; its defaults are the command line's.

    Attributes:
        year: wmt14, wmt15 or wmt18; "" for parallel files of the user's own.
        source: The source language, ISO 639-1.
        target: The target language.
        out: The folder that takes everything.
        from_dir: A folder with archives, or with parallel files; None downloads.
        czeng: The user's folder of CzEng; None leaves it out.
        without: Names of corpora to leave out.
        valid: newstests to validate on.
        tests: newstests to test on.
        sample: How many training pairs to use; None for all.
        seed: Of every random choice.
        tokenizer: "moses" or "none".
        bpe: "subword-nmt" or "sentencepiece".
        model_type: "unigram" or "bpe", of sentencepiece.
        vocab_size: Merges of subword-nmt, pieces of sentencepiece.
        learn_lines: Pairs that the units are learned on, at most.
        limits: What the filter lets pass.
        on_bad_line: "fail" or "drop".
        workers: Processes.
        shards: Of how many shards the training text is made.
        shard: The shard to make now; None makes all else.
    """

    year: str
    source: str
    target: str
    out: Path
    from_dir: Path | None = None
    czeng: Path | None = None
    without: tuple[str, ...] = ()
    valid: tuple[str, ...] = ("newstest2013",)
    tests: tuple[str, ...] = ("newstest2015",)
    sample: int | None = None
    seed: int = 1
    tokenizer: str = "moses"
    bpe: str = SUBWORD_NMT
    model_type: str = "unigram"
    vocab_size: int = 32000
    learn_lines: int = 100_000
    limits: Limits = field(default_factory=Limits)
    on_bad_line: str = "fail"
    workers: int = 2
    shards: int = 1
    shard: int | None = None

    @property
    def languages(self) -> tuple[str, str]:
        return self.source, self.target

    def sides(self, folder: Path, name: str) -> tuple[Path, Path]:
        """Return the two files of a text of ours."""
        return folder / f"{name}.{self.source}", folder / f"{name}.{self.target}"

    def cleaning(self) -> dict:
        """What the cleaned training text depends on, besides files."""
        return {
            "languages": self.languages,
            "sample": self.sample,
            "seed": self.seed if self.sample else None,
            "tokenizer": self.tokenizer,
            "limits": asdict(self.limits),
            "on_bad_line": self.on_bad_line,
        }

    def units(self) -> dict:
        """What the subword units depend on, besides files."""
        model = {"model_type": self.model_type} if self.bpe == SENTENCEPIECE else {}
        chosen = {"vocab_size": self.vocab_size, "learn_lines": self.learn_lines}
        return {"bpe": self.bpe, "seed": self.seed, **chosen, **model}
