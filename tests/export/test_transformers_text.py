"""Tokenizers of exported folders: AutoTokenizer gives the ids of the checkpoint's own text."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file

from helpers.exported import CLASSIFIED, hub_of, write_checkpoint
from helpers.formats import change_checkpoint
from relpos_fairseq.formats.base import read_encoder
from relpos_fairseq.heads import HEAD
from relpos_fairseq.models.building import build_roberta

PAIR = ("the old house hears, née Zoë 北", "a  mouse makes horses\u0301 x")
KINDS = ("bpe", "wordpiece", "sentencepiece", "gpt2", "symbols")


@pytest.mark.parametrize("segments", ["head", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_the_checkpoints(kind, segments, ways):
    """A tokenizer.json gives offsets, which question answering needs."""
    model, _ = write_checkpoint(ways.here, kind, segment_encoding=segments)
    ways.export("model.pt")
    hub = hub_of(ways.here, model, kind)
    tokenizer = ways.tokenizer("out")
    tokenizer.save_pretrained(ways / "again")
    again = ways.tokenizer("again")
    for one in (tokenizer, again):
        assert one(PAIR[0])["input_ids"] == hub.encode(PAIR[0]).tolist()
        ids, types = hub.encode_with_segments(*PAIR)
        found = one(*PAIR)
        assert found["input_ids"] == ids.tolist()
        assert one.is_fast == (kind != "symbols")
        assert found.get("token_type_ids") == (types.tolist() if segments == "head" else None)
        assert one.decode(found["input_ids"], skip_special_tokens=True)
        padded = one([PAIR[0], "the"], padding=True, return_tensors="pt")
        assert padded["input_ids"][1, -1] == 1 and padded["attention_mask"][1, -1] == 0
    mask = hub.dictionary.index("<mask>")
    ids = [0, *(hub.dictionary.index(piece) for piece in hub._pieces("the old <mask>, née <mask>", masked=True)), 2]
    assert ids.count(mask) == 2
    assert tokenizer("the old <mask>, née <mask>")["input_ids"] == ids
    assert tokenizer.mask_token_id == mask


def test_without_text_it_is_said(ways):
    write_checkpoint(ways.here, "bpe")
    shutil.rmtree(ways / "text")
    assert "tokenizer: none: no text/ beside" in ways.export("model.pt")
    assert not (ways / "out" / "tokenizer_config.json").exists()


def test_a_classifier_that_was_trained_there_comes_back(ways):
    """Fairseq, transformers, fairseq; the card says what is known."""
    model, _ = write_checkpoint(ways.here, "bpe", classes=3, task=CLASSIFIED)
    ways.export("model.pt")
    card = (ways / "out/MODEL_CARD.md").read_text()
    assert "largest difference: classification" in card and "m4" in card
    loaded = ways.opened("out", "AutoModelForSequenceClassification")
    loaded.roberta.classification_heads[HEAD].out_proj.bias.data += 1.0
    loaded.save_pretrained(ways / "trained")
    shutil.copytree(ways / "out/text", ways / "trained/text")
    ways.convert("trained", "back")
    back = read_encoder(ways / "back")
    assert back.task["_name"] == "sentence_prediction" and back.task["separator_token"] == 2
    tokens = torch.randint(4, 90, (3, 9), generator=torch.Generator().manual_seed(1))
    found = build_roberta(back.values, back.state)(tokens, classification_head_name=HEAD)[0]
    torch.testing.assert_close(found, model(tokens, classification_head_name="mine")[0] + 1.0, rtol=0, atol=1e-4)
    assert (ways / "back/label/dict.txt").read_text() == "yes 1\nno 1\nperhaps 1\n"
    assert (ways / "back/tokenizer.json").is_file()


@torch.no_grad()
def test_span_heads_go_along(ways):
    model, _ = write_checkpoint(ways.here, "wordpiece", spans=True)
    ways.export("model.pt")
    loaded = ways.opened("out", "AutoModelForQuestionAnswering")
    tokens = torch.randint(4, 40, (3, 9))
    expected = model(tokens, span_head_name="spans")[0]
    torch.testing.assert_close(loaded(tokens).start_logits, expected[..., 0], rtol=0, atol=1e-4)
    torch.testing.assert_close(loaded(tokens).end_logits, expected[..., 1], rtol=0, atol=1e-4)
    ways.convert("out", "back")
    back = read_encoder(ways / "back")
    assert back.task["_name"] == "question_answering"
    found = build_roberta(back.values, back.state)(tokens, span_head_name="question_answering")[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_untied_output_stays_untied(ways):
    """An output projection of its own is written, read and converted back."""
    _, checkpoint = write_checkpoint(ways.here, "symbols", untie_weights_roberta=True)
    name, weight = "encoder.lm_head.weight", torch.randn(8, 16)
    change_checkpoint(checkpoint, lambda state: state["model"].update({name: weight}))
    ways.export("model.pt")
    saved = load_file(ways / "out" / "model.safetensors")
    assert torch.equal(saved[f"roberta.{name}"], weight)
    assert torch.equal(read_encoder(ways / "out").state[name], weight)
