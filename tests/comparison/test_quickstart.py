"""A scheme's stages in the quickstart: done once, continued when interrupted; no real training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relpos_fairseq.comparison.quickstart import run
from relpos_fairseq.comparison.quickstart.compare import cells, write_results
from relpos_fairseq.comparison.quickstart.corpus import Corpus
from relpos_fairseq.comparison.quickstart.run import Choices, SchemeRun

VALID = '| INFO | valid | {"valid_loss": "2.0", "valid_ppl": "4.0"}\n'
TRAIN = '| INFO | train_inner | {"wps": "100", "num_updates": "1", "ppl": "5"}\n'


@pytest.fixture
def corpus(tmp_path) -> Corpus:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "dict.txt").write_text("a 1\n")
    for language in ("en", "de"):
        (tmp_path / f"test.{language}").write_text("ein Haus steht hier\nzwei Hunde sehen uns\n")
    tests = {"test": (tmp_path / "test.en", tmp_path / "test.de")}
    return Corpus(tmp_path / "bin", "en", "de", tests, subwords=False, key="k")


@pytest.fixture
def ran(monkeypatch) -> list[str]:
    """The commands that ran: each leaves what fairseq's would."""
    names: list[str] = []

    def run_tool(command, log, threads, on_line=None):
        name = "plot" if "plot" in command else Path(command[0]).name
        names.append(name)
        given = dict(zip(command, command[1:], strict=False))
        if name == "fairseq-train":
            folder = Path(given["--save-dir"])
            folder.mkdir(exist_ok=True)
            (folder / "checkpoint_last.pt").write_text(str(len(names)))
            with log.open("a") as file:
                file.write(f"num. shared model params: 1,234\n{TRAIN}{VALID}")
            (folder / "checkpoint_best.pt").write_text("best")
        elif name == "plot":
            Path(given["--out"]).mkdir()
        else:
            log.write_text("D-1\t-0.1\tzwei Hunde sehen uns\nD-0\t-0.1\tein Haus steht dort\n"
                           "Translated 2 sentences, 7.5 tokens/s)\n")  # fmt: skip

    monkeypatch.setattr(run, "run_tool", run_tool)
    monkeypatch.setattr(run, "find_tool", lambda name: name)
    return names


def test_stages_are_done_once(tmp_path, corpus, ran, capsys):
    one = SchemeRun("m4", corpus, Choices(tmp_path / "out", 4, None, 1, 1))
    row = one.finish()
    assert ran == ["fairseq-train", "fairseq-generate", "plot"]
    assert (row["parameters"], row["valid_ppl"], row["train_tokens_per_second"]) == (1234, 4, 100)
    assert 0 < row["test"]["bleu"] < 100 and row["test"]["tokens_per_second"] == 7.5
    assert (one.folder / "test.de").read_text() == "ein Haus steht dort\nzwei Hunde sehen uns\n"
    assert one.finish() == row and len(ran) == 3
    assert capsys.readouterr().out.count("unchanged") == 3
    (one.folder / "test.de").unlink()
    one.finish()
    assert ran[3:] == ["fairseq-generate"]
    write_results(tmp_path, [row])
    assert json.loads((tmp_path / "results.json").read_text())[0]["scheme"] == "m4"
    assert (tmp_path / "results.csv").read_text().splitlines()[1].split(",")[:2] == [
        "m4",
        f"{row['test']['bleu']:.2f}",
    ]
    assert cells([row])[0][:3] == ["scheme", "BLEU test", "valid ppl"]


def test_an_interrupted_training_continues(tmp_path, corpus, ran):
    """Its log goes on, too; other settings begin in another folder."""
    choices = Choices(tmp_path / "out", 4, None, 1, 1)
    one, tool = SchemeRun("m4", corpus, choices), run.run_tool

    def interrupted(*arguments):
        tool(*arguments)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "run_tool", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.finish()
    one.finish()
    assert ran == ["fairseq-train", "fairseq-train", "fairseq-generate", "plot"]
    assert (one.folder / "train.log").read_text().count("wps") == 2
    assert len((one.folder / "train.seconds").read_text().splitlines()) == 2
    other = SchemeRun("m4", corpus, Choices(tmp_path / "out", 5, None, 1, 1))
    assert other.folder != one.folder


def test_choices_are_checked(tmp_path):
    with pytest.raises(ValueError, match="--max-update must be above 0, got 0"):
        Choices(tmp_path, 0, None, 1, 1)
