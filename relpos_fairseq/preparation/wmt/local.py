"""Finds the user's own parallel files, and a folder of CzEng."""

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.lines import COMPRESSED, read_lines
from relpos_fairseq.preparation.wmt.parallel import Text

VALID = ("valid", "val", "dev")
CZENG_COLUMNS = {"cs": 2, "en": 3}  # number, score, Czech, English
CZENG_BLOCKS = "convert_czeng16_to_17.pl"  # names the blocks of 1.6 that 1.7 leaves out


@dataclass(frozen=True)
class Texts:
    """What a preparation reads."""

    training: list[Text]  # the training corpora
    held_out: dict[str, Text]  # "valid", "test", "test1", ... and the text
    # what the held-out sets are called where they come from
    names: dict[str, str] = field(default_factory=dict)

    def paths(self, texts: list[Text] | None = None) -> list[Path]:
        """Return all files, each once."""
        texts = [*self.training, *self.held_out.values()] if texts is None else texts
        return list(dict.fromkeys(path for text in texts for path in text.paths))


def has_parallel_files(folder: Path, source: str, target: str) -> bool:
    """Return whether a folder has a training set in two files."""
    return all(find(folder, "train", language) for language in (source, target))


def find(folder: Path, name: str, language: str) -> Path | None:
    """Return NAME.LANGUAGE, plain or compressed."""
    paths = [folder / f"{name}.{language}{suffix}" for suffix in COMPRESSED]
    found = [path for path in paths if path.is_file()]
    if len(found) > 1:
        raise PreparationError(f"{found[0]} and {found[1]} are both there: remove one")
    return found[0] if found else None


def parallel_files(folder: Path, source: str, target: str) -> Texts:
    """Find train, valid (or val, dev) and every test* of two languages; a missing file is named.

    Without a test set it warns.
    """
    endings = [f".{language}{suffix}" for language in (source, target) for suffix in COMPRESSED]
    names = sorted(
        {path.name[: -len(ending)] for path in folder.glob("test*") for ending in endings if path.name.endswith(ending)}
    )
    valid = next((name for name in VALID if find(folder, name, source)), VALID[0])
    if not names:
        print(
            f"warning: {folder} has no test set (test.{source} and test.{target}): nothing can be "
            f"scored but the validation set",
            file=sys.stderr,
        )
    texts = {}
    for name in ("train", valid, *names):
        paths = find(folder, name, source), find(folder, name, target)
        for path, language in zip(paths, (source, target), strict=True):
            if path is None:
                other = target if language == source else source
                instead = f", or take {name}.{other} away" if name in names else ""
                raise PreparationError(f"{folder} has no {name}.{language} (nor .gz, .bz2, .xz): put it there{instead}")
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
        raise PreparationError(
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
        raise PreparationError(f"{script} has no list of blocks: get it again or remove it")
    return frozenset(map(int, match.group(1).split()))
