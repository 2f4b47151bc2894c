"""What a preparation is asked to do."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

SUBWORD_NMT, SENTENCEPIECE = "subword-nmt", "sentencepiece"
DEFAULT_YEAR = {"de": "wmt15", "cs": "wmt18", "fr": "wmt14"}
DEFAULT_TESTS = {"wmt14": ("newstest2014",)}  # of a year, where not newstest2015


@dataclass(frozen=True)
class Limits:
    """What a pair must keep within."""

    max_words: int = 250  # words of each side
    max_ratio: float = 3.0  # words of the longer side to those of the shorter
    min_script: float = 0.5  # the least share of a side's letters that are of its language's script


@dataclass(frozen=True)
class WmtSettings:
    """All that decides the result, and how it is made; its defaults are the command line's."""

    year: str  # wmt14, wmt15 or wmt18; "" for parallel files of the user's own
    source: str  # the source language, ISO 639-1
    target: str  # the target language
    out: Path  # the folder that takes everything
    from_dir: Path | None = None  # a folder with archives, or with parallel files; None downloads
    czeng: Path | None = None  # the user's folder of CzEng; None leaves it out
    without: tuple[str, ...] = ()  # names of corpora to leave out
    valid: tuple[str, ...] = ("newstest2013",)  # newstests to validate on
    tests: tuple[str, ...] = ("newstest2015",)  # newstests to test on
    sample: int | None = None  # how many training pairs to use; None for all
    seed: int = 1  # of every random choice
    tokenizer: str = "moses"  # "moses" or "none"
    bpe: str = SUBWORD_NMT  # "subword-nmt" or "sentencepiece"
    model_type: str = "unigram"  # "unigram" or "bpe", of sentencepiece
    vocab_size: int = 32000  # merges of subword-nmt, pieces of sentencepiece
    learn_lines: int = 100_000  # pairs that the units are learned on, at most
    limits: Limits = field(default_factory=Limits)  # what the filter lets pass
    on_bad_line: str = "fail"  # "fail" or "drop"
    workers: int = 2  # processes
    shards: int = 1  # of how many shards the training text is made
    shard: int | None = None  # the shard to make now; None makes all else

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
