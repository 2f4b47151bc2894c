"""Keep the results of a long computation, one JSON line each, so that an interrupted process goes on with them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from relpos_fairseq.io.files import named_on_disk_full


class ResumeLog:
    """Results in the order in which they were computed, in a file that a kill may cut after any byte.

    `kept` has the results of an earlier process whose computation had the same key.
    """

    def __init__(self, path: Path, key: dict) -> None:
        """Read the results of an earlier process; those under another `key`, which names all inputs, are replaced."""
        self.path = path
        head = json.dumps(key, sort_keys=True) + "\n"
        lines = path.read_text(encoding="utf-8").splitlines(True) if path.is_file() else []
        whole = [line for line in lines if line.endswith("\n")]
        known = whole[:1] == [head]
        self.kept = [json.loads(line) for line in whole[1:]] if known else []
        self._start = "".join(whole) if known else head

    @contextmanager
    def opened(self) -> Iterator:
        """Open the file; yield a function that appends one more result."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with named_on_disk_full(self.path), self.path.open("w", encoding="utf-8") as file:
            file.write(self._start)

            def keep(result) -> None:
                file.write(json.dumps(result) + "\n")
                file.flush()

            yield keep
