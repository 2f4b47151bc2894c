"""What benchmarks refuse: one line that names flag, value and the way out; nothing is measured."""

from __future__ import annotations

import re

import pytest

from helpers.shell import Shell, told

REFUSED = {
    "attention --lengths 12,x": "--lengths must be whole numbers",
    "attention --lengths 0": "--lengths must be >= 1",
    "attention --modes train,slow": "--modes must be of train, forward, decode, memory, got slow",
    "attention --backends auto,fast": "of auto, sdpa, blocked, native, triton, got fast",
    "attention --heads 0": "--heads must be >= 1, got 0",
    "attention --schemes m5": "unknown position scheme 'm5'",
    "attention --resume": "add --csv FILE",
    "attention --layer --modes decode": "leave decode out of --modes",
    "attention --plot rows.txt": "--plot must end in .png",
    "attention --lengths 8 --csv no/rows.csv": "there is no folder",
    "models --lengths 12,x": "--lengths must be whole numbers separated by commas, got 12,x",
    "models --parts layer": "--parts must be of translation, layers, got layer",
    "models --parts layers --modes generate": "--parts layers has the modes train",
    "models --schemes m5": "unknown position scheme 'm5'",
    "models --batch-size 0": "--batch-size must be >= 1, got 0",
    "models --width 20 --heads 3": "--width 20 must be a multiple of --heads 3",
    "models --peers keras": "--peers must be of fairseq, transformers",
    "models --backends fast": "--backends must be of auto, reference, sdpa, blocked, native",
    "models --resume": "--resume continues a file: add --csv FILE",
    "models --dropout 1": "--dropout must be in [0, 1), got 1.0",
    "costs --lengths a": "--lengths must be whole numbers separated by commas, got a",
    "costs --layers 13": "--layers must be <= 12 with --size base, got 13",
    "costs --batch-size 0": "--batch-size must be >= 1, got 0",
    "costs --vocab-size 3": "--vocab-size must be >= 8, got 3",
    "costs --schemes learned,m7": "unknown position scheme 'm7'",
    "sampling x.pt --tokens 1": "--tokens must be >= 2, got 1",
}


@pytest.mark.parametrize(("line", "said"), REFUSED.items())
def test_a_wrong_line_of_a_benchmark(line: str, said: str, shell: Shell) -> None:
    assert re.search(told(said), shell.refused(f"benchmark {line}"))
