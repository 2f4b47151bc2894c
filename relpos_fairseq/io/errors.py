"""Errors that a command reports in one line."""

import os
import re
from pathlib import Path


class UserError(ValueError):
    """Bad input; the message names the input, the value and the remedy."""


class BusyError(UserError):
    """Another process works in the folder."""


class ToolError(RuntimeError):
    """A program that was started failed; the message is its own error line and where its log is."""


def unreadable(path: str | Path, error: Exception, kind: str = "checkpoint") -> str:
    """Say in one line why torch.load(weights_only=True) could not load a file.

    `kind` is what it should be; torch's advice to run the file's code is left out.
    """
    size = os.path.getsize(path) if os.path.isfile(path) else 0
    text = str(error)
    if code := re.search(r"GLOBAL (\S+)", text):
        return (
            f"{path} holds code or objects ({code[1]}), which a {kind} does not need, and was "
            f"refused: nothing of it was run; give another file"
        )
    lines = [line.strip() for line in text.splitlines() if "weights_only" not in line]
    reason = next((f": {line.split('. ')[0]}" for line in lines if line), "")
    return (
        f"{path} ({size:,} bytes) is truncated or no {kind}: copy it again or give another "
        f"({type(error).__name__}{reason})"
    )
