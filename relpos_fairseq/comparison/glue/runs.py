"""One fine-tuning by fairseq-train, and what it logged."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from relpos_fairseq.comparison.glue.pretrained import Pretrained
from relpos_fairseq.comparison.glue.protocols import BATCH_SIZE, WARMUP, Result, updates_of
from relpos_fairseq.engine.errors import PreparationError, ToolError
from relpos_fairseq.engine.files import read_json, write_json
from relpos_fairseq.engine.stages import Stage, run_stages
from relpos_fairseq.engine.tools import USER_DIR, find_tool, key_of, run_tool
from relpos_fairseq.preparation.glue.tasks import Task

VALID_LINE = re.compile(r"\bINFO \| (valid\d*) \| (\{.*\})\s*$")
REPORT = {
    "mcc": "--report-mcc",
    "f1": "--report-acc-and-f1",
    "spearman": "--report-pearson-and-spearman",
}


@dataclass(frozen=True)
class Shared:
    """What all runs have in common.

    Attributes:
        data: folder of prepare_glue.py.
        out: where runs go.
        checkpoint: `last` or `best`, as the protocol has it.
        interval: updates between checkpoints beside the ends of epochs; 0: none.
        max_update: an upper limit of a run's updates; 0: none.
        keep: whether to keep the model that counts.
        threads: threads of a run.
        more: further flags of fairseq-train.
    """

    data: Path
    out: Path
    checkpoint: str
    interval: int = 0
    max_update: int = 0
    keep: bool = False
    threads: int = 1
    more: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finetuning:
    """A model on a task with a learning rate, a number of epochs and a seed."""

    model: Pretrained
    task: Task
    learning_rate: float
    epochs: int
    seed: int

    def arguments(self, shared: Shared) -> list[str]:
        """Return the command line of fairseq-train, without --save-dir.

        Raises:
            PreparationError: the data have longer examples than the model has positions.
        """
        data = shared.data / self.task.name
        known = read_json(data / "task.json")
        if known is None:
            raise PreparationError(
                f"{data} was not made by prepare_glue.py: run it for {self.task.name}"
            )
        longest = max(known["max_length"], self.model.positions)
        if longest > self.model.positions and not self.model.any_length:
            raise PreparationError(
                f"{self.task.name} has examples of {known['max_length']} tokens, {self.model.name} "
                f"takes {self.model.positions}: prepare_glue.py --max-length {self.model.positions}"
            )
        updates = updates_of(known["train"], self.epochs)
        if shared.max_update:
            updates = min(updates, shared.max_update)
        metric = self.task.metrics[0]
        return [
            str(data), "--user-dir", str(USER_DIR), "--task", "sentence_prediction",
            "--finetune-from-model", str(self.model.path), *self.model.flags,
            "--max-positions", str(longest),
            "--num-classes", str(self.task.classes),
            "--init-token", str(known["init_token"]),
            "--separator-token", str(known["separator_token"]),
            "--criterion", "sentence_prediction_glue",
            *(["--regression-target"] if self.task.regression else []),
            *([REPORT[metric]] if metric in REPORT else []),
            "--best-checkpoint-metric", metric, "--maximize-best-checkpoint-metric",
            "--valid-subset", ",".join(self.task.valid_splits),
            "--batch-size", str(BATCH_SIZE), "--required-batch-size-multiple", "1",
            "--optimizer", "relpos_adam", "--adam-betas", "(0.9, 0.999)", "--adam-eps", "1e-6",
            "--weight-decay", "0.01", "--clip-norm", "1.0",
            "--lr", f"{self.learning_rate:g}", "--lr-scheduler", "polynomial_decay",
            "--warmup-updates", str(round(WARMUP * updates)), "--total-num-update", str(updates),
            "--max-update", str(updates), "--max-epoch", str(self.epochs),
            "--seed", str(self.seed), "--update-epoch-batch-itr", "True",
            "--no-epoch-checkpoints", "--log-format", "json", "--log-interval", "50",
            *self._interval(shared), *shared.more,
        ]  # fmt: skip

    def _interval(self, shared: Shared) -> list[str]:
        if not shared.interval:
            return []
        every = str(shared.interval)
        return ["--validate-interval-updates", every, "--save-interval-updates", every,
                "--keep-interval-updates", "1"]  # fmt: skip

    def folder(self, shared: Shared, key: str) -> Path:
        """Return where it goes; other settings have other folders."""
        name = f"lr{self.learning_rate:g}-epochs{self.epochs}-seed{self.seed}-{key}"
        return shared.out / self.model.name / self.task.name / name

    def inputs(self, shared: Shared) -> tuple[Path, Path]:
        """Return the checkpoint and the folder of the data."""
        return self.model.path, shared.data / self.task.name

    def finish(self, shared: Shared, contents: list[str]) -> Result:
        """Train, or read what a finished run left; an interrupted one goes on.

        Args:
            shared: what all runs have in common.
            contents: hashes of its inputs.

        Raises:
            ToolError: fairseq-train failed; the message names its log.
        """
        arguments = self.arguments(shared)
        neutral = [part for part in arguments if part not in (str(self.model.path), str(USER_DIR))]
        key = key_of([neutral[1:], contents, shared.checkpoint])
        folder = self.folder(shared, key)
        result = folder / "result.json"

        def train() -> dict:
            self._train(arguments, folder, shared)
            found = {"validations": read_validations(folder / "train.log", self.task)}
            write_json(result, found)
            return found

        found = run_stages([Stage("train", train, [], [result])], folder)["train"]
        self._tidy(folder, shared)
        return Result(self.learning_rate, self.epochs, self.seed, tuple(found["validations"]))

    def _train(self, arguments: list[str], folder: Path, shared: Shared) -> None:
        save = ["--save-dir", str(folder / "checkpoints")]
        try:
            command = [find_tool("fairseq-train"), *arguments, *save]
            run_tool(command, folder / "train.log", shared.threads)
        except ToolError as error:
            raise ToolError(f"{self.model.name} on {self.task.name}: {error}") from None

    def _tidy(self, folder: Path, shared: Shared) -> None:
        """Keep the model that counts, or none."""
        checkpoints = folder / "checkpoints"
        if not checkpoints.is_dir():
            return
        counted = checkpoints / f"checkpoint_{shared.checkpoint}.pt"
        if shared.keep and counted.exists():
            counted.replace(folder / "model.pt")
        for path in checkpoints.iterdir():
            path.unlink()
        checkpoints.rmdir()


def read_validations(log: Path, task: Task) -> list[dict[str, float]]:
    """Return the metrics of every validation in a log, by number of updates.

    A run that went on after an interruption may have validated a place twice: the later counts.

    Args:
        log: of fairseq-train with --log-format json.
        task: the task.

    Returns:
        Metric to value, `updates` among them; a second validation set's begin with `valid1_`.

    Raises:
        PreparationError: a metric is missing, or there was no validation.
    """
    found: dict[int, dict[str, float]] = {}
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        match = VALID_LINE.search(line)
        if match is None:
            continue
        split, values = match[1], json.loads(match[2])
        updates = int(values[f"{split}_num_updates"])
        place = found.setdefault(updates, {"updates": updates})
        for metric in task.metrics:
            value = values.get(f"{split}_{metric}")
            if value is None:
                raise PreparationError(f"{log} has no {split}_{metric}: {sorted(values)}")
            place[metric if split == "valid" else f"{split}_{metric}"] = float(value)
    if not found:
        raise PreparationError(f"fairseq-train ended without a validation; see {log}")
    return [found[updates] for updates in sorted(found)]
