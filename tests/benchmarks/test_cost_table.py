"""The papers' cost tables: their numbers by their formulas, ours from the real model."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from relpos_fairseq.benchmarks import published, scheme_table, timing
from relpos_fairseq.benchmarks.columns import Rows
from relpos_fairseq.benchmarks.masked_lm import masked_lm, parameters
from relpos_fairseq.benchmarks.report import Log
from relpos_fairseq.cli import cost_table
from relpos_fairseq.engine.command import run_command

BERT_BASE = published.Sizes(12, 768, 12, 512)
FEW = ["--rounds", "1", "--threads", str(torch.get_num_threads()), "--layers", "1"]
FEW += ["--lengths", "8", "--batch", "1", "--vocabulary", "20"]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "wait_until_idle", lambda *_: False)


def test_formulas_give_what_the_papers_print() -> None:
    """003's table 5 in thousands; 000's text evaluates its formulas without the head's width."""
    for scheme, printed in published.MULTIPLICATIVE_PRINTED.items():
        formula = published.MULTIPLICATIVE_TABLE_5[scheme]
        assert formula(BERT_BASE) // 1000 == printed, scheme
    vectors = published.HUANG_TABLE_1["m4"](BERT_BASE)
    assert vectors // BERT_BASE.head_dim // 1000 == 147
    assert published.HUANG_TABLE_1["m2"](BERT_BASE) // 1000 == 147
    assert published.HUANG_TABLE_1["m1"](BERT_BASE) == 73_728


def test_a_small_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """`learned` in its units, ratios below; the papers' cells; what was timed is said."""
    monkeypatch.setattr(cost_table, "BERT_WORDS", 50)
    monkeypatch.setattr(cost_table, "TOGETHER", 2)
    page = tmp_path / "page.md"
    flags = ["--model", "small", "--schemes", "none,learned,shaw,tupe,rel_scalar", *FEW]
    flags += ["--backends", "auto,blocked"]
    flags += ["--csv", str(tmp_path / "rows.csv"), "--write", str(page)]
    assert run_command(cost_table.main, flags) == 0
    text = page.read_text()
    assert text.strip().splitlines()[1] in capsys.readouterr().out
    assert "**1 of 4 layers** and 20 words" in text and "unclipped" in text and "nan" not in text
    (learned,) = [line for line in text.splitlines() if line.startswith("| `learned`")]
    assert learned.startswith("| `learned` | 262,144 | 262K | 262K | ")
    assert " ms ±" in learned and " MiB |" in learned
    assert text.count("| `tupe` |") == 2 and text.count("| `learned` |") == 1
    assert "| `tupe, blocked` | 167,940 | - | 151K | " in text
    assert "| `shaw` | +24%, " in text and "| `rel_scalar` | +0%, +0% | +0%, +0% |" in text
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert sum(row["name"] == "learned" and row["column"] == "train 8" for row in rows) == 1
    assert all(float(row["ratio"]) > 0 for row in rows if row["ratio"])


def test_without_rel_scalar_nothing_is_compared_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """004's table needs its own baseline; `learned` is timed even where it is not listed."""
    monkeypatch.setattr(cost_table, "BERT_WORDS", 50)
    args = cost_table.parse(["--model", "small", "--schemes", "m2", "--clip", "4", *FEW])
    rows = Rows(Log(None), "here")
    cost_table.count_parameters(args, rows)
    cost_table.measure(args, rows)
    text = cost_table.report(args, rows.found, cost_table.describe(args, "machine"))
    assert "beyond `rel_scalar`" not in text and "clip 4" in text
    # 4 layers, 2 * 4 + 1 distances; 000: 8 heads, 003: one scalar for all heads
    assert "| `m2` | 36 | 32K | 4K | " in text


def test_counts_of_the_whole_model() -> None:
    """The model's parameters beyond `none`'s are what the table of schemes says."""
    what = cost_table.setting(cost_table.parse(["--layers", "0", "--vocabulary", "20"]), 512)
    without = parameters(masked_lm("none", what))
    for scheme in ("tupe", "m1"):
        added = parameters(masked_lm(scheme, what)) - without
        assert added == scheme_table.parameters(scheme), scheme


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lengths", "a"], "--lengths must be whole numbers separated by commas, got a"),
        (["--layers", "13"], "--layers must be <= 12 with --model base, got 13"),
        (["--batch", "0"], "--batch must be >= 1, got 0"),
        (["--vocabulary", "3"], "--vocabulary must be >= 8, got 3"),
        (["--schemes", "learned,m7"], "unknown position scheme 'm7'"),
    ],
)
def test_bad_flags(flags: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    """One line that names flag, value and the way out, and status 2."""
    assert run_command(cost_table.main, flags) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ") and message in line
