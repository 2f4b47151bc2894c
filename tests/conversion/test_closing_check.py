"""A folder that transformers does not open, or opens as another model, is not published."""

from __future__ import annotations

import re

import pytest
import torch

from helpers.exported import spoilt_before
from helpers.formats import HEAD, NAMES, change, config, encoder, tensors
from relpos_fairseq.formats import closing_check, convert


def untruncated(folder):
    text = (folder / "tokenizer_config.json").read_text()
    (folder / "tokenizer_config.json").write_text(text.replace("model_max_length", "other_length"))


def cased(folder):
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"lowercase": true', '"lowercase": false'))


BIAS = "bert.encoder.layer.0.output.dense.bias"
SPOILT = {
    "weights": (tensors({BIAS: lambda state: state[BIAS] + 3 * torch.eye(16)[0]}), "its logits differ from ours by"),
    "a missing tensor": (tensors(but=f"^{BIAS}$"), f"does not read it as it is .{BIAS}"),
    "names": (lambda folder: change(folder / "config.json", "id2label", **{"1": "other"}), "its names of classes are"),
    "problem": (config(problem_type="multi_label_classification"), "does not open it: ValueError: Target size"),
    "no config": (lambda f: (f / "config.json").write_text('{"model_type": "nothing"}'), "does not open it: "),
    "truncation": (untruncated, "its longest input after truncation are None, ours 30"),
    "ids": (cased, "its ids are"),
}


@pytest.mark.usefixtures("opener_stays")
@pytest.mark.parametrize("name", SPOILT)
def test_what_differs_is_not_published(name, ways, monkeypatch):
    """The folder is spoilt after it was compared in this process, as a release or a file would."""
    spoil, said = SPOILT[name]
    encoder(ways / "first", "BertForSequenceClassification", **NAMES)
    ways.convert()
    spoilt_before(monkeypatch, convert, "check_written", spoil)
    error = ways.refused("ours/model.pt", "--head", HEAD, to="hf-bert")
    assert re.search(f"is not written: (transformers [0-9.]+ )?.*{said}", error)


def test_the_line_that_says_why_is_shown(tmp_path):
    """Not torch's last one, which is advice."""
    encoder(tmp_path, "BertForSequenceClassification", **NAMES)
    change(tmp_path / "config.json", id2label={"0": "a"})
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
