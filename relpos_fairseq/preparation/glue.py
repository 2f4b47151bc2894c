"""Prepare GLUE and XNLI as fairseq's sentence_prediction reads them: input0, input1, label.

An input's item is its ids and </s>; the task puts <s> (--init-token 0) before the first and a separator
(--separator-token 2) before the second: `<s> A </s> </s> B </s>`. A class is one symbol of label/dict.txt, in the
task's order; a number is a line of label/SPLIT.label.  input0 has the tokenizer as well.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import atomic_folder, copy_file, open_text_out, write_json
from relpos_fairseq.io.processes import ordered_map
from relpos_fairseq.io.progress import table
from relpos_fairseq.io.stages import Stage
from relpos_fairseq.preparation.binarise import write_indexed
from relpos_fairseq.preparation.glue_tasks import (
    GLUE,
    Example,
    GlueTask,
    TableFile,
    chosen_tasks,
    read_examples,
    sources_of,
)
from relpos_fairseq.preparation.pipeline import Preparation, Report, TextLines
from relpos_fairseq.preparation.settings import PAIR_EXTRA, SINGLE_EXTRA, GlueOptions
from relpos_fairseq.text.assets import TokenizerText, Vocabulary, tokenizer_files
from relpos_fairseq.text.dictionary import BOS, EOS, NSPECIAL, UNK, write_dictionary
from relpos_fairseq.text.dictionary import FILE as DICTIONARY

CHUNK = 512  # rows that a worker is given at a time
COLUMNS = ("rows", "dropped", "blank", "tokens", "unknown", "longest", "shortened")


def write_task(task: GlueTask, args: GlueOptions, vocabulary: Vocabulary) -> dict[str, int]:
    """Write all splits of a task; the folder appears whole or not at all.

    Args:
        task: the task.
        args: say where its files are, where they go, and how rows are read.
        vocabulary: of the model.

    Returns:
        Numbers of rows, tokens, and so on, by split.
    """
    counts = Counter()
    with atomic_folder(args.out / task.name) as temporary:
        for split, source in sources_of(task, args.glue).items():
            found = _write_split(task, split, source, temporary, vocabulary, args)
            counts.update({f"{split}_{name}": value for name, value in found.items()})
        for path in tokenizer_files(vocabulary.folder):  # with its dictionary
            copy_file(path, temporary / "input0" / path.name)
        if task.pairs:
            copy_file(vocabulary.folder / DICTIONARY, temporary / "input1" / DICTIONARY)
        if not task.regression:
            labels = ((label, 1) for label in task.labels)
            write_dictionary(temporary / "label" / DICTIONARY, labels)
        longest = max(value for name, value in counts.items() if name.endswith("_longest"))
        write_json(
            temporary / "task.json",
            {
                "task": task.name,
                "max_length": longest,
                "init_token": BOS,
                "separator_token": EOS,
                "train": counts["train_rows"],
                "vocabulary": vocabulary.size,
            },
        )
    return dict(counts)


def _write_split(
    task: GlueTask, split: str, source: TableFile, folder: Path, vocabulary: Vocabulary, args: GlueOptions
) -> Counter:
    """Write a split of a task into its folder; return its counts."""
    counts = Counter()
    # GLUE's server numbers the rows of a test set: none may be left out.
    on_bad_row = args.on_bad_row if source.columns.label else "fail"
    examples = list(read_examples(source, task, on_bad_row, counts))
    if not examples:
        raise UserError(f"{source.path} has no rows for split {split} of {task.name}")
    pairs = list(_encode(examples, vocabulary, args, counts))
    for number in range(2 if task.pairs else 1):
        prefix = folder / f"input{number}" / split
        prefix.parent.mkdir(parents=True, exist_ok=True)
        write_indexed(prefix, (pair[number] for pair in pairs), vocabulary.size)
    if source.columns.label:
        _write_labels(task, split, examples, folder)
    lengths = [sum(map(len, pair)) + (2 if task.pairs else 1) for pair in pairs]
    counts["longest"] = max(lengths)
    counts["tokens"] = sum(lengths)
    counts["unknown"] = sum(int((part == UNK).sum()) for pair in pairs for part in pair)
    return counts


def _write_labels(task: GlueTask, split: str, examples: list[Example], folder: Path) -> None:
    """Write a split's labels: numbers as text, classes as ids."""
    path = folder / "label"
    path.mkdir(exist_ok=True)
    if task.regression:
        with open_text_out(path / f"{split}.label") as file:
            file.writelines(f"{float(example.label)}\n" for example in examples)
        return
    numbers = {label: NSPECIAL + number for number, label in enumerate(task.labels)}
    items = ([numbers[example.label], EOS] for example in examples)
    write_indexed(path / split, items, NSPECIAL + len(numbers))


def _encode(
    examples: list[Example], vocabulary: Vocabulary, args: GlueOptions, counts: Counter
) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield the ids of the one or two sentences of every example, each with </s>."""

    def encode(chunk: list[Example]) -> tuple[list[tuple[np.ndarray, ...]], int]:
        firsts = vocabulary.encode([example.first for example in chunk])
        if not chunk[0].second:
            parts = [(first,) for first in firsts]
        else:
            seconds = vocabulary.encode([example.second for example in chunk])
            parts = list(zip(firsts, seconds, strict=True))
        cut = [shorten(pair, args.max_length) for pair in parts]
        shortened = sum(sum(map(len, new)) < sum(map(len, old)) for new, old in zip(cut, parts, strict=True))
        return [tuple(np.append(part, EOS) for part in pair) for pair in cut], shortened

    chunks = (examples[at : at + CHUNK] for at in range(0, len(examples), CHUNK))
    for pairs, shortened in ordered_map(encode, chunks, args.workers):
        counts["shortened"] += shortened
        yield from pairs


def shorten(parts: tuple[np.ndarray, ...], max_length: int) -> tuple[np.ndarray, ...]:
    """Take ids off the end of the longer of one or two parts until all fit, as BERT does.

    `max_length` counts the special tokens, which are not in the parts; 0: no limit.
    """
    if not max_length:
        return parts
    if len(parts) == 1:
        return (parts[0][: max_length - SINGLE_EXTRA],)
    room = max_length - PAIR_EXTRA
    first, second = map(len, parts)
    over = max(0, first + second - room)
    # The longer part falls to the shorter's length first; then both in turn, the second first.
    gap = min(over, abs(first - second))
    both = over - gap
    off_first = (gap if first > second else 0) + both // 2
    return parts[0][: first - off_first], parts[1][: second - (over - off_first)]


class GluePreparation(Preparation):
    """GLUE's and XNLI's files to data-bins for sentence_prediction."""

    def __init__(self, args: GlueOptions) -> None:
        super().__init__(args.out)
        self.args = args
        self.tasks = tasks_of(args)
        self.paths = {
            task.name: sorted({source.path for source in sources_of(task, args.glue).values()}) for task in self.tasks
        }

    def stages(self) -> list[Stage]:
        args, vocabulary = self.args, Vocabulary(self.args.tokenizer_folder)
        options = {"max_length": args.max_length, "on_bad_row": args.on_bad_row}
        stages = []
        for task in self.tasks:
            run = partial(write_task, task, args, vocabulary)
            read = [*self.paths[task.name], *tokenizer_files(args.tokenizer_folder)]
            stages.append(Stage(task.name, run, read, [self.out / task.name], options))
        return stages

    def report(self, counts: dict[str, Mapping]) -> list[Report]:
        rows = []
        for task in self.tasks:
            found = counts[task.name]
            for split in [name.removesuffix("_rows") for name in found if name.endswith("_rows")]:
                labels = {label: found.get(f"{split}_label {label}", 0) for label in task.labels}
                said = ", ".join(f"{label}: {number:,}" for label, number in labels.items() if any(labels.values()))
                rows.append((task.name, split, *(found.get(f"{split}_{name}", 0) for name in COLUMNS), said))
        return [
            Report(
                {f"{name}/{path.name}": path for name, paths in self.paths.items() for path in paths},
                [self.out / task.name for task in self.tasks],
                [table(rows, ("task", "split", *COLUMNS, "labels"))],
                counts,
                unknown={f"{row[0]} {row[1]}": (row[6], row[5]) for row in rows},
                texts=self.text_lines(),
            )
        ]

    def text_lines(self) -> dict[str, TextLines]:
        """Return the first sentences of every task's training examples."""
        args, text = self.args, TokenizerText(self.args.tokenizer_folder)
        found = {}
        for task in self.tasks:
            examples = read_examples(sources_of(task, args.glue)["train"], task, args.on_bad_row, Counter())
            found[task.name] = TextLines(text, (example.first for example in examples))
        return found


def tasks_of(args: GlueOptions) -> list[GlueTask]:
    """Return the tasks that are asked for: GLUE's that are whole, where none is named."""
    if args.tasks:
        return chosen_tasks(args.tasks)
    there, tasks = [task for task in GLUE.values() if (args.glue / task.name).is_dir()], []
    if not there:
        raise UserError(f"{args.glue} has none of the folders {', '.join(GLUE)}")
    for task in there:
        try:
            sources_of(task, args.glue)
            tasks.append(task)
        except UserError as error:
            print(f"warning: {task.name} is left out: {error}", file=sys.stderr)
    if not tasks:
        raise UserError(f"{args.glue}: no task is complete (see the warnings)")
    return tasks


def write_sentences(tasks: list[GlueTask], root: Path, path: Path, on_bad_row: str) -> None:
    """Write the training sentences of some tasks, without their labels."""
    rows = []
    with open_text_out(path) as file:
        for task in tasks:
            counts = Counter()
            source = sources_of(task, root)["train"]
            for example in read_examples(source, task, on_bad_row, counts):
                lines = filter(None, (example.first, example.second))
                file.write("".join(f"{line}\n" for line in lines) + "\n")
            rows.append((task.name, counts["rows"], counts["dropped"], counts["blank"]))
    print(table(rows, ("task", "rows", "dropped", "blank")))
