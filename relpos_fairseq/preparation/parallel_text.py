"""Find or download parallel text, and stream it in chunks of pairs."""

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath

from relpos_fairseq.io.archives import extract
from relpos_fairseq.io.downloads import RemoteFile, fetch
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import Hashes, open_together, write_text
from relpos_fairseq.io.lines import COMPRESSED, count_lines, in_blocks, plain_lines, raw_lines, read_lines
from relpos_fairseq.io.processes import ordered_map
from relpos_fairseq.io.progress import progress
from relpos_fairseq.io.stages import Stage
from relpos_fairseq.preparation.corpora import CZENG, ParallelCorpus, segments, test_set, training_set
from relpos_fairseq.preparation.wmt_settings import DEFAULT_TEST, DEFAULT_VALID, WmtSettings

LINES = 2000  # of a chunk
BYTES = 1 << 22  # of a chunk, so that long lines make short chunks
LONGEST_SIDE = 1 << 18  # bytes of a training line; a longer line is cut, then dropped as too long
MALFORMED = "wrong number of columns"
SKIPPED = (b"", b"")  # this one, not others that are equal: a pair that was left out, and stays out whatever is kept
CZENG_BLOCK = re.compile(rb"[^-]+-b(\d+)-")  # of a CzEng sentence's number


@dataclass(frozen=True)
class Text:
    """One corpus in two files, or in two columns of one."""

    name: str  # in the table and the manifest
    paths: tuple[Path, Path]  # the source's and the target's file; the same twice for columns
    # the source's and the target's column of tab-separated lines; () for two files
    columns: tuple[int, ...] = ()
    skipped: frozenset[int] = frozenset()  # blocks of CzEng 1.6 that are not in CzEng 1.7

    def count(self) -> int:
        """Return the number of pairs; files with different numbers of lines are refused."""
        counts = [count_lines(path) for path in dict.fromkeys(self.paths)]
        if counts[0] != counts[-1]:
            source, target = self.paths
            raise UserError(
                f"parallel files must have equally many lines: {source} has {counts[0]:,}, {target} has {counts[-1]:,}"
            )
        return counts[0]

    def rows(self) -> Iterator[tuple[bytes, bytes] | None]:
        """Stream the pairs; None where a line has not enough columns."""
        if not self.columns:
            yield from zip(*(raw_lines(path, LONGEST_SIDE) for path in self.paths), strict=True)
            return
        for line in raw_lines(self.paths[0], LONGEST_SIDE):
            cells = line.split(b"\t")
            if len(cells) <= max(self.columns):
                yield None
            elif self.is_skipped(cells[0]):
                yield SKIPPED
            else:
                yield cells[self.columns[0]], cells[self.columns[1]]

    def is_skipped(self, number: bytes) -> bool:
        """Return whether a sentence, by its number in CzEng 1.6, belongs to a block that CzEng 1.7 leaves out."""
        block = CZENG_BLOCK.match(number) if self.skipped else None
        return block is not None and int(block.group(1)) in self.skipped


@dataclass(frozen=True)
class Chunk:
    """Some pairs of a text, for a worker; no line holds a line feed."""

    text: Text
    numbers: Sequence[int]  # their lines' numbers in the files, from 1
    source: bytes  # the source's lines, joined by line feeds
    target: bytes  # the target's


def read_chunks(text: Text, wanted: Iterator[bool], counts: Counter, on_bad_line: str) -> Iterator[Chunk]:
    """Read the pairs of a text for which `wanted` has true, in chunks.

    Malformed lines are counted under MALFORMED, or an error where `on_bad_line` is "fail"; those that are SKIPPED are
    counted as empty.
    """
    numbers, source, target, size = [], [], [], 0
    for number, (row, asked) in enumerate(zip(text.rows(), wanted, strict=False), start=1):
        if not asked:
            continue
        if row is None:
            if on_bad_line == "fail":
                raise UserError(
                    f"{text.paths[0]}, line {number}: needs {max(text.columns) + 1} tab-separated "
                    "columns; mend it or use --on-bad-line drop"
                )
            counts[MALFORMED] += 1
            continue
        if row is SKIPPED:
            counts["empty"] += 1
            continue
        numbers.append(number)
        source.append(row[0])
        target.append(row[1])
        size += len(row[0]) + len(row[1])
        if len(numbers) == LINES or size > BYTES:
            yield Chunk(text, numbers, b"\n".join(source), b"\n".join(target))
            numbers, source, target, size = [], [], [], 0
    if numbers:
        yield Chunk(text, numbers, b"\n".join(source), b"\n".join(target))


def map_lines(function, blob: bytes) -> bytes:
    """Apply a function to each line of a block; the result ends every line."""
    lines = blob.decode("utf-8").split("\n")
    if lines[-1] == "":
        lines.pop()
    return "".join([f"{function(line)}\n" for line in lines]).encode("utf-8")


def apply_to_files(
    functions: tuple, files: tuple[Path, Path], outputs: tuple[Path, Path], workers: int, name: str
) -> list[int]:
    """Apply a function to every line of the source, another to the target; as many lines come out.

    Returns:
        The number of lines, and of words or units of each side.
    """
    counts = [0, 0, 0]

    def convert(task: tuple[int, bytes]) -> tuple[int, bytes, int, int]:
        side, blob = task
        converted = map_lines(functions[side], blob)
        return side, converted, converted.count(b"\n"), len(converted.split())

    with open_together(*outputs) as written, progress(description=name, unit="lines") as bar:
        for side, converted, lines, words in ordered_map(convert, read_blocks(files), workers):
            written[side].write(converted)
            counts[0] += lines if side == 0 else 0
            counts[1 + side] += words
            bar.update(lines)
    return counts


def read_blocks(files: tuple[Path, Path]) -> Iterator[tuple[int, bytes]]:
    """Stream blocks of lines with their side: 0, the source's, and 1, the target's, in turn."""
    for blocks in zip(*(in_blocks(plain_lines(path), LINES) for path in files), strict=True):
        yield from enumerate(blocks)


# Files of the user's own

VALID = ("valid", "val", "dev")
CZENG_COLUMNS = {"cs": 2, "en": 3}  # number, score, Czech, English
CZENG_BLOCKS = "convert_czeng16_to_17.pl"  # names the blocks of 1.6 that 1.7 leaves out


@dataclass(frozen=True)
class Texts:
    """The texts that a preparation reads."""

    training: list[Text]  # the training corpora
    held_out: dict[str, Text]  # by split: "valid", "test", "test1", ...
    names: dict[str, str] = field(default_factory=dict)  # the held-out sets' names where they come from, by split

    def paths(self, texts: list[Text] | None = None) -> list[Path]:
        """Return all files, each once."""
        texts = [*self.training, *self.held_out.values()] if texts is None else texts
        return list(dict.fromkeys(path for text in texts for path in text.paths))


def find_parallel_file(folder: Path, name: str, language: str) -> Path | None:
    """Return NAME.LANGUAGE, plain or compressed."""
    paths = [folder / f"{name}.{language}{suffix}" for suffix in COMPRESSED]
    found = [path for path in paths if path.is_file()]
    if len(found) > 1:
        raise UserError(f"{found[0]} and {found[1]} are both there: remove one")
    return found[0] if found else None


def parallel_files(folder: Path, source: str, target: str) -> Texts:
    """Find train, valid (or val, dev) and every test* of two languages; a missing file is named.

    Without a test set it warns.
    """
    endings = [f".{language}{suffix}" for language in (source, target) for suffix in COMPRESSED]
    names = sorted(
        {path.name[: -len(ending)] for path in folder.glob("test*") for ending in endings if path.name.endswith(ending)}
    )
    valid = next((name for name in VALID if find_parallel_file(folder, name, source)), VALID[0])
    if not names:
        print(
            f"warning: {folder} has no test set (test.{source} and test.{target}): nothing can be "
            f"scored but the validation set",
            file=sys.stderr,
        )
    texts = {}
    for name in ("train", valid, *names):
        paths = find_parallel_file(folder, name, source), find_parallel_file(folder, name, target)
        for path, language in zip(paths, (source, target), strict=True):
            if path is None:
                other = target if language == source else source
                instead = f", or take {name}.{other} away" if name in names else ""
                raise UserError(f"{folder} has no {name}.{language} (nor .gz, .bz2, .xz): put it there{instead}")
        texts[name] = Text(name, paths)
    numbered = {f"test{index or ''}": name for index, name in enumerate(names)}
    held_out = {"valid": texts[valid]} | {key: texts[name] for key, name in numbered.items()}
    return Texts([texts["train"]], held_out, {"valid": valid} | numbered)


def czeng(folder: Path, source: str, target: str) -> list[Text]:
    """Find CzEng 1.6's plain text: gzipped tab-separated files of the training part.

    With the list of blocks that CzEng 1.7 leaves out beside them (its authors' conversion script),
    the result is CzEng 1.7.
    """
    paths = sorted(folder.rglob("*train.gz"), key=lambda path: (path.name, path))
    if not paths:
        raise UserError(
            f"{folder} has no CzEng file (*train.gz of its plain-text format): "
            "get CzEng 1.6 at ufal.mff.cuni.cz/czeng, after registration"
        )
    scripts = sorted(folder.rglob(CZENG_BLOCKS))
    skipped = czeng_blocks(scripts[0]) if scripts else frozenset()
    columns = CZENG_COLUMNS[source], CZENG_COLUMNS[target]
    return [Text(f"czeng {path.name}", (path, path), columns, skipped) for path in paths]


def czeng_blocks(script: Path) -> frozenset[int]:
    """Read the numbers of the blocks that CzEng 1.7 leaves out."""
    match = re.search(r"qw\{([\s\d]*)\}", "\n".join(read_lines(script)))
    if match is None:
        raise UserError(f"{script} has no list of blocks: get it again or remove it")
    return frozenset(map(int, match.group(1).split()))


# Published text


class RawText:
    """The texts that a preparation reads, and the stages that download and extract them."""

    def __init__(self, settings: WmtSettings):
        self.settings = settings
        self.corpora: list[ParallelCorpus] = []
        self.tests: dict[str, ParallelCorpus] = {}
        self.lacks_czeng = False  # whether it belongs to the training set and is neither given nor declined
        if uses_own_files(settings):
            refuse_choices(settings)
            self.texts = parallel_files(settings.options.from_dir, *settings.languages)
            return
        options, corpora = settings.options, training_set(settings.year, *settings.languages)
        known = [corpus.name for corpus in corpora]
        if options.czeng and CZENG not in corpora:
            raise UserError(f"--czeng: the corpora are {', '.join(known)}: leave it out")
        for name in options.without:
            if name not in known:
                raise UserError(f"--without {name}: the corpora are {', '.join(known)}")
        wanted = [corpus for corpus in corpora if corpus.name not in options.without]
        self.corpora = [corpus for corpus in wanted if corpus is not CZENG]
        self.lacks_czeng = CZENG in wanted and options.czeng is None
        has_czeng = CZENG in wanted and options.czeng is not None
        if not self.corpora and not has_czeng:
            raise UserError(f"--without {' '.join(options.without)} leaves no training text: keep a corpus")
        self.tests = {
            f"{split}{index or ''}": test_set(name, *settings.languages)
            for split, names in (("valid", options.valid), ("test", settings.tests))
            for index, name in enumerate(names)
        }
        raw, training = settings.out / "raw", []
        for corpus in self.corpora:
            names = (PurePosixPath(corpus.members[language]).name for language in settings.languages)
            training.append(Text(corpus.name, tuple(raw / corpus.name / name for name in names)))
        if has_czeng:
            training += czeng(options.czeng, *settings.languages)
        held_out = {split: Text(test.name, settings.sides(raw, split)) for split, test in self.tests.items()}
        self.texts = Texts(training, held_out, {split: test.name for split, test in self.tests.items()})

    def archives(self) -> list[RemoteFile]:
        """Return the archives, each once."""
        archives = [corpus.archive for corpus in self.corpora]
        archives += [test.archive for test in self.tests.values()]
        return list({archive.name: archive for archive in archives}.values())

    def stages(self, hashes: Hashes) -> list[Stage]:
        """Return the stages download and extract; none for the user's own files."""
        archives = self.archives()
        if not archives:
            return []
        settings = self.settings
        folder = settings.options.from_dir or settings.downloads
        get = partial(fetch, archives, folder, from_dir=settings.options.from_dir, hashes=hashes)
        if settings.options.from_dir:
            paths = get()
        else:
            paths = {archive.name: folder / archive.filename for archive in archives}

        def download() -> dict:
            if not settings.options.from_dir:
                get(workers=max(4, settings.options.workers))
            return {
                name: {"file": str(path.relative_to(folder)), "sha256": hashes.of(path)} for name, path in paths.items()
            }

        extracted = self.texts.training[: len(self.corpora)]  # not CzEng
        made = self.texts.paths([*extracted, *self.texts.held_out.values()])
        files = list(dict.fromkeys(paths.values()))
        described = {a.filename: [list(a.urls), a.size, a.sha256] for a in archives}
        chosen = {
            "members": [corpus.members for corpus in self.corpora],
            "tests": {split: test.members for split, test in self.tests.items()},
        }
        return [
            Stage("download", download, [], files, {"sources": described}, keeps=True),
            Stage("extract", lambda: self.extract(paths), files, made, chosen),
        ]

    def members(self, archives: dict[str, Path], part: ParallelCorpus) -> list[Path]:
        """Extract both languages' members, at whatever depth they lie in the archive; return their paths."""
        wanted = [PurePosixPath(part.members[language]) for language in self.settings.languages]
        archive, folder = archives[part.archive.name], self.settings.out / "raw" / part.name
        try:
            found = extract(archive, folder, [f"*{member.name}" for member in wanted])
            paths = []
            for member in wanted:
                named = [path for path in found if path.name == member.name]
                exact = [path for path in named if path.as_posix().endswith(f"/{member}")]
                if not named:
                    raise UserError(f"{archive} does not contain {member}")
                paths.append((exact or named)[0])
            return paths
        except UserError as error:
            if self.settings.options.from_dir is not None:
                raise
            raise UserError(f"{error} (to download it anew, delete it)") from error

    def extract(self, archives: dict[str, Path]) -> dict:
        """Extract the members that are needed and unwrap the test sets."""
        for corpus, text in zip(self.corpora, self.texts.training, strict=False):  # behind them CzEng, of no archive
            for found, path in zip(self.members(archives, corpus), text.paths, strict=True):
                found.replace(path)
        counts = {}
        for split, test in self.tests.items():
            found = self.members(archives, test)
            for sgml, path in zip(found, self.texts.held_out[split].paths, strict=True):
                lines = segments(sgml.read_bytes().decode("utf-8-sig"))
                if not lines:
                    raise UserError(f"{sgml} has no <seg> lines: is it the right archive?")
                write_text(path, "".join(f"{line}\n" for line in lines))
                counts[path.name] = len(lines)
        return counts


def refuse_choices(settings: WmtSettings) -> None:
    """Raise an error for options that choose among published sets, where the user's own files are read."""
    for option, chosen in (
        ("--czeng", settings.options.czeng is not None),
        ("--without", bool(settings.options.without)),
        ("--valid", settings.options.valid != DEFAULT_VALID),
        ("--test", settings.tests != DEFAULT_TEST),
    ):
        if chosen:
            raise UserError(
                f"{option} goes with published sets; {settings.options.from_dir} has text of your own: "
                f"leave {option} out"
            )


def uses_own_files(settings: WmtSettings) -> bool:
    """Return whether --from-dir names parallel files, and not archives."""
    folder = settings.options.from_dir
    if folder is None:
        return False
    if settings.year and all(find_parallel_file(folder, "train", language) for language in settings.languages):
        raise UserError(
            f"{settings.year} names published sets, and --from-dir {folder} has text of your own "
            f"(train.{settings.source}, train.{settings.target}): leave {settings.year} out, or "
            f"name a folder of its archives"
        )
    return not settings.year
