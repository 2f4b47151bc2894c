"""Errors that a command reports in one line.

`UserError` is for whatever a user did wrong, in any part of the package; a command that meets it ends with status 2.
"""

import os
import re
from pathlib import Path


class UserError(ValueError):
    """Wrong input or options; the message names the input, its value and the remedy."""


class BusyError(UserError):
    """Another process works in the folder."""


class ToolError(RuntimeError):
    """A program that was started failed; the message is its own error line and the path of its log."""


def unreadable(path: str | Path, error: Exception, kind: str = "checkpoint") -> str:
    """Return one line on why torch.load(weights_only=True) could not load a file.

    `kind` names what the file should be; torch's advice to run the file's code is left out.
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
