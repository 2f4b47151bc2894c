"""`relpos finetune xtreme`: English training, every language, one table; nothing twice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.commands import call, relpos_job
from helpers.glue_data import write_xnli
from helpers.questions import make_data, make_file
from helpers.roberta import ARCH, MASKED_LM, OPTIMIZE
from relpos_fairseq.lab.comparison.choices import choose
from relpos_fairseq.lab.comparison.protocols import PROTOCOLS
from relpos_fairseq.lab.comparison.run import Run
from relpos_fairseq.lab.comparison.tasks import glue
from relpos_fairseq.lab.comparison.tasks.glue import MODEL_FLAG, count_windows

SHORT = ["--seeds", "1", "2", "--max-update", "3", "--train-flags=--num-workers 0"]
SHORT += ["--squad-flags=--tokens-per-sample 64 --doc-stride 16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Data of all kinds in the vocabulary of a masked language model of two updates."""
    folder = tmp_path_factory.mktemp("xtreme")
    squad = make_data(folder / "squad")
    (folder / "questions").mkdir()
    for number, name in enumerate(("xquad.en", "xquad.de", "test-context-de-question-de", "tydiqa.ar.dev")):
        make_file(folder / "questions" / f"{name}.json", 2, number)
    tokenizer = folder / "tokenizer"
    shutil.copytree(squad, tokenizer, ignore=shutil.ignore_patterns("train.json", "valid.json"))
    raw = write_xnli(folder / "raw", "xtreme")
    given = ("--tokenizer-folder", tokenizer, "--workers", "1")
    relpos_job("prepare", "glue", raw, "--tasks", "XNLI", "--out", folder / "glue", *given)
    text = folder / "text.txt"
    text.write_text("".join(f"The red cat is in Paris {n} today.\n" for n in range(40)))
    lengths = ("--tokens-per-sample", "64")
    cut = ("--hold-out", "0.2", "--documents", "line", *given, *lengths)
    relpos_job("prepare", "mlm", "--train", text, "--out", folder / "mlm", *cut)
    more = ("--max-update", "2", "--position-scheme", "rel_scalar", *lengths, "--save-dir", folder)
    call("train", folder / "mlm" / "data-bin", *ARCH, *MASKED_LM, *OPTIMIZE, *more)
    return folder


def arguments(folder: Path, out: Path, *more: str) -> list:
    asked = [part for name in ("xquad", "mlqa", "tydiqa") for part in (f"--{name}", folder / "questions")]
    given = ["--xnli", folder / "glue" / "XNLI", "--squad", folder / "squad", *asked]
    return [f"mine={folder / 'checkpoint_last.pt'}", "--out", out, *given, *SHORT, *more]


def test_the_protocol_is_the_papers():
    """Chen2021, section 4.2 and Table 7."""
    found = PROTOCOLS["xtreme"]
    assert found.learning_rates == (1e-5, 2e-5, 3e-5, 4e-5) and found.epochs == (3,)
    assert len(found.seeds) == 5 and found.checkpoint == "last"


def test_trials_are_of_the_chosen_settings(tmp_path):
    """One a seed, in their order, whatever else was run."""
    made = []
    for rate, seed in ((1e-5, 2), (1e-5, 1), (2e-5, 1)):
        run = Run("m", {}, glue.Questions(label="SQuAD", data=tmp_path, lr=rate, epochs=3), seed)
        made.append((run, {"validations": [{"valid_f1": 60.0 - 1e6 * rate}]}))
    assert [(run.task.lr, run.seed) for run in choose(made).runs] == [(1e-5, 1), (1e-5, 2)]


@pytest.mark.parametrize("file", ("dict.txt", "tokenizer.json", "train.json", "valid.json"))
def test_data_of_questions_count_by_all_that_training_reads(file, tmp_path):
    """The same questions under another tokenizer are other data; those of other languages, beside them, are not."""

    def key() -> str:
        return glue.Questions(label="SQuAD", data=tmp_path).data_key

    for name in ("dict.txt", "tokenizer.json", "train.json", "valid.json"):
        (tmp_path / name).write_text("{}")
    first = key()
    (tmp_path / "xquad.de.json").write_text("{}")
    assert key() == first
    (tmp_path / file).write_text("{ }")
    assert key() != first


def test_windows_are_counted_as_training_cuts_them(tmp_path):
    """So that the learning rate falls to 0 at the end of the last epoch and not before."""
    folder = make_data(tmp_path / "squad")
    known = json.loads((folder / "train.json").read_text())
    asked = known["data"][0]["paragraphs"][0]["qas"]
    asked.append({**asked[0], "id": "long", "question": "why " * 100})
    (folder / "train.json").write_text(json.dumps(known))

    def count(**cut: object) -> int:
        flags = {name.replace("_", "-"): value for name, value in cut.items()}
        return count_windows(folder, (("tokens-per-sample", 512), *flags.items()))

    longer = count(on_long_question="truncate")
    assert count(on_long_question="drop") == longer - 1
    assert count(on_long_question="drop", max_query_length="400") == longer
    with pytest.raises(ValueError, match="'long' .* choose --on-long-question truncate or drop"):
        count(on_long_question="fail")


def test_updates_follow_the_flags_of_training(tmp_path, monkeypatch):
    counted = []
    monkeypatch.setattr(glue, "count_windows", lambda data, cut: counted.append(dict(cut)) or 100)
    model = SimpleNamespace(positions=64, flags={})
    monkeypatch.setattr(glue, "read_once", lambda path: model)
    train = {"on-long-question": "drop", "max-query-length": "32"}
    task = glue.Questions(label="SQuAD", train=train, data=tmp_path, lr=1e-3, epochs=1)
    task.flags({MODEL_FLAG: "model.pt"}, 1)
    assert counted == [train | {"tokens-per-sample": 64, "doc-stride": 128}]


@pytest.mark.slow
def test_one_command_from_english_to_the_table(folder, tmp_path, shell):
    """Two learning rates of two trials each; again, nothing is done anew."""
    out = tmp_path / "out"
    given = arguments(folder, out, "--lr", "1e-3", "1e-5")
    assert "8 runs, 8 to do" in shell("finetune xtreme", *given)
    found = json.loads((out / "medians.json").read_text())["mine"]
    assert set(found) == {"XNLI", "XQuAD", "MLQA", "TyDiQA-GoldP"}
    trials = json.loads((out / "evaluated" / "mine" / "xtreme.json").read_text())
    assert set(trials) == {f"{name}-trial{number}" for name in found for number in (1, 2)}
    both = [trials[f"XNLI-trial{number}"] for number in (1, 2)]
    means = [sum(one.values()) / len(one) for one in both]
    assert found["XNLI"] == pytest.approx(sum(means) / 2)  # the median of two
    row = next(line for line in (out / "medians.md").read_text().splitlines() if "| mine" in line)
    numbers = [found.pop("XNLI"), *(one for both in found.values() for one in both)]
    assert f"{sum(numbers) / 7:.2f}" in row
    before = (out / "medians.md").read_bytes()
    said = shell("finetune xtreme", *given)
    assert "8 runs, 0 to do" in said and said.count("unchanged") == 8
    assert (out / "medians.md").read_bytes() == before


@pytest.mark.parametrize(
    ("more", "said"),
    {
        "": "nothing to fine-tune on: give --xnli or --squad",
        "--squad .": "--squad belongs together with one of --xquad",
        "--xquad .": "--squad belongs together with one of --xquad",
        "--xnli nowhere": "--xnli nowhere does not exist: give a folder",
        "--xnli .": "--xnli .: give the folder XNLI itself",
        "--xnli . --lr 0": "--lr must be above 0, got 0.0",
        "--squad . --xquad .": "m: there is no checkpoint nothing.pt",
    }.items(),
)
def test_wrong_commands_are_one_line(more, said, shell):
    assert said in shell.refused(f"finetune xtreme m=nothing.pt --out out {more}")
