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
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import Hashes, atomic_folder, remove, sha256_of, write_json
from relpos_fairseq.io.processes import USER_DIR, Fork, in_fork, key_of
from relpos_fairseq.io.reading import read_json
from relpos_fairseq.io.stages import locked
from relpos_fairseq.lab.comparison.scores import Packed, pack, unpack

KINDS: dict[str, type[Task]] = {}
HASHES = Hashes()  # of files and folders that specifications name
# Ends of the flags that name a file or folder which a training reads, beside the checkpoint whose weights alone count.
READ = ("restore-file", "continue-once", "embed-path", "tokenizer-folder")
# Flags of every training; a resumed one sees the same batches as one that never stopped.
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


@cache
def weights_of(file: tuple) -> str:
    """Return the SHA-256 of the weights in a checkpoint's file, given as `Hashes.state` gives it: path, size, times.

    What stands beside them is not counted: a conversion's record has rounding of the processor that compared outputs.
    """
    from relpos_fairseq.saved.identity import hash_weights
    from relpos_fairseq.saved.model import SavedModel

    return hash_weights(SavedModel.read(file[0], mapped=True).state)


def counted(name: str, value: Any) -> Any:
    """Return what identifies a flag's value: of a file or folder that a training reads a hash of what is in it."""
    place = str(value)
    if name.endswith("from-model") and value is not False:  # which leaves the flag out
        if not os.path.isfile(place):
            raise UserError(
                f"{name}: there is no checkpoint {value}: train or convert it, or correct the specification"
            )
        return weights_of(HASHES.state(place))
    return HASHES.of(place) if name.endswith(READ) and os.path.exists(place) else value


def check_label(label: str) -> None:
    """Raise a ValueError for a label that cannot be the name of a folder."""
    if not label or set(label) & set("/\\\0") or label.startswith("."):
        raise ValueError(f"{label!r} cannot be the name of a folder: choose another label")


def kind(name: str) -> Callable[[Any], Any]:
    """Register a class of tasks under the name that specifications use."""

    def register(cls: Any) -> Any:
        KINDS[name] = cls
        cls.kind = name
        return cls

    return register


@dataclass
class Scored:
    """The scores of one run on a test set."""

    lengths: np.ndarray  # (N,) of the examples, in `Task.unit`
    statistics: dict[str, np.ndarray]  # metric to (N, K), which `scores.METRICS` sums up
    notes: dict = field(default_factory=dict)  # other numbers of the run
    inputs: np.ndarray | None = None  # (N,) `scores.same_inputs`; None: all are distinct


class Extra(NamedTuple):
    """A table of a report that only one kind of task has."""

    title: str
    headers: tuple[str, ...]
    rows: list[list[str]]


@dataclass(frozen=True, kw_only=True)
class Task:
    """Data, the flags of the trainings on them, and scores of every example of the test sets."""

    kind: ClassVar[str] = ""
    test_sets: ClassVar[tuple[str, ...]] = ()  # their names, where no option changes them
    unit: ClassVar[str] = "tokens"  # of lengths
    checkpoint: ClassVar[str] = "last"  # or best, by the validation loss
    default: ClassVar[dict] = {}  # flags of fairseq-train
    logged: ClassVar[tuple[str, ...]] = ("valid_loss", "valid_ppl")  # kept of every validation

    noted: ClassVar[Any] = object  # the type of what a set's scores keep besides (`Scored.notes`)

    label: str  # the task's name in the specification
    train: dict = field(default_factory=dict)  # flags of fairseq-train
    generate: dict = field(default_factory=dict)  # flags of fairseq-generate

    def sets(self) -> tuple[str, ...]:
        """Return the names of the test sets."""
        return self.test_sets

    def make(self, folder: Path) -> None:
        """Write text to `folder/raw` and fairseq's binary data to `folder/bin`."""
        raise NotImplementedError

    def score(self, name: str, workspace: Workspace) -> Scored:
        """Score a trained model on a test set, and write its outputs into the run's folder."""
        raise NotImplementedError

    def extras(self, runs: Mapping[str, Mapping[int, dict]]) -> list[Extra]:
        """Return further tables of the report, from results by scheme and seed."""
        return []

    def code(self) -> set[Path]:
        """Return the files of the package that make the data."""
        return {Path(inspect.getfile(cls)) for cls in type(self).__mro__ if issubclass(cls, Task)}

    def inputs(self) -> list[Path]:
        """Return the user's files and folders that the data are made of."""
        return []

    def options(self) -> dict[str, Any]:
        """Return what the data depend on besides `inputs`, as JSON."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        paths = [name for name, value in own.items() if isinstance(value, Path)]
        left_out = ("label", "train", "generate", *paths)
        return {"kind": self.kind} | {k: v for k, v in own.items() if k not in left_out}

    @cached_property
    def data_key(self) -> str:
        """A hash of what the data are made of: options, inputs, and the code that makes them."""
        return key_of([self.options(), self.inputs_key], sorted(self.code()))

    @cached_property
    def inputs_key(self) -> str:
        """A hash of the user's files and folders as they were when it was first asked for: it names the data."""
        missing = [str(path) for path in self.inputs() if not path.exists()]
        if missing:
            raise ValueError(f"task {self.label} needs what is not there: {', '.join(missing)}")
        return self.hash_inputs()

    def hash_inputs(self) -> str:
        """Return a hash of the user's files and folders, as they are now."""
        return key_of([HASHES.of(path) for path in self.inputs()])

    def has_changed(self) -> bool:
        """Return whether the user's files and folders are no longer those that name the data."""
        return not all(path.exists() for path in self.inputs()) or self.hash_inputs() != self.inputs_key

    def data_folder(self, work: Path) -> Path:
        """Return the folder of the data, below a comparison's folder."""
        return work / "data" / f"{self.label}-{self.data_key}"

    def prepare(self, work: Path) -> Path:
        """Prepare the task's data unless they exist; return their folder."""
        folder = self.data_folder(work)
        with locked(work / "data", wait=True):
            # Links to prepared data that have moved since, or to equal data elsewhere, are made anew.
            places, noted = [str(path) for path in self.inputs()], Workspace(self, folder, work).manifest()
            if (folder / "bin").is_symlink() and noted.get("places") != places:
                remove(folder)
            if not folder.exists():
                print(f"data of {self.label}: {folder}", flush=True)
                with atomic_folder(folder) as partial:
                    self.make(partial)
                    write_json(partial / "data.json", {"sha256": self.hash_data(partial), "places": places})
                    if self.has_changed():
                        raise UserError(f"what {self.label} reads has changed since this command began: start it again")
        return folder

    def hash_data(self, folder: Path) -> str:
        """Return a hash of the data in a folder: of the text, where it is kept."""
        return sha256_of(folder / ("raw" if (folder / "raw").is_dir() else "bin"))

    def checkpoints(self, workspace: Workspace) -> list[Path]:
        """Return the folders that hold models when a run has ended."""
        return [workspace.checkpoints]

    def flags(self, scheme: dict, seed: int) -> dict:
        """Return all flags of fairseq-train but those that name folders."""
        flags = TRAIN | self.default | self.train | scheme | {"seed": seed}
        if flags["lr-scheduler"] == "polynomial_decay" and "total-num-update" not in flags:
            flags["total-num-update"] = flags["max-update"]
        return flags


@dataclass
class Workspace:
    """The folders of one run, and the commands that work in them."""

    task: Task
    data: Path  # the folder of the task's data
    folder: Path  # the run's own
    threads: int = 1  # to compute with
    seed: int = 1  # of the training

    @property
    def checkpoints(self) -> Path:
        """The folder that training writes models to."""
        return self.folder / "checkpoints"

    @property
    def model(self) -> Path:
        """The checkpoint that is scored."""
        return self.checkpoints / f"checkpoint_{self.task.checkpoint}.pt"

    def manifest(self) -> dict:
        """Return what `Task.prepare` noted of the data."""
        return read_json(self.data / "data.json", dict[str, object], {}, "delete it")

    def load(self) -> tuple[Any, Any]:
        """Return the trained model, on the GPU where there is one, and its fairseq task."""
        from relpos_fairseq.saved.model import SavedModel

        model, _, task = SavedModel.open(self.model).build({"data": str(self.data / "bin")})
        return model.to("cpu" if device() else "cuda"), task

    def call(self, tool: str, log: str, flags: dict) -> Fork:
        """Run a command of fairseq on the data to its end."""
        given = [self.data / "bin", "--user-dir", USER_DIR, *as_arguments(flags), *device()]
        return fairseq(tool, given, self.folder / log, self.threads)

    def computed(self, name: str, function: Callable[[], np.ndarray]) -> np.ndarray:
        """Return the array that a function computes of a test set in a child of this process, kept as `NAME.json`."""
        place = self.folder / f"{name}.json"
        self.in_child(name, lambda: write_json(place, pack(function()), renews=True))
        return unpack(read_json(place, Packed))

    def in_child(self, name: str, function: Callable[[], object]) -> None:
        """Call a function that scores a test set in a child of this process, with the run's threads."""

        def child() -> None:
            set_threads(self.threads)
            function()

        in_fork(child, self.folder / f"{name}.log", f"scoring {name}")


def prepare_process() -> None:
    """Import what every command of fairseq needs, with one thread, so that forks of this process have it."""
    # Asking for a GPU must not start CUDA in this process: neither it nor threads would survive a fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    set_threads(1)
    # fairseq-train's own format, whatever else has configured logging before.
    form = "%(asctime)s | %(levelname)s | %(name)s | %(message)s"
    logging.basicConfig(format=form, level=logging.INFO, stream=sys.stdout, force=True)
    # Every optimizer imports the compiler, a second's work.
    for module in ("torch._dynamo", *(f"fairseq_cli.{tool}" for tool in ("train", "generate", "preprocess"))):
        importlib.import_module(module)


def fairseq(tool: str, arguments: Sequence[object], log: Path, threads: int = 1) -> Fork:
    """Run a command of fairseq (`train`, `generate`, ...) in a fork to its end; ToolError if it fails."""
    given = [f"fairseq-{tool}", *map(str, arguments)]

    def run() -> None:
        set_threads(threads)
        sys.argv = given
        print("+", " ".join(given), flush=True)
        importlib.import_module(f"fairseq_cli.{tool}").cli_main()

    return in_fork(run, log, given[0])


def as_arguments(flags: dict[str, object]) -> list[str]:
    """Return flags as a command line's arguments: True or None is a flag without a value, False is left out."""
    arguments = []
    for name, value in flags.items():
        if value is not False:
            arguments.append(f"--{name.removeprefix('--')}")
            if value is not None and value is not True:
                arguments.append(str(value))
    return arguments


def set_threads(threads: int) -> None:
    """Set how many threads torch computes with in this process."""
    import torch

    torch.set_num_threads(threads)


def device() -> list[str]:
    """Return the argument --cpu where there is no GPU."""
    import torch

    return [] if torch.cuda.is_available() else ["--cpu"]


def binarise(folder: Path, texts: Mapping[str, object], to: str = "bin") -> None:
    """Run fairseq-preprocess on text of one side: `train`, `valid`, `test` (several by commas)."""
    given = [part for split, path in texts.items() for part in (f"--{split}pref", path)]
    given += ["--only-source", "--destdir", folder / to, "--workers", 1]
    fairseq("preprocess", given, folder / "prepare.log")


def write_lines(path: Path, lines: list[str]) -> None:
    """Write lines to a file, not atomically: the caller renames the whole folder once it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
