"""`--quantization` of every command that runs RoBERTas: the same outputs, nearly."""

from __future__ import annotations

import shutil

import pytest
import torch

from helpers.exported import write_checkpoint
from relpos_fairseq.inference.checkpoints.hooks import from_pretrained
from relpos_fairseq.models.relpos_roberta import RelPosRobertaModel
from relpos_fairseq.nn.packed import KINDS, QuantizedLinear

TASKS = {
    "classify": {
        "classes": 3,
        "task": {"_name": "sentence_prediction", "classification_head_name": "mine", "init_token": 0},
    },
    "fill": {},
    "answer": {"spans": True, "task": {"_name": "question_answering", "span_head_name": "spans"}},
}


def numbers(value) -> list[float]:
    """Every number of what a command says, in its order."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for part in value for number in numbers(part)]
    return [value] if isinstance(value, float) else []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TASKS)
def test_fewer_bits_say_nearly_the_same(name, kind, tmp_path, shell):
    if problem := KINDS[kind].problem():
        pytest.skip(problem)
    write_checkpoint(tmp_path, "bpe", "t5", **TASKS[name])
    if name == "classify":  # whose dictionary has a folder of its own
        (tmp_path / "text" / "input0").mkdir()
        shutil.copy(tmp_path / "text" / "dict.txt", tmp_path / "text" / "input0")
    last = "<mask>" if name == "fill" else "horse"
    (tmp_path / "in.txt").write_text(f"the old house sees a {last}\n")
    line = f"{name} model.pt in.txt {'what?' if name == 'answer' else ''} --jsonl --cpu"
    plain, found = (numbers(shell.objects(f"{line} {more}")) for more in ("", f"--quantization {kind}"))
    assert found == pytest.approx(plain, abs=0.1) and found != plain and plain


def test_the_hub_takes_integers(tmp_path):
    _, checkpoint = write_checkpoint(tmp_path, "bpe", "t5")
    hub = RelPosRobertaModel.from_pretrained(tmp_path, checkpoint.name, "./text", quantization="int8")
    assert any(isinstance(part, QuantizedLinear) for part in hub.model.modules())
    filled = hub.fill_mask("the old <mask>", topk=1)
    assert len(filled) == 1


def test_the_hub_takes_integers_of_our_models_alone(tmp_path):
    with pytest.raises(ValueError, match="quantization='int8' is for models of relpos_fairseq"):
        from_pretrained(lambda *_, **more: {"models": [torch.nn.Linear(2, 2)], **more}, tmp_path, quantization="int8")
