"""Define the papers' own experiment as a task: masked pre-training, then fine-tuning of the same checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import sha256_of
from relpos_fairseq.io.indexed import read_indexed
from relpos_fairseq.io.processes import key_of
from relpos_fairseq.io.stages import Stage, run_stages
from relpos_fairseq.lab.comparison.tasks.base import Scored, Task, Workspace, check_label, counted, kind
from relpos_fairseq.lab.comparison.tasks.glue import MODEL_FLAG, FineTuning
from relpos_fairseq.lab.comparison.tasks.registry import make_tasks
from relpos_fairseq.lab.comparison.training_run import Training, train

HELD_OUT = "held-out"
MASKS = 1  # the seed of the masks that are scored, the same for every run
BATCH = 64  # examples that are scored at once


@kind("mlm")
@dataclass(frozen=True, kw_only=True)
class MaskedLM(Task):
    """A RoBERTa that is pre-trained on a folder of `relpos prepare mlm`, and fine-tuned on other tasks.

    The validation text is the test: the last checkpoint counts, so nothing is chosen by it.
    """

    default: ClassVar[dict] = {
        "task": "masked_lm",
        "arch": "relpos_roberta_tiny",
        "criterion": "masked_lm",
        "mask-whole-words": True,
        "sample-break-mode": "eos",  # the folder has packed blocks
        "max-tokens": False,
        "batch-size": 32,
        "adam-eps": "1e-6",
        "weight-decay": 0.01,
    }

    data: Path  # the folder of `relpos prepare mlm`
    tokens: int = 64  # of a block, as in `relpos prepare mlm --tokens-per-sample`
    finetune: dict = field(default_factory=dict)  # tasks of kinds `glue` and `questions` by label

    def __post_init__(self) -> None:
        made = {}
        for label, options in self.finetune.items():
            check_label(str(label))
            if not isinstance(options, Mapping):
                raise ValueError(f"finetune: {label} must be a mapping, got {options!r}")
            own = make_tasks(str(label), dict(options), {"train": {}, "generate": {}})
            if [*own] != [str(label)]:
                raise ValueError(f"finetune: {label} is a grid of {len(own)}: give one lr and one number of epochs")
            made |= own
            if not isinstance(made[str(label)], FineTuning):
                raise ValueError(f"finetune: {label} must be a task of fine-tuning, got kind {made[str(label)].kind}")
        object.__setattr__(self, "finetune", made)
        names = [HELD_OUT, *(name for label in made for name in self.names(label))]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"finetune: two test sets would be called {', '.join(twice)}: choose other labels")

    def names(self, label: str) -> dict[str, str]:
        """Return the test sets of a fine-tuning task by the names that they have here."""
        sets = self.finetune[label].sets()
        return {label if len(sets) == 1 else f"{label} {name}": name for name in sets}

    def tests(self) -> dict[str, tuple[str, str]]:
        """Return the label of the fine-tuning task and its test set, by the name of each further test set."""
        return {name: (label, own) for label in self.finetune for name, own in self.names(label).items()}

    def sets(self) -> tuple[str, ...]:
        return HELD_OUT, *self.tests()

    def code(self) -> set[Path]:
        return super().code().union(*(task.code() for task in self.finetune.values()))

    def inputs(self) -> list[Path]:
        return [self.binary(), *(path for task in self.finetune.values() for path in task.inputs())]

    def options(self) -> dict:
        """Return what the data depend on, with options and flags of what is fine-tuned."""
        then = {
            label: {"kind": task.kind}
            | {part.name: value for part in fields(task) if not isinstance(value := getattr(task, part.name), Path)}
            | {"train": {name: counted(name, value) for name, value in task.train.items()}}
            for label, task in self.finetune.items()
        }
        return {"kind": self.kind, "tokens": self.tokens, "finetune": then}

    def binary(self) -> Path:
        """Return the folder that fairseq-train reads."""
        for folder in (self.data / "data-bin", self.data):
            if (folder / "valid.idx").is_file():
                return folder
            if (folder / "shard0").is_dir():
                raise UserError(f"{folder} is in shards, which this task does not read: make it with --shards 1")
        raise UserError(f"{self.data} has no valid.idx: make it with relpos prepare mlm")

    def make(self, folder: Path) -> None:
        binary = self.binary()
        longest = 1 + max(int(read_indexed(binary / split).sizes.max()) for split in ("train", "valid"))  # with <s>
        if longest > self.tokens:
            raise UserError(f"{binary} has blocks of {longest} tokens: write tokens: {longest}, got {self.tokens}")
        (folder / "bin").symlink_to(binary.absolute(), target_is_directory=True)
        for label, task in self.finetune.items():
            if sha256_of(task.dictionary()) != sha256_of(binary / "dict.txt"):
                raise UserError(
                    f"{label}: {task.folder()} was made with another tokenizer than {binary}: make it with "
                    f"--tokenizer-folder {binary}"
                )
            (folder / "finetune" / label).mkdir(parents=True)
            task.make(folder / "finetune" / label)

    def hash_data(self, folder: Path) -> str:
        hashes = [sha256_of(place / "bin") for place in (folder / "finetune" / label for label in self.finetune)]
        return key_of([sha256_of(folder / "bin"), *hashes])

    def flags(self, scheme: dict, seed: int) -> dict:
        """Return fairseq-train's flags."""
        return {"tokens-per-sample": self.tokens} | super().flags(scheme, seed)

    def score(self, name: str, workspace: Workspace) -> Scored:
        """Score the pre-trained model on the masks of the held-out text, or fine-tune it and score that."""
        if name == HELD_OUT:
            rows = workspace.computed(HELD_OUT, lambda: nats(workspace))
            return Scored(rows[:, 2].astype(int), {"perplexity": rows[:, :2]})
        label, own = self.tests()[name]
        task: FineTuning = self.finetune[label]
        place = Path("finetune") / label
        inner = Workspace(task, workspace.data / place, workspace.folder / place, workspace.threads, workspace.seed)
        flags = task.flags({MODEL_FLAG: str(workspace.model)}, workspace.seed)
        work, read = partial(train, inner, flags), [workspace.model]
        stage = Stage("train", work, read, [inner.checkpoints], keeps=True, counted=Training)
        trained = run_stages([stage], inner.folder)["train"]
        scored = task.score(own, inner)
        scored.notes |= {name: trained[name] for name in ("validations", "processor_seconds")}
        return scored

    def checkpoints(self, workspace: Workspace) -> list[Path]:
        return [*super().checkpoints(workspace), *(workspace.folder / "finetune").glob("*/checkpoints")]


def nats(workspace: Workspace) -> np.ndarray:
    """Return the nats of the masked tokens, their number and all tokens of each held-out block that has some: (N, 3).

    The masks are the same for every model: they are drawn by `MASKS` and not by the seed of the training.
    """
    import torch
    from fairseq.utils import move_to_cuda

    model, task = workspace.load()
    task.cfg.seed = MASKS
    task.load_dataset("valid")
    dataset = task.datasets["valid"]
    dataset.set_epoch(1)
    pad, rows = task.source_dictionary.pad(), []
    for start in range(0, len(dataset), BATCH):
        batch = dataset.collater([dataset[index] for index in range(start, min(start + BATCH, len(dataset)))])
        if next(model.parameters()).is_cuda:
            batch = move_to_cuda(batch)
        target, masked = batch["target"], batch["target"].ne(pad)
        with torch.no_grad():
            logits = model(**batch["net_input"], masked_tokens=masked)[0]
        losses = torch.zeros_like(target, dtype=torch.double)
        losses[masked] = torch.nn.functional.cross_entropy(logits.double(), target[masked], reduction="none")
        columns = losses.sum(1), masked.sum(1), batch["net_input"]["src_lengths"]
        rows.append(torch.stack([column.double().cpu() for column in columns], 1))
    found = torch.cat(rows).numpy()
    return found[found[:, 1] > 0]  # short blocks may have no masked token
