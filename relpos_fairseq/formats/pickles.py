"""Read what torch.save wrote of objects of any class, without running code of the file."""

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
from relpos_fairseq.io.tensor_files import loading

# A class that a pickle names is never imported: `UnknownObject` stands in for it, whose instances keep their
# saved attributes and do nothing. The functions below, which rebuild tensors, are all that is called.
_REBUILD = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter")
_CALLED = {("torch._utils", name): getattr(torch._utils, name) for name in _REBUILD}
_CALLED |= {("collections", "OrderedDict"): OrderedDict}
_CALLED |= {("torch.nn.parameter", "Parameter"): torch.nn.Parameter}  # as torch 0.4.0 saves it
_CALLED |= {(module, "set"): set for module in ("builtins", "__builtin__")}


class UnknownObject:
    """Hold the saved attributes of an object whose class is not imported."""

    dump_patches = False  # torch asks modules of old files

    def __new__(cls, *args: Any, **kwargs: Any) -> UnknownObject:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Ignore the arguments of the class."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({str(name): value for name, value in state.items()})

    def __setitem__(self, *items: Any) -> None:
        """Drop items of a dictionary's or a list's subclass."""

    append = extend = __setitem__


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CALLED:
            return _CALLED[module, name]
        return type(name, (UnknownObject,), {"__module__": module})


def safe_unpickle(path: Path, kind: str = "checkpoint") -> Any:
    """Read an object that torch.save wrote, of any classes, without running code of the file.

    Args:
        path: the file.
        kind: what it should be, for the error.

    Raises:
        ConversionError: the file is truncated or damaged, or of TorchScript or a tar, which are not read so.
    """
    reader = SimpleNamespace(Unpickler=_Unpickler, __name__="safe_unpickle")
    reader.load = lambda file, **options: _Unpickler(file, **options).load()
    with loading(path, kind, ConversionError):
        if "archive" in (found := file_kind(path)):
            raise ValueError(found)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the classes' source is not compared
            return torch.load(path, map_location="cpu", pickle_module=reader, weights_only=False)


def file_kind(path: Path) -> str:
    """Return the format that torch wrote a file in: `zip`, `pickle`, or an archive that is not read here."""
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            return "pickle" if file.read(2) == b"\x80\x02" else "an archive of another kind"
    with zipfile.ZipFile(path) as archive:
        script = any(name.endswith("/constants.pkl") for name in archive.namelist())
    return "a TorchScript archive" if script else "zip"


def tensors_of(module: Any, prefix: str = "") -> dict[str, Tensor]:
    """Return parameters and buffers of an unpickled module (UnknownObjects) by their names in its state_dict."""
    found = {}
    for kind in ("_parameters", "_buffers"):
        for name, value in (getattr(module, kind, None) or {}).items():
            if isinstance(value, Tensor):
                found[prefix + name] = value.detach()
    for name, child in (getattr(module, "_modules", None) or {}).items():
        found |= tensors_of(child, f"{prefix}{name}.")
    return found
