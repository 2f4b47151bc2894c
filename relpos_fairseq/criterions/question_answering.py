"""Criterion `question_answering`: cross-entropy of start and end; exact match and F1 in evaluation.

The loss is Devlin et al. 2018's (section 4.2): the mean of both cross-entropies over the positions
where an answer may begin or end, `<s>` standing for "no answer in this window".  In evaluation the
logging output holds sums over questions, so that exact match and F1 are those of the whole set
whatever the batches and however many processes; SQuAD v2.0's best thresholds need every question's
odds, which a table with a row a question adds up to.
"""

import math
import re
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor

from relpos_fairseq.data.answer_spans import IGNORED, Prediction, predict
from relpos_fairseq.metrics.answer_scores import Scored, best_scores, best_thresholds

_GROUPS = {"": "", "has_": "HasAns", "no_": "NoAns"}
TOKENS = 1 << 15  # that are evaluated at once
_COLUMNS = 6  # present, exact, F1, answerable, odds, answered


class ScoreTable(Tensor):
    """A table of scores of which a log line shows the size alone."""

    def tolist(self) -> str:  # type: ignore[override]  # what a log writes
        """Return the table's size."""
        return f"{self.shape[0]} questions"


@register_criterion("question_answering", dataclass=FairseqDataclass)
class QuestionAnsweringCriterion(FairseqCriterion):
    """The cross-entropy of the start and the end of the answer."""

    def __init__(self, cfg: Any, task: Any) -> None:
        """Keep the task's options.

        Raises:
            ValueError: another task.
        """
        super().__init__(task)
        if not hasattr(task.cfg, "span_head_name"):
            raise ValueError("--criterion question_answering needs --task question_answering")
        self.head = task.cfg.span_head_name
        self.options = task.options

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple:
        """Return the loss of a batch of B windows, its sample size and what is logged.

        Returns:
            Its sum over windows (B,) if not `reduce`, the number of windows, and what is logged.
        """
        logits = span_logits(model, sample, self.head)
        losses = [
            F.cross_entropy(logits[..., side], sample[name], ignore_index=IGNORED, reduction="none")
            for side, name in enumerate(("start", "end"))
        ]
        loss = (losses[0] + losses[1]) / 2  # (B,)
        size = sample["nsentences"]
        logged = {"loss": loss.detach().sum(), "ntokens": sample["ntokens"], "nsentences": size, "sample_size": size}
        if not model.training and "asked" in sample:
            with torch.no_grad():
                logged.update(score_sums(sample, predictions(sample, logits, self.options)))
        return (loss.sum() if reduce else loss), size, logged

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log the loss in bits, and EM and F1 in percent where questions were answered."""
        total = {
            key: sum(output[key] for output in logging_outputs if key in output)
            for key in dict.fromkeys(key for output in logging_outputs for key in output)
        }
        size = total.get("sample_size", 0)
        if size:
            loss = float(total["loss"]) / float(size) / math.log(2)
            metrics.log_scalar("loss", loss, float(size), round=3)
        for prefix in _GROUPS:
            count = float(total.get(f"_{prefix}total", 0))
            if count:
                for name in ("em", "f1"):
                    value = 100.0 * float(total[f"_{prefix}{name}"]) / count
                    metrics.log_scalar(f"{prefix}{name}", value, count, round=4)
        if "_table" in total:
            table = total["_table"].as_subclass(Tensor)
            # By its size: fairseq-validate adds up all subsets in its outermost aggregator.
            # tuned_, because best_f1 is fairseq's name for the best epoch's F1.
            source = f"_table_{len(table)}"
            metrics.log_scalar(source, table)
            for name in ("exact", "f1"):
                for key in (f"best_{name}", f"reached_{name}_thresh"):
                    shown = re.sub("best|reached", "tuned", key).replace("exact", "em")
                    metrics.log_derived(shown, _Best(source, key))

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Return True: all logged values are sums."""
        return True


class _Best:
    """A logged number at the best threshold, computed from the summed table."""

    def __init__(self, source: str, key: str) -> None:
        self.source = source
        self.key = key

    def __call__(self, meters: Any) -> float:
        return round(best_thresholds(read_table(meters[self.source].sum))[self.key], 4)


def span_logits(model: Any, sample: dict[str, Any], head: str) -> Tensor:
    """Return start and end logits (B, T, 2) in at least fp32, -inf where no answer may begin or end."""
    given = sample["net_input"]
    rows, width = given["src_tokens"].shape
    step = rows if torch.is_grad_enabled() else max(1, TOKENS // width)  # a text of any length fits the memory
    parts = [{name: value[first : first + step] for name, value in given.items()} for first in range(0, rows, step)]
    logits = torch.cat([model(**part, features_only=True, span_head_name=head)[0] for part in parts])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.masked_fill(~sample["allowed"][..., None], -math.inf)


def predictions(sample: dict[str, Any], logits: Tensor, options: Any) -> list[Prediction]:
    """Predict the answers to a batch's questions.

    Args:
        sample: of a QuestionDataset in evaluation.
        logits: (B, T, 2) of `span_logits`.
        options: how spans are chosen.
    """
    both = logits.detach().cpu().double().numpy()
    found = []
    for asked in sample["asked"]:
        rows = [both[asked.row + n] for n in range(len(asked.spans))]
        parts = [row[asked.offset : asked.offset + span.length] for row, span in zip(rows, asked.spans, strict=True)]
        found.append(
            predict(
                asked.context,
                asked.text,
                asked.spans,
                [part[:, 0] for part in parts],
                [part[:, 1] for part in parts],
                [float(row[0].sum()) for row in rows] if asked.unanswerable else None,
                options,
            )
        )
    return found


def score_sums(sample: dict[str, Any], answered: list[Prediction]) -> dict[str, Any]:
    """Sum exact match and F1 over a batch's questions, and make SQuAD v2.0's table."""
    first = sample["asked"][0]
    sums: dict[str, Any] = {}
    table = torch.zeros(first.total, _COLUMNS, dtype=torch.double) if first.unanswerable else None
    prefixes = tuple(_GROUPS) if first.unanswerable else ("",)
    for prefix in prefixes:
        sums |= dict.fromkeys((f"_{prefix}em", f"_{prefix}f1", f"_{prefix}total"), 0.0)
    for asked, one in zip(sample["asked"], answered, strict=True):
        question, v2 = asked.question, asked.unanswerable
        exact, overlap = best_scores(one.text, question.gold, asked.normalised, v2)
        group = "has_" if question.answerable else "no_"
        for prefix in ("", group) if v2 else ("",):
            sums[f"_{prefix}em"] += exact
            sums[f"_{prefix}f1"] += overlap
            sums[f"_{prefix}total"] += 1.0
        if table is not None:
            raw = best_scores(one.best, question.gold, asked.normalised, v2)
            odds = min(one.odds, 1e30)  # inf times 0 rows would be no sum
            row = (1.0, *raw, question.answerable, odds, bool(one.best))
            table[asked.index] = torch.tensor(row, dtype=torch.double)
    if table is not None:
        sums["_table"] = table.as_subclass(ScoreTable)
    return sums


def read_table(table: Tensor) -> list[Scored]:
    """Return the questions of a summed table."""
    return [
        Scored(exact, overlap, bool(answerable), odds, bool(answered))
        for present, exact, overlap, answerable, odds, answered in Tensor.tolist(table)
        if present
    ]
