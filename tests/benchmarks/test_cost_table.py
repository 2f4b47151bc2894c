"""What schemes add to BERT: parameters counted from the real model, times, memory, rows that fit."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from helpers.shell import Shell
from relpos_fairseq import scheme_table
from relpos_fairseq.lab.benchmarks import costs, measurement
from relpos_fairseq.lab.benchmarks.whole_models import MaskedLMSetting, count_parameters, masked_lm

FEW = (
    f"--size small --rounds 1 --threads {torch.get_num_threads()} --layers 1 --lengths 8 --batch-size 1 --vocab-size 20"
)


@pytest.mark.slow
def test_a_small_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell) -> None:
    """`learned` in its units, ratios below; what was timed is said."""
    monkeypatch.setattr(costs, "BERT_WORDS", 50)
    monkeypatch.setattr(costs, "TOGETHER", 2)
    schemes = "--schemes none,learned,shaw,tupe,rel_scalar --backends auto,blocked --fit 1"
    said = shell(f"benchmark costs {FEW} {schemes} --csv rows.csv --write page.md")
    text = (tmp_path / "page.md").read_text()
    assert text.strip().splitlines()[1] in said
    assert "**1 of 4 layers** and 20 words" in text and "unclipped" in text and "nan" not in text
    text, _, steps = text.partition("steps/s, train 8")
    assert steps.startswith(" (beside `none`)") and steps.count("(+0%) |") >= 1
    assert "rows in 1 MiB, 8" in text  # whose weights alone are more
    (learned,) = [line for line in text.splitlines() if line.startswith("| `learned`")]
    assert learned.startswith("| `learned` | 262,144 | ")
    assert " ms ±" in learned and " MiB |" in learned
    assert text.count("| `tupe` |") == 1 and text.count("| `learned` |") == 1
    assert "| `tupe, blocked` | 167,940 | " in text
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert sum(row["name"] == "learned" and row["column"] == "train 8" for row in rows) == 1
    assert all(float(row["ratio"]) > 0 for row in rows if row["ratio"])


def test_the_baseline_is_always_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell) -> None:
    """`learned` is timed even where it is not listed; other schemes are relative to it."""
    monkeypatch.setattr(costs, "BERT_WORDS", 50)
    text = shell(f"benchmark costs {FEW} --schemes m2 --position-clip-distance 4 --csv rows.csv")
    assert "clip 4" in text and "| `m2` | 36 | " in text  # 4 layers, 2 * 4 + 1 distances
    assert [row["name"] for row in measurement.read_csv(tmp_path / "rows.csv") if row["column"] == "train 8"] == [
        "learned",
        "m2",
    ]


def test_counts_of_the_whole_model() -> None:
    """The model's parameters beyond `none`'s are what the table of schemes says."""
    cpu = torch.device("cpu")
    what = MaskedLMSetting("base", 0, 20, 512, None, 1, 512, 0.0, torch.float32, cpu)
    without = count_parameters(masked_lm("none", what))
    for scheme in ("tupe", "m1"):
        added = count_parameters(masked_lm(scheme, what)) - without
        assert added == scheme_table.parameters(scheme), scheme


def test_rows_that_fit_are_found_by_search() -> None:
    def needed(rows: int) -> float:
        if rows > 40:
            raise torch.OutOfMemoryError("out of memory")
        return 3.0 * rows

    assert [costs.most_rows(needed, limit) for limit in (2, 3, 60, 61, 1000)] == [0, 1, 20, 20, 40]
    assert [costs.most_rows(needed, 3 * rows) for rows in range(41)] == list(range(41))
    assert costs.most_rows(lambda rows: 0.0, 1, most=8) == 8
