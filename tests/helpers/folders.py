"""What the tests of preparation share: where the scripts are, and folders to be compared."""

from __future__ import annotations

from pathlib import Path


def contents(folder: Path, *but: str) -> dict[str, bytes]:
    """Every file's bytes, by its path; `but` names path parts that are left out."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not set(path.relative_to(folder).parts) & set(but)
    }
