"""Gets the texts of a WMT pair: downloads or finds archives, extracts, unwraps test sets."""

import hashlib
from pathlib import Path, PurePosixPath

from relpos_fairseq.engine.archives import extract
from relpos_fairseq.engine.download import fetch
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import sha256_of, write_text
from relpos_fairseq.engine.stages import Stage
from relpos_fairseq.preparation.wmt.local import Texts, czeng, has_parallel_files, parallel_files
from relpos_fairseq.preparation.wmt.parallel import Text
from relpos_fairseq.preparation.wmt.settings import Settings
from relpos_fairseq.preparation.wmt.sources import (
    CZENG,
    Corpus,
    TestSet,
    segments,
    test_set,
    training_set,
)


class Plan:
    """What is read, and the stages that bring it here.

    Args:
        settings: What is asked for.

    Raises:
        PreparationError: Nothing is known of the pair, or the user's files are incomplete.
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self.corpora: list[Corpus] = []
        self.tests: dict[str, TestSet] = {}
        if uses_own_files(settings):
            refuse_choices(settings)
            self.texts = parallel_files(settings.from_dir, *settings.languages)
            return
        corpora = training_set(settings.year, *settings.languages)
        known = [corpus.name for corpus in corpora]
        if settings.czeng and CZENG not in corpora:
            raise PreparationError(f"--czeng: the corpora are {', '.join(known)}: leave it out")
        for name in settings.without:
            if name not in known:
                raise PreparationError(f"--without {name}: the corpora are {', '.join(known)}")
        self.corpora = [c for c in corpora if c.name not in settings.without and c is not CZENG]
        if not self.corpora and (settings.czeng is None or CZENG.name in settings.without):
            left_out = " ".join(settings.without)
            raise PreparationError(f"--without {left_out} leaves no training text: keep a corpus")
        self.tests = {
            f"{split}{index or ''}": test_set(name, *settings.languages)
            for split, names in (("valid", settings.valid), ("test", settings.tests))
            for index, name in enumerate(names)
        }
        self.texts = self.expected()

    def lacks_czeng(self) -> bool:
        """Tells whether CzEng belongs to the training set and is neither given nor declined."""
        settings = self.settings
        return (
            bool(self.corpora)
            and CZENG in training_set(settings.year, *settings.languages)
            and settings.czeng is None
            and CZENG.name not in settings.without
        )

    def expected(self) -> Texts:
        """Returns the texts that the stages will have made."""
        settings, raw = self.settings, self.settings.out / "raw"
        training = [
            Text(corpus.name, tuple(self.member(raw, corpus, lang) for lang in settings.languages))
            for corpus in self.corpora
        ]
        if settings.czeng and CZENG.name not in settings.without:
            training += czeng(settings.czeng, *settings.languages)
        held_out = {
            split: Text(test.name, settings.sides(settings.out / "raw", split))
            for split, test in self.tests.items()
        }
        return Texts(training, held_out, {split: test.name for split, test in self.tests.items()})

    @staticmethod
    def member(raw: Path, corpus: Corpus, language: str) -> Path:
        """Returns where a member of a corpus' archive is put."""
        return raw / corpus.name / PurePosixPath(corpus.members[language]).name

    def sources(self) -> list:
        """Returns the archives, each once."""
        archives = [corpus.source for corpus in self.corpora]
        archives += [test.archive for test in self.tests.values()]
        return list({source.name: source for source in archives}.values())

    def stages(self) -> list[Stage]:
        """Returns the stages download and extract; none for the user's own files."""
        if not self.sources():
            return []
        settings = self.settings
        folder = settings.from_dir or settings.out / "downloads"
        archives: dict[str, Path] = {}
        described = {s.filename: [list(s.urls), s.size, s.sha256] for s in self.sources()}

        def download() -> dict:
            self.discard_wrong_tests()
            found = fetch(
                self.sources(), settings.out / "downloads", from_dir=settings.from_dir,
                workers=max(4, settings.workers),
            )  # fmt: skip
            self.check_tests(found)
            archives.update(found)
            return {
                name: {"file": str(path.relative_to(folder)), "sha256": sha256_of(path)}
                for name, path in found.items()
            }

        if settings.from_dir:
            archives.update(fetch(self.sources(), folder, from_dir=settings.from_dir))
        else:
            archives.update({s.name: folder / s.filename for s in self.sources()})
        made = [*self.texts.paths(self.from_archives()), *self.texts.paths(self.held_out())]
        paths = list(dict.fromkeys(archives.values()))
        return [
            Stage("download", download, [], paths, {"sources": described}, keeps=True),
            Stage("extract", lambda: self.extract(archives), paths, made,
                  {"members": [corpus.members for corpus in self.corpora],
                   "tests": {split: test.members for split, test in self.tests.items()}}),
        ]  # fmt: skip

    def from_archives(self) -> list[Text]:
        """Returns the training texts that are extracted."""
        return self.texts.training[: len(self.corpora)]

    def held_out(self) -> list[Text]:
        """Returns the validation and test texts."""
        return list(self.texts.held_out.values())

    def discard_wrong_tests(self) -> None:
        """Removes downloaded test sets that are not sacrebleu's."""
        for test in self.tests.values():
            path = self.settings.out / "downloads" / test.archive.filename
            if path.is_file() and md5_of(path) != test.md5:
                discard(path)

    def check_tests(self, archives: dict[str, Path]) -> None:
        """Checks the test sets against sacrebleu's MD5.

        Raises:
            PreparationError: One is another file; if it was downloaded, it is removed.
        """
        for test in self.tests.values():
            path = archives[test.archive.name]
            found = md5_of(path)
            if found == test.md5:
                continue
            remedy = "replace it"
            if self.settings.from_dir is None:
                discard(path)
                remedy = "it is removed; run the same command again"
            raise PreparationError(
                f"{path} has md5 {found}, sacrebleu expects {test.md5}: {remedy}"
            )

    def members(self, archive: Path, wanted: list[str], folder: Path) -> list[Path]:
        """Extracts members; says what to do about a download that is of no use."""
        try:
            return members(archive, wanted, folder)
        except PreparationError as error:
            if self.settings.from_dir is not None:
                raise
            raise PreparationError(f"{error} (to download it anew, delete it)") from error

    def extract(self, archives: dict[str, Path]) -> dict:
        """Extracts the members that are needed and unwraps the test sets."""
        raw = self.settings.out / "raw"
        for corpus in self.corpora:
            wanted = [corpus.members[language] for language in self.settings.languages]
            found = self.members(archives[corpus.source.name], wanted, raw / corpus.name)
            for path, language in zip(found, self.settings.languages, strict=True):
                path.replace(self.member(raw, corpus, language))
        counts = {}
        for split, test in self.tests.items():
            wanted = [test.members[language] for language in self.settings.languages]
            found = self.members(archives[test.archive.name], wanted, raw / test.name)
            for sgml, path in zip(found, self.texts.held_out[split].paths, strict=True):
                lines = segments(sgml.read_bytes().decode("utf-8-sig"))
                if not lines:
                    raise PreparationError(f"{sgml} has no <seg> lines: is it the right archive?")
                write_text(path, "".join(f"{line}\n" for line in lines))
                counts[path.name] = len(lines)
        return counts


def members(archive: Path, wanted: list[str], folder: Path) -> list[Path]:
    """Extracts members, at whatever depth they lie in the archive; returns them in order."""
    found = extract(archive, folder, [f"*{PurePosixPath(member).name}" for member in wanted])
    paths = []
    for member in wanted:
        name = PurePosixPath(member).name
        named = [path for path in found if path.name == name]
        exact = [path for path in named if path.as_posix().endswith(f"/{member}")]
        if not named:
            raise PreparationError(f"{archive} does not contain {member}")
        paths.append((exact or named)[0])
    return paths


def md5_of(path: Path) -> str:
    """Returns a file's MD5."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def discard(path: Path) -> None:
    """Removes a download and the hash that was kept of it, so that another run gets another."""
    path.unlink()
    path.with_name(f"{path.name}.sha256").unlink(missing_ok=True)


def refuse_choices(settings: Settings) -> None:
    """Refuses options that choose among published sets, where the user's own files are read.

    Raises:
        PreparationError: One is given.
    """
    for option, chosen in (
        ("--czeng", settings.czeng is not None),
        ("--without", bool(settings.without)),
        ("--valid", settings.valid != Settings.valid),
        ("--test", settings.tests != Settings.tests),
    ):
        if chosen:
            raise PreparationError(
                f"{option} goes with published sets; {settings.from_dir} has text of your own: "
                f"leave {option} out"
            )


def uses_own_files(settings: Settings) -> bool:
    """Tells whether --from-dir names parallel files, and not archives."""
    folder = settings.from_dir
    if folder is None:
        return False
    if not folder.is_dir():
        raise PreparationError(f"--from-dir {folder} is not a folder")
    return not settings.year or has_parallel_files(folder, *settings.languages)
