"""Read files that torch.save and safetensors wrote, and say in one line which of them is broken, and where.

    state = read_checkpoint(path)               # a checkpoint of fairseq's, whose parts have their types
    tensors = read_tensors(path)                # weights of another library
    with building(path): ...                    # whatever making its model raises names the checkpoint

No code that a file names is run. Nothing else of this package loads tensors (tests/io/test_reading.py).
"""

from __future__ import annotations

import argparse
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relpos_fairseq.io.errors import UserError, unreadable
from relpos_fairseq.io.reading import ordinary, reading

PACKAGE = __name__.partition(".")[0]
REMEDY = "copy it again, or give the data, options and version of its training"
OF_SYSTEM = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
REPEATED = 1 << 30  # bytes up to which a tensor may be few numbers again and again, as `expand` makes it
OPAQUE = "_extra_state"  # the end of a name under which a module may keep what it likes


@contextmanager
def loading(
    path: str | Path, kind: str = "checkpoint", error: type[UserError] = UserError, whole: bool = True
) -> Iterator[None]:
    """As `reading`, of a file of torch's, whose errors advise to run the file's code.

    A `whole` file's checksums are compared, which torch does not.
    """
    with reading(path, f"a {kind}", error=error):
        try:
            ordinary(path)
            if whole and zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    if (wrong := archive.testzip()) is not None:
                        raise ValueError(f"the checksum of {wrong} is another: bits of it have changed")
            yield
        except (UserError, MemoryError, ModuleNotFoundError, *OF_SYSTEM):
            raise
        except Exception as found:  # unpickling has no common class of errors
            raise error(unreadable(path, found, kind)) from None


@contextmanager
def building(path: str | Path) -> Iterator[None]:
    """As `reading`, of making a checkpoint's model and task: errors that this package raises keep their words."""
    with reading(path, "a checkpoint that makes a model", REMEDY):
        try:
            yield
        except ValueError as found:
            if type(found) is ValueError and _is_of_package(found):
                raise UserError(str(found)) from found
            raise


def _is_of_package(error: Exception) -> bool:
    """Tell whether an error was raised in a file of this package."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and str(place.tb_frame.f_globals.get("__name__")).startswith(PACKAGE)


def load(path: str | Path, kind: str = "checkpoint", error: type[UserError] = UserError, mapped: bool = False) -> Any:
    """Return what torch.save wrote in a file, without running code of it.

    Args:
        path: the file.
        kind: what it should be, for the error.
        error: the class that is raised.
        mapped: leave its tensors where they lie, if its format allows that.
    """
    with loading(path, kind, error, whole=not mapped):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped and zipfile.is_zipfile(path))


def save(state: Any, path: Path) -> None:
    """Write what `load` reads; equal states are equal bytes under any name, which torch else keeps in the file."""
    with path.open("wb") as file:
        torch.save(state, file)


def read_checkpoint(path: str | Path, mapped: bool = False) -> dict[str, Any]:
    """Return a checkpoint of fairseq's, whose parts have the types that `check_checkpoint` names.

    Raises:
        UserError: it is truncated, holds code, or is something else.
    """
    with reading(path, "a checkpoint"):
        return check_checkpoint(load(path, mapped=mapped), path)


def check_checkpoint(state: Any, path: str | Path, error: type[UserError] = UserError) -> dict[str, Any]:
    """Return what was loaded of a file if it is a checkpoint of fairseq's.

    `model` has tensors by name, `cfg` and `args` are options by name, and what a training goes on from has its types.

    Raises:
        UserError: names the part that is missing or of another type.
    """
    if not isinstance(state, dict) or not isinstance(state.get("model"), Mapping):
        raise error(f"{path} is no fairseq checkpoint: it holds no model")
    check_tensors(state["model"], path, error)
    if (wrong := next(_of_parts(state), None)) is not None:
        raise error(f"{path} is no whole checkpoint: {wrong}; copy it again or give another")
    return state


def check_tensors(model: Mapping[Any, Any], path: str | Path, error: type[UserError] = UserError) -> None:
    """Raise an error that names a part of a model that is no tensor of plain numbers, or a weight of whole ones."""
    if (wrong := next(_of_model(model), None)) is not None:
        raise error(f"{path} is no whole checkpoint: {wrong}; copy it again or give another")


def _of_model(model: Mapping[Any, Any]) -> Iterator[str]:
    for name, value in model.items():
        if not isinstance(name, str):
            yield f"a tensor's name is {_said(name)}"
        elif not isinstance(value, Tensor):
            if not name.endswith(OPAQUE):
                yield f"{name} is {_said(value)}, and must be a tensor"
        elif value.layout is not torch.strided or value.is_quantized or value.is_complex() or value.is_meta:
            kind = value.dtype if value.layout is torch.strided else value.layout
            yield f"{name} is a tensor of {'no data' if value.is_meta else kind}, and must be one of plain numbers"
        elif value.numel() * value.element_size() > max(value.untyped_storage().nbytes(), REPEATED):
            yield f"{name} has {value.numel():,} numbers, more than the file holds"
        elif name.endswith(("weight", "bias")) and not value.is_floating_point():  # which loading would round
            yield f"{name} is a tensor of {value.dtype}, and must be one of floating-point numbers"


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) < 2**63


def _is_number(value: Any) -> bool:
    number = isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
    return value is None or (number and not isinstance(value, bool))


def _is_history(value: Any) -> bool:
    return value is None or (isinstance(value, list) and value != [] and all(isinstance(one, Mapping) for one in value))


def _is_config(value: Any) -> bool:
    return _is(Mapping, argparse.Namespace)(value) and not isinstance(value, dict)


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: value is None or isinstance(value, kinds)


# Options, and the parts that a training goes on from: what each is if it is there; what holds a part stands before it.
# A config of omegaconf is a Mapping.
PARTS = {
    "cfg": (_is(Mapping), "options by name"),
    "args": (_is_config, "options by name"),
    **dict.fromkeys(("cfg/model", "cfg/task", "cfg/criterion"), (_is(Mapping, argparse.Namespace), "options by name")),
    **dict.fromkeys(("extra_state", "task_state", "last_optimizer_state"), (_is(Mapping), "a dict")),
    "conversion": (_is(Mapping), "a dict"),  # the record of `relpos convert`
    "optimizer_history": (_is_history, "a list of dicts"),
    "optimizer_history/-1/num_updates": (_is_count, "a whole number"),
    "extra_state/train_iterator": (_is(Mapping), "a dict"),
    "extra_state/train_iterator/epoch": (_is_count, "a whole number"),
    "extra_state/train_iterator/iterations_in_epoch": (_is_count, "a whole number"),
    "extra_state/train_iterator/len": (_is_count, "a whole number"),
    "extra_state/patience_runs": (_is_count, "a whole number"),
    "extra_state/best": (_is_number, "a number"),
    "extra_state/patience_best": (_is_number, "a number"),
    "extra_state/val_loss": (_is_number, "a number"),
    "extra_state/previous_training_time": (_is_number, "a number"),
}
_ABSENT = object()


def _of_parts(state: Mapping[str, Any]) -> Iterator[str]:
    for place, (is_right, what) in PARTS.items():
        value = _at(state, place)
        if value is not _ABSENT and not is_right(value):
            yield f"{place} is {_said(value)}, and must be {what}"


def _at(value: Any, place: str) -> Any:
    """Return a part of a checkpoint, by the names that lead to it; `_ABSENT` if it is not there."""
    for name in place.split("/"):
        if isinstance(value, list):
            value = value[int(name)]
        else:
            value = value.get(name, _ABSENT) if isinstance(value, Mapping) else _ABSENT
    return value


def _said(value: Any) -> str:
    """Return a value for a message: itself if it is short, else its type."""
    words = repr(value) if value is None or isinstance(value, (bool, int, float, str)) else ""
    return words if 0 < len(words) <= 40 else f"a {type(value).__name__}"


LARGEST = 1e15  # a weight, whose products with activations are then finite
UNFILLED = "_float_tensor"  # a buffer of fairseq's adaptive inputs and softmax: a number of memory that nothing fills


def check_finite(tensors: Mapping[str, Tensor], path: str | Path) -> None:
    """Raise an error that names a tensor with values that no training leaves: the training diverged."""
    for name, value in tensors.items():
        numbers = isinstance(value, Tensor) and value.is_floating_point() and not str(name).endswith(UNFILLED)
        if numbers and not _is_finite(value):
            raise UserError(
                f"{path} holds {name}, which is not finite (NaN, infinite, or above {LARGEST:g}: the training "
                f"diverged, or the file was damaged): give another checkpoint"
            )


def _is_finite(value: Tensor) -> bool:
    """Tell whether all values are numbers up to `LARGEST`."""
    return not value.numel() or all(abs(one.item()) <= LARGEST for one in value.aminmax())  # NaN is both then


def read_tensors(path: str | Path, error: type[UserError] = UserError) -> dict[str, Any]:
    """Return the tensors of a .safetensors file or of one of torch.save's, by name."""
    kind = "file of weights"
    if Path(path).suffix == ".safetensors":
        from safetensors.torch import load_file

        with reading(path, f"a {kind}", error=error):
            try:
                return load_file(str(path))
            except Exception as found:  # of many types
                raise error(unreadable(path, found, kind)) from None
    state = load(path, kind, error)
    if not isinstance(state, dict) or not all(isinstance(n, str) and isinstance(v, Tensor) for n, v in state.items()):
        raise error(f"{path} holds something else than named tensors")
    return state
