"""Prepare text for language models: obtain it, split it, make its vocabulary, encode every split."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

from relpos_fairseq.io.archives import extract
from relpos_fairseq.io.downloads import agree, fetch
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import copy_file, open_together, require_space
from relpos_fairseq.io.lines import Part, read_lines
from relpos_fairseq.io.progress import table
from relpos_fairseq.io.stages import Stage
from relpos_fairseq.preparation.corpora import CORPORA, PublishedCorpus
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
    paths: Sequence[Path], outputs: Sequence[Path], fractions: Sequence[Fraction], options: dict
) -> dict[str, int]:
    """Write a text's contiguous parts as plain files; none may be empty.

    Args:
        paths: The text's files, one after another.
        outputs: The parts' files.
        fractions: The parts' shares: of the lines, or, at the levels of characters and bytes, of these.
        options: level, on_bad_line.

    Returns:
        How many lines or characters each part has.
    """
    level, on_bad_line = options["level"], options["on_bad_line"]
    exact = level in ("char", "byte")
    total = measure(paths, level, on_bad_line)["size" if exact else "lines"]
    ends = [int(total * sum(fractions[: i + 1])) for i in range(len(fractions))]
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    for path, size in zip(outputs, sizes, strict=True):
        if size < 1:
            unit = "characters" if exact else "lines"
            raise UserError(f"--shares leaves {path.stem} empty: the text has {total:,} {unit}")
    parts = read_text(paths, level, on_bad_line)
    with open_together(*outputs) as files:
        for place, part in place_parts(parts, ends, exact):
            text = part.text if isinstance(part.text, bytes) else part.text.encode("utf-8")
            files[place].write(text + b"\n" * part.ends)
    return {path.stem: size for path, size in zip(outputs, sizes, strict=True)}


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
TEXT = ("extract", "split")  # stages that make text, which is input rather than output


class LmPreparation(Preparation):
    """Text to binaries that language models train on."""

    prunes = True

    def __init__(self, args: LmOptions) -> None:
        super().__init__(args.out)
        self.args = args
        corpus = CORPORA.get(args.corpus or "")
        self.level = check_lm(args)
        self.fractions: list[Fraction] = []
        given = {split: getattr(args, split) for split in SPLITS if getattr(args, split)}
        if sum((bool(given), bool(args.text), bool(args.corpus))) != 1:
            raise UserError("give either --train/--valid/--test, or --text, or --corpus")
        split = args.shares or (corpus.split if corpus else None)
        if bool(split) != (bool(args.text) or bool(corpus and corpus.split)):
            raise UserError("--shares and --text belong together")
        if split:
            self.fractions = parse_fractions(split)
        if "train" not in given and given and not args.dict and self.level != "byte":
            raise UserError("without --train there must be --dict")
        if self.level == "sentencepiece" and given and "train" not in given:
            if not args.sentencepiece:
                raise UserError("without --train there must be --sentencepiece")
        self.files: dict[str, list[Path]] = given
        self.text: list[Path] = args.text
        self.archives: list[Path] = []
        self.planned: list[Stage] = []
        self.models: list[Path] = []  # sentencepiece's, at its level
        self.dictionary = self.out / "dict.txt"
        self.folders = [self.out]
        if args.shards > 1:
            self.folders = [self.out / f"shard{i}" for i in range(args.shards)]

    def stages(self) -> list[Stage]:
        self.planned.clear()
        self.find_text()
        self.learn_vocabulary()
        self.encode()
        return self.planned

    def find_text(self) -> None:
        """Add the stages that extract a corpus and split a text; set the files of every split."""
        corpus = CORPORA.get(self.args.corpus)
        if corpus:
            self.extract_corpus(corpus)
        else:
            missing = [str(path) for path in self.inputs() if not path.is_file()]
            if missing:
                raise UserError(f"not a file: {', '.join(missing)}")
            require_space(self.out, sum(path.stat().st_size for path in self.inputs()))
        if self.fractions:
            names = SPLITS[: len(self.fractions)]
            parts = [self.out / "text" / f"{split}.txt" for split in names]
            options = {"level": self.level, "on_bad_line": self.args.on_bad_line}
            self.add(
                "split",
                lambda: split_text(self.text, parts, self.fractions, options),
                self.text,
                parts,
                {**options, "split": [str(f) for f in self.fractions]},
            )
            self.files = {split: [path] for split, path in zip(names, parts, strict=True)}

    def extract_corpus(self, corpus: PublishedCorpus) -> None:
        """Download a corpus and add the stage that extracts its text."""
        folder = self.args.downloads or self.out / "downloads"
        if self.args.from_dir is None:
            agree([corpus.archive], folder, self.args.yes, self.hashes)
        files = fetch([corpus.archive], folder, from_dir=self.args.from_dir, hashes=self.hashes)
        archive, text = files[corpus.archive.name], self.out / "text"
        members = list(corpus.members.values())
        made = {split: text / member for split, member in corpus.members.items()}
        self.archives = [archive]
        self.add(
            "extract",
            lambda: {"files": len(extract(archive, text, members))},
            [archive],
            list(made.values()),
            {"members": members},
        )
        if corpus.split:
            self.text = list(made.values())
        else:
            self.files = {split: [path] for split, path in made.items()}

    def inputs(self) -> list[Path]:
        """Return the user's text files."""
        return [*self.text, *(path for paths in self.files.values() for path in paths)]

    def add(self, name, run, inputs, outputs, parameters) -> None:
        """Add a stage."""
        version = {"version": VERSION}
        self.planned.append(Stage(name, run, inputs, outputs, {**version, **parameters}))

    def learn_vocabulary(self) -> None:
        """Add the stages that make sentencepiece.model and dict.txt."""
        args = self.args
        train = self.files.get("train", [])
        reading = {"level": self.level, "on_bad_line": args.on_bad_line}
        if self.level == "sentencepiece":
            self.models = [self.out / "sentencepiece.model"]
            self.learn_sentencepiece(train, reading)
        if args.dict:
            self.add("dictionary", self.copy_dictionary, [args.dict], [self.dictionary], {})
        elif self.level == "byte":
            self.add("dictionary", self.byte_dictionary, [], [self.dictionary], reading)
        else:
            read = self.files if self.level == "char" else {"train": train}
            texts = [path for paths in read.values() for path in paths]
            cut = {name: getattr(args, name) for name in ("threshold", "words", "padding_factor")}
            self.add("dictionary", self.count_dictionary, [*texts, *self.models], [self.dictionary], {**reading, **cut})

    def learn_sentencepiece(self, train: list[Path], reading: dict) -> None:
        """Add the stage that trains a sentencepiece model, or copies the user's."""
        args, model = self.args, self.models[0]
        if args.sentencepiece:
            given = args.sentencepiece
            load_sentencepiece(given)
            self.add("sentencepiece", lambda: copy_file(given, model), [given], [model], {})
            return
        options = {name: getattr(args, name) for name in SENTENCEPIECE} | {"sample_lines": args.learn_lines}

        def run() -> dict[str, int]:
            return train_sentencepiece(model, read_text(train, self.level, args.on_bad_line), options)

        self.add("sentencepiece", run, train, [model], {**reading, **options})

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
        texts = [read_text(paths, self.level, args.on_bad_line) for paths in (train, others) if paths]
        symbols, different = count_symbols(texts, level, args.workers)
        kept = choose_symbols(symbols, args.threshold, args.words, args.padding_factor)
        write_dictionary(self.dictionary, kept)
        return {"symbols": len(kept), "different units": different}

    def copy_dictionary(self) -> dict[str, int]:
        """Check the user's dictionary and copy it."""
        symbols = read_dictionary(self.args.dict)
        copy_file(self.args.dict, self.dictionary)
        return {"symbols": len(symbols)}

    def encode(self) -> None:
        """Add a stage for every split."""
        args = self.args
        options = {
            "level": self.level,
            "documents": args.documents,
            "on_bad_line": args.on_bad_line,
            "refuse_unknown": self.level == "char" and args.dict is not None,
        }
        suffixes = ["bin", "idx"] + ["documents.npy"] * (args.documents != "none")
        for split, paths in self.files.items():
            folders = self.folders if split == "train" else self.folders[:1]

            def run(split=split, paths=paths, folders=folders) -> dict:
                symbols = read_dictionary(self.dictionary)
                level = load_level(self.level, *self.models, known=symbols)
                counts = encode_split(split, paths, folders, level, symbols, options, args.workers)
                return {str(shard): found for shard, found in enumerate(counts)}

            self.add(
                f"encode-{split}",
                run,
                [*paths, self.dictionary, *self.models],
                [folder / f"{split}.{suffix}" for folder in folders for suffix in suffixes],
                {**options, "shards": len(folders)},
            )
        if len(self.folders) > 1:
            copies = [folder / "dict.txt" for folder in self.folders]
            self.add("dictionaries", lambda: copy_file(self.dictionary, *copies), [self.dictionary], copies, {})

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
        made = sorted({path for stage in self.planned if stage.name not in TEXT for path in stage.outputs})
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
            made,
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
            outputs = [path for path in made if path.parent == folder]
            reports.append(Report(texts, outputs, [], extra={**facts, "shard": number, "splits": own}, folder=folder))
        return reports
