"""What was made of what: a manifest that depends on the input alone."""

import importlib.metadata
import platform
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from relpos_fairseq.engine.files import Hashes, sha256_of, size_of, write_json

# They say how fast and where something is made, not what: places are named, their paths are not.
NEUTRAL_OPTIONS = ("--workers",)
PLACES = ("--out", "--destdir", "--from-dir", "--downloads")
NEUTRAL_FLAGS = ("--force", "--no-progress")
PACKAGES = (
    "fairseq",
    "fairseq-fixed",
    "numpy",
    "regex",
    "requests",
    "sacrebleu",
    "sacremoses",
    "sentencepiece",
    "subword-nmt",
    "tokenizers",
)


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
        hashes: Those of files that stages have read; None reads every file.

    Returns:
        What was written.
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
    write_json(path, manifest)
    return manifest


def neutral(command: Sequence[str]) -> list[str]:
    """Leave out options that say how fast, the paths of places, and the program's folder."""
    kept: list[str] = []
    skip = False
    for index, part in enumerate(command):
        if skip:
            skip = False
        elif part in (*NEUTRAL_OPTIONS, *PLACES):
            kept += [part, "DIR"] if part in PLACES else []
            skip = True
        elif part.startswith(tuple(f"{option}=" for option in PLACES)):
            kept += [part.split("=", 1)[0], "DIR"]
        elif not (part in NEUTRAL_FLAGS or part.startswith(tuple(f"{o}=" for o in NEUTRAL_OPTIONS))):
            kept.append(Path(part).name if index == 0 else part)
    return kept


def labelled(files: Mapping[str, Path] | Iterable[Path], folder: Path | None) -> dict[str, Path]:
    """Give every file a label that does not depend on where this machine keeps it."""
    if isinstance(files, Mapping):
        return {label: Path(path) for label, path in files.items()}
    labels: dict[str, Path] = {}
    for path in map(Path, files):
        inside = folder is not None and path.is_relative_to(folder)
        label, depth = path.relative_to(folder).as_posix() if inside else path.name, 1
        path = path.absolute()
        while labels.get(label, path) != path:  # two files of one name in different folders
            depth += 1
            label = "/".join(path.parts[-depth:])
        labels[label] = path
    return labels


def describe_files(files: Mapping[str, Path], hashes: Hashes | None = None) -> dict[str, dict]:
    """Return size and hash of each file or folder."""
    return {label: {"bytes": size_of(path), "sha256": sha256_of(path, hashes)} for label, path in sorted(files.items())}


def versions() -> dict[str, str]:
    """Return the versions of all that may change a result."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # not installed, so it had no part in this
    return found
