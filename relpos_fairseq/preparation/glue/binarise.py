"""Writes a task as fairseq's sentence_prediction reads it: input0, input1, label.

An input's item is its ids and </s>; the task puts <s> (--init-token 0) before the first and a
separator (--separator-token 2) before the second: `<s> A </s> </s> B </s>`. A class is one symbol
of label/dict.txt, in the task's order; a number is a line of label/SPLIT.label.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from relpos_fairseq.data.dictionary import BOS, EOS, NSPECIAL, UNK, write_dictionary
from relpos_fairseq.data.dictionary import FILE as DICTIONARY
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import atomic_folder, copy_file, open_text_out, write_json
from relpos_fairseq.engine.pool import ordered_map
from relpos_fairseq.preparation.binarise import write_indexed
from relpos_fairseq.preparation.glue.layout import sources_of
from relpos_fairseq.preparation.glue.reading import Example, TableFile, read_examples
from relpos_fairseq.preparation.glue.settings import PAIR_EXTRA, SINGLE_EXTRA
from relpos_fairseq.preparation.glue.tasks import Task
from relpos_fairseq.preparation.mlm.vocabulary import Vocabulary

CHUNK = 512  # rows that a worker is given at a time


def write_task(task: Task, root: Path, folder: Path, vocabulary: Vocabulary, options: dict) -> dict[str, int]:
    """Write all splits of a task; the folder appears whole or not at all.

    Args:
        task: the task.
        root: the folder that has the task's folder.
        folder: where to write.
        vocabulary: of the model.
        options: `max_length`, `on_bad_row`, `workers`.

    Returns:
        Numbers of rows, tokens, and so on, by split.
    """
    counts = Counter()
    with atomic_folder(folder) as temporary:
        for split, source in sources_of(task, root).items():
            found = _write_split(task, split, source, temporary, vocabulary, options)
            counts.update({f"{split}_{name}": value for name, value in found.items()})
        for part in ("input0", "input1") if task.pairs else ("input0",):
            copy_file(vocabulary.folder / DICTIONARY, temporary / part / DICTIONARY)
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
    task: Task, split: str, source: TableFile, folder: Path, vocabulary: Vocabulary, options: dict
) -> Counter:
    counts = Counter()
    # GLUE's server numbers the rows of a test set: none may be left out.
    on_bad_row = options["on_bad_row"] if source.columns.label else "fail"
    examples = list(read_examples(source, task, on_bad_row, counts))
    if not examples:
        raise PreparationError(f"{source.path} has no rows for split {split} of {task.name}")
    pairs = list(_encode(examples, vocabulary, options["max_length"], options["workers"], counts))
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


def _write_labels(task: Task, split: str, examples: list[Example], folder: Path) -> None:
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
    examples: list[Example], vocabulary: Vocabulary, max_length: int, workers: int, counts: Counter
) -> Iterator[tuple[np.ndarray, ...]]:
    """Ids of the one or two sentences of every example, each with </s>."""

    def encode(chunk: list[Example]) -> tuple[list[tuple[np.ndarray, ...]], int]:
        firsts = vocabulary.encode([example.first for example in chunk])
        if not chunk[0].second:
            parts = [(first,) for first in firsts]
        else:
            seconds = vocabulary.encode([example.second for example in chunk])
            parts = list(zip(firsts, seconds, strict=True))
        cut = [shorten(pair, max_length) for pair in parts]
        shortened = sum(sum(map(len, new)) < sum(map(len, old)) for new, old in zip(cut, parts, strict=True))
        return [tuple(np.append(part, EOS) for part in pair) for pair in cut], shortened

    for pairs, shortened in ordered_map(encode, _chunks(examples), workers):
        counts["shortened"] += shortened
        yield from pairs


def shorten(parts: tuple[np.ndarray, ...], max_length: int) -> tuple[np.ndarray, ...]:
    """Take ids off the end of the longer of one or two parts until all fit, as BERT does.

    `max_length` counts special tokens, which the parts have not; 0: as long as it is.
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


def _chunks(examples: Iterable[Example]) -> Iterator[list[Example]]:
    rows = iter(examples)
    while chunk := list(islice(rows, CHUNK)):
        yield chunk
