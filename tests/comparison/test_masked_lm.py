"""Task kind `mlm`: masked pre-training, then fine-tuning of the same checkpoint, in one run."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from helpers.commands import relpos, relpos_job
from helpers.glue_data import write_glue
from helpers.questions import make_data
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.lab.comparison.scheduling import Comparison
from relpos_fairseq.lab.comparison.scores import unpack
from relpos_fairseq.lab.comparison.tasks import masked_lm

WIDTHS = {"encoder-embed-dim": 16, "encoder-ffn-embed-dim": 24, "encoder-attention-heads": 2}
RTE = {"kind": "glue", "name": "RTE", "data": "x"}
CUT = {"tokens-per-sample": 32, "doc-stride": 8}
TRAIN = {"max-update": 4, "warmup-updates": 1, "batch-size": 8, **WIDTHS}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Text, GLUE's tasks and questions, prepared with one tokenizer."""
    folder = tmp_path_factory.mktemp("data")
    tokenizer, raw = str(make_data(folder / "squad")), write_glue(folder / "raw", train=20)
    one = ("--tokenizer-folder", tokenizer, "--workers", "1")
    relpos_job("prepare", "glue", str(raw), "--out", str(folder / "glue"), "--max-length", "32", *one)
    relpos_job("prepare", "glue", str(raw), "--text", str(folder / "text"))
    mlm = ("--train", str(folder / "text"), "--hold-out", "0.2", "--tokens-per-sample", "32")
    relpos_job("prepare", "mlm", "--out", str(folder / "mlm"), *mlm, *one)
    return folder


def comparison(folder: Path, data: Path, seed: int = masked_lm.MASKS, **changes) -> Comparison:
    """A comparison of one run, whose seed is that of the scored masks: fairseq's own validation has the same."""
    glue = {"kind": "glue", "data": str(data / "glue"), "max_update": 3}
    task = {
        "kind": "mlm",
        "data": str(data / "mlm"),
        "tokens": 32,
        "train": TRAIN,
        "finetune": {
            **{name: {**glue, "name": name} for name in ("RTE", "MNLI")},
            "SQuAD": {"kind": "questions", "data": str(data / "squad"), "max_update": 3, "train": CUT},
        },
    }
    content = {"seeds": [seed], "schemes": ["m4"], "tasks": {"pretraining": {**task, **changes}}}
    folder.mkdir(exist_ok=True)
    spec = folder / "small.yaml"
    spec.write_text(yaml.safe_dump(content, sort_keys=False))
    return Comparison.of(spec, folder / "work")


def test_pre_trained_then_fine_tuned_and_resumed(tmp_path, data, monkeypatch):
    """The perplexity is that of fairseq's validation; a run that ends in between goes on with what it has."""
    made = comparison(tmp_path, data)
    (run,) = made.runs
    own, trained = masked_lm.train, []

    def train(workspace, flags):
        trained.append(workspace.task.label)
        if trained == ["RTE"]:
            raise UserError("ended here")
        return own(workspace, flags)

    monkeypatch.setattr(masked_lm, "train", train)
    made.prepare(made.runs)
    with pytest.raises(UserError, match="ended here"):
        run.finish(made.work, made.store, made.code)
    log = made.folder(run) / "train.log"
    before = log.read_bytes()
    run.finish(made.work, made.store, made.code)
    assert log.read_bytes() == before and trained == ["RTE", "RTE", "MNLI", "SQuAD"]
    result = made.result(run)
    assert list(result["sets"]) and set(result["sets"]) == {"held-out", "RTE", "MNLI valid", "MNLI valid1", "SQuAD"}
    bits = result["validations"][-1]["valid_loss"]
    assert result["sets"]["held-out"]["values"]["perplexity"] == pytest.approx(2**bits, rel=2e-3)
    last = result["sets"]["RTE"]["validations"][-1]
    assert result["sets"]["RTE"]["values"]["accuracy"] == pytest.approx(last["valid_accuracy"], abs=0.01)
    answered, last = (result["sets"]["SQuAD"][name] for name in ("values", "validations"))
    assert answered["question F1"] == pytest.approx(last[-1]["valid_f1"], abs=0.01)
    assert not list(made.folder(run).glob("**/*.pt"))
    assert relpos("compare", "report", tmp_path / "small.yaml", "--work", tmp_path / "work") == 0
    report = (tmp_path / "small" / "report.md").read_text()
    assert report.index("`held-out`") < report.index("`RTE`") < report.index("`MNLI valid1`")
    other = comparison(tmp_path / "other", data, seed=masked_lm.MASKS + 1, finetune={})
    assert other.run() == 0
    masked = [
        unpack(one["sets"]["held-out"]["statistics"]["perplexity"])[:, 1] for one in (result, other.result(*other.runs))
    ]
    assert (masked[0] == masked[1]).all()  # the masks of another seed's training are the same


@pytest.mark.parametrize(
    ("finetune", "said"),
    [
        ({"a": {"kind": "copy"}}, "finetune: a must be a task of fine-tuning, got kind copy"),
        ({"a": 3}, "finetune: a must be a mapping, got 3"),
        ({"a": {"kind": "glue", "name": "RTE", "date": "x"}}, "kind glue has no date"),
        ({"a/b": {**RTE}}, "'a/b' cannot be the name of a folder"),
        ({"../../a": {**RTE}}, "cannot be the name of a folder"),
        ({"": {**RTE}}, "'' cannot be the name of a folder"),
        ({"held-out": {**RTE}}, "two test sets would be called held-out: choose other labels"),
        ({"MNLI": {**RTE, "name": "MNLI"}, "MNLI valid": {**RTE}}, "would be called MNLI valid"),
        ({"a": {**RTE, "epochs": -1}}, "epochs is -1, and must be a whole number from 1"),
        ({"a": {**RTE, "max_update": -3}}, "max_update is -3, and must be a whole number from 0"),
        ({"a": {**RTE, "protocol": "chen"}}, "finetune: a is a grid of 8: give one lr and one number of epochs"),
        ({"a": {**RTE, "lr": -1.0}}, "lr must be above 0, got -1.0"),
    ],
)
def test_wrong_fine_tuning(finetune, said, tmp_path, data):
    """Kinds that do not fine-tune, what is no task: one line each."""
    with pytest.raises(UserError, match=said):
        comparison(tmp_path, data, finetune=finetune)


def test_data_that_do_not_fit(tmp_path, data):
    """Another tokenizer, other blocks, and what is not there or in shards: one line each."""
    made = comparison(tmp_path, data)
    symbols = data / "glue" / "RTE" / "input0" / "dict.txt"
    content = symbols.read_text()
    try:
        symbols.write_text(content + "further 1\n")
        with pytest.raises(UserError, match="RTE: .* was made with another tokenizer than"):
            made.prepare(made.runs)
    finally:
        symbols.write_text(content)
    short = comparison(tmp_path, data, tokens=20, finetune={})
    with pytest.raises(UserError, match="has blocks of 31 tokens: write tokens: 31, got 20"):
        short.prepare(short.runs)
    with pytest.raises(UserError, match="has no valid.idx: make it with relpos prepare mlm"):
        (tmp_path / "mlm").mkdir()
        other = comparison(tmp_path, tmp_path, finetune={})
        other.prepare(other.runs)
    (tmp_path / "mlm" / "shard0").mkdir()
    with pytest.raises(UserError, match="is in shards, which this task does not read: make it with --shards 1"):
        other.prepare(other.runs)
