"""Gets the texts of a WMT pair: downloads or finds archives, extracts, unwraps test sets."""

from functools import partial
from pathlib import Path, PurePosixPath

from relpos_fairseq.engine.archives import extract
from relpos_fairseq.engine.download import fetch
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import Hashes, write_text
from relpos_fairseq.engine.remote import RemoteFile
from relpos_fairseq.engine.stages import Stage
from relpos_fairseq.preparation.wmt.local import Texts, czeng, has_parallel_files, parallel_files
from relpos_fairseq.preparation.wmt.parallel import Text
from relpos_fairseq.preparation.wmt.settings import WmtSettings
from relpos_fairseq.preparation.wmt.sources import CZENG, TestSet, TrainingCorpus, segments, test_set, training_set


class RawText:
    """What is read, and the stages that bring it here."""

    def __init__(self, settings: WmtSettings):
        self.settings = settings
        self.corpora: list[TrainingCorpus] = []
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
        """Return whether CzEng belongs to the training set and is neither given nor declined."""
        settings = self.settings
        return (
            bool(self.corpora)
            and CZENG in training_set(settings.year, *settings.languages)
            and settings.czeng is None
            and CZENG.name not in settings.without
        )

    def expected(self) -> Texts:
        """Return the texts that the stages will have made."""
        settings, raw = self.settings, self.settings.out / "raw"
        training = [
            Text(corpus.name, tuple(self.member(raw, corpus, lang) for lang in settings.languages))
            for corpus in self.corpora
        ]
        if settings.czeng and CZENG.name not in settings.without:
            training += czeng(settings.czeng, *settings.languages)
        held_out = {
            split: Text(test.name, settings.sides(settings.out / "raw", split)) for split, test in self.tests.items()
        }
        return Texts(training, held_out, {split: test.name for split, test in self.tests.items()})

    @staticmethod
    def member(raw: Path, corpus: TrainingCorpus, language: str) -> Path:
        """Return where a member of a corpus' archive is put."""
        return raw / corpus.name / PurePosixPath(corpus.members[language]).name

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
        folder = settings.from_dir or settings.out / "downloads"
        get = partial(fetch, archives, folder, from_dir=settings.from_dir, hashes=hashes)
        if settings.from_dir:
            paths = get()
        else:
            paths = {archive.name: folder / archive.filename for archive in archives}

        def download() -> dict:
            if not settings.from_dir:
                get(workers=max(4, settings.workers))
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

    def members(self, archives: dict[str, Path], part: TrainingCorpus | TestSet) -> list[Path]:
        """Extract both languages' members; say what to do about a download that is of no use."""
        wanted = [part.members[language] for language in self.settings.languages]
        try:
            folder = self.settings.out / "raw" / part.name
            return members(archives[part.archive.name], wanted, folder)
        except PreparationError as error:
            if self.settings.from_dir is not None:
                raise
            raise PreparationError(f"{error} (to download it anew, delete it)") from error

    def extract(self, archives: dict[str, Path]) -> dict:
        """Extract the members that are needed and unwrap the test sets."""
        for corpus in self.corpora:
            found = self.members(archives, corpus)
            for path, language in zip(found, self.settings.languages, strict=True):
                path.replace(self.member(self.settings.out / "raw", corpus, language))
        counts = {}
        for split, test in self.tests.items():
            found = self.members(archives, test)
            for sgml, path in zip(found, self.texts.held_out[split].paths, strict=True):
                lines = segments(sgml.read_bytes().decode("utf-8-sig"))
                if not lines:
                    raise PreparationError(f"{sgml} has no <seg> lines: is it the right archive?")
                write_text(path, "".join(f"{line}\n" for line in lines))
                counts[path.name] = len(lines)
        return counts


def members(archive: Path, wanted: list[str], folder: Path) -> list[Path]:
    """Extract members, at whatever depth they lie in the archive; return them in order."""
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


def refuse_choices(settings: WmtSettings) -> None:
    """Refuse options that choose among published sets, where the user's own files are read."""
    for option, chosen in (
        ("--czeng", settings.czeng is not None),
        ("--without", bool(settings.without)),
        ("--valid", settings.valid != WmtSettings.valid),
        ("--test", settings.tests != WmtSettings.tests),
    ):
        if chosen:
            raise PreparationError(
                f"{option} goes with published sets; {settings.from_dir} has text of your own: leave {option} out"
            )


def uses_own_files(settings: WmtSettings) -> bool:
    """Return whether --from-dir names parallel files, and not archives."""
    folder = settings.from_dir
    if folder is None:
        return False
    if not folder.is_dir():
        raise PreparationError(f"--from-dir {folder} is not a folder")
    if settings.year and has_parallel_files(folder, *settings.languages):
        raise PreparationError(
            f"{settings.year} names published sets, and --from-dir {folder} has text of your own "
            f"(train.{settings.source}, train.{settings.target}): leave {settings.year} out, or "
            f"name a folder of its archives"
        )
    return not settings.year
