"""Import optional packages; say what brings them, and which one a command misses."""

from __future__ import annotations

import importlib
import sys
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from types import ModuleType

from relpos_fairseq.io.errors import UserError

PACKAGE = __name__.partition(".")[0]
INSTALLS = {"yaml": "pyyaml", "google": "protobuf", "sklearn": "scikit-learn"} | {
    "fairseq": "fairseq-fixed",
    "comet": "unbabel-comet",
}
MODULES = {distribution: module for module, distribution in INSTALLS.items()}
OF_DEVELOPERS = ("test", "all")  # extras that no user is sent to


@cache
def extras() -> dict[str, list[str]]:
    """Return the extras of this package, and the distributions that each installs; {} where it was not installed."""
    from packaging.requirements import Requirement

    found: dict[str, list[str]] = {}
    try:
        distribution = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        return found
    names = [name for name in distribution.metadata.get_all("Provides-Extra") or [] if name not in OF_DEVELOPERS]
    for one in map(Requirement, distribution.requires or []):
        for name in names:
            if one.marker is not None and one.marker.evaluate({"extra": name}):
                found.setdefault(name, []).append(one.name)
    return found


def remedy(module: str) -> str:
    """Return the command that installs what a module belongs to: an extra of this package, if one has it."""
    top = module.partition(".")[0]
    distribution = INSTALLS.get(top, top)
    wanted = distribution.replace("_", "-").lower()
    extra = next((name for name, those in extras().items() if wanted in (one.lower() for one in those)), None)
    return f"pip install {distribution}" if extra is None else f"pip install '{PACKAGE}[{extra}]'"


def require(module: str, least: str = "") -> ModuleType:
    """Import an optional package.

    Args:
        module: what is imported.
        least: the oldest version that is right.

    Raises:
        UserError: it is absent, or older; names the extra.
    """
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"this needs {module} ({error}): {remedy(module)}") from None
    version = getattr(found, "__version__", "0")
    if least and _numbers(version) < _numbers(least):
        raise UserError(f"{module} {version} is too old, {least} or newer is needed: {remedy(module)}")
    return found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".") if part.isdigit())


def describe_missing(error: ModuleNotFoundError) -> str | None:
    """Describe a package that is not installed, and what installs it; None of a module of ours or of Python's."""
    top = (error.name or "").partition(".")[0]
    if not top or top == PACKAGE or top in sys.stdlib_module_names:
        return None
    return f"this needs {top}, which is not installed: {remedy(top)}"


def absent() -> dict[str, list[str]]:
    """Return the distributions that are not installed, by the extra that brings them."""
    found = {}
    for extra, those in extras().items():
        if lacking := [one for one in those if find_spec(MODULES.get(one, one.replace("-", "_"))) is None]:
            found[extra] = lacking
    return found
