"""Plants each bug of tests/mutations.md in a copy of the project and runs the test to see it.

    python tests/mutate.py            # all of them, two at a time
    python tests/mutate.py rope       # those whose row mentions `rope`

Exit status: 0 every planted bug was caught, 1 one survived, 2 a row no longer fits the code.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "mutations.md"


@dataclass(frozen=True)
class Mutation:
    """One planted bug."""

    bug: str
    file: str
    before: str
    after: str
    test: str


def mutations(text: str) -> list[Mutation]:
    """The rows of the table.

    Raises:
        ValueError: if a row's `before` does not occur exactly once in its file.
    """
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) != 5 or cells[0] in ("bug", "---") or set(cells[0]) == {"-"}:
            continue
        row = Mutation(*(cell.removeprefix("`").removesuffix("`") for cell in cells))
        found = (ROOT / row.file).read_text().count(row.before)
        if found != 1:
            raise ValueError(f"{row.bug}: {row.before!r} occurs {found} times in {row.file}")
        rows.append(row)
    return rows


def caught(row: Mutation) -> bool:
    """Whether the named test fails with the bug planted (fails, not crashes on its way in)."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "project"
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "quickstart_out", "*.pt")
        shutil.copytree(ROOT, copy, ignore=ignored)
        path = copy / row.file
        path.write_text(path.read_text().replace(row.before, row.after))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
                   f"tests/{row.test}"]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(copy)}
        result = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    if result.returncode not in (0, 1):
        raise ValueError(f"{row.bug}: {row.test} did not run:\n{result.stdout[-600:]}")
    return result.returncode == 1


def main() -> int:
    """Plant, run, report."""
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    try:
        rows = [row for row in mutations(TABLE.read_text()) if word in str(row)]
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            results = list(tqdm(pool.map(caught, rows), total=len(rows), disable=None))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    survivors = [row for row, seen in zip(rows, results, strict=True) if not seen]
    for row in survivors:
        print(f"SURVIVED: {row.bug} ({row.file}); {row.test} passed")
    print(f"{len(rows) - len(survivors)} of {len(rows)} planted bugs caught")
    return 1 if survivors or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
