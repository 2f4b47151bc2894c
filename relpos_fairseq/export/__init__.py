"""Export trained models to other libraries' own formats; no file here knows a scheme by name."""

import importlib
import sys
from types import ModuleType
from typing import Any


def _forward(name: str, target: str) -> None:
    """Let `from relpos_fairseq.export.NAME import CLASS` find the classes of another module, which stays lazy."""
    module = ModuleType(f"{__name__}.{name}")
    module.__getattr__ = lambda attribute: _attribute(target, attribute)  # type: ignore[method-assign]
    sys.modules[module.__name__] = module


def _attribute(target: str, attribute: str) -> Any:
    """Return an attribute of a module of this folder, importing it."""
    if attribute.startswith("__"):  # what Python asks of every module
        raise AttributeError(attribute)
    return getattr(importlib.import_module(f".{target}", __name__), attribute)


# Folders that earlier versions of `relpos export transformers` wrote import their classes by these names.
_forward("transformers_generation", "transformers")
_forward("transformers_memory", "transformers")
