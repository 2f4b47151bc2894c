"""The papers' cost tables: their numbers by their formulas, ours from the real model."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from helpers.commands import relpos
from relpos_fairseq import scheme_table
from relpos_fairseq.benchmarks import costs, measurement, published
from relpos_fairseq.benchmarks import costs as fitting
from relpos_fairseq.benchmarks.masked_lm import MaskedLMSetting, count_parameters, masked_lm

BERT_BASE = published.ModelSizes(12, 768, 12, 512)
# What 003 prints for BERT-base at 512 tokens, in thousands.
PRINTED = {"learned": 393, "shaw_keys": 785, "t5": 12, "m2": 12, "m4": 785, "deberta": 834}
PRINTED |= {"tupe": 454, "m4m": 785}
FEW = ["--rounds", "1", "--threads", str(torch.get_num_threads()), "--layers", "1"]
FEW += ["--lengths", "8", "--batch", "1", "--vocabulary", "20"]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "wait_until_idle", lambda *_: False)


def test_formulas_give_what_the_papers_print() -> None:
    """003's table 5 in thousands; 000's text evaluates its formulas without the head's width."""
    huang, multiplicative = published.PARAMETERS.values()
    found = {scheme: BERT_BASE.count(formula) // 1000 for scheme, formula in multiplicative.items()}
    assert found == PRINTED
    assert BERT_BASE.count(huang["m4"]) // 64 // 1000 == 147
    assert BERT_BASE.count(huang["m2"]) // 1000 == 147
    assert BERT_BASE.count(huang["m1"]) == 73_728


@pytest.mark.slow
def test_a_small_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """`learned` in its units, ratios below; the papers' cells; what was timed is said."""
    monkeypatch.setattr(costs, "BERT_WORDS", 50)
    monkeypatch.setattr(costs, "TOGETHER", 2)
    page = tmp_path / "page.md"
    flags = ["--model", "small", "--schemes", "none,learned,shaw,tupe,rel_scalar", *FEW]
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
    assert learned.startswith("| `learned` | 262,144 | 262K | 262K | ")
    assert " ms ±" in learned and " MiB |" in learned
    assert text.count("| `tupe` |") == 2 and text.count("| `learned` |") == 1
    assert "| `tupe, blocked` | 167,940 | - | 151K | " in text
    assert "| `shaw` | +24%, " in text and "| `rel_scalar` | +0%, +0% | +0%, +0% |" in text
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert sum(row["name"] == "learned" and row["column"] == "train 8" for row in rows) == 1
    assert all(float(row["ratio"]) > 0 for row in rows if row["ratio"])


def test_without_rel_scalar_nothing_is_compared_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """004's table needs its own baseline; `learned` is timed even where it is not listed."""
    monkeypatch.setattr(costs, "BERT_WORDS", 50)
    flags = ["--model", "small", "--schemes", "m2", "--clip", "4", *FEW]
    assert relpos("benchmark", "costs", *flags) == 0
    text = capsys.readouterr().out
    assert "beyond `rel_scalar`" not in text and "clip 4" in text
    # 4 layers, 2 * 4 + 1 distances; 000: 8 heads, 003: one scalar for all heads
    assert "| `m2` | 36 | 32K | 4K | " in text


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
        (["--layers", "13"], "--layers must be <= 12 with --model base, got 13"),
        (["--batch", "0"], "--batch must be >= 1, got 0"),
        (["--vocabulary", "3"], "--vocabulary must be >= 8, got 3"),
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

    assert [fitting.most_rows(needed, limit) for limit in (2, 3, 60, 61, 1000)] == [0, 1, 20, 20, 40]
    assert [fitting.most_rows(needed, 3 * rows) for rows in range(41)] == list(range(41))
    assert fitting.most_rows(lambda rows: 0.0, 1, most=8) == 8
