"""Write manifests and check what they list.

A manifest says of a whole result what a stage's stamp (`stages.py`) says of its files, for readers: it depends on the
input alone, and holds no path and no date.
"""

import functools
import importlib.metadata
import platform
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import STAMPS, Hashes, files_below, hash_file, sha256_of, size_of, write_json
from relpos_fairseq.io.reading import Count, of_type, read_json

# Options of speed and place, which change no result: the values of places are left out, the others altogether.
NEUTRAL_OPTIONS = ("--workers",)
NEUTRAL_FLAGS = ("--force", "--no-progress")
PLACES = ("--out", "--destdir", "--from-dir", "--downloads")
PACKAGES = (
    *("fairseq", "fairseq-fixed", "langcodes", "numpy", "regex", "requests", "sacrebleu", "sacremoses"),
    *("sentencepiece", "subword-nmt", "tokenizers"),
)


class Settings(TypedDict, total=False):
    """What a manifest says of the text."""

    languages: tuple[str, str]  # of parallel text
    tokenizer: str
    bpe: str
    normalization: str


class Manifest(TypedDict, total=False):
    """What is read of manifests and stamps; those of older versions say less."""

    command: str
    settings: Settings
    inputs: dict[str, dict[str, object]]
    outputs: dict[str, dict[str, object]]
    level: str | None
    sets: dict[str, str]


class _Made(TypedDict, total=False):
    outputs: dict[str, object]


class _File(TypedDict):
    bytes: Count
    sha256: str


class File(_File, total=False):
    """A file that was made."""

    files: None


class Folder(TypedDict):
    """A folder that was made; a manifest says of one what it says of a file."""

    files: dict[str, File]


def write_manifest(
    path: str | Path,
    *,
    command: Sequence[str] | str,
    inputs: Mapping[str, Path] | Iterable[Path],
    outputs: Mapping[str, Path] | Iterable[Path],
    stages: Mapping[str, Mapping] | None = None,
    extra: Mapping[str, object] | None = None,
    hashes: Hashes | None = None,
) -> dict:
    """Write a manifest; the same input and options give the same bytes.

    Args:
        path: The file, JSON.
        command: The program and its arguments; options that do not change the result are left out,
            and a place is DIR.
        inputs: Files read, by label or by their own names.
        outputs: Files and folders made, by label or by their names seen from the manifest's folder.
        stages: Each stage's counts, as `run_stages` returns them.
        extra: More top-level entries.
        hashes: Hashes of files that stages have read; None reads every file.

    Returns:
        The manifest as written.
    """
    path = Path(path)
    manifest = {
        "command": command if isinstance(command, str) else shlex.join(neutral(command)),
        "inputs": describe_files(labelled(inputs, None), hashes),
        "outputs": describe_files(labelled(outputs, path.parent), hashes),
        "stages": {name: dict(counts) for name, counts in (stages or {}).items()},
        "versions": versions(),
        **(extra or {}),
    }
    write_json(path, manifest, renews=is_manifest(path))
    return manifest


def is_manifest(path: Path) -> bool:
    """Tell whether a file is a manifest, which the command that is run in its folder may write anew."""
    try:
        return read_json(path, dict[str, object], {}).keys() >= {"command", "inputs", "outputs", "stages", "versions"}
    except UserError:
        return False


def neutral(command: Sequence[str]) -> list[str]:
    """Return a command without its program's folder, the paths of places, and options of speed."""
    kept = [Path(part).name for part in command[:1]]
    parts = iter(command[1:])
    for part in parts:
        name, equals, _ = part.partition("=")
        if name in (*PLACES, *NEUTRAL_OPTIONS):
            kept += [name, "DIR"] if name in PLACES else []
            if not equals:
                next(parts, None)
        elif part not in NEUTRAL_FLAGS:
            kept.append(part)
    return kept


def labelled(files: Mapping[str, Path] | Iterable[Path], folder: Path | None) -> dict[str, Path]:
    """Return the files by labels that do not depend on where this machine stores them."""
    if isinstance(files, Mapping):
        return {label: Path(path) for label, path in files.items()}
    labels: dict[str, Path] = {}
    for path in map(Path, files):
        inside = folder is not None and path.is_relative_to(folder)
        label, depth = path.relative_to(folder or "").as_posix() if inside else path.name, 1
        path = path.absolute()
        while labels.get(label, path) != path:  # two files of one name in different folders
            depth += 1
            label = "/".join(path.parts[-depth:])
        labels[label] = path
    return labels


def describe_files(files: Mapping[str, Path], hashes: Hashes | None = None) -> dict[str, dict]:
    """Return size and hash of each file or folder, by its label."""
    return {label: {"bytes": size_of(path), "sha256": sha256_of(path, hashes)} for label, path in sorted(files.items())}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that may change a result."""
    found = {name: version_of(name) for name in PACKAGES}
    return {"python": platform.python_version()} | {name: version for name, version in found.items() if version}


@functools.cache  # importlib reads all that a package says of itself, a hundredth of a second each
def version_of(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_unchanged(path: Path, full: bool = False) -> None:
    """Raise a UserError if a file is not what the manifest or stamp that lists it says: cut, zeroed, exchanged.

    Its size and time are looked at first. A file that is not younger than what lists it is not read, unless `full`.
    A file that nothing lists passes.
    """
    found = listed(path)
    if found is None or not path.is_file():
        return
    source, described = found
    status = path.stat()
    young = status.st_mtime_ns > source.stat().st_mtime_ns
    same = status.st_size == described["bytes"]
    if not same or ((young or full) and hash_file(path)["sha256"] != described["sha256"]):
        raise UserError(
            f"{path} is not the file that {source} describes: it was damaged or changed since; get it again, or "
            f"move it and run the command that made it (if the change is meant, delete {source})"
        )


def listed(path: Path) -> tuple[Path, dict] | None:
    """Return the manifest or stamp above a file that lists it, and the size and hash that it lists; None without."""
    path = path.absolute()
    for folder in path.parents[:3]:
        name = path.relative_to(folder).as_posix()
        manifest = folder / "manifest.json"
        outputs = _outputs_of(manifest)
        # The text beside checkpoints has a copy of the manifest, and files of other places.
        copied = folder == path.parent and folder.name.startswith("text")
        named = [one for label, one in outputs.items() if copied and Path(label).name == name]
        if found := outputs.get(name) or (named[0] if len(named) == 1 else None):
            return manifest, found
        for stamp in sorted((folder / STAMPS).glob("*.json")):
            for label, described in _outputs_of(stamp).items():
                files = described.get("files", {})
                inner = name.removeprefix(f"{label}/")
                if found := described if label == name and not files else files.get(inner) if inner != name else None:
                    return stamp, found
    return None


def _outputs_of(path: Path) -> dict[str, dict]:
    """Return the outputs that a manifest or stamp lists, by their names; none where it is of another program."""
    try:
        outputs = read_json(path, _Made, {}).get("outputs", {})
    except UserError:
        return {}
    found = {}
    for name, one in outputs.items():
        with suppress(ValueError):
            found[name] = of_type(one, File | Folder)
    return found


def check_folder(folder: Path) -> int:
    """Compare every file below a folder that a manifest or stamp lists with its hash; return how many there are.

    Raises:
        UserError: One differs, or is missing, or there is none.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder")
    files = [path for path in files_below(folder) if STAMPS not in path.parts and listed(path)]
    if not files:
        raise UserError(f"{folder} holds no file that a manifest.json lists: name a folder that `relpos prepare` wrote")
    for path in files:
        check_unchanged(path, full=True)
    for name, described in _outputs_of(folder / "manifest.json").items():
        if described["bytes"] and not (folder / name).exists():
            raise UserError(f"{folder / name} is missing, which {folder / 'manifest.json'} lists: get it again")
    return len(files)
