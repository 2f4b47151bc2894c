"""The quickstart: a comparison of one seed, its table and files; no real training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from sacrebleu.metrics import BLEU

from helpers.results import measured
from relpos_fairseq.cli.quickstart import Quickstart
from relpos_fairseq.lab.comparison import quickstart
from relpos_fairseq.lab.comparison.run import packed_scores
from relpos_fairseq.lab.comparison.scores import of_translations
from relpos_fairseq.lab.comparison.tasks.base import Scored

LINES = ["ein Haus steht hier", "zwei Hunde sehen uns"]


@pytest.fixture
def text(tmp_path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for split in ("train", "valid", "test"):
        for language in ("en", "de"):
            (folder / f"{split}.{language}").write_text("\n".join(LINES) + "\n")
    return folder


def test_the_table_and_files(tmp_path, text, monkeypatch, capsys):
    """Two schemes, one of which failed: the other's row, samples, exit status 1."""

    def make_runs(comparison) -> int:
        run = comparison.runs[0]
        assert run.flags["max-update"] == run.flags["total-num-update"] == 4
        assert run.flags["stop-time-hours"] == 0.5 and run.seed == 3
        assert run.task.languages == ("en", "de") and comparison.keep_models
        for name in ("raw/test.en", "raw/test.de"):
            path = run.task.data_folder(comparison.work) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(LINES) + "\n")
        folder = comparison.folder(run)
        folder.mkdir(parents=True)
        (folder / "test.txt").write_text("\n".join(LINES[::-1]) + "\n")
        statistics = of_translations(LINES, LINES, BLEU(force=True))
        scored = packed_scores(Scored(np.array([4, 4]), statistics, {"tokens_per_second": 7.5}))
        own = {"scheme": "m4", "task": run.task.label, "seed": 3, "code": comparison.code, "settings": run.settings}
        validated = [{"updates": 2 * n, "valid_loss": 4.0 - n, "valid_ppl": 2.0 ** (4 - n)} for n in (1, 2)]
        more = {"validations": validated, "sets": {"test": scored | {"seconds": 1.0}}, "seconds": 2.0}
        comparison.store.write(run.name(comparison.code), measured(**own, **more))
        return 1

    monkeypatch.setattr(quickstart.Comparison, "run", make_runs)
    monkeypatch.setattr(quickstart, "run_tool", lambda command, *_: Path(command[-1]).mkdir())
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    (out / "data").mkdir(parents=True)
    drawn = []
    monkeypatch.setattr(quickstart, "draw", lambda run, comparison: drawn.append(run.scheme))
    given = Quickstart(out=out, max_update=4, minutes=30.0, seed=3, threads=1, from_dir=text)
    assert quickstart.quickstart(["m4", "t5"], given) == 1
    said = capsys.readouterr().out
    assert "| m4 " in said and "translation  zwei Hunde sehen uns" in said and drawn == ["m4"]
    names = ("scheme", "BLEU test", "valid ppl", "parameters", "train tok/s", "generate tok/s", "seconds")
    expected = dict(zip(names, ("m4", 100.0, 4.0, 1234, 100, 8, 3), strict=True))
    assert json.loads((out / "results.json").read_text())[0] == expected
    assert (out / "results.csv").read_text().splitlines()[1].startswith("m4,100.00,4.00,1234")


@pytest.mark.parametrize("flag", ["--max-update", "--minutes", "--threads"])
def test_choices_are_checked(flag, tmp_path, shell):
    assert f"{flag} must be above 0, got 0" in shell.refused(f"quickstart --out out {flag} 0")
    assert not (tmp_path / "out").exists()


def test_wrong_text_is_named(tmp_path, text):
    """Whatever is missing or does not fit, in one line, before anything is made."""

    def message() -> str:
        with pytest.raises(ValueError) as found:
            quickstart.comparison_of(["m4"], Quickstart(out=tmp_path / "out", max_update=1, from_dir=text)).missing()
        return str(found.value)

    (text / "test.de").unlink()
    assert f"missing in {text} (plain or .gz): test.de" in message()
    (text / "train.de").unlink()
    (text / "valid.de").unlink()
    assert "must give two languages, found: en" in message()
