"""`sentence_prediction_glue`: metrics of the whole validation set, whatever its batches."""

from __future__ import annotations

import re
import shutil
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.criterions.sentence_prediction import SentencePredictionConfig
from fairseq.data import Dictionary
from fairseq.logging import metrics
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score, matthews_corrcoef

from helpers import commands as cli
from helpers.commands import call
from helpers.roberta import ARCH, OPTIMIZE, write_pairs
from relpos_fairseq.criterions import sentence_prediction_glue as glue_metrics
from relpos_fairseq.criterions.sentence_prediction_glue import SentencePredictionGlueCriterion

TASK = ["--task", "sentence_prediction", "--criterion", "sentence_prediction_glue"]
HEAD = "sentence_classification_head"


class Answers(torch.nn.Module):
    """A model whose logits are given: src_tokens are the numbers of the samples."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = logits
        self.classification_heads = {HEAD: None}

    def forward(self, src_tokens, **unused):
        return self.logits[src_tokens], None

    def get_targets(self, sample, net_output):
        return sample["target"]


def criterion(samples: int, labels: tuple[str, ...] = ("0", "1"), **report):
    """The criterion of a task with `samples` validation samples."""
    dictionary = Dictionary()
    for label in labels:
        dictionary.add_symbol(label)
    words = {"label_dictionary": dictionary, "target_dictionary": dictionary}
    task = SimpleNamespace(**words, datasets={"valid": range(samples)})
    return SentencePredictionGlueCriterion(SentencePredictionConfig(**report), task).eval()


def outputs(judge, logits: torch.Tensor, targets: torch.Tensor, cuts: list[int]) -> list[dict]:
    """Logging outputs of batches cut at `cuts`, the samples in an order of their own."""
    model = Answers(logits).eval()
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(1))
    found = []
    for rows in torch.tensor_split(order, sorted(cuts)):
        if len(rows):
            sample = {"net_input": {"src_tokens": rows}, "id": rows, "target": targets[rows], "ntokens": 7 * len(rows)}
            found.append(judge(model, sample)[2])
    return found


def logged(parts: list[list[dict]]) -> dict:
    """What is logged when each part is reduced after the other."""
    with metrics.aggregate(new_root=True) as aggregator:
        for part in parts:
            SentencePredictionGlueCriterion.reduce_metrics(part)
        return dict(aggregator.get_smoothed_values())


def summed(parts: list[dict]) -> dict:
    """What several processes make of their outputs: one, by addition (Trainer, in doubles)."""
    return {key: sum(torch.as_tensor(p[key]).double() for p in parts) for key in parts[0]}


CUTS = st.lists(st.integers(0, 40), max_size=6)


@settings(max_examples=20, deadline=None)
@given(CUTS, st.integers(0, 99), st.integers(2, 4))
def test_classes(cuts: list[int], seed: int, classes: int) -> None:
    """Accuracy, MCC, F1: those of all samples at once, by any batches and processes."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(40, classes, generator=generator)
    targets = torch.randint(classes, (40,), generator=generator)
    judge = criterion(40, tuple("0123"[:classes]), report_mcc=True, report_acc_and_f1=True)
    parts = outputs(judge, logits, targets, cuts)
    truth, guess = targets.numpy(), logits.argmax(1).numpy()
    expected = {"accuracy": (truth == guess).mean(), "mcc": matthews_corrcoef(truth, guess)}
    expected["f1"] = f1_score(truth == 1, guess == 1, zero_division=0)
    expected["acc_and_f1"] = (expected["accuracy"] + expected["f1"]) / 2
    loss = torch.nn.functional.cross_entropy(logits, targets).item() / np.log(2)
    for way in ([parts], [[part] for part in parts], [[summed(parts)]]):
        found = logged(way)
        for name, value in expected.items():
            assert found[name] == pytest.approx(100 * value, abs=0.00501), name
        assert found["loss"] == pytest.approx(loss, abs=2e-3)


@settings(max_examples=20, deadline=None)
@given(CUTS, st.integers(0, 99), st.booleans())
def test_regression(cuts: list[int], seed: int, ties: bool) -> None:
    """Pearson and Spearman of all samples at once, tied ranks included."""
    generator = torch.Generator().manual_seed(seed)
    logits, targets = torch.randn(2, 40, generator=generator)
    if ties:
        targets = targets.round()
    judge = criterion(40, regression_target=True, report_pearson_and_spearman=True)
    parts = outputs(judge, logits[:, None], targets, cuts)
    expected = [of(logits.numpy(), targets.numpy())[0] for of in (pearsonr, spearmanr)]
    for way in ([parts], [[part] for part in parts], [[summed(parts)]]):
        found = logged(way)
        assert found["pearson"] == pytest.approx(100 * expected[0], abs=0.0051)
        assert found["spearman"] == pytest.approx(100 * expected[1], abs=0.0051)
        assert found["pearson_and_spearman"] == pytest.approx(50 * sum(expected), abs=0.0051)
        assert "accuracy" not in found


def test_by_hand() -> None:
    """Small tables whose metrics are known."""
    table = np.array([[3, 1], [2, 4]])  # true negatives, false positives; false negatives, true
    assert glue_metrics.mcc(table) == pytest.approx((4 * 3 - 1 * 2) / np.sqrt(5 * 6 * 4 * 5))
    assert glue_metrics.f1(table) == pytest.approx(2 * 4 / (2 * 4 + 1 + 2))
    assert glue_metrics.mcc(np.array([[0, 5], [0, 5]])) == 0 and glue_metrics.f1(np.array([[5, 0], [5, 0]])) == 0
    constant, other = np.zeros(4), np.arange(4.0)
    assert glue_metrics.pearson(constant, other) == glue_metrics.spearman(other, constant) == 0
    assert glue_metrics.spearman(other, other**3) == pytest.approx(1)
    assert glue_metrics.pearson(other, -other) == pytest.approx(-1)


def test_f1_is_of_label_1_whatever_its_number() -> None:
    """Labels are numbered by their frequency; GLUE's positive class is the one called 1."""
    logits = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    targets = torch.tensor([0, 1, 1])
    for labels in (("0", "1"), ("1", "0"), ("x", "1")):
        judge = criterion(3, labels, report_acc_and_f1=True)
        assert judge.positive == labels.index("1")
        assert logged([outputs(judge, logits, targets, [])])["f1"] == pytest.approx(100 * 2 / 3, abs=0.01)


@pytest.mark.parametrize(
    "report, labels, message",
    [
        ({"report_mcc": True, "regression_target": True}, ("0", "1"), "need classes"),
        ({"report_pearson_and_spearman": True}, ("0", "1"), "needs --regression-target"),
        ({"report_acc_and_f1": True}, ("yes", "no"), "F1 is that of label '1', .* yes, no"),
    ],
)
def test_metrics_that_the_labels_cannot_have(report: dict, labels: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        criterion(4, labels, **report)


def test_a_model_without_the_head() -> None:
    model = Answers(torch.zeros(4, 2))
    model.classification_heads = {}
    sample = {"net_input": {"src_tokens": torch.arange(2)}, "target": torch.zeros(2).long()}
    with pytest.raises(ValueError, match=f"no classification head '{HEAD}'"):
        criterion(4)(model, sample)


def glue(data: Path, save: Path, *more: str) -> list[str]:
    """Command line of a fine-tuning, with a second validation set."""
    flags = "--init-token 0 --separator-token 2 --max-positions 24 --batch-size 4 --max-epoch 1 --segment-encoding head"
    return [str(data), *ARCH, *OPTIMIZE, *TASK, *flags.split(), "--save-dir", str(save), *more]


def read(output: str, subset: str, name: str) -> float:
    """The last value of a metric of a validation set."""
    lines = [line for line in output.splitlines() if re.search(rf"\b{subset}\b.*\| {name} ", line)]
    return float(re.search(rf"\| {name} (-?[\d.]+)", lines[-1]).group(1))


def validate(data: Path, save: Path, subsets: str) -> str:
    """Run fairseq-validate on the last checkpoint."""
    more = ("--valid-subset", subsets, "--batch-size", "9", *TASK)
    return cli.evaluate("validate", data, save / "checkpoint_last.pt", *more)


@pytest.mark.slow
def test_validation_sets_under_their_names(tmp_path: Path) -> None:
    """Matched and mismatched, each its own; the best checkpoint by a metric; validated alike."""
    data = write_pairs(tmp_path / "data")
    for part, kind in product(("input0", "input1", "label"), ("bin", "idx")):
        for name, split in (("valid_matched", "valid"), ("valid_mismatched", "train")):
            shutil.copy(data / part / f"{split}.{kind}", data / part / f"{name}.{kind}")
    flags = "--num-classes 2 --report-mcc --report-acc-and-f1 --valid-subset valid_matched,valid_mismatched"
    best = "--ignore-unused-valid-subsets --best-checkpoint-metric mcc --maximize-best-checkpoint-metric"
    output = call("train", *glue(data, tmp_path / "save", *flags.split(), *best.split()))
    assert (tmp_path / "save" / "checkpoint_best.pt").is_file()
    validated = validate(data, tmp_path / "save", "valid_matched,valid_mismatched")
    for subset in ("valid_matched", "valid_mismatched"):
        for name in ("accuracy", "mcc", "f1", "acc_and_f1"):
            expected = read(output, subset, name)
            assert read(validated, subset, name) == pytest.approx(expected, abs=0.011), name


@pytest.mark.slow
def test_two_processes_agree_with_one(tmp_path: Path) -> None:
    """Correlations are of the whole set though each process sees half of it."""
    data = write_pairs(tmp_path / "data", regression=True)
    flags = "--num-classes 1 --regression-target --report-pearson-and-spearman --find-unused-parameters"
    given = glue(data, tmp_path / "two", *flags.split(), "--distributed-world-size", "2")
    together = cli.forked_training(given, 2, tmp_path / "log")
    assert "training on 2 devices" in together
    alone = validate(data, tmp_path / "two", "valid")
    for name in ("pearson", "spearman", "pearson_and_spearman"):
        expected = read(alone, "valid", name)
        assert read(together, "valid", name) == pytest.approx(expected, abs=0.011), name
