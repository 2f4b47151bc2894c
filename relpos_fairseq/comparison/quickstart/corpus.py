"""The quickstart's data: the built-in corpus, or the user's own parallel text."""

import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from relpos_fairseq.comparison.quickstart.recipe import (
    BPE_UNITS,
    BPE_WORDS_PER_UNIT,
    PREPROCESS,
    as_arguments,
)
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.lines import read_lines
from relpos_fairseq.engine.tools import USER_DIR, find_tool, key_of, run_tool
from relpos_fairseq.preparation.pieces import train_pieces

SPLITS = ("train", "valid", "test")
GRAMMAR = USER_DIR / "data" / "grammar"
FILE_NAME = re.compile(r"(train|valid|test)\.([A-Za-z][\w-]*?)(\.gz)?")


class DataError(ValueError):
    """The user's data cannot be used; nothing has been written."""


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus.

    Attributes:
        binary: The folder fairseq reads.
        source: The source language, as in the files' names.
        target: The target language.
        tests: fairseq's name of each test set and its plain source and target files.
        subwords: Whether the text is cut into sentencepiece units.
        key: A hash of all that made it.
    """

    binary: Path
    source: str
    target: str
    tests: dict[str, tuple[Path, Path]]
    subwords: bool
    key: str


def built_in(out: Path, threads: int) -> Corpus:
    """Makes and binarises the built-in corpus, or finds it made.

    Args:
        out: The quickstart's output folder.
        threads: How many processes may binarise.
    """
    key = key_of(PREPROCESS, sorted(GRAMMAR.rglob("*.py")))
    folder = out / "data" / f"builtin-{key}"

    def build(partial: Path) -> None:
        make = [sys.executable, "-m", "relpos_fairseq.cli", "corpus"]
        run_tool([*make, "--out", str(partial / "raw")], partial / "prepare.log", threads)
        binarise(partial, "raw", ("test", "test_long"), ("en", "de"), threads)

    build_whole(folder, build)
    raw = folder / "raw"
    tests = {name: (raw / f"{name}.en", raw / f"{name}.de") for name in ("test", "test_long")}
    return Corpus(folder / "bin", "en", "de", tests, subwords=False, key=key)


def user_data(
    data: Path, out: Path, source: str | None, target: str | None, threads: int
) -> Corpus:
    """Checks, cuts into subwords and binarises the user's text, or finds that done.

    Args:
        data: The folder with train, valid and test in two languages.
        out: The quickstart's output folder.
        source: The source language; None guesses from the files' names.
        target: The target language; None guesses.
        threads: How many processes may binarise.

    Raises:
        DataError: A file is missing, empty, not UTF-8, or its lines have no counterparts.
    """
    source, target = guess_languages(data, source, target)
    files = find_files(data, source, target)
    check_lines(files)
    key = key_of([PREPROCESS, BPE_UNITS, BPE_WORDS_PER_UNIT, source, target], files.values())
    folder = out / "data" / f"user-{key}"

    def build(partial: Path) -> None:
        cut_into_subwords(files, partial)
        binarise(partial, "units", ("test",), (source, target), threads)

    build_whole(folder, build)
    tests = {"test": (files["test", source], files["test", target])}
    return Corpus(folder / "bin", source, target, tests, subwords=True, key=key)


def build_whole(folder: Path, build: Callable[[Path], None]) -> None:
    """Builds a folder under a temporary name and renames it when it is complete."""
    if folder.exists():
        print(f"data: reusing {folder}", flush=True)
        return
    print(f"data: preparing {folder}", flush=True)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    build(partial)
    partial.rename(folder)


def binarise(
    folder: Path, text: str, tests: tuple[str, ...], pair: tuple[str, str], threads: int
) -> None:
    """Runs fairseq-preprocess on the text below a folder; the result is its bin/."""
    raw = folder / text
    command = [
        find_tool("fairseq-preprocess"),
        *("--source-lang", pair[0], "--target-lang", pair[1]),
        *("--trainpref", str(raw / "train"), "--validpref", str(raw / "valid")),
        *("--testpref", ",".join(str(raw / name) for name in tests)),
        *("--destdir", str(folder / "bin"), "--workers", str(threads)),
        *as_arguments(PREPROCESS),
    ]
    run_tool(command, folder / "prepare.log", threads)


def guess_languages(data: Path, source: str | None, target: str | None) -> tuple[str, str]:
    """Completes the pair of languages from the names of the files.

    Raises:
        DataError: The folder is missing, or its files do not name exactly one pair.
    """
    if not data.is_dir():
        raise DataError(f"{data} is not a folder")
    if source and target:
        return source, target
    matches = [FILE_NAME.fullmatch(path.name) for path in data.iterdir()]
    found = {match.group(2) for match in matches if match}
    wanted = {language for language in (source, target) if language}
    if len(found) != 2 or not wanted <= found:
        names = ", ".join(sorted(found)) or "none"
        raise DataError(
            f"the names train|valid|test.LANGUAGE[.gz] in {data} must give two languages, found: "
            f"{names}; name them with --source-lang and --target-lang"
        )
    # English first, else in alphabetical order.
    first, second = sorted(found, key=lambda language: (language != "en", language))
    if source == second or target == first:
        first, second = second, first
    if not wanted:
        print(f"data: {first} -> {second}, guessed from the file names; "
              f"--source-lang {second} turns it round", flush=True)  # fmt: skip
    return first, second


def find_files(data: Path, source: str, target: str) -> dict[tuple[str, str], Path]:
    """Finds the six files, plain before .gz.

    Raises:
        DataError: Some are missing; the message names all of them.
    """
    if source == target:
        raise DataError(f"source and target language are both {source}")
    files, missing = {}, []
    for split in SPLITS:
        for language in (source, target):
            name = f"{split}.{language}"
            paths = [path for path in (data / name, data / f"{name}.gz") if path.is_file()]
            if paths:
                files[split, language] = paths[0]
            else:
                missing.append(name)
    if missing:
        raise DataError(f"missing in {data} (plain or .gz): {', '.join(missing)}")
    return files


def check_lines(files: dict[tuple[str, str], Path]) -> None:
    """Checks that every split has as many lines in both languages, and some.

    Raises:
        DataError: Names every wrong pair with its counts.
    """
    counts: dict[str, list[tuple[str, int]]] = {}
    for (split, _), path in files.items():
        try:
            number = sum(1 for _ in read_lines(path))
        except PreparationError as error:
            raise DataError(str(error)) from error
        counts.setdefault(split, []).append((path.name, number))
    wrong = [
        f"{first}: {lines} lines, {second}: {others} lines"
        for (first, lines), (second, others) in counts.values()
        if lines != others or lines == 0
    ]
    if wrong:
        raise DataError(
            "both languages of a split need the same number of lines, at least one; "
            + "; ".join(wrong)
        )


def cut_into_subwords(files: dict[tuple[str, str], Path], folder: Path) -> None:
    """Trains one sentencepiece model on both languages and writes all splits in its units."""
    import sentencepiece

    model = train_subwords([path for (split, _), path in files.items() if split == "train"])
    (folder / "sentencepiece.model").write_bytes(model)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    units = folder / "units"
    units.mkdir()
    for (split, language), path in files.items():
        with (units / f"{split}.{language}").open("w", encoding="utf-8", newline="\n") as file:
            for line in read_lines(path):
                # Split at every kind of white space: some of it would end a line elsewhere.
                pieces = processor.encode(" ".join(line.split()), out_type=str)
                file.write(" ".join(pieces) + "\n")


def train_subwords(paths: list[Path]) -> bytes:
    """Returns a byte pair model whose size suits the amount of text.

    Raises:
        DataError: sentencepiece finds no way to make a model of this text.
    """
    words, letters = 0, set()
    for path in paths:
        for line in read_lines(path):
            words += len(line.split())
            letters.update(line)
    smallest, largest = BPE_UNITS
    size = max(min(words // BPE_WORDS_PER_UNIT, largest), smallest, len(letters) + 100)
    try:
        return train_pieces(
            (line for path in paths for line in read_lines(path)), size, "their number",
            model_type="bpe", input_sentence_size=1_000_000, shuffle_input_sentence=True,
            hard_vocab_limit=False,  # little text has fewer units
        )  # fmt: skip
    except PreparationError as error:
        raise DataError(f"no subword units can be learned: {error}") from error
