"""GLUE's tasks as their files lay them out, and how each is scored.

Source: GLUE (Wang et al. 2018, gluebenchmark.com) and XNLI (Conneau et al. 2018). The metric that
comes first is the one by which checkpoints and learning rates are chosen, and which the papers'
tables print: F1 for MRPC and QQP, Spearman's correlation for STS-B, Matthews' for CoLA, else
accuracy (Huang et al. 2020, section 4.2; the M4M paper, Table 2).
"""

from __future__ import annotations

from dataclasses import dataclass, field

NLI = ("contradiction", "entailment", "neutral")


@dataclass(frozen=True)
class Columns:
    """Where a file says what."""

    first: str  # column of the first sentence: its name in the header
    second: str = ""  # column of the second sentence; empty: there is none
    label: str = "label"  # column of the label
    count: int = 0  # number of columns where there is no header; the others are then numbers ("3")
    quoted: bool = False  # whether columns may be quoted as in CSV; else quotes are letters


@dataclass(frozen=True)
class Task:
    """One task."""

    name: str  # its folder's name
    columns: Columns  # the columns of train and dev
    metrics: tuple[str, ...] = ("accuracy",)  # names of what is reported, the deciding one first
    labels: tuple[str, ...] = ("0", "1")  # the classes in their order; empty: a number is predicted
    test_columns: Columns | None = None  # the columns of test, where they differ; it has no labels
    # fairseq's name of a split to the file's name without ending
    splits: dict[str, str] = field(default_factory=lambda: {"train": "train", "valid": "dev", "test": "test"})

    @property
    def regression(self) -> bool:
        """Whether a number is predicted."""
        return not self.labels

    @property
    def classes(self) -> int:
        """Outputs of the head."""
        return len(self.labels) or 1

    @property
    def pairs(self) -> bool:
        """Whether an example has two sentences."""
        return bool(self.columns.second)

    @property
    def valid_splits(self) -> list[str]:
        """The splits on which it is evaluated: two of MNLI (matched, mismatched), else one."""
        return [split for split in self.splits if split.startswith("valid")]


_MATCHED = {
    "train": "train",
    "valid": "dev_matched",
    "valid1": "dev_mismatched",
    "test": "test_matched",
    "test1": "test_mismatched",
    "test2": "diagnostic",  # GLUE's diagnostic set, which lies in a folder of its own
}

GLUE = {
    task.name: task
    for task in (
        Task("CoLA", Columns("3", label="1", count=4), ("mcc",), test_columns=Columns("sentence")),
        Task("MNLI", Columns("sentence1", "sentence2", "gold_label"), labels=NLI, splits=_MATCHED),
        Task("MRPC", Columns("#1 String", "#2 String", "Quality"), ("f1", "accuracy")),
        Task("QNLI", Columns("question", "sentence"), labels=("entailment", "not_entailment")),
        Task("QQP", Columns("question1", "question2", "is_duplicate"), ("f1", "accuracy")),
        Task("RTE", Columns("sentence1", "sentence2"), labels=("entailment", "not_entailment")),
        Task("SST-2", Columns("sentence")),
        Task("STS-B", Columns("sentence1", "sentence2", "score"), ("spearman", "pearson"), labels=()),
        Task("WNLI", Columns("sentence1", "sentence2")),
    )
}
XNLI = Task("XNLI", Columns("sentence1", "sentence2", "gold_label"), labels=NLI)
TASKS = GLUE | {"XNLI": XNLI}


def chosen_tasks(names: str) -> list[Task]:
    """The tasks of a comma-separated list, each once, in its order; an unknown one is refused."""
    folded = {name.replace("-", "").lower(): task for name, task in TASKS.items()}
    tasks = {}
    for name in filter(None, (name.strip() for name in names.split(","))):
        task = folded.get(name.replace("-", "").lower())
        if task is None:
            raise ValueError(f"there is no GLUE task {name!r}; choose from {', '.join(TASKS)}")
        tasks[task.name] = task
    if not tasks:
        raise ValueError(f"no task was named in {names!r}; choose from {', '.join(TASKS)}")
    return list(tasks.values())
