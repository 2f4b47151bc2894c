"""Declare the options of `relpos prepare wmt`, and derive from them languages, limits and the paths of all files."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.options import InFolder, OutFolder, argument, flag, option
from relpos_fairseq.text.languages import find_language
from relpos_fairseq.text.subwords import IDENTITY, NORMALIZATIONS
from relpos_fairseq.text.tokenizer import SENTENCEPIECE, SUBWORD_NMT

DEFAULT_YEAR = {"de": "wmt15", "cs": "wmt18", "fr": "wmt14"}
DEFAULT_VALID, DEFAULT_TEST = ["newstest2013"], ["newstest2015"]
DEFAULT_TESTS = {"wmt14": ["newstest2014"]}  # of a year, where not DEFAULT_TEST
MODEL_TYPES = ("unigram", "bpe")  # of sentencepiece; the first is the default
MIN_SCRIPT = 0.5  # the least share of a side's letters that are of its language's scripts
DUPLICATE = "duplicate"
# The filters by their reasons to drop a pair, in the order they are tried; the first that applies counts the pair.
FILTERS = {
    "empty": "a side has no character",
    "too long": "a side has more words than `--max-words`, or more than 12 characters for each of these",
    "length ratio": "a side is more than `--max-ratio` times as long as the other, and by more than 3 words",
    "identical sides": "both sides are the same text, but for capitals",
    "wrong script": "less than half of a side's letters are of its language (beside Chinese a Latin word is one)",
    "in a test set": "a side is a sentence of the validation or test sets",
    DUPLICATE: "both sides are those of an earlier pair",
}
NO_FILTER = {reason.replace(" ", "-"): reason for reason in FILTERS}  # by the names on the command line
FILTER = "filter"  # the heading of the options of filters


@dataclass(kw_only=True)
class Limits:
    """The options that say what a pair must keep within."""

    max_words: int = option(250, "words of each side (default: %(default)s)", group=FILTER, least=1, metavar="N")
    max_ratio: float = option(
        3.0, "longer side's length to the shorter's (default: %(default)s)", group=FILTER, metavar="R", least=1
    )
    no_filter: list[str] = option(
        [], f"keep such pairs: {', '.join(NO_FILTER)}", group=FILTER, choices=NO_FILTER, metavar="NAME"
    )
    max_dropped: float = option(
        0.5,
        "share of a corpus' pairs that one filter may drop (default: %(default)s)",
        group=FILTER,
        metavar="F",
        above=0,
        most=1,
    )

    @property
    def kept(self) -> list[str]:
        """The reasons that are no reason to drop a pair."""
        return [reason for name, reason in NO_FILTER.items() if name in self.no_filter]


def shard(text: str) -> tuple[int, int]:
    """Read I/N."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"must be I/N with 1 <= I <= N, got {text}")
    return int(number), int(count)


@dataclass(kw_only=True)
class WmtOptions(Limits):
    """The options of `relpos prepare wmt`."""

    pair: list[str] = argument("wmt14 en-fr, wmt15 de-en, wmt18 en-cs, ...", metavar="[YEAR] PAIR")
    out: OutFolder | None = option(None, "folder that takes everything (default: data/YEAR.PAIR)")
    from_dir: InFolder | None = option(
        None, "use local files: the archives, or train.LANG, valid.LANG, test*.LANG (also .gz)", metavar="DIR"
    )
    yes: bool = flag("download without asking")
    czeng: InFolder | None = option(None, "folder of CzEng 1.6 (its licence forbids fetching)", metavar="DIR")
    without: list[str] = option([], "corpora to leave out", metavar="CORPUS")
    valid: list[str] = option(DEFAULT_VALID, "sacrebleu's name", metavar="SET")
    test: list[str] | None = option(
        None, "sacrebleu's name (default: newstest2015; wmt14: newstest2014)", metavar="SET"
    )
    sample: int | None = option(None, "use N training pairs, chosen by --seed", least=1, metavar="N")
    seed: int = option(1)
    on_bad_line: str = option(
        "fail", "invalid UTF-8 in training text: stop, or drop the pair and count it", choices=("fail", "drop")
    )
    tokenizer: str | None = option(
        None,
        "default: moses for subword-nmt, if it gives text in the scripts of both languages back; else none",
        choices=("moses", "none"),
    )
    normalization: str = option(
        "",
        f"{', '.join(NORMALIZATIONS)}: the first, with --tokenizer none, leaves all but white space; others are "
        "sentencepiece's (default: Moses' punctuation, and sentencepiece's nmt_nfkc)",
        choices=NORMALIZATIONS,
        metavar="NAME",
    )
    bpe: str = option(SUBWORD_NMT, choices=(SUBWORD_NMT, SENTENCEPIECE))
    model_type: str | None = option(None, f"of sentencepiece (default: {MODEL_TYPES[0]})", choices=MODEL_TYPES)
    vocab_size: int = option(
        32000, "merges (subword-nmt) or pieces (sentencepiece), joint (default: %(default)s)", least=1, metavar="N"
    )
    learn_lines: int = option(
        100_000, "pairs that units are learned on, at most (default: %(default)s)", least=1, metavar="N"
    )
    workers: int = option(2, "processes (default: %(default)s)", least=1, metavar="N")
    shard: tuple[int, int] | None = option(
        None, "only clean and tokenise part I of N of the training text", type=shard, metavar="I/N"
    )
    merge: int | None = option(None, "join N shards and do the rest", least=1, metavar="N")
    force: bool = flag("run every stage again")
    dry_run: bool = flag("print sources, sizes and disk needed; do nothing")


class WmtSettings:
    """What follows from the options of `relpos prepare wmt`, and the paths of its files.

    A set of text has two files: the source's and the target's.

    Args:
        options: The options, each within its own bounds.

    Attributes:
        year: wmt14, wmt15 or wmt18; "" for parallel files of the user's own.
        languages: Source and target, any codes of them; also apart, `source` and `target`.
        out: The folder that takes everything.
        tests: Names of the sets to test on.
        tokenizer: "moses" or "none".
        tokenises: Whether words are cut from punctuation before subwords are learned.
        remedy: The options that leave more of the text as it is; "" if there are none.
        model_type: "unigram" or "bpe", of sentencepiece.
        shards: The number of shards of the training text.
        shard: The shard to make now; None makes all the rest.
        downloads: The folder of the archives that are downloaded.
        pairs: The file of the numbers of pairs of every text.
        lengths: How the lengths of the training text's sides are counted and compared.
        folded: The sentences of validation and test sets, which are not trained on.
        model: The subwords that were learned.
        learned_on: The sample of the training text that subwords are learned on.
        dictionary: The subwords of the training text.

    Raises:
        UserError: Options that do not go together, or a pair that is none.
    """

    def __init__(self, options: WmtOptions):
        self.options = options
        *years, pair = options.pair
        languages = tuple(pair.split("-"))
        if len(languages) != 2 or not all(languages) or len(set(languages)) != 2 or len(years) > 1:
            raise UserError(f"give [YEAR] PAIR, as in wmt15 en-de; got {' '.join(options.pair)}")
        self.languages = self.source, self.target = languages
        fits = options.bpe == SUBWORD_NMT and all(find_language(one).comes_back_from_moses for one in languages)
        self.tokenizer = options.tokenizer or ("moses" if fits else "none")
        self.tokenises = self.tokenizer == "moses"
        self.remedy = "" if options.normalization == IDENTITY else f"--normalization {IDENTITY} --tokenizer none"
        if self.tokenises:
            self.remedy = "--tokenizer none"
        self.refuse_contradictions()
        other = self.target if self.source == "en" else self.source
        self.year = years[0] if years else ("" if options.from_dir else DEFAULT_YEAR.get(other, ""))
        if not self.year and not options.from_dir:
            raise UserError(f"no training set is known for {pair}: give yours with --from-dir")
        self.out = (options.out or Path("data", ".".join(filter(None, (self.year, pair))))).absolute()
        self.tests = options.test or DEFAULT_TESTS.get(self.year, DEFAULT_TEST)
        self.model_type = options.model_type or MODEL_TYPES[0]
        self.shard: int | None
        self.shard, self.shards = options.shard or (None, options.merge or 1)
        self.downloads = self.out / "downloads"
        self.pairs, self.lengths = self.out / "shards" / "pairs.json", self.out / "shards" / "lengths.json"
        self.folded = self.out / "text" / "held-out.txt"
        units = self.out / "units"
        self.model = units / ("bpe.codes" if options.bpe == SUBWORD_NMT else "sentencepiece.model")
        self.learned_on, self.dictionary = units / "sample.txt", units / "dict.txt"

    def refuse_contradictions(self) -> None:
        """Raise an error for options that do not go together."""
        options = self.options
        if options.shard and options.merge:
            raise UserError("--shard makes one part, --merge joins all: give one of them")
        if options.model_type and options.bpe != SENTENCEPIECE:
            raise UserError(f"--model-type {options.model_type} goes with --bpe sentencepiece, not with {options.bpe}")
        if options.normalization == IDENTITY and self.tokenizer != "none":
            raise UserError(f"--normalization {IDENTITY} goes with --tokenizer none, not with {self.tokenizer}")
        if options.normalization not in ("", IDENTITY) and options.bpe != SENTENCEPIECE:
            raise UserError(
                f"--normalization {options.normalization} goes with --bpe {SENTENCEPIECE}, not with {options.bpe}"
            )

    def sides(self, folder: Path, name: str) -> tuple[Path, Path]:
        """Return the source's and the target's file of a set in a folder."""
        return folder / f"{name}.{self.source}", folder / f"{name}.{self.target}"

    def text(self, split: str) -> tuple[Path, Path]:
        """Return the files of a set before it is cut into subwords."""
        return self.sides(self.out / "text", split)

    def references(self, split: str) -> tuple[Path, Path]:
        """Return the unchanged files of a held-out set, which translations are scored on."""
        return self.sides(self.out / "reference", split)

    def units(self, split: str) -> tuple[Path, Path]:
        """Return the files of a set in subwords."""
        return self.sides(self.out / "units", split)

    def shard_folder(self, shard: int) -> Path:
        """Return the folder of a shard."""
        return self.out / "shards" / f"{shard}-of-{self.shards}"

    def cleaned(self, shard: int) -> list[Path]:
        """Return a shard's source lines, target lines and records."""
        folder = self.shard_folder(shard)
        return [*self.sides(folder, "clean"), folder / "clean.records"]

    def dropped(self, shard: int) -> Path:
        """Return the file of examples of the pairs that were dropped from a shard."""
        return self.shard_folder(shard) / "dropped.json"

    def ready(self, shard: int) -> tuple[Path, Path]:
        """Return a shard's lines as subwords are learned on them."""
        return self.sides(self.shard_folder(shard), "tokens" if self.tokenises else "clean")

    def of_shard(self, shard: int) -> list[Path]:
        """Return all files of a shard but its manifest."""
        return list(dict.fromkeys([*self.cleaned(shard), self.dropped(shard), *self.ready(shard)]))

    def cleaning(self) -> dict:
        """Return the options on which the cleaned training text depends."""
        options = self.options
        kept = [reason for reason in options.kept if reason != DUPLICATE]
        limits = {"max_words": options.max_words, "max_ratio": options.max_ratio, "min_script": MIN_SCRIPT}
        return {
            "languages": self.languages,
            "sample": options.sample,
            "seed": options.seed if options.sample else None,
            "tokenizer": self.tokenizer,
            "limits": limits | {"no_filter": kept},
            "on_bad_line": options.on_bad_line,
            "normalization": options.normalization,
        }

    def merging(self) -> dict:
        """Return the options on which the joined training text depends."""
        duplicates = "kept" if DUPLICATE in self.options.kept else "dropped"
        return {"duplicates": duplicates, "max_dropped": self.options.max_dropped}

    def learning(self) -> dict:
        """Return the options on which the subwords depend."""
        options = self.options
        model = {"model_type": self.model_type} if options.bpe == SENTENCEPIECE else {}
        model["normalization"] = options.normalization
        chosen = {"vocab_size": options.vocab_size, "learn_lines": options.learn_lines}
        return {"bpe": options.bpe, "seed": options.seed, **chosen, **model}
