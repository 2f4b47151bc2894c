"""DistilBERT becomes ours, with each of its heads; transformers is the oracle."""

from __future__ import annotations

import pytest
import torch

from helpers.formats import encoder

CLASSES = "ForSequenceClassification"
HEADS = ("Model", "ForMaskedLM", CLASSES, "ForQuestionAnswering", "ForTokenClassification", "ForMultipleChoice")


@torch.no_grad()
@pytest.mark.parametrize("head", HEADS)
def test_every_head_is_exact(head, ways):
    values = {"num_labels": 2 if head == "ForQuestionAnswering" else 3, "activation": "relu"}
    encoder(ways / "first", f"DistilBert{head}", sinusoidal_pos_embds=head == "Model", **values)
    said = ways.convert()
    assert "exact     yes" in said and "compared  with transformers" in said and "lost" not in said
    if head == CLASSES:
        assert "cannot express a classifier with relu after its first layer" in ways.refused("ours", to="hf-bert")
        ways.export()
    elif head == "ForMaskedLM":
        ways.back()
