"""DistilBERT becomes ours, with each of its heads; transformers is the oracle."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from helpers.commands import relpos
from helpers.conversion import shake
from relpos_fairseq.formats.base import read_encoder

LETTERS = [chr(number) for number in range(ord("a"), ord("z") + 1)]
HEADS = ("Model", *(f"For{name}" for name in ("MaskedLM", "SequenceClassification", "QuestionAnswering")))
HEADS += ("ForTokenClassification", "ForMultipleChoice")


def write(folder, head: str, **values):
    """A random model with a tokenizer."""
    folder.mkdir()
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "DistilBertTokenizer"}))
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48, "max_position_embeddings": 64}
    sizes |= {"vocab_size": len(pieces), "num_labels": 2 if head == "ForQuestionAnswering" else 3}
    model = getattr(transformers, f"DistilBert{head}")(transformers.DistilBertConfig(**sizes | values)).eval()
    shake(model)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
@pytest.mark.parametrize("head", HEADS)
def test_every_head_is_exact(head, tmp_path, capsys):
    write(tmp_path / "theirs", head, sinusoidal_pos_embds=head == "Model", activation="relu")
    assert relpos("convert", tmp_path / "theirs", "--to", "same", "--out", tmp_path / "ours") == 0
    said = capsys.readouterr().out
    assert "exact     yes" in said and "compared  with transformers" in said and "lost" not in said
    if head == "ForSequenceClassification":
        assert relpos("convert", tmp_path / "ours", "--to", "hf-bert", "--out", tmp_path / "bert") == 2
        assert "cannot express a classifier with relu after its first layer" in capsys.readouterr().err
        assert relpos("export", "transformers", tmp_path / "ours" / "model.pt", "--out", tmp_path / "out") == 0
    elif head == "ForMaskedLM":
        assert relpos("convert", tmp_path / "ours", "--to", "hf-bert", "--out", tmp_path / "bert") == 0


def test_a_tensor_that_is_missing_is_named_as_there(tmp_path):
    write(tmp_path / "theirs", "ForMaskedLM")
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    del tensors["distilbert.transformer.layer.1.ffn.lin2.bias"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"distilbert.transformer.layer.1.ffn.lin2.bias"):
        read_encoder(tmp_path / "theirs")
