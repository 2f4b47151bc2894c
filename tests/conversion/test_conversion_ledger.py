"""Everything that a folder holds is used, neutral for a reason, kept for the way back, or named as lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from conversion.test_conversion_heads import CASES, write
from conversion.test_conversion_translation import marian, opennmt
from safetensors.torch import load_file, save_file

from helpers import transformer_xl_original as original
from helpers.commands import relpos
from helpers.conversion import fairseq_roberta
from helpers.exported import write_checkpoint
from helpers.tokenizers import ODD
from relpos_fairseq.conversion import ConversionError
from relpos_fairseq.formats.base import read, read_encoder
from relpos_fairseq.saved.ledger import LOST, NEUTRAL, USED, Ledger, Recorded


def told(folder, capsys, *arguments) -> str:
    capsys.readouterr()
    assert relpos("convert", folder, "--to", "same", *arguments) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_lost_of_a_folder_that_transformers_writes(name, tmp_path, capsys):
    suffix, values, _, _ = CASES[name]
    write(tmp_path / "first", suffix, **values)
    said = told(tmp_path / "first", capsys, "--out", tmp_path / "ours")
    assert "exact     yes" in said and "\nlost " not in said
    ledger = json.loads((tmp_path / "ours" / "conversion.json").read_text())["ledger"]
    assert sorted(name for names in ledger["keys"].values() for name in names) == sorted(
        json.loads((tmp_path / "first" / "config.json").read_text())
    )
    assert all(why for kind in ledger.values() for name, why in kind.get(NEUTRAL, {}).items())


@pytest.mark.skipif(not ODD.is_dir(), reason="no ../shared/odd: folders as people have them")
def test_nothing_is_lost_of_odd_folders():
    for folder in sorted([*(ODD / "folders").glob("[bdqrx]*_*"), *(ODD / "heads").iterdir()]):
        if folder.name in ("bert_mc", "bert_ner"):
            continue
        assert read_encoder(folder).ledger.lost == [], folder.name


def test_unknown_keys_and_files_are_named(tmp_path, capsys):
    write(tmp_path / "first", "ForMaskedLM")
    config = json.loads((tmp_path / "first" / "config.json").read_text())
    (tmp_path / "first" / "config.json").write_text(json.dumps(config | {"attention_bias_kind": "novel"}))
    (tmp_path / "first" / "adapter").mkdir()
    (tmp_path / "first" / "adapter" / "weights.bin").write_bytes(b"x")
    said = told(tmp_path / "first", capsys, "--out", tmp_path / "ours")
    assert "lost      config key attention_bias_kind ('novel'): not read here" in said
    assert "lost      file adapter/weights.bin: not read here" in said
    assert "exact     no" in said and "exact     yes" not in said
    ledger = json.loads((tmp_path / "ours" / "conversion.json").read_text())["ledger"]
    assert list(ledger["keys"][LOST]) == ["attention_bias_kind"]


@torch.no_grad()
def test_sentence_transformers_files_and_pooler_go_along_and_come_back(tmp_path):
    """By way of another scheme too, as far as it is expressible."""
    model = write(tmp_path / "first", "Model")
    files = {"modules.json": "[]", "1_Pooling/config.json": '{"a": 1}', "sentence_bert_config.json": "{}"}
    for name, text in files.items():
        (tmp_path / "first" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "first" / name).write_text(text)
    (tmp_path / "first" / "README.md").write_text("what it is")
    assert relpos("convert", tmp_path / "first", "--to", "same", "--out", tmp_path / "ours") == 0
    assert relpos("convert", tmp_path / "ours", "--to", "hf-bert", "--out", tmp_path / "back") == 0
    for name, text in files.items():
        assert (tmp_path / "ours" / name).read_text() == (tmp_path / "back" / name).read_text() == text
    back = transformers.AutoModel.from_pretrained(tmp_path / "back").eval()
    ids = torch.tensor([[2, 9, 12, 3]])
    torch.testing.assert_close(back(ids).pooler_output, model(ids).pooler_output, rtol=1e-5, atol=1e-6)


def test_a_ledger_forgets_nothing():
    config = Recorded({"a": 1, "b": 2, "c": 3})
    assert config["a"] == 1 and config.get("b") == 2 and config.get("d") is None
    ledger = Ledger(["t"], config, ["f"])
    assert ledger.named("keys", USED).keys() == {"a", "b"}
    assert ledger.lost == ["tensor t: not read here", "config key c (3): not read here", "file f: not read here"]
    ledger.mark("tensors", NEUTRAL, ["t", "u"], "a buffer")
    assert ledger.lines() == ["ledger    tensors 1 neutral; keys 2 used, 1 lost; files 1 lost"]


def test_a_checkpoint_names_no_file_elsewhere(tmp_path):
    """Of the files that a record names only those in the places that a conversion keeps files in are read."""
    write(tmp_path / "first", "Model")
    (tmp_path / "first" / "modules.json").write_text("[]")
    assert relpos("convert", tmp_path / "first", "--to", "same", "--out", tmp_path / "ours") == 0
    (tmp_path / "secret").write_text("x")
    state = torch.load(tmp_path / "ours" / "model.pt", weights_only=True)
    state["conversion"]["kept_files"] += ["../secret", str(tmp_path / "secret"), "1_a/../../secret", "dict.txt"]
    torch.save(state, tmp_path / "ours" / "model.pt")
    assert list(read_encoder(tmp_path / "ours").kept_files) == ["modules.json"]


def sources(folder) -> dict[str, Path]:
    """A model of every format but transformers' encoders, whose folders are tested above."""
    made = {name: folder / name for name in ("marian", "opennmt", "xl", "exported", "translation")}
    marian(made["marian"])
    for name in ("opennmt", "xl"):
        made[name].mkdir()
    opennmt(max_relative_positions=3).save(made["opennmt"] / "step_1.pt")
    original.save(original.model(20), made["xl"] / "model.pt")
    (made["xl"] / "vocab.txt").write_text("".join(f"w{n}\n" for n in range(20)))
    made["opennmt"], made["xl"] = made["opennmt"] / "step_1.pt", made["xl"] / "model.pt"
    for style in ("argparse", "legacy", "dataclass"):
        (folder / style).mkdir()
        made[style] = fairseq_roberta(folder / style, style)[0]
    write(folder / "bert", "ForSequenceClassification")
    assert relpos("convert", folder / "bert", "--to", "m4", "--approximate", "--out", folder / "ours") == 0
    made["ours"] = folder / "ours" / "model.pt"
    assert relpos("export", "transformers", made["ours"], "--out", made["exported"]) == 0
    assert relpos("convert", made["marian"], "--to", "same", "--out", folder / "en-de") == 0
    assert relpos("export", "transformers", folder / "en-de" / "model.pt", "--out", made["translation"]) == 0
    return made


def test_every_format_has_a_ledger_that_loses_nothing(tmp_path):
    lost = {}
    for name, path in sources(tmp_path).items():
        ledger = read(path).ledger
        lost |= {name: ledger.lost} if ledger.lost else {}
        assert all(ledger.named(kind, USED) for kind in ("tensors", "keys", "files")), name
    assert lost == {}


def test_what_a_format_has_beside_is_named(tmp_path):
    """Keys that change outputs, options of fairseq's that ours has not, tensors that are no sinusoids."""
    made = sources(tmp_path)
    for name in ("marian", "exported", "translation"):
        config = json.loads((made[name] / "config.json").read_text())
        (made[name] / "config.json").write_text(json.dumps(config | {"attention_bias_kind": "novel"}))
    for name in ("ours", "dataclass"):
        state = torch.load(made[name], weights_only=False)
        state["cfg"]["model"]["spectral_norm_classification_head"] = True
        torch.save(state, made[name])
    for name, said in {
        **dict.fromkeys(("marian", "exported", "translation"), "config key attention_bias_kind ('novel')"),
        **dict.fromkeys(("ours", "dataclass"), "config key spectral_norm_classification_head (True)"),
    }.items():
        assert [line.partition(": ")[0] for line in read(made[name]).ledger.lost] == [said], name


def test_a_second_conversion_keeps_the_numbers_of_rows(tmp_path):
    """Of a folder without a tokenizer, whose numbers nothing else tells."""
    model = write(tmp_path / "first", "ForMaskedLM")
    for name in ("vocab.txt", "tokenizer_config.json"):
        (tmp_path / "first" / name).unlink()
    for one, other in (("first", "second"), ("second", "third")):
        assert relpos("convert", tmp_path / one, "--to", "same", "--out", tmp_path / other) == 0
    assert relpos("convert", tmp_path / "third", "--to", "hf-bert", "--out", tmp_path / "back") == 0
    ids = torch.arange(30)[None, :20]
    back = transformers.BertForMaskedLM.from_pretrained(tmp_path / "back").eval()
    with torch.no_grad():
        torch.testing.assert_close(back(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("named", ["BertForMaskedLM", "BertModel", "BertLMHeadModel"])
def test_a_masked_lm_head_comes_back_whatever_names_it(named, tmp_path):
    """Without its output bias too, which the library begins with zeros."""
    model = write(tmp_path / "first", "ForMaskedLM")
    tensors = load_file(tmp_path / "first" / "model.safetensors")
    tensors = {
        name: value for name, value in tensors.items() if not name.endswith(("predictions.bias", "decoder.bias"))
    }
    save_file(tensors, tmp_path / "first" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "first" / "config.json").read_text())
    (tmp_path / "first" / "config.json").write_text(json.dumps(config | {"architectures": [named]}))
    model.cls.predictions.bias.zero_()
    assert relpos("convert", tmp_path / "first", "--to", "same", "--out", tmp_path / "ours") == 0
    assert relpos("convert", tmp_path / "ours", "--to", "hf-bert", "--out", tmp_path / "back") == 0
    back = transformers.BertForMaskedLM.from_pretrained(tmp_path / "back").eval()
    ids = torch.tensor([[2, 9, 12, 3]])
    torch.testing.assert_close(back(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


def test_what_another_family_has_not_is_named(tmp_path, capsys):
    write(tmp_path / "first", "ForPreTraining", hidden_act="gelu")
    assert relpos("convert", tmp_path / "first", "--to", "same", "--out", tmp_path / "ours") == 0
    capsys.readouterr()
    assert relpos("convert", tmp_path / "ours", "--to", "hf-roberta", "--out", tmp_path / "back") == 0
    said = capsys.readouterr().out
    assert "lost      tensor cls.seq_relationship.weight: roberta has none" in said and "exact     no" in said


def test_a_file_alone_keeps_no_files_and_says_so(tmp_path, capsys):
    write(tmp_path / "first", "Model")
    (tmp_path / "first" / "modules.json").write_text("[]")
    said = told(tmp_path / "first", capsys, "--out", tmp_path / "ours.pt")
    assert "lost      file modules.json: a file alone has none beside it" in said and "exact     no" in said


def test_averages_beside_a_model_are_named(tmp_path):
    path = fairseq_roberta(tmp_path, "dataclass")[0]
    state = torch.load(path, weights_only=False)
    state["extra_state"] = {"ema": {"a": torch.zeros(1)}}
    torch.save(state, path)
    assert read(path).ledger.lost == ["tensor extra_state.ema: not read here"]


DOUBLED = {
    "bert": ("bert.embeddings.LayerNorm.weight", "bert.embeddings.LayerNorm.gamma"),
    "marian": ("model.decoder.layers.0.fc1.bias", "decoder.layers.0.fc1.bias"),
}


@pytest.mark.parametrize("name", DOUBLED)
def test_two_tensors_of_one_name_are_refused(name, tmp_path):
    made = {"bert": lambda: write(tmp_path / name, "Model"), "marian": lambda: marian(tmp_path / name)}
    made[name]()
    file = tmp_path / name / "model.safetensors"
    tensors = load_file(file)
    own, other = DOUBLED[name]
    own = own if own in tensors else own.removeprefix("bert.")
    save_file(tensors | {other: tensors[own] + 1}, file, {"format": "pt"})
    with pytest.raises(ConversionError, match="remove one"):
        read(tmp_path / name)


@pytest.mark.parametrize("name", ["transformer", "transformer_lm", "lstm"])
def test_a_model_of_another_kind_is_named(name, tmp_path):
    """A translation model of fairseq's has `version` in its encoder and its decoder."""
    tensors = {f"{side}.{part}": torch.zeros(1) for side in ("encoder", "decoder") for part in ("version", "bias")}
    torch.save({"model": tensors, "cfg": {"model": {"_name": name}, "task": {}}}, tmp_path / "model.pt")
    with pytest.raises(ConversionError, match=f"holds a {name}: only RoBERTa's encoder is converted"):
        read(tmp_path / "model.pt")


def test_tensors_that_do_not_fit_are_not_written_though_nothing_is_compared(tmp_path, capsys):
    model = opennmt(max_relative_positions=3)
    model.save(tmp_path / "step.pt")
    state = torch.load(tmp_path / "step.pt", weights_only=False)
    name = next(name for name in state["model"] if name.endswith("w_1.weight"))
    for value, said in ((torch.zeros(3, 3), "do not fit"), (state["model"][name] * torch.nan, "NaN or infinite")):
        torch.save(state | {"model": state["model"] | {name: value}}, tmp_path / "broken.pt")
        assert relpos("convert", tmp_path / "broken.pt", "--to", "same", "--out", tmp_path / "out") == 2
        assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_name_that_no_line_holds_stays_in_the_record(tmp_path):
    names = {"id2label": {0: "a\nb", 1: "<s>", 2: "c"}, "label2id": {"a\nb": 0, "<s>": 1, "c": 2}}
    write(tmp_path / "first", "ForSequenceClassification", **names)
    assert relpos("convert", tmp_path / "first", "--to", "same", "--out", tmp_path / "ours") == 0
    assert (tmp_path / "ours" / "label" / "dict.txt").read_text() == "LABEL_0 1\nLABEL_1 1\nLABEL_2 1\n"
    arguments = ("--to", "hf-bert", "--head", "sentence_classification_head", "--out", tmp_path / "back")
    assert relpos("convert", tmp_path / "ours", *arguments) == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text())["id2label"]["0"] == "a\nb"


@pytest.mark.parametrize("problem", [None, "single_label_classification", "multi_label_classification", "regression"])
def test_exported_folders_keep_problem_and_names(problem, tmp_path):
    names = {"id2label": {0: "O"}, "label2id": {"o": 0}}
    write(tmp_path / "first", "ForSequenceClassification", problem_type=problem, num_labels=1, **names)
    assert relpos("convert", tmp_path / "first", "--to", "learned+m4", "--out", tmp_path / "ours") == 0
    assert relpos("export", "transformers", tmp_path / "ours" / "model.pt", "--out", tmp_path / "one") == 0
    assert relpos("convert", tmp_path / "one", "--to", "same", "--out", tmp_path / "back") == 0
    assert relpos("export", "transformers", tmp_path / "back" / "model.pt", "--out", tmp_path / "two") == 0
    told = [json.loads((tmp_path / part / "config.json").read_text()) for part in ("one", "two")]
    for key in ("problem_type", "id2label", "label2id", "architectures"):
        assert told[0].get(key) == told[1].get(key), key
    assert read(tmp_path / "two").ledger.lost == []


@pytest.mark.parametrize("text", [True, False])
def test_an_exported_folders_tokenizer_is_lost_without_its_text(text, tmp_path):
    """As transformers saves such a folder again: model and tokenizer, but no text/ of which they were made."""
    _, checkpoint = write_checkpoint(tmp_path, "wordpiece", "learned")
    assert relpos("export", "transformers", checkpoint, "--out", tmp_path / "out") == 0
    again = tmp_path / "again"
    transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out", trust_remote_code=True).save_pretrained(again)
    transformers.AutoTokenizer.from_pretrained(tmp_path / "out").save_pretrained(again)
    if text:
        shutil.copytree(tmp_path / "out" / "text", again / "text")
    ledger = read(again).ledger
    made = ["special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"]
    assert [name for name in ledger.named("files", LOST)] == ([] if text else made)
    assert [name for name, why in ledger.named("files", NEUTRAL).items() if "text/" in why] == (made if text else [])
    assert ledger.named("files", NEUTRAL)["relpos_code.py"] == "the code of this package"
