"""What models are read by: one line for whatever is wrong with a checkpoint, and no other reader of one."""

from __future__ import annotations

import argparse
import ast
import copy
from pathlib import Path
from typing import Any

import fairseq  # noqa: F401  (the plugin says which classes a checkpoint may hold)
import pytest
import torch

from helpers import ROOT
from relpos_fairseq.core.scheme import PositionMismatchError
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.tensor_files import building, check_finite, load, read_checkpoint, read_tensors, save

GOOD = {
    "model": {"w": torch.ones(2), "version": torch.zeros(1, dtype=torch.uint8), "m._extra_state": b"x"},
    "cfg": {"model": {"_name": "x"}, "task": argparse.Namespace(task="y"), "criterion": None},
    "args": None,
    "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}, "best": float("inf"), "val_loss": 1},
    "optimizer_history": [{"num_updates": 2}],
    "last_optimizer_state": None,
    "task_state": {},
}


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("model", None, "holds no model"),
        ("model", [1], "holds no model"),
        ("model/w", [1.0], "w is a list, and must be a tensor"),
        ("model/w", torch.ones(2, dtype=torch.complex64), "w is a tensor of torch.complex64"),
        ("model/w", torch.ones(2).to_sparse(), "w is a tensor of torch.sparse_coo"),
        ("model/w", torch.ones(2, device="meta"), "w is a tensor of no data"),
        ("model/m.weight", torch.ones(2).int(), "m.weight is a tensor of torch.int32"),
        ("model/w", torch.ones(1).expand(10**5, 10**5), "w has 10,000,000,000 numbers, more than the file holds"),
        ("model/3", torch.ones(2), "a tensor's name is 3"),
        ("cfg", "x", "cfg is 'x', and must be options by name"),
        ("cfg/model", [1], "cfg/model is a list"),
        ("args", 1, "args is 1"),
        ("extra_state", [], "extra_state is a list"),
        ("extra_state/train_iterator", "x", "train_iterator is 'x', and must be a dict"),
        ("extra_state/train_iterator/epoch", "1", "epoch is '1', and must be a whole number"),
        ("extra_state/train_iterator/iterations_in_epoch", -1, "iterations_in_epoch is -1"),
        ("extra_state/best", "x", "best is 'x', and must be a number"),
        ("optimizer_history", [], "optimizer_history is a list"),
        ("optimizer_history", [3], "must be a list of dicts"),
        ("last_optimizer_state", "x", "last_optimizer_state is 'x'"),
        ("task_state", 1.5, "task_state is 1.5"),
        ("conversion", 5, "conversion is 5, and must be a dict"),
    ],
)
def test_a_part_of_another_type_is_one_line(tmp_path: Path, place: str, value: Any, said: str) -> None:
    path = tmp_path / "a.pt"
    *above, last = place.split("/")
    state = owner = copy.deepcopy(GOOD)
    for part in above:
        owner = owner[part]
    owner[int(last) if last.isdigit() else last] = value
    torch.save(state, path)
    with pytest.raises(UserError, match=f"^{path} .*{said}"):
        read_checkpoint(path)


def test_a_whole_checkpoint_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    for zipped in (True, False):
        torch.save(GOOD, path, _use_new_zipfile_serialization=zipped)
        assert read_checkpoint(path, mapped=True).keys() == GOOD.keys()
    with pytest.raises(FileNotFoundError):
        read_checkpoint(tmp_path / "none.pt")


def test_values_that_are_no_numbers_are_named() -> None:
    large = torch.full((9,), -1e15)
    # Of fairseq's adaptive inputs, which register a number that nothing fills: NaN now and then.
    unfilled = {"decoder.embed_tokens._float_tensor": torch.tensor([torch.nan])}
    whole = {"a": large, "b": torch.full((9,), 60000.0, dtype=torch.half), "c": torch.ones(1).int()}
    check_finite(whole | unfilled, "a.pt")
    for value in (torch.nan, torch.inf, -torch.inf, 1e30, -1e16):
        with pytest.raises(UserError, match="^a.pt holds b, which is not finite"):
            check_finite({"a": large, "b": torch.tensor([[1.0, value]], dtype=torch.bfloat16)}, "a.pt")


@pytest.mark.parametrize("name", ["a.bin", "a.safetensors"])
def test_weights_that_are_none_are_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for content in (b"", b"x" * 99, b"PK\x03\x04"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"^{path} .*is truncated or no file of weights"):
            read_tensors(path)
    torch.save([1], tmp_path / "b.bin")
    with pytest.raises(UserError, match="something else than named tensors"):
        read_tensors(tmp_path / "b.bin")


def test_errors_of_building_name_the_checkpoint() -> None:
    with pytest.raises(PositionMismatchError, match=r"^a.pt: other$"), building("a.pt"):
        raise PositionMismatchError("other")
    with pytest.raises(UserError, match=r"^a.pt is not a checkpoint that makes a model \(KeyError: 'x'\): "):
        with building("a.pt"):
            raise KeyError("x")


# What loads models and arrays, and where each may stand.
LOADERS = ("torch.load", "load_file", "safe_open", "np.load", "np.memmap", "np.fromfile")
ALLOWED = {
    "io/tensor_files.py": "the reader of models",
    "io/indexed.py": "the reader of binarised text",
    "formats/pickles.py": "the reader of objects of any class, whose errors are lines too",
    "preparation/cleaning.py": "records that this process has just written",
    "lab/comparison/tasks/classification.py": "outputs that this process's child has just written",
    "data/streams/dataset.py": "a text that was checked when it was opened, and its sidecar",
}


def test_nothing_else_loads_models() -> None:
    package, found = ROOT / "relpos_fairseq", set()
    for path in package.rglob("*.py"):
        calls = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
        names = {ast.unparse(call.func) for call in calls}
        if any(name in LOADERS or name.endswith((".load_file", ".safe_open")) for name in names):
            found.add(path.relative_to(package).as_posix())
    assert found == set(ALLOWED)


def test_loading_runs_no_code(tmp_path: Path) -> None:
    torch.save({"model": pytest.raises}, tmp_path / "a.pt")
    with pytest.raises(UserError, match="holds code or objects"):
        load(tmp_path / "a.pt")


def test_changed_bits_are_found_by_the_checksum(tmp_path: Path) -> None:
    """In a tensor's numbers, where nothing else can tell."""
    path = tmp_path / "a.pt"
    values = torch.arange(4096, dtype=torch.float32)
    torch.save({**GOOD, "model": {"a.weight": values}}, path)
    content = bytearray(path.read_bytes())
    place = content.find(values.numpy().tobytes()[400:800])
    content[place + 1] ^= 64
    path.write_bytes(content)
    with pytest.raises(UserError, match="the checksum of .*data/0 is another"):
        read_checkpoint(path)


def test_a_name_does_not_stand_in_the_file(tmp_path: Path) -> None:
    for name in ("a.pt", "b.tmp"):
        save(GOOD, tmp_path / name)
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.tmp").read_bytes()
    assert read_checkpoint(tmp_path / "b.tmp").keys() == GOOD.keys()
