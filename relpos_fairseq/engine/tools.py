"""Run other programs, fairseq's commands above all, with a log."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from relpos_fairseq.engine.command import last_words
from relpos_fairseq.engine.errors import ToolError

USER_DIR = Path(__file__).resolve().parents[1]


def run_tool(command: list[str], log: Path, threads: int) -> None:
    """Run a command to its end with some threads; its output is appended to a log, line by line.

    Raises:
        ToolError: The command did not end with status 0.
    """
    # Unbuffered, so that progress shows at once and no line is cut by another stream's.
    settings = {"PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}
    settings |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    process = subprocess.Popen(
        command,
        env=os.environ | settings,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    try:
        reason = follow(process, log)
        status = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if status != 0:
        reason = reason if status > 0 else f"killed by {signal.Signals(-status).name}"
        name = Path(command[1] if command[0] == sys.executable else command[0]).name
        raise ToolError(f"{name}: {reason} (its whole output: {log})")


def follow(process: subprocess.Popen, log: Path) -> str:
    """Copy a command's output to its log; return its last words."""

    def copied() -> Iterator[str]:
        for line in process.stdout:
            file.write(line)
            yield line

    with log.open("a", encoding="utf-8") as file:
        return last_words(copied())


def key_of(settings: object, files: Iterable[Path] = ()) -> str:
    """Return a short hash of settings and of the contents of source files."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]
