"""Tokenizers of exported folders: AutoTokenizer gives the ids of the checkpoint's own text."""

from __future__ import annotations

import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

from helpers.commands import relpos
from helpers.exported import hub_of, write_checkpoint
from relpos_fairseq.formats.base import read_encoder
from relpos_fairseq.models.building import build_roberta

PAIR = ("the old house hears, née Zoë 北", "a  mouse makes horses\u0301 x")
KINDS = ("bpe", "wordpiece", "sentencepiece", "gpt2", "symbols")


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_the_checkpoints(kind, tmp_path):
    model, checkpoint = write_checkpoint(tmp_path, kind, segment_encoding="head")
    assert relpos("export", "transformers", checkpoint, "--out", tmp_path / "out") == 0
    hub = hub_of(tmp_path, model, kind)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    tokenizer.save_pretrained(tmp_path / "again")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "again", trust_remote_code=True)
    for one in (tokenizer, again):
        assert one(PAIR[0])["input_ids"] == hub.encode(PAIR[0]).tolist()
        ids, segments = hub.encode_with_segments(*PAIR)
        found = one(*PAIR)
        assert found["input_ids"] == ids.tolist()
        assert found["token_type_ids"] == segments.tolist()
        assert one.decode(found["input_ids"], skip_special_tokens=True)
        padded = one([PAIR[0], "the"], padding=True, return_tensors="pt")
        assert padded["input_ids"][1, -1] == 1 and padded["attention_mask"][1, -1] == 0
    mask = hub.dictionary.index("<mask>")
    ids = [0, *(hub.dictionary.index(piece) for piece in hub._pieces("the old <mask>, née <mask>", masked=True)), 2]
    assert ids.count(mask) == 2
    assert tokenizer("the old <mask>, née <mask>")["input_ids"] == ids
    assert tokenizer.mask_token_id == mask


def test_the_fast_tokenizers_are_fast(tmp_path):
    """tokenizer.json gives offsets, which question answering needs."""
    _, checkpoint = write_checkpoint(tmp_path, "bpe")
    assert relpos("export", "transformers", checkpoint, "--out", tmp_path / "out") == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.is_fast
    assert "token_type_ids" not in tokenizer(*PAIR)


def test_other_dictionary_is_refused(tmp_path, capsys):
    _, checkpoint = write_checkpoint(tmp_path, "bpe")
    (tmp_path / "text" / "dict.txt").write_text("a 1\n")
    assert relpos("export", "transformers", checkpoint, "--out", tmp_path / "out") != 0
    assert "text/dict.txt makes 5 rows, and the model has 299" in capsys.readouterr().err
    assert not list(tmp_path.glob("*out*"))


def test_without_text_it_is_said(tmp_path, capsys):
    _, checkpoint = write_checkpoint(tmp_path, "bpe")
    shutil.rmtree(tmp_path / "text")
    assert relpos("export", "transformers", checkpoint, "--out", tmp_path / "out") == 0
    assert "tokenizer: none: no text/ beside" in capsys.readouterr().out
    assert not (tmp_path / "out" / "tokenizer_config.json").exists()


CLASSIFIED = {
    "_name": "sentence_prediction",
    "classification_head_name": "mine",
    "init_token": 0,
    "separator_token": 2,
    "num_classes": 3,
}


@torch.no_grad()
def test_heads_go_along_and_come_back(tmp_path):
    """A fine-tuned classifier: fairseq, transformers, fairseq; the card says what is known."""
    model, checkpoint = write_checkpoint(tmp_path, "bpe", classes=3, task=CLASSIFIED)
    assert relpos("export", "transformers", checkpoint, "--out", tmp_path / "out") == 0
    auto = transformers.AutoModelForSequenceClassification
    loaded = auto.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    assert loaded.config.id2label == {0: "yes", 1: "no", 2: "perhaps"}
    tokens = torch.randint(4, 90, (3, 9), generator=torch.Generator().manual_seed(1))
    expected = model(tokens, classification_head_name="mine")[0]
    torch.testing.assert_close(loaded(tokens).logits, expected, rtol=0, atol=1e-4)
    card = (tmp_path / "out" / "MODEL_CARD.md").read_text()
    assert "largest difference: classification" in card and "m4" in card
    loaded.roberta.classification_heads["sentence_classification_head"].out_proj.bias += 1.0
    loaded.save_pretrained(tmp_path / "trained")
    shutil.copytree(tmp_path / "out" / "text", tmp_path / "trained" / "text")
    assert relpos("convert", tmp_path / "trained", "--to", "same", "--out", tmp_path / "back") == 0
    back = read_encoder(tmp_path / "back")
    assert back.task["_name"] == "sentence_prediction" and back.task["separator_token"] == 2
    ours = build_roberta(back.values, back.state)
    found = ours(tokens, classification_head_name="sentence_classification_head")[0]
    torch.testing.assert_close(found, expected + 1.0, rtol=0, atol=1e-4)
    assert (tmp_path / "back" / "label" / "dict.txt").read_text() == "yes 1\nno 1\nperhaps 1\n"
    assert (tmp_path / "back" / "tokenizer.json").is_file()
    original = read_encoder(checkpoint).state
    for name, value in back.state.items():
        if not name.startswith("classification_heads"):
            assert torch.equal(value, original[name]), name


@torch.no_grad()
def test_span_heads_go_along(tmp_path):
    model, checkpoint = write_checkpoint(tmp_path, "wordpiece", spans=True)
    assert relpos("export", "transformers", checkpoint, "--out", tmp_path / "out") == 0
    auto = transformers.AutoModelForQuestionAnswering
    loaded = auto.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    tokens = torch.randint(4, 40, (3, 9))
    expected = model(tokens, span_head_name="spans")[0]
    torch.testing.assert_close(loaded(tokens).start_logits, expected[..., 0], rtol=0, atol=1e-4)
    torch.testing.assert_close(loaded(tokens).end_logits, expected[..., 1], rtol=0, atol=1e-4)
    assert relpos("convert", tmp_path / "out", "--to", "same", "--out", tmp_path / "back") == 0
    back = read_encoder(tmp_path / "back")
    assert back.task["_name"] == "question_answering"
    found = build_roberta(back.values, back.state)(tokens, span_head_name="question_answering")[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_untied_output_stays_untied(tmp_path):
    """An output projection of its own is written, read and converted back."""
    _, checkpoint = write_checkpoint(tmp_path, "symbols", untie_weights_roberta=True)
    state = torch.load(checkpoint, weights_only=True)
    state["model"]["encoder.lm_head.weight"] = torch.randn(8, 16)
    torch.save(state, checkpoint)
    assert relpos("export", "transformers", checkpoint, "--out", tmp_path / "out") == 0
    saved = load_file(tmp_path / "out" / "model.safetensors")
    name = "encoder.lm_head.weight"
    assert torch.equal(saved[f"roberta.{name}"], state["model"][name])
    assert torch.equal(read_encoder(tmp_path / "out").state[name], state["model"][name])


def test_several_heads_need_a_name(tmp_path, capsys):
    _, checkpoint = write_checkpoint(tmp_path, "bpe", classes=3)
    state = torch.load(checkpoint, weights_only=True)
    for name in [n for n in state["model"] if n.startswith("classification_heads.mine")]:
        state["model"][name.replace("mine", "other")] = state["model"][name].clone()
    torch.save(state, checkpoint)
    assert relpos("export", "transformers", checkpoint, "--out", tmp_path / "out") != 0
    assert "has the heads mine, other: name one by --head" in capsys.readouterr().err
    assert relpos("export", "transformers", checkpoint, "--out", tmp_path / "out", "--head", "mine") == 0
