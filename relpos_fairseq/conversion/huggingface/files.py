"""Reads a Hugging Face folder: its config, its weights in one file or several, nothing executed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relpos_fairseq.conversion.report import ConversionError
from relpos_fairseq.engine.errors import unreadable

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def read_json(path: Path) -> dict[str, Any]:
    """Read an object of a JSON file.

    Raises:
        ConversionError: the file is absent, truncated or no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConversionError(f"{path} is missing: give a whole Hugging Face folder") from None
    except ValueError as error:
        raise ConversionError(f"{path} is truncated or no JSON ({error}): copy it again") from None
    if not isinstance(value, dict):
        raise ConversionError(f"{path} holds no object: it is not a model's {path.name}")
    return value


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read every tensor of a folder.

    Raises:
        ConversionError: no file of weights, a part of several is missing, or one is truncated.
    """
    for name in _WEIGHTS:
        path = folder / name
        if not path.is_file():
            continue
        if path.suffix != ".json":
            return _read(path)
        parts = sorted(set(_weight_map(path).values()))
        lost = [part for part in parts if not (folder / part).is_file()]
        if lost:
            raise ConversionError(
                f"{folder} lacks {', '.join(lost)} of the {len(parts)} files of weights that "
                f"{name} lists: copy the whole folder"
            )
        state: dict[str, Tensor] = {}
        for part in parts:
            state |= _read(folder / part)
        absent = sorted(set(_weight_map(path)) - set(state))
        if absent:
            raise ConversionError(
                f"{name} lists {len(absent)} tensors that no file holds ({absent[0]}): the folder mixes two models"
            )
        return state
    raise ConversionError(f"{folder} holds no weights: one of {', '.join(_WEIGHTS)} is needed")


def _weight_map(path: Path) -> dict[str, str]:
    found = read_json(path).get("weight_map")
    if not isinstance(found, dict) or not all("/" not in str(v) for v in found.values()):
        raise ConversionError(f"{path} has no weight_map of file names: copy it again")
    return found


def _read(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            state = import_safetensors().load_file(str(path))
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except ConversionError:
        raise
    except Exception as error:  # both libraries raise many types for a broken file
        raise ConversionError(unreadable(path, error, "file of weights")) from None
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ConversionError(f"{path} holds something else than named tensors")
    return state


def import_safetensors() -> Any:
    """Return the module safetensors.torch.

    Raises:
        ConversionError: it is not installed.
    """
    try:
        import safetensors.torch as library
    except ImportError:
        raise ConversionError("this file needs the library safetensors: pip install safetensors") from None
    return library
