"""Folders for transformers: its Auto classes load them, train them and save them again."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from cases import ENCODERS, LIKE_OTHERS
from helpers import FULL, roberta
from helpers.commands import relpos
from helpers.conversion import config, random_state
from helpers.exported import write_checkpoint
from relpos_fairseq.export.transformers import AUTO, RelPosForSequenceClassification
from relpos_fairseq.models.building import build_roberta
from relpos_fairseq.saved.checkpoint import checkpoint_of

SCHEMES = [name for name in ENCODERS if FULL or name not in LIKE_OTHERS]


def exported(folder, scheme, **values):
    """A checkpoint's model, and the folder that was exported of it."""
    source = config(scheme, **values)
    state = {name: part.float() if part.is_floating_point() else part for name, part in random_state(source).items()}
    torch.save(checkpoint_of("relpos_roberta", source, state), folder / "model.pt")
    assert relpos("export", "transformers", folder / "model.pt", "--out", folder / "out") == 0
    return build_roberta(source, state), folder / "out"


PRICES = {"classification_head_name": "mine", "init_token": 0, "regression_target": True, "num_classes": 1}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_are_the_models(scheme, tmp_path):
    model, folder = exported(tmp_path, scheme)
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
    tokens = roberta.tokens() % 20
    tokens[1, -2:] = 1
    found = loaded.eval()(tokens, attention_mask=(tokens != 1).long()).logits
    torch.testing.assert_close(found, model(tokens)[0].float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_saved_again_it_is_the_same_and_comes_back(scheme, tmp_path):
    """Tables that layers share are saved once, by any of their names."""
    model, folder = exported(tmp_path, scheme)
    auto = transformers.AutoModelForMaskedLM
    auto.from_pretrained(folder, trust_remote_code=True).save_pretrained(tmp_path / "again")
    again = auto.from_pretrained(tmp_path / "again", trust_remote_code=True).eval()
    tokens = roberta.tokens() % 20
    torch.testing.assert_close(again(tokens).logits, model(tokens)[0].float(), rtol=0, atol=1e-5)
    assert relpos("convert", tmp_path / "again", "--to", "same", "--out", tmp_path / "back") == 0


def test_values_are_the_options_without_the_models_name(tmp_path):
    """As in the folders of models that generate; model_type names it."""
    _, folder = exported(tmp_path, "m4")
    told = json.loads((folder / "config.json").read_text())
    assert told["model_type"] == "relpos_roberta" and "_name" not in told["values"]
    assert told["values"]["position_scheme"] == "m4"


def test_outputs_of_any_size_are_exported(tmp_path):
    """Differences are judged beside the outputs' size: a regression may give prices."""
    _, checkpoint = write_checkpoint(tmp_path, "bpe", classes=1, task={"_name": "sentence_prediction"} | PRICES)
    state = torch.load(checkpoint, weights_only=False)
    state["model"]["classification_heads.mine.out_proj.weight"] *= 40_000
    torch.save(state, checkpoint)
    assert relpos("export", "transformers", checkpoint, "--out", tmp_path / "out") == 0


@pytest.mark.parametrize("name", AUTO)
def test_every_auto_class_saves_and_loads(name, tmp_path):
    _, folder = exported(tmp_path, "m4")
    auto = getattr(transformers, name)
    model = auto.from_pretrained(folder, trust_remote_code=True).eval()
    model.save_pretrained(tmp_path / "again")
    again = auto.from_pretrained(tmp_path / "again", trust_remote_code=True).eval()
    assert not list((tmp_path / "again").glob("*.bin"))
    code = tmp_path / "again" / "relpos_code.py"
    assert list((tmp_path / "again").glob("*.py")) == [code]
    assert code.read_text() == (folder / code.name).read_text()
    for other in AUTO:  # with another head, as pre-training is followed by fine-tuning
        # A classifier and multiple choice share a head; 4.46 takes 1 output beside 2 for packed weights.
        how = {"trust_remote_code": True, "ignore_mismatched_sizes": True, "num_labels": 3}
        getattr(transformers, other).from_pretrained(tmp_path / "again", **how)
    saved = again.state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(value, saved[key]), key
    tokens = torch.randint(4, 20, (2, 3, 6) if name == "AutoModelForMultipleChoice" else (2, 6))
    torch.testing.assert_close(again(tokens)[0], model(tokens)[0], rtol=0, atol=1e-5)


def test_heads_learn(tmp_path):
    torch.manual_seed(1)
    _, folder = exported(tmp_path, "t5")
    model = RelPosForSequenceClassification.from_pretrained(folder, num_labels=3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    tokens, labels = torch.randint(4, 20, (6, 8)), torch.tensor([0, 1, 2, 0, 1, 2])
    losses = []
    for _ in range(60):
        loss = model(tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("version", ["Deberta", "DebertaV2"])
def test_tables_that_layers_share_are_saved_again(version, tmp_path):
    """DeBERTa's one table of all layers."""
    config = getattr(transformers, f"{version}Config")(
        vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=30, relative_attention=True, pos_att_type=["c2p", "p2c"], position_biased_input=False,
        type_vocab_size=0, max_relative_positions=8,
    )  # fmt: skip
    getattr(transformers, f"{version}ForMaskedLM")(config).save_pretrained(tmp_path / "first")
    assert relpos("convert", tmp_path / "first", "--to", "same", "--out", tmp_path / "ours") == 0
    assert relpos("export", "transformers", tmp_path / "ours" / "model.pt", "--out", tmp_path / "out") == 0
    auto = transformers.AutoModelForMaskedLM
    model = auto.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    model.save_pretrained(tmp_path / "again")
    again = auto.from_pretrained(tmp_path / "again", trust_remote_code=True).eval()
    tokens = torch.randint(4, 40, (2, 9))
    torch.testing.assert_close(again(tokens).logits, model(tokens).logits, rtol=1e-6, atol=1e-6)
