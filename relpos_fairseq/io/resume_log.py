"""Keep the results of long work in a file of JSON lines, so that an interrupted run continues after the last one."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from relpos_fairseq.io.files import named_on_disk_full


class ResumeLog:
    """A file of JSON lines that a kill may cut after any byte: a key, then one result a line, in the order of the work.

    Attributes:
        kept: Results of an earlier process that worked under the same key.
    """

    def __init__(self, path: Path, key: dict) -> None:
        """Read the results kept under `key`, which holds all that they depend on; a file of another key is replaced."""
        self.path = path
        head = json.dumps(key, sort_keys=True) + "\n"
        lines = path.read_text(encoding="utf-8").splitlines(True) if path.is_file() else []
        whole = [line for line in lines if line.endswith("\n")]
        known = whole[:1] == [head]
        self.kept = [json.loads(line) for line in whole[1:]] if known else []
        self._start = "".join(whole) if known else head

    @contextmanager
    def opened(self) -> Iterator:
        """Open the file; give a function that appends one result."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with named_on_disk_full(self.path), self.path.open("w", encoding="utf-8") as file:
            file.write(self._start)

            def keep(result) -> None:
                file.write(json.dumps(result) + "\n")
                file.flush()

            yield keep
