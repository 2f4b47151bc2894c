"""Store the results of a comparison: one JSON file for each new run, and one compressed archive of JSON lines.

    TASK/RUN.json       written atomically by the process that made the run
    results.jsonl.gz    the archive: one line for each run, sorted by name; equal results give equal bytes

`fold` moves the JSON files into the archive.  Results are read from both.  gzip files may be concatenated, so
`cat theirs/results.jsonl.gz >> ours/results.jsonl.gz` merges the results of two people.  Where several lines have one
`run`, the last counts.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TypedDict

from relpos_fairseq.io.files import TEMPORARY, open_text_out, write_json
from relpos_fairseq.io.reading import Amount, Number, read_json, read_json_lines
from relpos_fairseq.io.stages import locked
from relpos_fairseq.lab.comparison.scores import Packed
from relpos_fairseq.lab.comparison.training_run import Training

ARCHIVE = "results.jsonl.gz"


class ScoredSet(TypedDict):
    """The scores of a test set."""

    values: dict[str, Number]
    lengths: Packed
    statistics: dict[str, Packed]
    seconds: Amount


class _Kind(TypedDict):
    kind: str


class _Settings(TypedDict):
    task: _Kind
    train: dict[str, object]


class Result(Training):
    """What is kept of a run."""

    task: str
    scheme: str
    seed: int
    code: str
    data: str
    unit: str
    versions: dict[str, str]
    sets: dict[str, ScoredSet]
    settings: _Settings


class _Line(Result):
    """A line of the archive."""

    run: str


REMEDY = "delete it, and its run is made again"


class ResultStore:
    """Read and write the results in one folder, by the name of the run: `TASK/SCHEME-seedN-KEY`.

    KEY is a hash of the run's settings and of the code that made the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lines: dict[str, dict] = {}  # the archive's results by run, read when the file had `_state`
        self._state: tuple | None = None

    def path(self, name: str) -> Path:
        """Return the path of a run's own JSON file."""
        return self.folder / f"{name}.json"

    def write(self, name: str, result: dict) -> None:
        """Write a run's result, with the time of this call in UTC, to the run's own JSON file."""
        finished = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        write_json(self.path(name), {**result, "finished": finished}, renews=True)

    def read(self, name: str) -> dict | None:
        """Return a run's result from its own file or from the archive, or None where neither has it."""
        # The file first: `fold` removes it after its line is in the archive.
        found = read_json(self.path(name), Result, None, REMEDY)
        return self.archived().get(name) if found is None else found

    def newest(self, task: str, scheme: str, seed: int, settings: dict, inputs: str) -> dict | None:
        """Return the newest result with these settings, whatever version of the code made it, or None without any.

        Of results that do not record their task's inputs, as older ones do not, it is taken that they are the same.
        """
        start = f"{task}/{scheme}-seed{seed}-"
        found = {name: line for name, line in self.archived().items() if name.startswith(start)}
        times = {name: line.get("finished", "") for name, line in found.items()}
        for path in self.files():
            name = f"{path.parent.name}/{path.stem}"
            if name.startswith(start) and (result := read_json(path, Result, None, REMEDY)):
                changed = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(path.stat().st_mtime))
                found[name], times[name] = result, result.get("finished", changed)
        wanted = (scheme, settings, inputs)
        matching = [
            name for name, one in found.items() if (one["scheme"], one["settings"], one.get("inputs", inputs)) == wanted
        ]
        return found[max(matching, key=lambda name: (times[name], name))] if matching else None

    def files(self) -> list[Path]:
        """Return the JSON files of single runs, without those that are still being written."""
        return sorted(path for path in self.folder.glob("*/*-seed*-*.json") if not path.name.startswith(TEMPORARY))

    def archived(self) -> dict[str, dict]:
        """Return the archive's results by the names of their runs; the file is read only if it has changed."""
        path = self.folder / ARCHIVE
        if not path.exists():
            return {}
        status = path.stat()
        state = (status.st_ino, status.st_size, status.st_mtime_ns)
        if state != self._state:
            self._lines, self._state = read_archive(path), state
        return self._lines

    def fold(self) -> int:
        """Move the results of all JSON files into the archive; return how many were moved.

        Files of other names stay where they are.  If the process is killed, every result is in the archive, in its own
        file, or in both.
        """
        if not self.files():
            return 0
        with locked(self.folder, wait=True):
            read = {path: read_json(path, Result, None, REMEDY) for path in self.files()}
            files = {path: found for path, found in read.items() if found}
            merged = dict(self.archived())
            merged |= {f"{path.parent.name}/{path.stem}": result for path, result in files.items()}
            with open_text_out(self.folder / ARCHIVE, renews=True) as archive:
                for name in sorted(merged):
                    archive.write(json.dumps({**merged[name], "run": name}, sort_keys=True, ensure_ascii=False) + "\n")
            for path in files:
                path.unlink()
        return len(files)


def read_archive(path: Path) -> dict[str, dict]:
    """Read an archive, which may be several gzip files one after another; return the results by run.

    Raises:
        UserError: the file is not gzip, or its lines are not results in JSON.
    """
    return {line.pop("run"): line for line in read_json_lines(path, _Line)}
