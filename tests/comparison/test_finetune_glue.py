"""finetune_glue.py: protocols, results, resuming, the table; pre-trained models as flags."""

from __future__ import annotations

import json
import math
import shutil
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score, matthews_corrcoef

from helpers import ROOT
from helpers.commands import call, relpos, relpos_job
from helpers.folders import prepare
from helpers.glue_data import write_glue, write_tokenizer
from helpers.recipes import composed
from helpers.roberta import ARCH, MASKED_LM, OPTIMIZE
from relpos_fairseq.core.config import resolve
from relpos_fairseq.core.options import AttentionShape
from relpos_fairseq.io.errors import ToolError
from relpos_fairseq.lab.comparison import scheduling
from relpos_fairseq.lab.comparison.choices import choose
from relpos_fairseq.lab.comparison.protocols import PROTOCOLS, average_score, metrics_cell, updates_of
from relpos_fairseq.lab.comparison.results import ResultStore
from relpos_fairseq.lab.comparison.run import Run
from relpos_fairseq.lab.comparison.scores import METRICS
from relpos_fairseq.lab.comparison.spec import read_spec
from relpos_fairseq.lab.comparison.tasks import base
from relpos_fairseq.lab.comparison.tasks.glue import (
    METRIC_NAMES,
    MODEL_FLAG,
    PRETRAINED,
    REPORT,
    Glue,
    Pretrained,
    read_pretrained,
    statistics_of,
    takes_any_length,
)
from relpos_fairseq.lab.comparison.tasks.registry import make_tasks
from relpos_fairseq.lab.comparison.training_run import TrainingLog
from relpos_fairseq.models.configs import RelPosRobertaConfig
from relpos_fairseq.preparation.glue_tasks import GLUE, TASKS


@pytest.fixture(scope="module")
def glue(tmp_path_factory) -> Path:
    """Prepared data of every task."""
    folder = tmp_path_factory.mktemp("glue")
    raw, tokenizer = write_glue(folder / "raw", train=40), write_tokenizer(folder / "tokenizer")
    prepare("glue", [raw, "--tokenizer-folder", tokenizer, "--out", folder / "bin", "--workers", "1"])
    return folder


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory, glue) -> Path:
    """A masked language model of two updates, with the options that a checkpoint must carry."""
    folder = tmp_path_factory.mktemp("pretrained")
    prepare("glue", [glue / "raw", "--text", folder / "text"])
    length = ("--tokens-per-sample", "32")
    cut = ("--tokenizer-folder", glue / "tokenizer", "--hold-out", "0.2", "--workers", "1", *length)
    prepare("mlm", ["--out", folder, "--train", folder / "text", *cut])
    positions = "--position-scheme learned+m4m --position-clip-distance 3 --encoder-normalize-before --dropout 0.25"
    more = (*f"--max-update 2 --sample-break-mode eos {positions}".split(), *length, "--save-dir", folder)
    call("train", folder / "data-bin", *ARCH, *MASKED_LM, *OPTIMIZE, *more)
    return folder / "checkpoint_last.pt"


def arguments(glue: Path, out: Path, models: list[str], *more: str) -> list[str]:
    return ["--data", str(glue / "bin"), *models, "--out", str(out), "--train-flags=--num-workers 0", *more]


def result(values: list[float], rate: float = 1e-5, seed: int = 1, protocol: str = "chen") -> tuple[Run, dict]:
    """A run on CoLA that logged these values of its metric, one a validation."""
    task = Glue(label="CoLA", data=Path("none"), name="CoLA", protocol=protocol, lr=rate, epochs=3)
    return Run("m", {}, task, seed), {"validations": [{"updates": 9, "valid_mcc": value} for value in values]}


def test_protocols_are_the_papers():
    huang, chen = PROTOCOLS["huang"], PROTOCOLS["chen"]
    assert (huang.learning_rates, huang.epochs, len(huang.seeds)) == ((3e-5,), (3,), 1)
    m4m = PROTOCOLS["multiplicative"]
    assert m4m == replace(huang, name=m4m.name, learning_rates=(2e-5, 3e-5, 4e-5))
    assert chen.learning_rates == (1e-5, 2e-5, 3e-5, 4e-5)
    assert (chen.epochs, len(chen.seeds), chen.checkpoint) == ((5, 10), 5, "best")
    assert updates_of(2490, 3) == 78 * 3


CONFIGS = ROOT / "examples" / "roberta" / "config"
EXAMPLES = {"CoLA": 8551, "MNLI": 392702, "MRPC": 3668, "QNLI": 104743, "QQP": 363846, "RTE": 2490, "SST-2": 67349}
EXAMPLES |= {"STS-B": 5749, "XNLI": 392702}


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
    wanted = REPORT.get(task.metrics[0], "none").replace("-", "_")
    assert {key for key in criterion if key.startswith("report")} <= {wanted}


TABLES = ("position_scheme", "position_share", "position_clip_distance")
# Sequence length, batch, updates, learning rate, warm-up.
PAPERS = {
    "huang_base": (512, 160, 1_000_000, 1e-4, 10_000),
    "m4m_base": (512, 96, 500_000, 1e-4, 10_000),
    "m4m_base_continued": (512, 480, 500_000, 1e-4, 10_000),
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
    updates = optimization["max_update"]
    assert schedule["total_num_update"] == updates
    rates = (optimization["lr"][0], schedule["warmup_updates"])
    assert PAPERS[name] == (config["task"]["tokens_per_sample"], batch, updates, *rates)


def test_huangs_recipes_have_a_table_a_head():
    """Huang2020, Table 1: m h (2n - 1) d; the recipe of Table 5 is section 4.4's."""
    read = {}
    for path in ("pretraining/huang_base", "squad", "squad_large_m4"):
        read[path] = yaml.safe_load((CONFIGS / f"{path}.yaml").read_text())
        assert read[path]["model"]["position_share"] == "none"
    model = RelPosRobertaConfig(**{k: read["pretraining/huang_base"]["model"][k] for k in TABLES})
    shape = AttentionShape(embed_dim=768, num_heads=12, max_positions=512)
    (member,) = resolve(model, shape, "masked_lm").members
    layer = sum(value.numel() for value in member.scheme(shape, member.options).parameters())
    assert 12 * layer == 12 * 12 * (2 * 512 - 1) * 64 == 9_427_968
    large = read["squad_large_m4"]
    assert large["model"]["_name"] == "relpos_roberta_large"
    assert (large["optimization"]["lr"], large["optimization"]["max_epoch"]) == ([5e-5], 3)
    assert large["model"]["position_clip_distance"] == 512


def test_average_is_the_papers():
    """Chen2021's first row of Table 4: seven numbers, accuracy for QQP, 84.8; not without all tasks."""
    found = {"MNLI": {"accuracy": 85.8, "valid1_accuracy": 85.9}, "QQP": {"f1": 88.0, "accuracy": 91.1}}
    found |= {"QNLI": {"accuracy": 89.9}, "SST-2": {"accuracy": 93.2}, "CoLA": {"mcc": 58.7}}
    found |= {"STS-B": {"spearman": 89.0, "pearson": 1.0}, "RTE": {"accuracy": 1.0}}
    assert average_score(found) == "84.80"
    assert average_score({name: found[name] for name in list(found)[1:]}) == "-"


def test_huang_takes_the_last_checkpoint_of_the_best_learning_rate():
    runs = (([90, 10], 2e-5), ([5, 30], 3e-5), ([1, 20], 4e-5))
    choice = choose([result(values, rate, protocol="multiplicative") for values, rate in runs])
    assert (choice.values["mcc"], choice.run.task.lr, len(choice.runs)) == (30, 3e-5, 1)


def test_chen_takes_the_median_of_the_best_checkpoints():
    tops = [50, 90, 10, 70, 60]
    found = [result([0, top, 1], 2e-5, seed=n) for n, top in enumerate(tops)]
    found += [result([55], 1e-5, seed=n) for n in range(5)]
    choice = choose(found)
    assert (choice.values["mcc"], choice.run.task.lr, choice.run.seed) == (60, 2e-5, 4)
    assert (choice.lowest, choice.highest, len(choice.runs)) == (10, 90, 5)


@given(st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=4), min_size=1, max_size=7))
@settings(max_examples=40, deadline=None)
def test_median_is_one_that_was_measured(values):
    found = [result(some, seed=n) for n, some in enumerate(values)]
    median = statistics.median_low(max(some) for some in values)
    assert choose(found).values["mcc"] == median


def test_what_is_no_number_is_the_worst():
    found = [result([math.nan, -3.0], 2e-5), result([math.nan], 3e-5)]
    assert choose(found).values["mcc"] == -3.0
    with pytest.raises(ValueError, match="a run of CoLA has no validation"):
        choose([result([])])


def grid_of(**options: object) -> dict[str, tuple[object, object]]:
    """The learning rate and number of epochs of the tasks that an entry becomes, by label."""
    made = make_tasks("a", {"kind": "glue", "name": "CoLA", "data": "x", **options}, {"train": {}, "generate": {}})
    return {label: (task.lr, task.epochs) for label, task in made.items()}


def test_a_protocol_that_is_named_stands_for_what_is_not_given():
    chen = grid_of(protocol="chen")
    assert [*chen.values()] == [(lr, n) for lr in PROTOCOLS["chen"].learning_rates for n in (5, 10)]
    assert [*chen][:2] == ["a-lr1e-05-epochs5", "a-lr1e-05-epochs10"]
    assert [*grid_of(protocol="chen", lr=1e-3).values()] == [(1e-3, 5), (1e-3, 10)]
    assert grid_of(lr=[1e-3, 1], epochs=None) == {"a-lr0.001-epochs3": (1e-3, 3), "a-lr1-epochs3": (1, 3)}
    assert grid_of(epochs=[7]) == {"a-lr3e-05-epochs7": (3e-5, 7)}
    for one in ({}, {"lr": 1e-3}, {"protocol": "huang"}, {"protocol": "chen", "lr": 1, "epochs": 2}):
        assert grid_of(**one) == {"a": (one.get("lr"), one.get("epochs"))}  # no grid
    questions = make_tasks("q", {"kind": "questions", "data": "x", "epochs": [1, 2]}, {"train": {}, "generate": {}})
    assert [*questions] == ["q-lr1e-05-epochs1", "q-lr1e-05-epochs2"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": []}, "task a: lr and epochs must be different numbers each, got \\[\\] and"),
        ({"lr": [1e-3, 1e-3]}, "different numbers each"),
        ({"lr": ["x"]}, 'task a: lr/0 is "x", and must be a number'),
        ({"lr": [0.0]}, "lr must be above 0, got 0"),
        ({"epochs": [1.5]}, "task a: epochs/0 is 1.5, and must be a whole number"),
        ({"protocol": "chem"}, "there is no chem; known: "),
    ],
)
def test_wrong_grids(options, said):
    with pytest.raises(ValueError, match=said):
        grid_of(**options)


@pytest.mark.parametrize(
    ("scheme", "any_length"),
    [("m4", True), ("rel_scalar", True), ("m4m", True), ("learned", False), ("learned+m4", False)],
)
def test_relative_models_take_longer_examples_than_in_pre_training(tmp_path, scheme, any_length, monkeypatch):
    config = {"position_scheme": scheme, "position_clip_distance": "auto", "max_positions": None}
    assert takes_any_length(config, 16) is any_length
    assert not takes_any_length({"encoder_embed_dim": 768}, 512)  # fairseq's own RoBERTa
    (tmp_path / "RTE").mkdir()
    known = {"train": 9, "max_length": 20, "init_token": 0, "separator_token": 2}
    (tmp_path / "RTE" / "task.json").write_text(json.dumps(known))
    monkeypatch.setitem(PRETRAINED, Path("x.pt"), Pretrained("x", Path("x.pt"), 16, {}, any_length))
    task = Glue(label="RTE", data=tmp_path, name="RTE")
    if any_length:
        assert task.flags({MODEL_FLAG: "x.pt"}, 1)["max-positions"] == 20
    else:
        with pytest.raises(ValueError, match="has examples of 20 tokens, x takes 16"):
            task.flags({MODEL_FLAG: "x.pt"}, 1)


@pytest.mark.parametrize(
    ("task", "values", "cell"),
    [
        ("MRPC", {"f1": 81.25, "accuracy": 70.0}, "81.25 / 70.00"),
        ("MNLI", {"accuracy": 80.0, "valid1_accuracy": 81.0}, "80.00 / 81.00"),
        ("CoLA", None, "-"),
        ("STS-B", {"spearman": float("nan"), "pearson": 8.0}, "- / 8.00"),
    ],
)
def test_cells_are_as_glue_writes_them(task, values, cell):
    assert metrics_cell(GLUE[task], values) == cell


def test_logs_are_read_by_updates():
    """A run that went on after an interruption may have validated a place twice."""
    log = TrainingLog()
    for split, updates, accuracy in (("", 10, 50), ("1", 10, 40), ("", 20, 55), ("", 20, 60), ("1", 20, 61)):
        named = {f"valid{split}_accuracy": str(accuracy), f"valid{split}_num_updates": str(updates)}
        log.read(f"2026-01-01 00:00:00 | INFO | valid{split} | {json.dumps(named)}\n")
    log.read('2026 | INFO | train | {"train_wps": "9.5"}\n')
    log.read("2026 | INFO | fairseq | num. shared model params: 1,234 (num. trained: 1,234)\n")
    for name in ("fairseq.trainer", "relpos_fairseq.patches.training", "relpos_fairseq.patches.training"):
        log.read(f"2026 | WARNING | {name} | of {name}\n")
    found = {n: (one["valid_accuracy"], one["valid1_accuracy"]) for n, one in log.valid.items()}
    assert found == {10: (50.0, 40.0), 20: (60.0, 61.0)}
    assert (log.speed, log.parameters, [*log.warnings]) == (10, 1234, ["of relpos_fairseq.patches.training"])


def test_statistics_are_the_metrics():
    """Of predictions against scikit-learn's and scipy's, and of the criterion's F1."""
    generator = np.random.default_rng(2)
    found, true = generator.integers(0, 2, (2, 40))
    values = {"f1": f1_score(true, found), "mcc": matthews_corrcoef(true, found), "accuracy": np.mean(found == true)}
    for metric, value in values.items():
        rows = statistics_of(metric, found, true)
        assert METRICS[METRIC_NAMES[metric]].value(rows.sum(0)) == pytest.approx(100 * value), metric
    found = generator.standard_normal(40).round(1) + true
    for metric, theirs in (("pearson", pearsonr), ("spearman", spearmanr)):
        rows = statistics_of(metric, found, true.astype(float))
        expected = 100 * theirs(found, true)[0]
        assert METRICS[METRIC_NAMES[metric]].value(rows.sum(0)) == pytest.approx(expected), metric


def test_checkpoint_says_its_model(pretrained):
    found = read_pretrained("m", pretrained)
    flags = {name: str(value) for name, value in found.flags.items()}
    assert flags["position-scheme"] == "learned+m4m"
    assert flags["position-clip-distance"] == "3"
    assert flags["encoder-embed-dim"] == "16" and flags["dropout"] == "0.25"
    assert found.flags["encoder-normalize-before"] is True
    assert found.positions == 32


@pytest.fixture(scope="module")
def finished(tmp_path_factory, glue, pretrained) -> tuple[Path, str]:
    """Two learning rates on one task of each kind, run to the end."""
    out = tmp_path_factory.mktemp("finished")
    more = ["--tasks", "MNLI,CoLA,STS-B", "--lr", "1e-3", "1e-2", "--epochs", "1"]
    relpos_job("finetune", "glue", *arguments(glue, out, [f"small={pretrained}"], *more))
    return out, (out / "huang.md").read_text()


def cells(text: str) -> list[list[str]]:
    """The cells of the rows of tables."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"]


@pytest.mark.slow
def test_table_stands_beside_the_majority_class(finished):
    out, text = finished
    lines = cells(text)
    assert lines[0] == ["model", "MNLI (accuracy m / mm)", "CoLA (Matthews)", "STS-B (Spearman / Pearson)"]
    assert lines[2][0] == "majority class" and lines[2][2:] == ["0.00", "0.00 / 0.00"]
    assert lines[3][0] == "small" and all(cell != "-" for cell in lines[3])
    assert "learning rate 0.001, 1 epochs" in text or "learning rate 0.01, 1 epochs" in text
    results = list((out / "results").rglob("*.json"))
    assert len(results) == 6 and not list(out.rglob("*.pt"))
    for path in results:  # scored one by one they are what the criterion logged
        one = json.loads(path.read_text())
        for split, scored in one["sets"].items():
            for metric, value in scored["values"].items():
                key = next(key for key, name in METRIC_NAMES.items() if name == metric)
                logged = one["validations"][-1][f"{split}_{key}"]
                assert value == pytest.approx(logged, abs=0.02) or math.isnan(logged), metric


def test_finished_runs_are_kept(finished, glue, pretrained, monkeypatch, tmp_path):
    """Other rates, or other data though as many and as long, are other runs."""
    out, text = finished
    asked = []
    monkeypatch.setattr(scheduling.Comparison, "prepare", lambda self, runs: asked.append(len(runs)))
    monkeypatch.setattr(scheduling.ProcessPool, "run", lambda self: {})
    more = ["--tasks", "MNLI,CoLA,STS-B", "--lr", "1e-3", "1e-2", "--epochs", "1"]
    model = [f"small={pretrained}"]
    relpos_job("finetune", "glue", *arguments(glue, out, model, *more))
    assert (out / "huang.md").read_text() == text and not asked
    relpos_job("finetune", "glue", *arguments(glue, out, model, *more[:-1], "2"))
    folder = tmp_path / "glue"
    shutil.copytree(glue, folder)
    path = folder / "bin" / "STS-B" / "label" / "valid.label"
    path.write_text("".join(sorted(path.read_text().splitlines(keepends=True))))
    relpos_job("finetune", "glue", *arguments(folder, out, model, *more))
    assert asked == [6, 2]


def test_a_specification_with_a_grid_is_the_command(finished, glue, pretrained, tmp_path, shell):
    """It has the command's runs and chooses as the command does; the report is of the chosen runs alone."""
    out, text = finished
    shutil.copytree(out / "results", tmp_path / "grid")
    entry = {"kind": "glue", "data": str(glue / "bin"), "lr": [1e-3, 1e-2], "epochs": [1], "train": {"num-workers": 0}}
    tasks = {name: entry | {"name": name} for name in ("MNLI", "CoLA", "STS-B")}
    content = {"schemes": {"small": {MODEL_FLAG: str(pretrained)}}, "seeds": 1, "tasks": tasks}
    path = tmp_path / "grid.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    said = shell("compare run grid.yaml --work work")
    assert "6 runs, 0 to do" in said
    printed, table = cells(said), cells(text)[4:]
    assert [row[1:6] for row in printed] == [row[1:] for row in table[-5:]]
    assert printed[0][-1] == "reported" and printed[3][-1].startswith("mcc ")
    shell("compare report grid.yaml --work work")
    report = (tmp_path / "grid" / "report.md").read_text()
    headings = [line for line in report.splitlines() if line[:1] == "#"]
    assert headings == ["# grid", "## MNLI", "## CoLA", "## STS-B", "## What was chosen", "## How it was made"]
    choices = json.loads((out / "huang.json").read_text())
    rates = {key.split("/")[1]: one["learning_rate"] for key, one in choices.items()}
    made = {line.split(" ")[1]: line for line in report.splitlines() if " (glue) " in line}
    assert all(f"lr {rate:g}, " in made[name] for name, rate in rates.items())
    page = (tmp_path / "grid" / "report.html").read_text()
    assert page.count(f">learning rate {rates['CoLA']:g}, 1 epochs</td>") >= 1
    one = next(line for line in report.splitlines() if line.startswith("| small"))
    assert one.split("|")[2].strip() == "1"  # seed, not one a point


@pytest.mark.slow
def test_interrupted_run_goes_on_to_the_same_result(tmp_path, glue, pretrained):
    more = ["--tasks", "RTE", "--lr", "1e-2", "--epochs", "2", "--keep-models"]
    models = [f"small={pretrained}"]
    relpos_job("finetune", "glue", *arguments(glue, tmp_path / "whole", models, *more))
    task, fairseq = "relpos_fairseq.lab.comparison.tasks.base", base.fairseq

    def interrupted(tool, given, *rest):
        """End after the first epoch as if killed."""
        fairseq(tool, [*given, "--stop-min-lr", "1"], *rest)
        raise ToolError("killed")

    given = arguments(glue, tmp_path / "parts", models, *more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{task}.fairseq", interrupted)
        assert relpos("finetune", "glue", *given) == 1
    assert not list((tmp_path / "parts" / "results").rglob("*.json"))
    relpos_job("finetune", "glue", *given)
    found = {}
    for name in ("whole", "parts"):
        model = next((tmp_path / name).rglob("checkpoint_last.pt"))
        state = torch.load(model, map_location="cpu", weights_only=True)["model"]
        result = json.loads(next((tmp_path / name / "results").rglob("*.json")).read_text())
        found[name] = (result, state)
    assert len(found["whole"][0]["validations"]) == 2
    for key in ("validations", "settings", "data"):
        assert found["parts"][0][key] == found["whole"][0][key]
    for key, value in found["whole"][1].items():
        assert torch.equal(value, found["parts"][1][key]), key


def test_predictions_are_what_the_server_takes(tmp_path, glue, pretrained, monkeypatch, capsys):
    more = ["--tasks", "STS-B,MNLI", "--max-update", "2", "--predictions"]
    relpos_job("finetune", "glue", *arguments(glue, tmp_path, [f"small={pretrained}"], *more))
    assert "3 epochs, at most 2 updates" in capsys.readouterr().out
    written = (tmp_path / "submission" / "huang" / "small").iterdir()
    tables = {path.stem: [line.split("\t") for line in path.read_text().splitlines()] for path in written}
    assert tables.keys() == {"STS-B", "MNLI-m", "AX"}
    for rows in tables.values():
        assert rows[0] == ["index", "prediction"] and [row[0] for row in rows[1:]] == list("012")
    assert all(0 <= float(score) <= 5 for _, score in tables["STS-B"][1:])
    assert all(label in TASKS["MNLI"].labels for _, label in tables["AX"][1:])
    valid = tmp_path / "predictions" / "huang" / "small" / "MNLI" / "valid1.tsv"
    rows = [line.split("\t") for line in valid.read_text().splitlines()][1:]
    found = json.loads((tmp_path / "huang.json").read_text())["small/MNLI"]["values"]
    accuracy = sum(predicted == label for _, predicted, label in rows) / len(rows)
    assert found["valid1_accuracy"] == pytest.approx(100 * accuracy, abs=0.01)


def test_failure_names_the_run_and_its_log(tmp_path, glue, pretrained, monkeypatch, capsys):
    def failing(tool, given, log, *rest):
        raise ToolError(f"fairseq-train: ValueError: no (its whole output: {log})")

    monkeypatch.setattr(base, "fairseq", failing)
    given = arguments(glue, tmp_path, [f"small={pretrained}"], "--tasks", "RTE")
    assert relpos("finetune", "glue", *given) == 1
    said = capsys.readouterr().out
    assert "failed: RTE-lr3e-05-epochs3 / small / seed 1: fairseq-train: ValueError: no" in said


@pytest.mark.parametrize(
    ("line", "said"),
    {
        "nowhere.pt": "there is no checkpoint",
        "broken.pt": "is truncated or no checkpoint",
        "plain.pt": "has neither cfg nor args",
        "small=<pretrained> small=<pretrained>": "two models are called 'small'",
        "small=<pretrained> --lr -1": "--lr must be above 0",
        "small=<pretrained> --data none": "has no task",
        "small=<pretrained> --tasks XNLI": "was not made by relpos prepare glue",
        "small=<pretrained> --data long --tasks RTE": "examples of 99 tokens, small takes 32: relpos prepare glue "
        "--max-length 32",
    }.items(),
)
def test_wrong_input_is_said_first(line, said, tmp_path, glue, pretrained, monkeypatch, shell):
    monkeypatch.setattr(scheduling.Comparison, "run", lambda self: pytest.fail("it trained"))
    (tmp_path / "broken.pt").write_bytes(pretrained.read_bytes()[:3000])
    torch.save({"model": {}}, tmp_path / "plain.pt")
    (tmp_path / "none").mkdir()
    shutil.copytree(glue / "bin" / "RTE", tmp_path / "long" / "RTE")
    known = tmp_path / "long" / "RTE" / "task.json"
    known.write_text(json.dumps(json.loads(known.read_text()) | {"max_length": 99}))
    data = "" if "--data" in line else "--data <glue>/bin"
    assert said in shell.refused(f"finetune glue --out out --train-flags='--num-workers 0' {line} {data}")


SPECS = sorted((ROOT / "examples" / "comparison").glob("*.yaml"))


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_shipped_comparison_reads_and_is_listed(path):
    assert read_spec(path).tasks
    assert f"| `{path.name}` |" in (path.parent / "README.md").read_text()


def test_diverging_searches_the_papers_rates():
    """Section 3.2: the best of 2e-5, 3e-5, 4e-5."""
    tasks = read_spec(ROOT / "examples" / "comparison" / "diverging.yaml").tasks
    rates = {task.lr for task in tasks.values() if task.name == "MRPC"}
    assert rates == {4e-6, *PROTOCOLS["multiplicative"].learning_rates}
    assert {task.protocol for task in tasks.values()} == {"multiplicative"}


def test_data_may_move(glue, tmp_path):
    """Their folder is named by their content: a link to where they were is made anew."""
    places = [tmp_path / name for name in ("one", "two")]
    for place in places:
        shutil.copytree(glue / "bin" / "MRPC", place / "MRPC")
        task = Glue(label="MRPC", train={}, data=place, name="MRPC", protocol="multiplicative")
        made = task.prepare(tmp_path / "work")
        assert (made / "bin" / "label").is_dir()
        shutil.rmtree(place)
    assert len(list((tmp_path / "work" / "data").glob("MRPC-*"))) == 1


@pytest.mark.nightly
@pytest.mark.slow
def test_diverging_runs_small(glue, pretrained, tmp_path, monkeypatch):
    """A loss that leaves the majority's is in what the run keeps: a rate of 10 does that."""
    monkeypatch.chdir(tmp_path)  # where compare_out goes
    content = yaml.safe_load((ROOT / "examples" / "comparison" / "diverging.yaml").read_text())
    content["schemes"] = {name: {MODEL_FLAG: str(pretrained)} for name in ("m4", "raffel")}
    content["seeds"] = 1
    kept = content["tasks"]["MRPC at 4e-6"] | {"data": str(glue / "bin"), "max_update": 6}
    content["tasks"] = {"MRPC at 4e-6": kept, "MRPC at 10": kept | {"lr": 10.0}}
    content["train"] = {"cpu": True, "num-workers": 0, "clip-norm": 0}
    path = tmp_path / "diverging.yaml"
    path.write_text(yaml.safe_dump(content))
    assert relpos("compare", "run", str(path), "--workers", "1") == 0
    results = ResultStore(tmp_path / "diverging").archived()
    losses = {one["task"]: one["validations"][-1]["valid_loss"] for one in results.values()}
    assert losses["MRPC at 4e-6"] < 1.5 < losses["MRPC at 10"]
