"""Translations as systems write them."""

import re
from pathlib import Path

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.lines import read_lines

HYPOTHESIS = re.compile(r"([DH])-(\d+)\t[^\t]*\t(.*)")
SHOWN = 10  # numbers of sentences that an error lists


def read_system(path: Path, sentences: int) -> list[str]:
    """Read one translation for every sentence of the test set, in its order.

    Args:
        path: Lines `D-NUMBER<tab>score<tab>text` (or `H-`) among others, as fairseq-generate prints
            them in any order, or one plain translation a line.
        sentences: How many there must be.

    Raises:
        PreparationError: Sentences are missing, repeated, or more than there are.
    """
    generated: dict[str, dict[int, list[str]]] = {"D": {}, "H": {}}
    plain = []
    for line in read_lines(path):
        match = HYPOTHESIS.fullmatch(line)
        if match:
            kind, number, text = match.groups()
            generated[kind].setdefault(int(number), []).append(text)
        plain.append(line)
    found = generated["D"] or generated["H"]
    if not found:
        if len(plain) != sentences:
            raise PreparationError(
                f"{path} has {len(plain):,} lines, the reference has {sentences:,}: "
                "every sentence needs exactly one translation"
            )
        return plain
    check_complete(path, found, sentences)
    return [found[number][0] for number in range(sentences)]


def check_complete(path: Path, found: dict[int, list[str]], sentences: int) -> None:
    """Check that every sentence is translated once.

    Raises:
        PreparationError: The message lists the sentences' numbers and what may be the cause.
    """
    problems = (
        ("repeated", [n for n, texts in found.items() if len(texts) > 1], "two runs in one file, or --nbest above 1?"),
        ("unknown", [n for n in found if n >= sentences], "another test set's output?"),
        (
            "missing",
            [n for n in range(sentences) if n not in found],
            "was the run cut off, or skipped it long ones (--skip-invalid-size-inputs-valid-test)?",
        ),
    )
    for problem, numbers, cause in problems:
        if numbers:
            listed = ", ".join(map(str, sorted(numbers)[:SHOWN]))
            more = ", ..." if len(numbers) > SHOWN else ""
            raise PreparationError(
                f"{path}: of {sentences:,} sentences {len(numbers):,} are {problem} ({listed}{more}): {cause}"
            )
