"""A folder that transformers does not open, or opens as another model, is not published."""

from __future__ import annotations

import json

import pytest
import torch
from conversion.test_conversion_heads import NAMES, write
from safetensors.torch import load_file, save_file

from helpers.commands import relpos
from relpos_fairseq.formats import closing_check
from relpos_fairseq.formats import convert as job


def change(name, folder):
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    if name == "weights":
        weights["bert.encoder.layer.0.output.dense.bias"][0] += 3.0
    if name == "a missing tensor":
        del weights["bert.encoder.layer.0.output.dense.bias"]
    if name == "names":
        config["id2label"]["1"] = "other"
    if name == "problem":
        config["problem_type"] = "multi_label_classification"
    if name == "no config":
        config = {"model_type": "nothing"}
    if name == "truncation":
        del settings["model_max_length"]
    if name == "ids":
        made = (folder / "tokenizer.json").read_text().replace('"lowercase": true', '"lowercase": false')
        (folder / "tokenizer.json").write_text(made)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


SPOILT = {
    "weights": "its logits differ from ours by",
    "a missing tensor": "does not read it as it is .bert.encoder.layer.0.output.dense.bias",
    "names": "its names of classes are",
    "problem": "does not open it: ValueError: Target size",
    "no config": "does not open it: ",
    "truncation": "its longest input after truncation are None, ours 30",
    "ids": "its ids are",
}


@pytest.mark.usefixtures("opener_stays")
@pytest.mark.parametrize("name", SPOILT)
def test_what_differs_is_not_published(name, tmp_path, monkeypatch):
    """The folder is spoilt after it was compared in this process, as a release or a file would."""
    write(tmp_path / "first", "ForSequenceClassification", **NAMES)
    assert relpos("convert", tmp_path / "first", "--to", "same", "--out", tmp_path / "ours") == 0
    original = job.check_written

    def spoilt(folder, *given):
        change(name, folder)
        return original(folder, *given)

    monkeypatch.setattr(job, "check_written", spoilt)
    source = job.read(tmp_path / "ours" / "model.pt")
    made = job.Job("hf-bert", {}, head="sentence_classification_head")
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=f"is not written: (transformers [0-9.]+ )?.*{SPOILT[name]}"):
        job.convert_source(made, source).write(tmp_path / "out", print)


def test_the_line_that_says_why_is_shown(tmp_path):
    """Not torch's last one, which is advice."""
    write(tmp_path, "ForSequenceClassification", **NAMES)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"id2label": {"0": "a"}}))
    asked = {"auto": "AutoModelForSequenceClassification", "trust": False}
    with pytest.raises(closing_check.NotOpenedError, match=r"Error\(s\) in loading .*: size mismatch for classifier"):
        closing_check._answer(tmp_path, asked)


def test_a_symbol_that_is_never_written_hides_no_difference():
    ours = torch.tensor([[0.5, 2.0, -1e4]])
    assert closing_check.measured(ours, ours) == (0.0, 2.0)
    apart, size = closing_check.measured(ours + torch.tensor([0.0, 0.02, 3.0]), ours)
    assert (round(apart, 4), size) == (0.02, 2.0) and not closing_check.agree(apart, size)
    for wrong in (torch.tensor([[0.5, 2.0, 1.0]]), torch.tensor([[0.5, float("nan"), -1e4]])):
        assert not closing_check.agree(*closing_check.measured(wrong, ours))
