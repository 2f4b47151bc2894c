"""Prepare text for language models: obtain it, split it, make its vocabulary, encode every split."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import accumulate
from pathlib import Path

from relpos_fairseq.io.archives import extract
from relpos_fairseq.io.downloads import agree, fetch
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import copy_file, open_together, require_space
from relpos_fairseq.io.lines import Part, read_lines
from relpos_fairseq.io.progress import table
from relpos_fairseq.io.stages import Stage
from relpos_fairseq.preparation.corpora import CORPORA
from relpos_fairseq.preparation.lm_encoding import (
    count_symbols,
    encode_split,
    measure,
    read_text,
    size_of,
    train_sentencepiece,
)
from relpos_fairseq.preparation.pipeline import Preparation, Report, TextLines
from relpos_fairseq.preparation.settings import SPLITS, LmOptions, check_lm
from relpos_fairseq.text.dictionary import NSPECIAL, choose_symbols, read_dictionary, write_dictionary
from relpos_fairseq.text.levels import END, Bytes, LevelText, load_level
from relpos_fairseq.text.tokenizer import load_sentencepiece


def parse_fractions(text: str) -> list[Fraction]:
    """Read `0.9,0.05,0.05`: two or three positive numbers with the sum 1."""
    try:
        fractions = [Fraction(part) for part in text.split(",")]
    except (ValueError, ZeroDivisionError):
        fractions = []
    if len(fractions) not in (2, 3) or min(fractions) <= 0 or sum(fractions) != 1:
        raise UserError(
            "--shares must be two or three positive numbers with the sum 1 (train, valid, test), "
            f"such as 0.9,0.05,0.05; got {text}"
        )
    return fractions


def split_text(
    paths: Sequence[Path], outputs: Sequence[Path], fractions: Sequence[Fraction], level: str, on_bad_line: str
) -> dict[str, int]:
    """Write a text's contiguous parts as plain files; none may be empty.

    Args:
        paths: The text's files, one after another.
        outputs: The parts' files.
        fractions: The parts' shares: of the lines, or, at the levels of characters and bytes, of these.
        level: What the text is read as.
        on_bad_line: "fail" or "drop".

    Returns:
        How many lines or characters each part has.
    """
    exact = level in ("char", "byte")
    total = measure(paths, level, on_bad_line)["size" if exact else "lines"]
    ends = [int(total * share) for share in accumulate(fractions)]
    sizes = {path.stem: end - start for path, start, end in zip(outputs, [0, *ends], ends, strict=False)}
    for name, size in sizes.items():
        if size < 1:
            unit = "characters" if exact else "lines"
            raise UserError(f"--shares leaves {name} empty: the text has {total:,} {unit}")
    with open_together(*outputs) as files:
        for place, part in place_parts(read_text(paths, level, on_bad_line), ends, exact):
            text = part.text if isinstance(part.text, bytes) else part.text.encode("utf-8")
            files[place].write(text + b"\n" * part.ends)
    return sizes


def place_parts(parts: Iterator[Part], ends: Sequence[int], exact: bool) -> Iterator[tuple[int, Part]]:
    """Pair lines with the number of the split that they belong to; if `exact`, cut lines at the ends of splits."""
    done = place = 0
    for part in parts:
        while exact and done + size_of(part) > ends[place]:
            cut = ends[place] - done
            if cut:
                yield place, part._replace(text=part.text[:cut], ends=False)
                part = part._replace(text=part.text[cut:], begins=False)
            done, place = ends[place], place + 1
        if not exact and done == ends[place]:
            place += 1
        yield place, part
        done += size_of(part) if exact else 1


SENTENCEPIECE = ("model_type", "vocab_size", "character_coverage", "byte_fallback", "seed")
VERSION = 2  # to be raised when the result for the same input and options changes
COLUMNS = ("tokens", "lines", "words", "characters", "bytes", "unknown", "documents")
ENCODE = "encode-"  # begins the name of the stage of a split


class LmPreparation(Preparation):
    """Text to binaries that language models train on."""

    prunes = True

    def __init__(self, args: LmOptions) -> None:
        super().__init__(args.out)
        self.args, self.level = args, check_lm(args)
        self.reading = {"level": self.level, "on_bad_line": args.on_bad_line}
        self.corpus = CORPORA.get(args.corpus or "")
        given = {split: getattr(args, split) for split in SPLITS if getattr(args, split)}
        if sum((bool(given), bool(args.text), bool(args.corpus))) != 1:
            raise UserError("give either --train/--valid/--test, or --text, or --corpus")
        corpus_shares = self.corpus.split if self.corpus else None
        shares = args.shares or corpus_shares
        if bool(shares) != bool(args.text or corpus_shares):
            raise UserError("--shares and --text belong together")
        self.fractions = parse_fractions(shares) if shares else []
        if given and "train" not in given:
            if not args.dict and self.level != "byte":
                raise UserError("without --train there must be --dict")
            if self.level == "sentencepiece" and not args.sentencepiece:
                raise UserError("without --train there must be --sentencepiece")
        texts = self.out / "text"
        self.members = {name: texts / member for name, member in self.corpus.members.items()} if self.corpus else {}
        self.text: list[Path] = []  # to be split
        self.files: dict[str, list[Path]] = given or {split: [path] for split, path in self.members.items()}
        if self.fractions:
            self.text = args.text or [*self.members.values()]
            self.files = {split: [texts / f"{split}.txt"] for split in SPLITS[: len(self.fractions)]}
        self.archives: list[Path] = []
        self.made: list[Path] = []
        self.models = [self.out / "sentencepiece.model"] if self.level == "sentencepiece" else []
        self.dictionary = self.out / "dict.txt"
        self.folders = [self.out / f"shard{i}" for i in range(args.shards)] if args.shards > 1 else [self.out]

    def stages(self) -> list[Stage]:
        made = [*self.vocabulary_stages(), *self.encoding_stages()]
        self.made = sorted({path for stage in made for path in stage.outputs})
        stages = [*self.text_stages(), *made]
        return [replace(stage, parameters={"version": VERSION, **stage.parameters}) for stage in stages]

    def text_stages(self) -> list[Stage]:
        """Return the stages that extract a corpus, which is downloaded, and split a text."""
        args, stages, parts = self.args, [], [path for paths in self.files.values() for path in paths]
        if self.corpus:
            archive, folder = self.corpus.archive, args.downloads or self.out / "downloads"
            if args.from_dir is None:
                agree([archive], folder, args.yes, self.hashes)
            self.archives = [*fetch([archive], folder, from_dir=args.from_dir, hashes=self.hashes).values()]
            members = {"members": [*self.corpus.members.values()]}
            stages.append(Stage("extract", self.extract, self.archives, [*self.members.values()], members))
        else:
            require_space(self.out, sum(path.stat().st_size for path in self.text or parts))
        if self.fractions:
            split = partial(split_text, self.text, parts, self.fractions, **self.reading)
            shares = {"split": [str(share) for share in self.fractions]}
            stages.append(Stage("split", split, self.text, parts, self.reading | shares))
        return stages

    def extract(self) -> dict[str, int]:
        """Extract the corpus' text."""
        return {"files": len(extract(self.archives[0], self.out / "text", self.corpus.members.values()))}

    def vocabulary_stages(self) -> list[Stage]:
        """Return the stages that make sentencepiece.model and dict.txt."""
        args, train, stages = self.args, self.files.get("train", []), []
        if args.sentencepiece:
            load_sentencepiece(args.sentencepiece)
            copy = partial(copy_file, args.sentencepiece, *self.models)
            stages.append(Stage("sentencepiece", copy, [args.sentencepiece], self.models))
        elif self.models:
            options = {name: getattr(args, name) for name in SENTENCEPIECE} | {"sample_lines": args.learn_lines}

            def learn() -> None:
                train_sentencepiece(self.models[0], read_text(train, **self.reading), options)

            stages.append(Stage("sentencepiece", learn, train, self.models, self.reading | options))
        made = [self.dictionary]
        if args.dict:
            dictionary = Stage("dictionary", self.copy_dictionary, [args.dict], made)
        elif self.level == "byte":
            dictionary = Stage("dictionary", self.byte_dictionary, [], made, self.reading)
        else:
            texts = [path for paths in self.files.values() for path in paths] if self.level == "char" else train
            cut = {name: getattr(args, name) for name in ("threshold", "words", "padding_factor")}
            dictionary = Stage("dictionary", self.count_dictionary, [*texts, *self.models], made, self.reading | cut)
        return [*stages, dictionary]

    def byte_dictionary(self) -> dict[str, int]:
        """Make the dict.txt of all bytes."""
        write_dictionary(self.dictionary, [(symbol, 1) for symbol in Bytes.symbols])
        return {"symbols": len(Bytes.symbols)}

    def count_dictionary(self) -> dict[str, int]:
        """Make dict.txt of the training text."""
        args, files = self.args, dict(self.files)
        train = files.pop("train", [])
        # Characters that only valid or test have are in the dictionary too, at its end: bits per
        # character allow no unknown, and published enwik8 vocabularies count all splits.
        others = [path for paths in files.values() for path in paths] * (self.level == "char")
        level = load_level(self.level, *self.models)
        texts = [read_text(paths, **self.reading) for paths in (train, others) if paths]
        symbols = count_symbols(texts, level, args.workers)
        kept = choose_symbols(symbols, args.threshold, args.words, args.padding_factor)
        write_dictionary(self.dictionary, kept)
        return {"symbols": len(kept), "different units": len(symbols)}

    def copy_dictionary(self) -> dict[str, int]:
        """Check the user's dictionary and copy it."""
        symbols = read_dictionary(self.args.dict)
        copy_file(self.args.dict, self.dictionary)
        return {"symbols": len(symbols)}

    def encoding_stages(self) -> list[Stage]:
        """Return a stage for every split."""
        args = self.args
        options = self.reading | {
            "documents": args.documents,
            "refuse_unknown": self.level == "char" and args.dict is not None,
        }
        suffixes = ["bin", "idx"] + ["documents.npy"] * (args.documents != "none")
        stages = []
        for split, paths in self.files.items():
            folders = self.folders if split == "train" else self.folders[:1]
            run = partial(self.encode, split, folders, options)
            made = [folder / f"{split}.{suffix}" for folder in folders for suffix in suffixes]
            read = [*paths, self.dictionary, *self.models]
            stages.append(Stage(f"{ENCODE}{split}", run, read, made, options | {"shards": len(folders)}))
        if len(self.folders) > 1:
            copies = [folder / "dict.txt" for folder in self.folders]
            copy = partial(copy_file, self.dictionary, *copies)
            stages.append(Stage("dictionaries", copy, [self.dictionary], copies))
        return stages

    def encode(self, split: str, folders: list[Path], options: dict) -> dict[str, dict]:
        """Encode a split; return its counts by shard."""
        symbols = read_dictionary(self.dictionary)
        level = load_level(self.level, *self.models, known=symbols)
        counts = encode_split(split, self.files[split], folders, level, symbols, options, self.args.workers)
        return {str(shard): found for shard, found in enumerate(counts)}

    def text_lines(self) -> dict[str, TextLines]:
        """Return the lines of the first split; those that are not UTF-8 are no lines of text."""
        split, paths = next(iter(self.files.items()))
        lines = (line for path in paths for line in read_lines(path, "drop"))
        known = {*read_dictionary(self.dictionary), END}
        return {split: TextLines(LevelText(self.level, *self.models, known=known), lines, known)}

    def report(self, counts: dict[str, Mapping]) -> list[Report]:
        facts = {
            "level": self.level,
            "vocabulary": NSPECIAL + len(read_dictionary(self.dictionary)),
            "</s>": "line feed" if self.level in ("char", "byte") else "end of line",
        }
        read = {"archive": self.archives, "text": self.text, **self.files}
        texts = {
            f"{split} {place}: {path.name}": path for split, paths in read.items() for place, path in enumerate(paths)
        }
        encoded = [name for name in counts if name.startswith(ENCODE)]
        shards = {name.removeprefix(ENCODE): [*counts.pop(name).values()] for name in encoded}
        splits = {}
        for split, parts in shards.items():
            total = Counter()
            for part in parts:
                total.update(part)
            splits[split] = dict(total)
        columns = [name for name in COLUMNS if any(name in found for found in splits.values())]
        rows = [[split, *(found.get(c, 0) for c in columns)] for split, found in splits.items()]
        found = {f"split {name}": (found.get("unknown", 0), found["tokens"]) for name, found in splits.items()}
        whole = Report(
            texts,
            self.made,
            [
                table(rows, ["split", *columns]),
                f"{self.level} level, {facts['vocabulary']:,} entries in the dictionary",
                f"data: {':'.join(map(str, self.folders))}",
            ],
            counts,
            {**facts, "splits": splits},
            {} if self.level == "word" else found,  # whose vocabulary leaves rare words out
            self.text_lines(),
        )
        reports = [whole]
        for number, folder in enumerate(self.folders if len(self.folders) > 1 else []):
            own = {split: parts[number] for split, parts in shards.items() if number < len(parts)}
            outputs = [path for path in self.made if path.parent == folder]
            reports.append(Report(texts, outputs, [], extra={**facts, "shard": number, "splits": own}, folder=folder))
        return reports
