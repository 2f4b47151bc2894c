"""Values of config.json and types of tensors that no model computes with are refused at reading, by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conversion.test_conversion_heads import HEAD, NAMES, write
from conversion.test_conversion_huggingface import deberta
from safetensors.torch import load_file, save_file

from helpers.commands import relpos
from helpers.exported import write_checkpoint
from relpos_fairseq.conversion import ConversionError
from relpos_fairseq.formats.base import read
from relpos_fairseq.formats.transformers_folder import _KEYS, _VALUES, read_config, read_weights

NAMED = [
    *({"0": "a", "2": "c"}, {"1": "a", "2": "b", "3": "c"}, {"-1": "a", "0": "b", "1": "c"}, ["a", "b", "c"]),
    *({"neg": "a"}, {"0": 0, "1": "b", "2": "c"}, {"0": "a", "1": None, "2": "c"}, {"0": "a"}, {"0": ["x"]}),
    {str(number): "x" for number in range(4)},
]
WRONG = {
    "layer_norm_eps": ["1e-12", None, -1.0, float("nan"), float("inf")],
    "hidden_dropout_prob": ["0.1", 2.0, None, True],
    "attention_probs_dropout_prob": ["0.1", 2.0],
    "classifier_dropout": ["x", -0.1],
    "hidden_act": [["gelu"], None, {}],
    "model_type": [["bert"], None, 5],
    "position_embedding_type": [["absolute"], "", {"a": 1}],
    "num_attention_heads": [True, 2.0, "2", 0, None],
    "pad_token_id": ["0", [0]],
    "tie_word_embeddings": ["no", 0],
    "id2label": NAMED,
    "label2id": [["a"], 5],
}
DEBERTA = {
    "position_buckets": ["256", None, 4.0],
    "max_relative_positions": [None, "512"],
    "pos_att_type": [5, [5], {}],
    "share_att_key": ["yes"],
    "conv_kernel_size": ["0", None],
    "type_vocab_size": [None, -1],
    "pooler_hidden_act": [None, "swish"],
    "norm_rel_ebd": [None],
}


def refused(folder: Path, key: str, value, capsys, within: str = "") -> None:
    """Convert a folder with this value in its config.json: one line names the file, the key and the value."""
    path = folder / "config.json"
    before = json.loads(path.read_text())
    told = json.loads(path.read_text())
    (told[within] if within else told)[key] = value
    path.write_text(json.dumps(told))
    capsys.readouterr()
    assert relpos("convert", folder, "--to", "same", "--out", folder.parent / "out") == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {path}") and said.count("\n") == 1 and "RELPOS_TRACEBACK" not in said
    assert key in said and repr(value) in said
    path.write_text(json.dumps(before))


@pytest.mark.parametrize("key", WRONG)
def test_a_value_that_no_model_computes_with_is_named(key, tmp_path, capsys):
    write(tmp_path / "first", "ForSequenceClassification", **NAMES)
    for value in WRONG[key]:
        refused(tmp_path / "first", key, value, capsys)


@pytest.mark.parametrize("key", DEBERTA)
def test_a_value_that_no_deberta_computes_with_is_named(key, tmp_path, capsys):
    deberta(tmp_path / "first", "v3")
    for value in DEBERTA[key]:
        refused(tmp_path / "first", key, value, capsys)


def test_an_exported_folders_values_are_named(tmp_path, capsys):
    """By the same table, and those of fairseq's options in it; with names of another number of classes."""
    _, checkpoint = write_checkpoint(tmp_path, "wordpiece", "learned", classes=3)
    assert relpos("export", "transformers", checkpoint, "--out", tmp_path / "out0") == 0
    for key, value in (("id2label", NAMED[-1]), ("id2label", NAMED[0]), ("values", 5), ("pair_separators", "x")):
        refused(tmp_path / "out0", key, value, capsys)
    for key, value in (("dropout", "0.1"), ("layer_norm_eps", None), ("encoder_layers", True), ("activation_fn", [])):
        refused(tmp_path / "out0", key, value, capsys, within="values")


ODD = (None, True, "", "1", [], [5], {}, {"a": 5}, -1, 0, 0.5, 2.5, float("nan"), float("inf"))


def test_the_table_answers_whatever_json_holds(tmp_path):
    for table, begin in ((_KEYS, {}), (_VALUES, {"values": {}})):
        for key in table:
            for value in ODD:
                told = {"values": {key: value}} if begin else {key: value}
                (tmp_path / "config.json").write_text(json.dumps(told))
                try:
                    assert read_config(tmp_path).keys() == told.keys()
                except ConversionError as error:
                    assert f"{key} {value!r}: " in str(error)


def test_multiple_choice_has_one_output(tmp_path):
    write(tmp_path, "ForSequenceClassification", **NAMES, architectures=["BertForMultipleChoice"])
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["BertForMultipleChoice"]}))
    with pytest.raises(ConversionError, match="multiple choice has 1 outputs, and the tensors have 3"):
        read(tmp_path)


def test_names_of_classes_may_be_absent(tmp_path):
    """The library calls them LABEL_n."""
    write(tmp_path / "first", "ForSequenceClassification", **NAMES)
    path = tmp_path / "first" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"id2label": None, "label2id": None}))
    assert relpos("convert", tmp_path / "first", "--to", "same", "--out", tmp_path / "ours") == 0
    made = tmp_path / "ours" / "model.pt"
    assert relpos("convert", made, "--to", "hf-bert", "--head", HEAD, "--out", tmp_path / "back") == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text())["id2label"]["2"] == "LABEL_2"


TYPES = [torch.int8, torch.int64, torch.bool, torch.complex64, torch.uint8]


@pytest.mark.parametrize("kind", TYPES)
def test_weights_that_no_model_computes_with_are_named(kind, tmp_path, capsys):
    write(tmp_path / "first", "ForSequenceClassification", **NAMES)
    file = tmp_path / "first" / "model.safetensors"
    tensors = load_file(file)
    torch.save(
        tensors | {"classifier.weight": tensors["classifier.weight"].to(kind)}, file.with_name("pytorch_model.bin")
    )
    file.unlink()
    assert relpos("convert", tmp_path / "first", "--to", "same", "--out", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert f"classifier.weight is of the type {kind}, and weights are torch.float32" in said and said.count("\n") == 1


def test_sparse_and_quantized_weights_are_named(tmp_path):
    weight = torch.eye(4)
    for value in (weight.to_sparse(), torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8)):
        torch.save({"a.weight": value}, tmp_path / "pytorch_model.bin")
        with pytest.raises(ConversionError, match="a.weight is of the type torch"):
            read_weights(tmp_path)


def test_types_that_hold_the_same_are_read(tmp_path):
    """Floats of 8 bits as float32, exactly; whole numbers in buffers."""
    small = torch.randn(4, 4).to(torch.float8_e5m2)
    save_file({"a.weight": small, "embeddings.position_ids": torch.arange(4)}, tmp_path / "model.safetensors")
    found = read_weights(tmp_path)
    assert torch.equal(found["a.weight"], small.float()) and found["embeddings.position_ids"].dtype == torch.int64


def test_an_index_names_files(tmp_path):
    for value in (5, None, ["a"], "../a"):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": value}}))
        with pytest.raises(ConversionError, match="weight_map/a is .*must be a text|not a file beside it"):
            read_weights(tmp_path)
