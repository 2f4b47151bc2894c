"""Define what a task of a comparison is: data, fairseq's commands that train on them, and scores of every example."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from relpos_fairseq.io.files import atomic_folder, read_json, remove, sha256_of, write_json
from relpos_fairseq.io.processes import USER_DIR, Fork, in_fork, key_of
from relpos_fairseq.io.stages import locked

# ---- fairseq's own commands, each in a fork of this process: fairseq is imported once.


def as_arguments(flags: dict[str, object]) -> list[str]:
    """Return flags, with `--` or without, as a command line's arguments.

    True or None: a flag without a value; False: none.
    """
    arguments = []
    for name, value in flags.items():
        if value is not False:
            arguments.append(f"--{name.removeprefix('--')}")
            if value is not None and value is not True:
                arguments.append(str(value))
    return arguments


def prepare_process() -> None:
    """Import what every command needs, with one thread: others would not survive a fork."""
    # Asking for a GPU must not start CUDA here: it would not survive a fork either.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    torch.set_num_threads(1)
    # As fairseq-train sets it, where nothing that was imported before it has set another.
    form = "%(asctime)s | %(levelname)s | %(name)s | %(message)s"
    logging.basicConfig(format=form, level=logging.INFO, stream=sys.stdout, force=True)
    for tool in ("train", "generate", "preprocess"):
        importlib.import_module(f"fairseq_cli.{tool}")


def fairseq(tool: str, arguments: Sequence[object], log: Path, threads: int = 1) -> Fork:
    """Run a command of fairseq (`train`, `generate`, ...) to its end; ToolError if it fails."""
    given = [f"fairseq-{tool}", *map(str, arguments)]

    def run() -> None:
        computing(threads)
        sys.argv = given
        print("+", " ".join(given), flush=True)
        importlib.import_module(f"fairseq_cli.{tool}").cli_main()

    return in_fork(run, log, given[0])


def computing(threads: int) -> None:
    """Set the threads of this process, in a child that computes."""
    import torch

    torch.set_num_threads(threads)


def device() -> list[str]:
    """Return --cpu where there is no GPU, as an argument."""
    import torch

    return [] if torch.cuda.is_available() else ["--cpu"]


# ---- What a task is, and a run of it.


KINDS: dict[str, type[Task]] = {}
# Of every training; a resumed one sees the same batches as one that never stopped.
TRAIN = {
    "optimizer": "relpos_adam",
    "adam-betas": "(0.9, 0.98)",
    "clip-norm": 1.0,
    "lr": 1e-3,
    "lr-scheduler": "polynomial_decay",
    "warmup-updates": 100,
    "max-update": 1000,
    "max-tokens": 2048,
    "save-interval-updates": 500,
    "keep-interval-updates": 1,
    "no-epoch-checkpoints": None,
    "update-epoch-batch-itr": "True",
    "num-workers": 0,
    "distributed-world-size": 1,
    "log-format": "json",
    "log-interval": 20,
}


def kind(name: str) -> Callable[[type], type]:
    """Register a class of tasks under the name that specifications use."""

    def register(cls: type) -> type:
        KINDS[name] = cls
        cls.kind = name
        return cls

    return register


@dataclass
class Scored:
    """What a run scored on a test set."""

    lengths: np.ndarray  # (N,) of the examples, in `Task.unit`
    statistics: dict[str, np.ndarray]  # metric to (N, K), as `scores.METRICS` sums them up
    notes: dict = field(default_factory=dict)  # other numbers of the run


@dataclass(frozen=True, kw_only=True)
class Task:
    """Data, the commands that train on them, and scores of every example."""

    kind: ClassVar[str] = ""
    test_sets: ClassVar[tuple[str, ...]] = ()  # their names, where no option changes them
    unit: ClassVar[str] = "tokens"  # of lengths
    checkpoint: ClassVar[str] = "last"  # or best, by the validation loss
    default: ClassVar[dict] = {}  # flags of fairseq-train
    logged: ClassVar[tuple[str, ...]] = ("valid_loss", "valid_ppl")  # kept of every validation

    label: str  # as the specification calls it
    train: dict = field(default_factory=dict)  # flags of fairseq-train
    generate: dict = field(default_factory=dict)  # flags of fairseq-generate

    def sets(self) -> tuple[str, ...]:
        """Return the names of the test sets."""
        return self.test_sets

    def make(self, folder: Path) -> None:
        """Write text to `folder/raw` and what fairseq reads to `folder/bin`."""
        raise NotImplementedError

    def score(self, name: str, run: Workspace) -> Scored:
        """Score a trained run on a test set, and write its outputs into the run's folder."""
        raise NotImplementedError

    def inputs(self) -> list[Path]:
        """Return the user's files and folders that the data are made of."""
        return []

    def options(self) -> dict[str, Any]:
        """Return what the data depend on beside `inputs`, as JSON."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        named = [name for name, value in own.items() if isinstance(value, Path)]
        left_out = ("label", "train", "generate", *named)
        return {"kind": self.kind} | {k: v for k, v in own.items() if k not in left_out}

    def data_key(self) -> str:
        """Return a hash of what the data are made of, read once."""
        return self._data_key

    @cached_property
    def _data_key(self) -> str:
        """Return a hash of what the data are made of: options, inputs, the code that makes them."""
        code = [Path(inspect.getfile(cls)) for cls in type(self).__mro__ if issubclass(cls, Task)]
        missing = [str(path) for path in self.inputs() if not path.exists()]
        if missing:
            raise ValueError(f"task {self.label} needs what is not there: {', '.join(missing)}")
        hashes = [sha256_of(path) for path in self.inputs()]
        return key_of([self.options(), hashes], sorted(set(code)))

    def data_folder(self, work: Path) -> Path:
        return work / "data" / f"{self.label}-{self.data_key()}"

    def prepare(self, work: Path) -> Path:
        """Make the data, or find them made; returns their folder."""
        folder = self.data_folder(work)
        with locked(work / "data", wait=True):
            # Links to prepared data that have moved since are made anew.
            if folder.exists() and not all(path.exists() for path in folder.iterdir()):
                remove(folder)
            if not folder.exists():
                print(f"data of {self.label}: {folder}", flush=True)
                with atomic_folder(folder) as partial:
                    self.make(partial)
                    text = partial / ("raw" if (partial / "raw").is_dir() else "bin")
                    write_json(partial / "data.json", {"sha256": sha256_of(text)})
        return folder

    def flags(self, scheme: dict, seed: int) -> dict:
        """Return all flags of fairseq-train but those that name folders."""
        flags = TRAIN | self.default | self.train | scheme | {"seed": seed}
        if flags["lr-scheduler"] == "polynomial_decay" and "total-num-update" not in flags:
            flags["total-num-update"] = flags["max-update"]
        return flags


@dataclass
class Workspace:
    """A cell at work."""

    task: Task  # what it runs
    data: Path  # the folder of its data
    folder: Path  # its own
    threads: int = 1  # to compute with

    @property
    def checkpoints(self) -> Path:
        """Where training leaves models."""
        return self.folder / "checkpoints"

    @property
    def model(self) -> Path:
        """The checkpoint that is scored."""
        return self.checkpoints / f"checkpoint_{self.task.checkpoint}.pt"

    def manifest(self) -> dict:
        return read_json(self.data / "data.json") or {}

    def load(self) -> tuple[Any, Any]:
        """Return the trained model, on the GPU where there is one, and its task."""
        from fairseq import checkpoint_utils

        models, _, task = checkpoint_utils.load_model_ensemble_and_task(
            [str(self.model)], arg_overrides={"data": str(self.data / "bin")}
        )
        return models[0].eval().to("cpu" if device() else "cuda"), task

    def call(self, tool: str, log: str, flags: dict) -> Any:
        """Run a command of fairseq on the data; returns its fork."""
        given = [self.data / "bin", "--user-dir", USER_DIR, *as_arguments(flags), *device()]
        return fairseq(tool, given, self.folder / log, self.threads)

    def apart(self, name: str, work: Callable[[], object]) -> None:
        """Score a test set in a child of this process, with the run's threads."""

        def child() -> None:
            computing(self.threads)
            work()

        in_fork(child, self.folder / f"{name}.log", f"scoring {name}")


def binarise(folder: Path, texts: Mapping[str, object], to: str = "bin") -> None:
    """Run fairseq-preprocess on text of one side: `train`, `valid`, `test` (several by commas)."""
    given = [part for split, path in texts.items() for part in (f"--{split}pref", path)]
    given += ["--only-source", "--destdir", folder / to, "--workers", 1]
    fairseq("preprocess", given, folder / "prepare.log")


def write_lines(path: Path, lines: list[str]) -> None:
    """Write a file of lines, in a folder that is renamed when whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
