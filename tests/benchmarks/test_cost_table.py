"""What schemes add to BERT: parameters counted from the real model, times, memory, rows that fit."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from helpers.commands import relpos
from relpos_fairseq import scheme_table
from relpos_fairseq.lab.benchmarks import costs, measurement
from relpos_fairseq.lab.benchmarks.whole_models import MaskedLMSetting, count_parameters, masked_lm

FEW = ["--rounds", "1", "--threads", str(torch.get_num_threads()), "--layers", "1"]
FEW += ["--lengths", "8", "--batch-size", "1", "--vocab-size", "20"]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "wait_until_idle", lambda *_: False)


@pytest.mark.slow
def test_a_small_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """`learned` in its units, ratios below; what was timed is said."""
    monkeypatch.setattr(costs, "BERT_WORDS", 50)
    monkeypatch.setattr(costs, "TOGETHER", 2)
    page = tmp_path / "page.md"
    flags = ["--size", "small", "--schemes", "none,learned,shaw,tupe,rel_scalar", *FEW]
    flags += ["--backends", "auto,blocked", "--fit", "1"]
    flags += ["--csv", str(tmp_path / "rows.csv"), "--write", str(page)]
    assert relpos("benchmark", "costs", *flags) == 0
    text = page.read_text()
    assert text.strip().splitlines()[1] in capsys.readouterr().out
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


def test_the_baseline_is_always_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """`learned` is timed even where it is not listed; other schemes are relative to it."""
    monkeypatch.setattr(costs, "BERT_WORDS", 50)
    path = tmp_path / "rows.csv"
    flags = ["--size", "small", "--schemes", "m2", "--position-clip-distance", "4", "--csv", str(path), *FEW]
    assert relpos("benchmark", "costs", *flags) == 0
    text = capsys.readouterr().out
    assert "clip 4" in text and "| `m2` | 36 | " in text  # 4 layers, 2 * 4 + 1 distances
    assert [row["name"] for row in measurement.read_csv(path) if row["column"] == "train 8"] == ["learned", "m2"]


def test_counts_of_the_whole_model() -> None:
    """The model's parameters beyond `none`'s are what the table of schemes says."""
    cpu = torch.device("cpu")
    what = MaskedLMSetting("base", 0, 20, 512, None, 1, 512, 0.0, torch.float32, cpu)
    without = count_parameters(masked_lm("none", what))
    for scheme in ("tupe", "m1"):
        added = count_parameters(masked_lm(scheme, what)) - without
        assert added == scheme_table.parameters(scheme), scheme


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lengths", "a"], "--lengths must be whole numbers separated by commas, got a"),
        (["--layers", "13"], "--layers must be <= 12 with --size base, got 13"),
        (["--batch-size", "0"], "--batch-size must be >= 1, got 0"),
        (["--vocab-size", "3"], "--vocab-size must be >= 8, got 3"),
        (["--schemes", "learned,m7"], "unknown position scheme 'm7'"),
    ],
)
def test_bad_flags(flags: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    """One line that names flag, value and the way out, and status 2."""
    assert relpos("benchmark", "costs", *flags) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ") and message in line


def test_rows_that_fit_are_found_by_search() -> None:
    def needed(rows: int) -> float:
        if rows > 40:
            raise torch.OutOfMemoryError("out of memory")
        return 3.0 * rows

    assert [costs.most_rows(needed, limit) for limit in (2, 3, 60, 61, 1000)] == [0, 1, 20, 20, 40]
    assert [costs.most_rows(needed, 3 * rows) for rows in range(41)] == list(range(41))
    assert costs.most_rows(lambda rows: 0.0, 1, most=8) == 8
