"""What the tests of preparation share: the scripts' folder on the path, and folders compared."""

from __future__ import annotations

import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.insert(0, str(SCRIPTS))


def contents(folder: Path, *but: str) -> dict[str, bytes]:
    """Every file's bytes, by its path; `but` names path parts that are left out."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not set(path.relative_to(folder).parts) & set(but)
    }
