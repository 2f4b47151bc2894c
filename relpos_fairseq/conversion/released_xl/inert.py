"""Reads pickles that hold objects of unknown classes, without their code.

A class that a pickle names becomes an inert one, whose instances keep what was saved of them as
attributes and do nothing else; only what rebuilds tensors is called.
"""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from relpos_fairseq.conversion.report import ConversionError
from relpos_fairseq.engine.errors import unreadable

_REBUILD = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter")
_CALLED = {("torch._utils", name): getattr(torch._utils, name) for name in _REBUILD}
_CALLED |= {("collections", "OrderedDict"): OrderedDict}
_CALLED |= {("torch.nn.parameter", "Parameter"): torch.nn.Parameter}  # as torch 0.4.0 saves it
_CALLED |= {(module, "set"): set for module in ("builtins", "__builtin__")}


class Inert:
    """What stands for an object of a class that was not loaded."""

    dump_patches = False  # torch asks modules of old files

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take whatever the class took."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({str(name): value for name, value in state.items()})

    def __setitem__(self, key: Any, value: Any) -> None:
        """Drop items of a dictionary's subclass."""

    def append(self, item: Any) -> None:
        """Drop items of a list's subclass."""

    def extend(self, items: Any) -> None:
        """Drop items of a list's subclass."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CALLED:
            return _CALLED[module, name]
        return type(name, (Inert,), {"__module__": module})


def _load(file: Any, **options: Any) -> Any:
    return _Unpickler(file, **options).load()


def read_inert(path: Path, kind: str = "checkpoint") -> Any:
    """Read what torch.save wrote; nothing of it is run.

    Raises:
        ConversionError: the file is truncated, or of TorchScript or a tar, which are not read so.
    """
    reader = SimpleNamespace(Unpickler=_Unpickler, load=_load, __name__="inert")
    try:
        if "archive" in (found := file_kind(path)):
            raise ValueError(found)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the classes' source is not compared
            return torch.load(path, map_location="cpu", pickle_module=reader, weights_only=False)
    except Exception as error:  # torch and pickle raise many types for a broken file
        raise ConversionError(unreadable(path, error, kind)) from None


def file_kind(path: Path) -> str:
    """Return how torch wrote a file: `zip`, `pickle`, or an archive that is not read here."""
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            return "pickle" if file.read(2) == b"\x80\x02" else "an archive of another kind"
    with zipfile.ZipFile(path) as archive:
        script = any(name.endswith("/constants.pkl") for name in archive.namelist())
    return "a TorchScript archive" if script else "zip"


def tensors_of(module: Any, prefix: str = "") -> dict[str, Tensor]:
    """Return parameters and buffers of an inert module under the names of its state_dict."""
    found = {}
    for kind in ("_parameters", "_buffers"):
        for name, value in (getattr(module, kind, None) or {}).items():
            if isinstance(value, Tensor):
                found[prefix + name] = value.detach()
    for name, child in (getattr(module, "_modules", None) or {}).items():
        found |= tensors_of(child, f"{prefix}{name}.")
    return found
