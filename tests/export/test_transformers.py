"""Folders for transformers: its Auto classes load them, train them and save them again."""

from __future__ import annotations

import pytest
import torch

from cases import ENCODERS, LIKE_OTHERS
from helpers import FULL, roberta
from helpers.conversion import config, random_state
from helpers.exported import write_checkpoint
from helpers.formats import change_checkpoint
from relpos_fairseq.export.transformers import AUTO
from relpos_fairseq.models.building import build_roberta
from relpos_fairseq.saved.checkpoint import checkpoint_of

# DeBERTa's has one table of all layers.
SCHEMES = [name for name in ENCODERS if FULL or name not in LIKE_OTHERS - {"deberta_released"}]


def exported(ways, scheme, **values):
    """A checkpoint's model, which is exported to `out`."""
    source = config(scheme, **values)
    state = random_state(source, torch.float32)
    torch.save(checkpoint_of("relpos_roberta", source, state), ways / "model.pt")
    ways.export("model.pt")
    return build_roberta(source, state)


PRICES = {"classification_head_name": "mine", "init_token": 0, "regression_target": True, "num_classes": 1}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_saved_again_it_is_the_same_and_comes_back(scheme, ways):
    """Tables that layers share are saved once, by any of their names; model_type names the model, and no value does."""
    model = exported(ways, scheme)
    told = ways.told("out")
    assert told["model_type"] == "relpos_roberta" and "_name" not in told["values"]
    assert told["values"]["position_scheme"] == scheme
    loaded = ways.opened("out", "AutoModelForMaskedLM")
    tokens = roberta.tokens() % 20
    tokens[1, -2:] = 1
    found = loaded(tokens, attention_mask=(tokens != 1).long()).logits
    torch.testing.assert_close(found, model(tokens)[0].float(), rtol=0, atol=1e-5)
    loaded.save_pretrained(ways / "again")
    again = ways.opened("again", "AutoModelForMaskedLM")
    tokens = roberta.tokens() % 20
    torch.testing.assert_close(again(tokens).logits, model(tokens)[0].float(), rtol=0, atol=1e-5)
    ways.convert("again", "back")


def test_outputs_of_any_size_are_exported(ways):
    """Differences are judged beside the outputs' size: a regression may give prices."""
    _, checkpoint = write_checkpoint(ways.here, "bpe", classes=1, task={"_name": "sentence_prediction"} | PRICES)
    name = "classification_heads.mine.out_proj.weight"
    change_checkpoint(checkpoint, lambda state: state["model"][name].mul_(40_000))
    ways.export("model.pt")


@pytest.mark.parametrize("name", AUTO)
def test_every_auto_class_saves_and_loads(name, ways):
    exported(ways, "m4")
    model = ways.opened("out", name)
    model.save_pretrained(ways / "again")
    again = ways.opened("again", name)
    assert not list((ways / "again").glob("*.bin"))
    code = ways / "again/relpos_code.py"
    assert list((ways / "again").glob("*.py")) == [code]
    assert code.read_text() == (ways / "out" / code.name).read_text()
    for other in AUTO:  # with another head, as pre-training is followed by fine-tuning
        # A classifier and multiple choice share a head; 4.46 takes 1 output beside 2 for packed weights.
        ways.opened("again", other, ignore_mismatched_sizes=True, num_labels=3)
    saved = again.state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(value, saved[key]), key
    tokens = torch.randint(4, 20, (2, 3, 6) if name == "AutoModelForMultipleChoice" else (2, 6))
    torch.testing.assert_close(again(tokens)[0], model(tokens)[0], rtol=0, atol=1e-5)
