"""Criterion `sentence_prediction_glue`: fairseq's sentence_prediction with GLUE's metrics, exactly.

fairseq's criterion hands predictions on as lists, which several processes cannot sum, and rounds
to one decimal.  Here every metric is computed from what adds up over batches and processes: the
counts of (target, prediction) for accuracy, Matthews' correlation and F1, and for correlations the
predictions themselves, each in its sample's own place.  So a metric is that of the whole validation
set, whatever the batches and the number of processes.  scikit-learn and scipy compute them.

The options and the names of the metrics are fairseq's (--report-mcc, --report-acc-and-f1,
--report-pearson-and-spearman, --regression-target); two validation sets
(--valid-subset valid_matched,valid_mismatched) are logged under their own names.
"""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from fairseq.criterions import register_criterion
from fairseq.criterions.sentence_prediction import SentencePredictionConfig, SentencePredictionCriterion
from fairseq.logging import metrics
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score, matthews_corrcoef
from torch import Tensor

POSITIVE = "1"  # the label that GLUE's F1 is about: paraphrases in MRPC and QQP
DECIMALS = 2  # of per cent


@register_criterion("sentence_prediction_glue", dataclass=SentencePredictionConfig)
class SentencePredictionGlueCriterion(SentencePredictionCriterion):
    """The loss of fairseq's sentence_prediction, and GLUE's metrics of whole validation sets."""

    def __init__(self, cfg: SentencePredictionConfig, task: Any) -> None:
        """Check that the metrics fit the labels.

        Raises:
            ValueError: a metric that the task's labels cannot have.
        """
        super().__init__(cfg, task)
        self.task = task
        self._check_metrics()
        labels = self.label_dict
        self.positive = labels.index(POSITIVE) - labels.nspecial if self.report_acc_and_f1 else 0

    def _check_metrics(self) -> None:
        of_classes = self.report_mcc or self.report_acc_and_f1
        if self.regression_target and of_classes:
            raise ValueError(
                "--report-mcc and --report-acc-and-f1 need classes, and --regression-target has "
                "none: use --report-pearson-and-spearman"
            )
        if self.report_pearson_and_spearman and not self.regression_target:
            raise ValueError("--report-pearson-and-spearman needs --regression-target")
        if self.report_acc_and_f1 and POSITIVE not in self.label_dict:
            names = ", ".join(self.label_dict.symbols[self.label_dict.nspecial :])
            raise ValueError(f"--report-acc-and-f1: F1 is that of label {POSITIVE!r}, and the labels are {names}")

    def forward(self, model: Any, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """Return the loss (a sum), the sample size, and what is logged.

        Raises:
            ValueError: the model has no such head.
        """
        name = self.classification_head_name
        if name not in getattr(model, "classification_heads", ()):
            raise ValueError(f"the model has no classification head {name!r} (--classification-head-name)")
        logits, _ = model(**sample["net_input"], features_only=True, classification_head_name=name)
        targets = model.get_targets(sample, [logits]).view(-1)
        size = targets.numel()
        if self.regression_target:
            logits, targets = logits.view(-1).float(), targets.float()
            loss = F.mse_loss(logits, targets, reduction="sum")
        else:
            lprobs = F.log_softmax(logits, dim=-1, dtype=torch.float32)
            loss = F.nll_loss(lprobs, targets, reduction="sum")
        logged = {"ntokens": sample["ntokens"], "nsentences": size, "sample_size": size}
        loss = self._regularised(model, loss, logged)
        logged["loss"] = loss.data
        if not self.regression_target:
            logged["ncorrect"] = (logits.argmax(dim=1) == targets).sum()
        if not model.training:
            logged |= self._summable(sample, logits.detach(), targets)
        return loss, size, logged

    def _regularised(self, model: Any, loss: Tensor, logged: dict[str, Any]) -> Tensor:
        """Return the loss with the terms of adaptive pruning, where the model asks for them."""
        for part, loss_of in (("mha", "_get_adaptive_head_loss"), ("ffn", "_get_adaptive_ffn_loss")):
            if getattr(getattr(model, "args", None), f"{part}_reg_scale_factor", 0.0):
                extra = getattr(model, loss_of)()
                loss = loss + extra
                logged[f"{part}_reg_loss"] = extra.data
        return loss

    def _summable(self, sample: dict, logits: Tensor, targets: Tensor) -> dict[str, Any]:
        """Return what the metrics need, as tensors that are summed over batches and processes."""
        found: dict[str, Any] = {}
        if self.report_mcc:
            classes = logits.size(1)
            found["counts"] = _counts(targets, logits.argmax(dim=1), classes)
        if self.report_acc_and_f1:
            positive, said = targets == self.positive, logits.argmax(dim=1) == self.positive
            found["positive_counts"] = _counts(positive.long(), said.long(), 2)
        if self.report_pearson_and_spearman:
            samples = max(len(dataset) for dataset in self.task.datasets.values())
            placed = torch.zeros(3, samples, dtype=torch.double, device=logits.device)
            values = torch.stack([torch.ones_like(logits), logits, targets]).double()
            placed[:, sample["id"].view(-1)] = values
            found["placed"] = placed
        return found

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log the metrics of the batches so far."""
        total = {
            key: sum(output.get(key, 0) for output in logging_outputs)
            for key in dict.fromkeys(key for output in logging_outputs for key in output)
        }
        size = total["sample_size"]
        metrics.log_scalar("loss", total["loss"] / size / math.log(2), size, round=3)
        for key in ("mha_reg_loss", "ffn_reg_loss"):
            if key in total:
                metrics.log_scalar(key, total[key] / size / math.log(2), size, round=3)
        if size != total["ntokens"]:
            tokens = total["ntokens"]
            metrics.log_scalar("nll_loss", total["loss"] / tokens / math.log(2), tokens, round=3)
        if "ncorrect" in total:
            accuracy = 100.0 * total["ncorrect"] / total["nsentences"]
            metrics.log_scalar("accuracy", accuracy, total["nsentences"], round=DECIMALS)
        _log_derived(total)


def _log_derived(total: dict[str, Any]) -> None:
    """Log what a batch adds (names with _ are not printed), and derive the metrics from the sums."""
    if "counts" in total:
        _keep("_counts", total["counts"][None])
        _derive("mcc", lambda m: mcc(_summed(m, "_counts")))
    if "positive_counts" in total:
        _keep("_positive_counts", total["positive_counts"][None])
        _derive("f1", lambda m: f1(_summed(m, "_positive_counts")))
        _derive("acc_and_f1", lambda m: (m["accuracy"].avg / 100 + f1(_summed(m, "_positive_counts"))) / 2)
    if "placed" in total:
        placed = total["placed"]
        _keep("_predictions", placed[1:, placed[0] > 0].T)
        for name, correlation in (("pearson", pearson), ("spearman", spearman)):
            _derive(name, lambda m, of=correlation: of(*_predictions(m)))
        _derive("pearson_and_spearman", lambda m: (pearson(*_predictions(m)) + spearman(*_predictions(m))) / 2)


def _keep(name: str, value: Tensor) -> None:
    metrics.log_concat_tensor(name, value.cpu(), dim=0)


def _derive(name: str, of: Any) -> None:
    metrics.log_derived(name, lambda meters: round(100 * float(of(meters)), DECIMALS))


def _summed(meters: Any, name: str) -> np.ndarray:
    return meters[name].tensor.sum(dim=0).numpy()


def _predictions(meters: Any) -> tuple[np.ndarray, np.ndarray]:
    return tuple(meters["_predictions"].tensor.T.numpy())


def _counts(targets: Tensor, predictions: Tensor, classes: int) -> Tensor:
    """Count samples by (target, prediction): (classes, classes)."""
    cells = torch.bincount(targets * classes + predictions, minlength=classes * classes)
    return cells.view(classes, classes)


def _cells(counts: np.ndarray) -> dict[str, np.ndarray]:
    """Turn a table of counts into weighted samples, which scikit-learn takes."""
    target, prediction = np.indices(counts.shape).reshape(2, -1)
    return {"y_true": target, "y_pred": prediction, "sample_weight": counts.reshape(-1)}


def mcc(counts: np.ndarray) -> float:
    """Return Matthews' correlation of a (target, prediction) table; 0 where one side is constant."""
    return float(matthews_corrcoef(**_cells(counts)))


def f1(counts: np.ndarray) -> float:
    """Return F1 of class 1 of a (target, prediction) table; 0 where neither side has it."""
    return float(f1_score(**_cells(counts), zero_division=0))


def pearson(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Return Pearson's correlation; 0 where one side is constant."""
    return _correlation(pearsonr, predictions, targets)


def spearman(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Return Spearman's correlation of ranks; 0 where one side is constant."""
    return _correlation(spearmanr, predictions, targets)


def _correlation(of: Any, predictions: np.ndarray, targets: np.ndarray) -> float:
    if np.ptp(predictions) == 0 or np.ptp(targets) == 0:
        return 0.0
    return float(of(predictions, targets)[0])
