"""Everything that a folder holds is used, neutral for a reason, kept for the way back, or named as lost."""

from __future__ import annotations

import shutil

import pytest
import torch
import transformers

from helpers.exported import write_checkpoint
from helpers.formats import FORMATS, change_checkpoint, change_tensors, checkpoint, config, encoder
from helpers.tokenizers import ODD
from relpos_fairseq.formats.base import read, read_encoder
from relpos_fairseq.saved.ledger import LOST, NEUTRAL, USED, Ledger, Recorded

IDS = torch.tensor([[2, 9, 12, 3]])
pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.mark.skipif(not ODD.is_dir(), reason="no ../shared/odd: folders as people have them")
def test_nothing_is_lost_of_odd_folders():
    for folder in sorted([*(ODD / "folders").glob("[bdqrx]*_*"), *(ODD / "heads").iterdir()]):
        if folder.name in ("bert_mc", "bert_ner"):
            continue
        assert read_encoder(folder).ledger.lost == [], folder.name


novel = config(attention_bias_kind="novel")  # a key that changes outputs
NOVEL = "config key attention_bias_kind ('novel')"
NORMED = checkpoint(lambda state: state["cfg"]["model"].update(spectral_norm_classification_head=True))
AVERAGES = checkpoint(lambda state: state["extra_state"].update(ema={"a": torch.zeros(1)}))
# What a source of a format has beside, and as what it is lost.
BESIDE = {
    **dict.fromkeys(("bert", "marian", "exported", "translation"), (novel, NOVEL)),
    **dict.fromkeys(("ours", "dataclass"), (NORMED, "config key spectral_norm_classification_head (True)")),
    "argparse": (AVERAGES, "tensor extra_state.ema"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_a_ledger_that_loses_nothing(name, tmp_path):
    """But what is beside: options and tensors of no model of ours are named."""
    path = FORMATS[name](tmp_path / "source")
    ledger = read(path).ledger
    assert ledger.lost == []
    assert all(ledger.named(kind, USED) for kind in ("tensors", "keys", "files"))
    if name in BESIDE:
        add, said = BESIDE[name]
        add(path)
        assert read(path).ledger.lost == [f"{said}: not read here"]


def test_unknown_keys_and_files_are_named(ways):
    encoder(ways / "first", "BertForMaskedLM")
    ways.tell(attention_bias_kind="novel")
    (ways / "first/adapter").mkdir()
    (ways / "first/adapter/weights.bin").write_bytes(b"x")
    said = ways.convert()
    assert "lost      config key attention_bias_kind ('novel'): not read here" in said
    assert "lost      file adapter/weights.bin: not read here" in said
    assert "exact     no" in said and "exact     yes" not in said
    assert list(ways.ledger()["keys"][LOST]) == ["attention_bias_kind"]


def test_sentence_transformers_files_and_pooler_go_along_and_come_back(ways):
    """A record that names other files, elsewhere too, reads none of them; a file alone has none beside it."""
    model = encoder(ways / "first", "BertModel")
    files = {"modules.json": "[]", "1_Pooling/config.json": '{"a": 1}', "sentence_bert_config.json": "{}"}
    for name, text in files.items():
        (ways / "first" / name).parent.mkdir(exist_ok=True)
        (ways / "first" / name).write_text(text)
    (ways / "first/README.md").write_text("what it is")
    ways.convert()
    ways.back()
    for name, text in files.items():
        assert (ways / "ours" / name).read_text() == (ways / "back" / name).read_text() == text
    after, before = (one(IDS).pooler_output for one in (ways.opened("back", "AutoModel"), model))
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)
    (ways / "secret").write_text("x")
    more = ["../secret", str(ways / "secret"), "1_a/../../secret", "dict.txt"]
    change_checkpoint(ways / "ours/model.pt", lambda state: state["conversion"]["kept_files"].extend(more))
    assert sorted(read_encoder(ways / "ours").kept_files) == sorted(files)
    said = ways.convert(out="ours.pt")
    assert "lost      file modules.json: a file alone has none beside it" in said and "exact     no" in said


def test_a_ledger_forgets_nothing():
    config = Recorded({"a": 1, "b": 2, "c": 3})
    assert config["a"] == 1 and config.get("b") == 2 and config.get("d") is None
    ledger = Ledger(["t"], config, ["f"])
    assert ledger.named("keys", USED).keys() == {"a", "b"}
    assert ledger.lost == ["tensor t: not read here", "config key c (3): not read here", "file f: not read here"]
    ledger.mark("tensors", NEUTRAL, ["t", "u"], "a buffer")
    assert ledger.lines() == ["ledger    tensors 1 neutral; keys 2 used, 1 lost; files 1 lost"]


def test_a_second_conversion_keeps_the_numbers_of_rows(ways):
    """Of a folder without a tokenizer, whose numbers nothing else tells."""
    model = encoder(ways / "first", "BertForMaskedLM", None)
    ways.convert(out="second")
    ways.convert("second", "third")
    ways.back("third")
    ids = torch.arange(30)[None, :20]
    torch.testing.assert_close(ways.opened("back", type(model))(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("named", ["BertForMaskedLM", "BertModel", "BertLMHeadModel"])
def test_a_masked_lm_head_comes_back_whatever_names_it(named, ways):
    """Without its output bias too, which the library begins with zeros."""
    model = encoder(ways / "first", "BertForMaskedLM")
    change_tensors(ways / "first", but="(predictions|decoder).bias$")
    ways.tell(architectures=[named])
    model.cls.predictions.bias.zero_()
    ways.convert()
    ways.back()
    torch.testing.assert_close(ways.opened("back", type(model))(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("problem", [None, "single_label_classification", "multi_label_classification", "regression"])
def test_exported_folders_keep_problem_and_names(problem, ways):
    names = {"id2label": {0: "O"}, "label2id": {"o": 0}}
    encoder(ways / "first", "BertForSequenceClassification", problem_type=problem, num_labels=1, **names)
    ways.convert(to="learned+m4")
    ways.export(out="one")
    ways.convert("one", "back")
    ways.export("back/model.pt", "two")
    one, two = ways.told("one"), ways.told("two")
    for key in ("problem_type", "id2label", "label2id", "architectures"):
        assert one.get(key) == two.get(key), key
    assert read(ways / "two").ledger.lost == []


@pytest.mark.parametrize("text", [True, False])
def test_an_exported_folders_tokenizer_is_lost_without_its_text(text, ways):
    """As transformers saves such a folder again: model and tokenizer, but no text/ of which they were made."""
    write_checkpoint(ways.here, "wordpiece", "learned")
    ways.export("model.pt")
    ways.opened("out", "AutoModelForMaskedLM").save_pretrained(ways / "again")
    transformers.AutoTokenizer.from_pretrained(ways / "out").save_pretrained(ways / "again")
    if text:
        shutil.copytree(ways / "out/text", ways / "again/text")
    ledger = read(ways / "again").ledger
    made = ["special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"]
    assert [name for name in ledger.named("files", LOST)] == ([] if text else made)
    assert [name for name, why in ledger.named("files", NEUTRAL).items() if "text/" in why] == (made if text else [])
    assert ledger.named("files", NEUTRAL)["relpos_code.py"] == "the code of this package"
