"""The benchmark holds schemes against fp64 before it times them, and reports what it measured."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import benchmark_attention as benchmark  # noqa: E402
from _benchmark import report, timing  # noqa: E402

TINY = ["--heads", "2", "--head-dim", "8", "--clip", "3", "--rounds", "2", "--seconds", "1"]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "wait_until_idle", lambda *_: False)


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Every mode gives a cell; the table goes where it is asked to, once."""
    threads, path = torch.get_num_threads(), tmp_path / "README.md"
    path.write_text("# Numbers\n")
    for _ in range(2):
        command = [*TINY, "--lengths", "20", "--tokens", "40", "--schemes", "none,m4,tupe"]
        command += ["--modes", "train,forward,decode,memory", "--naive"]
        command += ["--csv", str(tmp_path / "rows.csv"), "--write", str(path)]
        assert benchmark.main([*command, "--threads", str(threads)]) == 0
    out, text = capsys.readouterr().out, path.read_text()
    assert "3 schemes right against fp64" in out and "not idle" in out
    assert text.startswith("# Numbers\n") and text.count("| `m4` |") == 1
    assert "`m4, naive`" in text and " MiB" in text and "nan" not in text
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert {row["mode"] for row in rows} == {"train", "forward", "decode", "memory"}
    assert all(float(row["ms"]) > 0 for row in rows if row["mode"] != "memory")


def test_a_wrong_backend_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What errs is refused by name, before any time is printed."""
    honest = benchmark.attend

    def wrong(inputs, backend):
        out, probs = honest(inputs, backend)
        return (out if backend == "reference" else out * 1.01), probs

    monkeypatch.setattr(benchmark, "attend", wrong)
    with pytest.raises(ValueError, match="m4: .* times the error"):
        benchmark.main([*TINY, "--lengths", "20", "--schemes", "m4"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lengths", "12,x"], "--lengths must be whole numbers"),
        (["--modes", "train,slow"], "--modes must be of"),
        (["--heads", "0"], "--heads must be >= 1, got 0"),
        (["--schemes", "m5"], "unknown position scheme 'm5'"),
    ],
)
def test_bad_flags(flags: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    """One line that names flag, value and the way out."""
    with pytest.raises(SystemExit):
        benchmark.main(flags)
    assert message in capsys.readouterr().err


def test_spread_and_sections(tmp_path: Path) -> None:
    """Quartiles relative to the median; a section is replaced, its neighbours are kept."""
    times = timing.Times([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (times.median, times.least) == (3.0, 1.0)
    assert times.spread == pytest.approx((4.5 - 1.5) / 2 / 3)
    path = tmp_path / "page.md"
    report.write_section(path, "one", "first")
    report.write_section(path, "two", "second")
    report.write_section(path, "one", "third")
    text = path.read_text()
    assert "first" not in text and text.index("third") < text.index("second")
