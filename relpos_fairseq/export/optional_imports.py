"""Import optional packages, or name the extra of this package that installs them."""

from __future__ import annotations

import importlib
from types import ModuleType

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.packages import remedy


class ExportError(UserError):
    """A model that cannot be exported, or a package that is missing; the message names the remedy in one line."""


def require(module: str, least: str = "") -> ModuleType:
    """Import an optional package.

    Args:
        module: what is imported.
        least: the oldest version that is right.

    Raises:
        ExportError: it is absent, or older; names the extra.
    """
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ExportError(f"this needs {module} ({error}): {remedy(module)}") from None
    version = getattr(found, "__version__", "0")
    if least and _numbers(version) < _numbers(least):
        raise ExportError(f"{module} {version} is too old, {least} or newer is needed: {remedy(module)}")
    return found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".") if part.isdigit())
