"""finetune_glue.py: protocols, results, resuming, the table; pre-trained models as flags."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import statistics
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import ROOT
from helpers.commands import call, relpos, relpos_job
from helpers.glue_data import write_glue, write_tokenizer
from helpers.recipes import composed
from helpers.roberta import ARCH, MASKED_LM, OPTIMIZE
from relpos_fairseq.comparison.glue import runs
from relpos_fairseq.comparison.glue.pretrained import Pretrained, read_pretrained, takes_any_length
from relpos_fairseq.comparison.glue.protocols import PROTOCOLS, Result, summarise, updates_of
from relpos_fairseq.comparison.glue.runs import Finetuning, Shared
from relpos_fairseq.comparison.glue.tables import cell
from relpos_fairseq.engine.errors import ToolError
from relpos_fairseq.preparation.glue.tasks import GLUE, TASKS


@pytest.fixture(scope="module")
def glue(tmp_path_factory) -> Path:
    """Prepared data of every task."""
    folder = tmp_path_factory.mktemp("glue")
    raw, tokenizer = write_glue(folder / "raw", train=40), write_tokenizer(folder / "tokenizer")
    relpos_job(
        "prepare",
        "glue",
        *[str(raw), "--tokenizer", str(tokenizer), "--out", str(folder / "bin"), "--workers", "1"],
    )
    return folder


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory, glue) -> Path:
    """A masked language model of two updates, with the options that a checkpoint must carry."""
    folder = tmp_path_factory.mktemp("pretrained")
    relpos_job("prepare", "glue", *[str(glue / "raw"), "--text", str(folder / "text")])
    relpos_job("prepare", "mlm", *
        [*("--out", str(folder), "--train", str(folder / "text"), "--hold-out", "0.2"),
         *("--tokenizer-folder", str(glue / "tokenizer"), "--tokens-per-sample", "32"),
         *("--workers", "1")]
    )  # fmt: skip
    call(
        *("train", str(folder / "data-bin"), *ARCH, *MASKED_LM, *OPTIMIZE, "--max-update", "2"),
        *("--sample-break-mode", "eos", "--tokens-per-sample", "32", "--save-dir", str(folder)),
        *("--position-scheme", "learned+m4m", "--position-clip-distance", "3"),
        *("--encoder-normalize-before", "--dropout", "0.25"),
    )
    return folder / "checkpoint_last.pt"


def in_process(command: list[str], log: Path, threads: int, on_line=None) -> None:
    """Instead of run_tool: the same command in this process."""
    assert Path(command[0]).name == "fairseq-train"
    with log.open("a") as file:
        file.write(call("train", *command[1:]))


def arguments(glue: Path, out: Path, models: list[str], *more: str) -> list[str]:
    flags = ["--out", str(out), "--train-flags", "--num-workers 0 --cpu", *more]
    return [str(glue / "bin"), *models, *flags]


def result(values: list[float], rate: float = 1e-5, epochs: int = 3, seed: int = 1) -> Result:
    return Result(rate, epochs, seed, tuple({"mcc": value} for value in values))


def test_protocols_are_the_papers():
    huang, chen = PROTOCOLS["huang"], PROTOCOLS["chen"]
    assert (huang.learning_rates, huang.epochs, len(huang.seeds)) == ((2e-5, 3e-5, 4e-5), (3,), 1)
    assert chen.learning_rates == (1e-5, 2e-5, 3e-5, 4e-5)
    assert (chen.epochs, len(chen.seeds), chen.checkpoint) == ((5, 10), 5, "best")
    assert updates_of(2490, 3) == 78 * 3


CONFIGS = ROOT / "examples" / "roberta" / "config"
EXAMPLES = {"CoLA": 8551, "MNLI": 392702, "MRPC": 3668, "QNLI": 104743, "QQP": 363846, "RTE": 2490,
            "SST-2": 67349, "STS-B": 5749, "XNLI": 392702}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_hydra_config_is_a_run_of_the_protocol(name):
    task = TASKS[name]
    config = composed(CONFIGS / "glue", name.lower().replace("-", "_"))
    updates = updates_of(EXAMPLES[name], 3)
    assert config["lr_scheduler"]["total_num_update"] == updates
    assert config["lr_scheduler"]["warmup_updates"] == round(0.1 * updates)
    assert config["optimization"]["lr"][0] in PROTOCOLS["huang"].learning_rates
    assert config["dataset"]["batch_size"] == 32 and config["optimization"]["max_epoch"] == 3
    assert config["dataset"]["valid_subset"].split(",") == task.valid_splits
    assert config["checkpoint"]["best_checkpoint_metric"] == task.metrics[0]
    assert config["task"]["num_classes"] == task.classes
    criterion = config["criterion"]
    assert criterion["regression_target"] is task.regression
    wanted = runs.REPORT.get(task.metrics[0], "--none")[2:].replace("-", "_")
    assert {key for key in criterion if key.startswith("report")} <= {wanted}


# Sequence length, batch, updates, learning rate, warm-up.
PAPERS = {
    "huang_base": (512, 160, 1_000_000, 1e-4, 10_000),
    "m4m_base": (512, 96, 500_000, 1e-4, 10_000),
    "m4m_large": (512, 192, 500_000, 1e-4, 10_000),
    "chen_english": (128, 4096, 500_000, 0.0018, 12_500),
    "chen_multilingual": (512, 4096, 125_000, 0.0018, 3_125),
    "tiny": (64, 32, 800, 2e-3, 80),
}


@pytest.mark.parametrize("name", PAPERS)
def test_pre_training_config_has_the_papers_settings(name):
    config = yaml.safe_load((CONFIGS / "pretraining" / f"{name}.yaml").read_text())
    optimization, schedule = config["optimization"], config["lr_scheduler"]
    batch = config["dataset"]["batch_size"] * optimization["update_freq"][0]
    assert schedule["total_num_update"] == optimization["max_update"]
    assert PAPERS[name] == (
        config["task"]["tokens_per_sample"], batch, optimization["max_update"],
        optimization["lr"][0], schedule["warmup_updates"],
    )  # fmt: skip


def test_huang_takes_the_last_checkpoint_of_the_best_learning_rate():
    found = [result([90, 10], 2e-5), result([5, 30], 3e-5), result([1, 20], 4e-5)]
    summary = summarise(found, "mcc", "last")
    assert (summary.values["mcc"], summary.learning_rate, summary.runs) == (30, 3e-5, 1)


def test_chen_takes_the_median_of_the_best_checkpoints():
    tops = [50, 90, 10, 70, 60]
    found = [result([0, top, 1], 2e-5, seed=n) for n, top in enumerate(tops)]
    found += [result([55], 1e-5, seed=n) for n in range(5)]
    summary = summarise(found, "mcc", "best")
    assert (summary.values["mcc"], summary.learning_rate) == (60, 2e-5)
    assert (summary.lowest, summary.highest, summary.runs) == (10, 90, 5)


@given(st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=4), min_size=1, max_size=7))
@settings(max_examples=40, deadline=None)
def test_median_is_one_that_was_measured(values):
    found = [result(some, seed=n) for n, some in enumerate(values)]
    median = statistics.median_low(max(some) for some in values)
    assert summarise(found, "mcc", "best").values["mcc"] == median


def test_what_is_no_number_is_the_worst():
    found = [result([math.nan, -3.0], 2e-5), result([math.nan], 3e-5)]
    assert summarise(found, "mcc", "best").values["mcc"] == -3.0
    with pytest.raises(ValueError, match="no run has ended"):
        summarise([], "mcc", "best")


@pytest.mark.parametrize(
    ("scheme", "any_length"),
    [("m4", True), ("rel_scalar", True), ("m4m", True), ("learned", False), ("learned+m4", False)],
)
def test_relative_models_take_longer_examples_than_in_pre_training(tmp_path, scheme, any_length):
    config = {"position_scheme": scheme, "position_clip_distance": "auto", "max_positions": None}
    assert takes_any_length(config, 16) is any_length
    assert not takes_any_length({"encoder_embed_dim": 768}, 512)  # fairseq's own RoBERTa
    (tmp_path / "RTE").mkdir()
    known = {"train": 9, "max_length": 20, "init_token": 0, "separator_token": 2}
    (tmp_path / "RTE" / "task.json").write_text(json.dumps(known))
    model = Pretrained("x", Path("x.pt"), 16, (), any_length)
    run = Finetuning(model, GLUE["RTE"], 1e-5, 3, 1)
    if any_length:
        flags = run.arguments(Shared(tmp_path, tmp_path, "last"))
        assert flags[flags.index("--max-positions") + 1] == "20"
    else:
        with pytest.raises(ValueError, match="has examples of 20 tokens, x takes 16"):
            run.arguments(Shared(tmp_path, tmp_path, "last"))


def test_cells_are_as_glue_writes_them():
    assert cell(GLUE["MRPC"], {"f1": 81.25, "accuracy": 70.0}) == "81.25 / 70.00"
    assert cell(GLUE["MNLI"], {"accuracy": 80.0, "valid1_accuracy": 81.0}) == "80.00 / 81.00"
    assert cell(GLUE["CoLA"], None) == "-"
    assert cell(GLUE["STS-B"], {"spearman": float("nan"), "pearson": 8.0}) == "- / 8.00"


def log_line(split: str, updates: int, **values: float) -> str:
    named = {f"{split}_{name}": str(value) for name, value in values.items()}
    named[f"{split}_num_updates"] = str(updates)
    return f"2026-01-01 00:00:00 | INFO | {split} | {json.dumps(named)}\n"


def test_logs_are_read_by_updates(tmp_path):
    log = tmp_path / "log"
    lines = [
        log_line("valid", 10, accuracy=50), log_line("valid1", 10, accuracy=40),
        log_line("valid", 20, accuracy=55), log_line("valid", 20, accuracy=60),
        log_line("valid1", 20, accuracy=61), "2026 | INFO | train | {}\n",
    ]  # fmt: skip
    log.write_text("".join(lines))
    assert runs.read_validations(log, GLUE["MNLI"]) == [
        {"updates": 10, "accuracy": 50.0, "valid1_accuracy": 40.0},
        {"updates": 20, "accuracy": 60.0, "valid1_accuracy": 61.0},
    ]
    with pytest.raises(ValueError, match="has no valid_mcc"):
        runs.read_validations(log, GLUE["CoLA"])
    log.write_text("nothing")
    with pytest.raises(ValueError, match="without a validation"):
        runs.read_validations(log, GLUE["MNLI"])


def test_checkpoint_says_its_model(pretrained):
    found = read_pretrained("m", pretrained)
    flags = dict(itertools.pairwise(found.flags))
    assert flags["--position-scheme"] == "learned+m4m"
    assert flags["--position-clip-distance"] == "3"
    assert flags["--encoder-embed-dim"] == "16" and flags["--dropout"] == "0.25"
    assert "--encoder-normalize-before" in found.flags
    assert found.positions == 32


@pytest.fixture(scope="module")
def finished(tmp_path_factory, glue, pretrained) -> tuple[Path, str]:
    """Two learning rates on one task of each kind, run to the end."""
    out = tmp_path_factory.mktemp("finished")
    more = ["--tasks", "MNLI,CoLA,STS-B", "--lr", "1e-3", "1e-2", "--epochs", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "run_tool", in_process)
        relpos_job("finetune", "glue", *arguments(glue, out, [f"small={pretrained}"], *more))
    return out, (out / "huang.md").read_text()


def test_table_stands_beside_the_majority_class(finished):
    out, text = finished
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert lines[0] == ["model", "MNLI (accuracy m / mm)", "CoLA (Matthews)",
                        "STS-B (Spearman / Pearson)"]  # fmt: skip
    assert lines[2][0] == "majority class" and lines[2][2:] == ["0.00", "0.00 / 0.00"]
    assert lines[3][0] == "small" and all(cell != "-" for cell in lines[3])
    assert "learning rate 0.001, 1 epochs" in text or "learning rate 0.01, 1 epochs" in text
    assert len(list(out.rglob("result.json"))) == 6
    assert not list(out.rglob("*.pt"))


def test_finished_runs_are_kept(finished, glue, pretrained, monkeypatch, capsys):
    def never(*given):
        raise AssertionError("a finished run was repeated")

    out, text = finished
    monkeypatch.setattr(runs, "run_tool", never)
    more = ["--tasks", "MNLI,CoLA,STS-B", "--lr", "1e-3", "1e-2", "--epochs", "1"]
    relpos_job("finetune", "glue", *arguments(glue, out, [f"small={pretrained}"], *more))
    assert (out / "huang.md").read_text() == text
    with pytest.raises(AssertionError, match="repeated"):
        relpos_job(
            "finetune", "glue", *arguments(glue, out, [f"small={pretrained}"], *more[:-1], "2")
        )


def test_other_data_are_other_runs(finished, glue, pretrained, tmp_path, monkeypatch):
    """Though as many and as long."""

    def repeated(*given):
        raise ToolError("repeated")

    folder, out = tmp_path / "glue", tmp_path / "out"
    shutil.copytree(glue, folder)
    shutil.copytree(finished[0], out)
    path = folder / "bin" / "STS-B" / "label" / "valid.label"
    path.write_text("".join(sorted(path.read_text().splitlines(keepends=True))))
    monkeypatch.setattr(runs, "run_tool", repeated)
    more = ["--tasks", "STS-B", "--lr", "1e-3", "1e-2", "--epochs", "1"]
    for data, status in ((glue, 0), (folder, 1)):
        given = arguments(data, out, [f"small={pretrained}"], *more)
        assert relpos("finetune", "glue", *given) == status


@pytest.mark.slow
def test_interrupted_run_goes_on_to_the_same_result(tmp_path, glue, pretrained, monkeypatch):
    more = ["--tasks", "RTE", "--lr", "1e-2", "--epochs", "2", "--keep-models"]
    models = [f"small={pretrained}"]
    monkeypatch.setattr(runs, "run_tool", in_process)
    relpos_job("finetune", "glue", *arguments(glue, tmp_path / "whole", models, *more))

    def interrupted(command, log, threads, on_line=None):
        in_process([*command, "--stop-min-lr", "1"], log, threads)  # ends after its first epoch
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "run_tool", interrupted)
    given = arguments(glue, tmp_path / "parts", models, *more)
    assert relpos("finetune", "glue", *given) == 130
    assert not list((tmp_path / "parts").rglob("result.json"))
    monkeypatch.setattr(runs, "run_tool", in_process)
    relpos_job("finetune", "glue", *given)
    found = {}
    for name in ("whole", "parts"):
        model = next((tmp_path / name).rglob("model.pt"))
        state = torch.load(model, map_location="cpu", weights_only=True)["model"]
        found[name] = (json.loads(next((tmp_path / name).rglob("result.json")).read_text()), state)
    assert len(found["whole"][0]["validations"]) == 2
    assert found["parts"][0] == found["whole"][0]
    for key, value in found["whole"][1].items():
        assert torch.equal(value, found["parts"][1][key]), key


def test_failure_names_the_run_and_its_log(tmp_path, glue, pretrained, monkeypatch, capsys):
    def failing(command, log, threads, on_line=None):
        raise ToolError(f"fairseq-train: ValueError: no (its whole output: {log})")

    monkeypatch.setattr(runs, "run_tool", failing)
    given = arguments(glue, tmp_path, [f"small={pretrained}"], "--tasks", "RTE")
    assert relpos("finetune", "glue", *given) == 1
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and "small on RTE: fairseq-train: ValueError: no" in error[0]


def test_wrong_input_is_said_first(tmp_path, glue, pretrained, monkeypatch, capsys):
    monkeypatch.setattr(runs, "run_tool", lambda *given: pytest.fail("it trained"))
    model = f"small={pretrained}"
    (tmp_path / "broken.pt").write_bytes(pretrained.read_bytes()[:3000])
    torch.save({"model": {}}, tmp_path / "plain.pt")
    (tmp_path / "none").mkdir()
    wrong = {
        "there is no checkpoint": arguments(glue, tmp_path, ["nowhere.pt"]),
        "is no checkpoint, or cut off": arguments(glue, tmp_path, [str(tmp_path / "broken.pt")]),
        "it has no configuration": arguments(glue, tmp_path, [str(tmp_path / "plain.pt")]),
        "two models are called 'small'": arguments(glue, tmp_path, [model, model]),
        "--lr must be above 0": arguments(glue, tmp_path, [model], "--lr", "-1"),
        "has no task": [str(tmp_path / "none"), model, "--out", str(tmp_path)],
        "was not made by prepare_glue.py": arguments(glue, tmp_path, [model], "--tasks", "XNLI"),
    }
    for message, command in wrong.items():
        assert relpos("finetune", "glue", *command) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert message in error, error
    task = glue / "bin" / "RTE" / "task.json"
    before = task.read_text()
    try:
        task.write_text(json.dumps(json.loads(before) | {"max_length": 99}))
        given = arguments(glue, tmp_path, [model], "--tasks", "RTE")
        assert relpos("finetune", "glue", *given) == 2
        assert "examples of 99 tokens, small takes 32: prepare_glue.py --max-length 32" in (
            capsys.readouterr().err
        )
    finally:
        task.write_text(before)
