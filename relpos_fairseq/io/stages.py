"""Run stages from files to files, each skipped while nothing it depends on has changed.

A stage that has run leaves a stamp, `.stages/NAME.json` of its folder: its parameters, the hashes of its inputs and
outputs, the versions of the packages, and its counts (`manifests.py` says the same of a whole result, for readers).
`ResumeLog` keeps results of long work line by line.
"""

import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, TypedDict

from relpos_fairseq.io import records
from relpos_fairseq.io.errors import BusyError, UserError
from relpos_fairseq.io.files import (
    STAMPS,
    Hashes,
    check_outputs,
    check_replaceable,
    file_lock,
    files_below,
    named_on_disk_full,
    remove,
    size_of,
    write_json,
)
from relpos_fairseq.io.manifests import File, Folder, is_manifest, listed, versions
from relpos_fairseq.io.progress import doing
from relpos_fairseq.io.reading import Noted, of_type, ordinary, parse_json, read_json, reading


class Stamp(TypedDict):
    """What is read of a stage's notes of itself."""

    outputs: dict[str, File | Folder]
    counts: dict[str, object]


@dataclass(frozen=True)
class Stage:
    """One step from files to files."""

    name: str  # unique in its pipeline; also the stamp's file name
    # makes the outputs, each whole or not at all, and returns counts for the manifest
    run: Callable[[], Mapping | None]
    inputs: list[Path]  # files and folders that it reads
    outputs: list[Path]  # files and folders that it makes
    parameters: dict = field(default_factory=dict)  # all else that the outputs depend on, as JSON values
    # whether what is there stays and is gone on with: downloads, a user's own files, a training's checkpoints
    keeps: bool = False
    home: Path | None = None  # the folder that keeps its stamp, where it is not the folder of `run_stages`
    counted: Any = Noted  # the type of what `run` returns: a stage whose stamp has another is run again


def run_stages(
    stages: Sequence[Stage],
    folder: str | Path,
    *,
    force: bool = False,
    prune: bool = False,
    wait: bool = False,
    hashes: Hashes | None = None,
) -> dict[str, dict]:
    """Run the stages whose inputs, parameters, versions or outputs differ from their stamps.

    A stage's stamp is removed before it runs and written after its outputs are complete, so after
    a kill at any moment the same call continues where it was.

    Args:
        stages: In order; a stage may read the outputs of earlier ones.
        folder: Where the stamps are kept, in `.stages`.
        force: Whether to run all of them.
        prune: Whether to remove the outputs of stages that ran here before and are not among these.
        wait: Whether to wait for another process at work in the folder, rather than refuse.
        hashes: Hashes of files that were read before; None: of this call alone.

    Returns:
        Every stage's counts, by its name.

    Raises:
        UserError: An input is missing, another process is at work in the folder, or someone
            has put files into a folder that has to be made anew.
    """
    folder = Path(folder)
    names = [stage.name for stage in stages]
    if len(set(names)) != len(names):
        raise UserError(f"stages must have different names, got {', '.join(names)}")
    hashes = Hashes() if hashes is None else hashes
    check_stages(stages)
    if not is_manifest(manifest := folder / "manifest.json"):
        check_replaceable(manifest)
    counts = {}
    for home, group in groupby(enumerate(stages, start=1), lambda item: item[1].home or folder):
        with locked(home, wait):
            if prune:
                remove_others(stages, home, hashes)
            for number, stage in group:
                position = f"[{number}/{len(stages)}]"
                counts[stage.name] = run_stage(stage, home, position, force, hashes)
    return counts


def check_stages(stages: Sequence[Stage]) -> None:
    """Raise a UserError, before anything runs, if a stage would write over a file that no earlier stage makes."""
    made: list[Path] = []
    read: dict[str, Path] = {}
    for stage in stages:
        read |= {str(path): Path(path) for path in stage.inputs if not any(Path(path).is_relative_to(m) for m in made)}
        made += map(Path, stage.outputs)
    for stage in stages:
        for path in stage.outputs:
            check_outputs({f"the output of {stage.name},": Path(path)}, read)


def run_stage(stage: Stage, folder: Path, position: str, force: bool, hashes: Hashes) -> dict:
    """Run a stage unless its stamp holds; return its counts."""
    missing = [str(path) for path in stage.inputs if not Path(path).exists()]
    if missing:
        raise UserError(f"stage {stage.name} needs what is not there: {', '.join(missing)}")
    stamp = folder / STAMPS / f"{stage.name}.json"
    key = {
        "parameters": stage.parameters,
        "inputs": {label(path, folder): hashes.of(path) for path in stage.inputs},
        "versions": versions(),  # the manifest says that they made it
    }
    old = read_stamp(stamp, stage.counted)
    if not force and old and holds(old, key, stage, folder, hashes):
        print(f"{position} {stage.name} ... unchanged", flush=True)
        return old["counts"]
    print(f"{position} {stage.name} ...", flush=True)
    start = time.monotonic()
    claim(stage, old, folder, hashes)
    remove(stamp)
    if not stage.keeps:
        remove_outputs(old, folder, {label(path, folder) for path in stage.outputs})
    with doing(f"{position} {stage.name}"):
        counts = dict(stage.run() or {})
    absent = [str(path) for path in stage.outputs if not Path(path).exists()]
    if absent:
        raise RuntimeError(f"stage {stage.name} did not make {', '.join(absent)}")
    outputs = {label(path, folder): describe_output(path, hashes) for path in stage.outputs}
    write_json(stamp, {**key, "outputs": outputs, "counts": counts}, renews=True)
    print(f"{position} {stage.name} ... {time.monotonic() - start:.0f} s", flush=True)
    return read_json(stamp, Stamp)["counts"]  # as a later run will find them


def holds(old: dict, key: dict, stage: Stage, folder: Path, hashes: Hashes) -> bool:
    """Return whether a stamp has this key, and the outputs that it describes are unchanged."""
    outputs = old.get("outputs", {})
    if {name: old.get(name) for name in key} != as_json(key):
        return False
    if set(outputs) != {label(path, folder) for path in stage.outputs}:
        return False
    return all(is_same(Path(path), outputs[label(path, folder)], hashes) for path in stage.outputs)


def is_same(path: Path, described: dict, hashes: Hashes) -> bool:
    """Return whether an output is unchanged; files that others put into a folder do not count."""
    if "files" in described:
        files = described["files"].items()
        return path.is_dir() and all(is_same(path / name, file, hashes) for name, file in files)
    return path.is_file() and size_of(path) == described["bytes"] and hashes.of(path) == described["sha256"]


def claim(stage: Stage, old: dict | None, folder: Path, hashes: Hashes) -> None:
    """Check that a stage may write its outputs: nothing is there, or this command's own by stamp, manifest or records.

    What a stamp or manifest lists with its hash is recorded as this command's, so that a folder of another machine or
    an earlier version is gone on with.
    """
    adopt(old, folder, hashes)
    for path in map(Path, stage.outputs):
        if not stage.keeps and path.exists():
            if path.is_file() and (found := listed(path)) and is_same(path, found[1], hashes):
                records.note(Path(os.path.realpath(path)), {records.SELF: (found[1]["bytes"], found[1]["sha256"])})
            check_replaceable(path)


def adopt(stamp: dict | None, folder: Path, hashes: Hashes) -> None:
    """Record as this command's own the outputs that a stamp lists with their hash."""
    for name, described in (stamp or {}).get("outputs", {}).items():
        files = described.get("files", {records.SELF: described})
        same = {inner: one for inner, one in files.items() if is_same(folder / name / inner, one, hashes)}
        if same:
            place = Path(os.path.realpath(folder / name))
            records.note(place, {inner: (one["bytes"], one["sha256"]) for inner, one in same.items()})


def remove_others(stages: Sequence[Stage], folder: Path, hashes: Hashes) -> None:
    """Remove the stamps, and inside the folder the outputs, of stages that are not listed."""
    kept = {label(path, folder) for stage in stages for path in stage.outputs}
    names = {stage.name for stage in stages}
    for stamp in (folder / STAMPS).glob("*.json"):
        if stamp.stem not in names:
            if (old := read_stamp(stamp)) is None:
                continue  # no stage's
            adopt(old, folder, hashes)
            remove_outputs(old, folder, kept)
            remove(stamp)


def remove_outputs(stamp: dict | None, folder: Path, kept: set[str]) -> None:
    """Remove a stamp's outputs that are inside the folder and not kept, where they are as this command wrote them.

    Raises:
        UserError: names a file that others wrote, or changed since.
    """
    for name in (stamp or {}).get("outputs", {}):
        if name not in kept and not Path(name).is_absolute():
            check_replaceable(folder / name)
            remove(folder / name)


def describe_output(path: Path, hashes: Hashes) -> dict:
    """Return a file's size and hash, or those of a folder's files."""
    path = Path(path)
    if path.is_dir():
        files = files_below(path)
        return {"files": {f.relative_to(path).as_posix(): describe_output(f, hashes) for f in files}}
    return {"bytes": size_of(path), "sha256": hashes.of(path)}


def read_stamp(path: Path, counted: Any = Noted) -> dict | None:
    """Read the stamp of a stage, whose counts are `counted`, in a folder's `.stages`; None if missing or damaged.

    Raises:
        UserError: The stamp names an output that lies outside the folder: no stage has written it.
    """
    folder = path.parent.parent
    try:
        if (stamp := read_json(path, Stamp, None)) is None:
            return None
        of_type(stamp["counts"], counted)
    except ValueError:
        return None
    for name, described in stamp["outputs"].items():
        inner = [f"{name}/{file}" for file in described.get("files", {})]
        for one in (name, *inner):
            if not Path(name).is_absolute() and not _is_inside(folder / one, folder):
                raise UserError(f"{path} names {one}, which is not in {folder}: delete {path} if you trust the rest")
    return stamp


def _is_inside(path: Path, folder: Path) -> bool:
    """Return whether a path is below a folder, by its own words and after all links in the folders above it."""
    words = os.path.normpath(path)
    plain = Path(words).is_relative_to(os.path.normpath(folder)) and words != os.path.normpath(folder)
    return plain and path.parent.resolve().is_relative_to(folder.resolve())


def as_json(value: object) -> object:
    """Return a value as it is after being written as JSON and read again: tuples are lists."""
    return json.loads(json.dumps(value))


def label(path: str | Path, folder: Path) -> str:
    """Return a file's path relative to the folder if it is inside, so that the folder may be moved; else its path."""
    path = Path(path)
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)


def locked(folder: Path, wait: bool) -> AbstractContextManager:
    """Lock a folder against other processes; the system frees the lock if this process is killed.

    Raises:
        BusyError: Another process works in the folder, and `wait` is false.
    """
    try:
        return file_lock(folder / STAMPS / "lock", wait)
    except BlockingIOError as error:
        raise BusyError(f"another process works in {folder}: wait for it or choose another folder") from error


class ResumeLog:
    """A file of lines that a kill may cut after any byte: a key, then results in the order of the work.

    Before each result stands the checksum of it and of those before it.

    Attributes:
        kept: Results of an earlier process that worked under the same key.
    """

    def __init__(self, path: Path, key: dict) -> None:
        """Read results kept under `key`, all that they depend on; others are replaced."""
        self.path = path
        self._start = head = json.dumps(key, sort_keys=True) + "\n"
        self._sum = 0
        self.kept: list = []
        if path.exists() and ordinary(path).is_file() and (content := path.read_bytes()).startswith(head.encode()):
            with reading(path, "a record of work that was cut off", "delete it"):
                for line in content[: content.rindex(b"\n")].decode().split("\n")[1:]:
                    self.kept.append(parse_json(line[9:]))
                    if self._line(self.kept[-1]) != f"{line}\n":
                        raise ValueError(f"line {len(self.kept) + 1} has another checksum")
                    self._start += f"{line}\n"

    def _line(self, result: Any) -> str:
        text = json.dumps(result)
        self._sum = zlib.crc32(text.encode(), self._sum)
        return f"{self._sum:08x} {text}\n"

    @contextmanager
    def opened(self) -> Iterator:
        """Open the file for writing, with the results kept so far; yield a function that appends one result."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with named_on_disk_full(self.path), self.path.open("w", encoding="utf-8") as file:
            file.write(self._start)

            def keep(result) -> None:
                file.write(self._line(result))
                file.flush()

            yield keep
