"""Make one run of a comparison: train a scheme on a task with a seed, score every example, keep the result."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from relpos_fairseq.io import processor
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import remove, write_json
from relpos_fairseq.io.manifests import versions
from relpos_fairseq.io.processes import USER_DIR, key_of
from relpos_fairseq.io.stages import Stage, as_json, run_stages
from relpos_fairseq.lab.comparison.results import ResultStore, ScoredSet
from relpos_fairseq.lab.comparison.scores import METRICS, pack
from relpos_fairseq.lab.comparison.spec import Spec
from relpos_fairseq.lab.comparison.tasks.base import Scored, Workspace, counted
from relpos_fairseq.lab.comparison.training_run import Training, train

# Folders of the package whose code no trained number depends on.
NOT_TRAINING = "cli conversion examples export inference io lab plots preparation".split()


def code_version() -> str:
    """Return a hash of the sources that a result depends on, and of the packages' versions."""
    files = [path for path in USER_DIR.rglob("*") if path.suffix in (".py", ".c", ".h")]
    trained = [path for path in files if path.relative_to(USER_DIR).parts[0] not in NOT_TRAINING]
    return key_of({name: v for name, v in versions().items() if name != "python"}, sorted(trained))


@dataclass(frozen=True)
class Run:
    """A scheme on a task with a seed."""

    scheme: str
    scheme_flags: dict  # the scheme's flags of fairseq-train
    task: Any  # a Task, of the specification's kind
    seed: int

    @property
    def title(self) -> str:
        """The run in messages."""
        return f"{self.task.label} / {self.scheme} / seed {self.seed}"

    @cached_property
    def flags(self) -> dict:
        """All flags of fairseq-train but those that name folders."""
        return self.task.flags(self.scheme_flags, self.seed)

    @property
    def never_warm(self) -> bool:
        """Whether its training ends before it reaches its learning rate."""
        return 0 < int(self.flags.get("max-update") or 0) <= int(self.flags.get("warmup-updates") or 0)

    @cached_property
    def settings(self) -> dict:
        """All that was chosen, as JSON; what a training reads is represented by its hash, not by its place."""
        flags = {name: str(counted(name, value)) for name, value in self.flags.items()}
        generate = {name: str(value) for name, value in self.task.generate.items()}
        return as_json({"task": self.task.options(), "train": flags, "generate": generate})

    def name(self, code: str) -> str:
        """Return the name of the run's folder and result, `TASK/SCHEME-seedN-KEY`, for a version of the code."""
        key = key_of([self.settings, self.task.data_key, code, self.seed])
        return f"{self.task.label}/{self.scheme}-seed{self.seed}-{key}"

    def folder(self, work: Path, code: str) -> Path:
        """Return the folder of the run's checkpoints, logs and outputs."""
        return work / "runs" / self.name(code)

    def finish(self, work: Path, store: ResultStore, code: str, threads: int = 1, keep: bool = False) -> None:
        """Train, score and keep the result; what an earlier process has done is not repeated.

        Args:
            work: folder of data and runs.
            store: keeps the result.
            code: version of the code.
            threads: threads to compute with.
            keep: whether the checkpoints stay.

        Raises:
            UserError: what the run reads is not what names it.
        """
        if replace(self).settings != self.settings or self.task.has_changed():
            raise UserError(f"what {self.title} reads has changed since this command began: start it again")
        folder = self.folder(work, code)
        workspace = Workspace(self.task, self.task.data_folder(work), folder, threads, self.seed)
        data, checkpoints = workspace.data / "bin", workspace.checkpoints
        # The folder is the run's own, by its hash: what a kill has left there, fairseq's or ours, is gone on with.
        training = partial(train, workspace, self.flags)
        stages = [Stage("train", training, [data], [checkpoints], keeps=True, counted=Training)]
        for name in self.task.sets():
            file = folder / "scores" / f"{name}.json"
            score = partial(self._score, name, workspace, file)
            stages.append(Stage(f"score-{name}", score, [checkpoints], [file], keeps=True, counted=ScoredSet))
        made = run_stages(stages, folder)
        store.write(
            self.name(code),
            {
                "scheme": self.scheme,
                "task": self.task.label,
                "seed": self.seed,
                "code": code,
                "settings": self.settings,
                "settings_key": key_of(self.settings),
                "data": workspace.manifest()["sha256"],
                "inputs": self.task.inputs_key,
                "versions": versions(),
                "processor": processor_in_use(),
                "unit": self.task.unit,
                **made["train"],
                "sets": {name: made[f"score-{name}"] for name in self.task.sets()},
            },
        )
        if not keep:
            for place in self.task.checkpoints(workspace):
                remove(place)

    def _score(self, name: str, workspace: Workspace, file: Path) -> dict:
        """Score a test set; return the scores and every example's statistics, which `file` keeps too."""
        start = time.monotonic()
        scored = packed_scores(self.task.score(name, workspace))
        scored["seconds"] = round(time.monotonic() - start, 1)
        write_json(file, scored, renews=True)
        return scored


def processor_in_use() -> str:
    """Return the processor that trains here, with torch's set of instructions."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{processor.name()}, {torch.backends.cpu.get_cpu_capability()}"


def runs_of(spec: Spec) -> list[Run]:
    """Return all runs, seed by seed, so that an interrupted comparison has whole pairs."""
    return [
        Run(label, flags, task, seed)
        for seed in spec.seeds
        for task in spec.tasks.values()
        for label, flags in spec.schemes.items()
    ]


def packed_scores(scored: Scored) -> dict:
    """Return scores as JSON: the value of each metric, and every example's length and statistics."""
    metrics = scored.statistics.items()
    repeated = scored.inputs is not None and len(set(scored.inputs.tolist())) < len(scored.inputs)
    return {
        "values": {name: float(METRICS[name].value(rows.sum(0))) for name, rows in metrics},
        **scored.notes,
        "lengths": pack(scored.lengths),
        **({"inputs": pack(scored.inputs)} if repeated else {}),
        "statistics": {name: pack(rows) for name, rows in metrics},
    }
