"""Name this machine's processor and what it can do."""

from __future__ import annotations

import platform
from contextlib import suppress
from pathlib import Path


def lines() -> list[str]:
    """Return what Linux says of the first processor; nothing on other systems."""
    with suppress(OSError):
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    return []


def name() -> str:
    """Return the processor's model."""
    found = (line.partition(":")[2].strip() for line in lines() if line.startswith("model name"))
    return next(found, "") or platform.processor() or platform.machine()


def abilities() -> set[str]:
    """Return the processor's abilities as Linux names them."""
    return {word for line in lines() if line.startswith(("flags", "Features")) for word in line.split()}
