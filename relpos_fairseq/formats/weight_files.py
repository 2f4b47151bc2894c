"""Read weights and configs of other libraries without running any code that a file names."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypedDict

import torch
from torch import Tensor

from relpos_fairseq.conversion.report import ConversionError
from relpos_fairseq.io.errors import unreadable
from relpos_fairseq.io.reading import read_json
from relpos_fairseq.io.tensor_files import read_tensors

_COMPUTED = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_BUFFERS = ("_ids", "version")  # ends of names of tensors that hold whole numbers
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read every tensor of a Hugging Face folder, by name.

    Raises:
        ConversionError: no file of weights, a part of several is missing, or one is truncated.
    """
    path, *parts = weight_files(folder)
    if path.suffix != ".json":
        return _read(path)
    if lost := [part.name for part in parts if not part.is_file()]:
        raise ConversionError(
            f"{folder} lacks {', '.join(lost)} of the {len(parts)} files of weights that "
            f"{path.name} lists: copy the whole folder"
        )
    state = {name: value for part in parts for name, value in _read(part).items()}
    if absent := sorted(_weight_map(path).keys() - state):
        raise ConversionError(
            f"{path.name} lists {len(absent)} tensors that no file holds ({absent[0]}): the folder mixes two models"
        )
    return state


def weight_files(folder: Path) -> list[Path]:
    """Return the files from which `read_weights` reads a folder's tensors: one, or an index and those that it lists.

    Raises:
        ConversionError: there is none, or an index lists no files.
    """
    path = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if path is None:
        raise ConversionError(f"{folder} holds no weights: one of {', '.join(_WEIGHTS)} is needed")
    if path.suffix != ".json":
        return [path]
    return [path, *(folder / part for part in sorted(set(_weight_map(path).values())))]


class _Index(TypedDict):
    """What model.safetensors.index.json says."""

    weight_map: dict[str, str]


def _weight_map(path: Path) -> dict[str, str]:
    """Return the file of every tensor, of an index of files that lie beside it."""
    found = read_json(path, _Index, error=ConversionError)["weight_map"]
    if wrong := [name for name in found.values() if not name or "/" in name or name.startswith(".")]:
        raise ConversionError(f"{path} names {wrong[0]!r}, and not a file beside it: copy it again")
    return found


def _read(path: Path) -> dict[str, Tensor]:
    return {n: _computable(value, n, path) for n, value in read_tensors(path, error=ConversionError).items()}


def _computable(value: Tensor, name: str, path: Path) -> Tensor:
    """Return a tensor that models compute with, or a buffer of whole numbers; 8-bit floats become float32, exactly.

    Raises:
        ConversionError: names a tensor of another type.
    """
    kind = value.dtype if value.layout is torch.strided else value.layout
    small = str(kind).startswith("torch.float8")
    whole = kind in (torch.int64, torch.int32, torch.uint8) and name.endswith(_BUFFERS)
    if value.is_quantized or not (small or whole or kind in _COMPUTED):
        raise ConversionError(
            f"{path}: {name} is of the type {kind}, and weights are {', '.join(map(str, _COMPUTED))}: save it so"
        )
    return value.float() if small else value


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
        ConversionError: the file is truncated, or of TorchScript or a tar, which are not read so.
    """
    reader = SimpleNamespace(Unpickler=_Unpickler, __name__="safe_unpickle")
    reader.load = lambda file, **options: _Unpickler(file, **options).load()
    try:
        if "archive" in (found := file_kind(path)):
            raise ValueError(found)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the classes' source is not compared
            return torch.load(path, map_location="cpu", pickle_module=reader, weights_only=False)
    except Exception as error:  # torch and pickle raise many types for a broken file
        raise ConversionError(unreadable(path, error, kind)) from None


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
