"""Everything that a folder holds is used, neutral for a reason, kept for the way back, or named as lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from conversion.test_conversion_heads import CASES, write
from conversion.test_conversion_translation import marian, opennmt

from helpers import transformer_xl_original as original
from helpers.commands import relpos
from helpers.conversion import fairseq_roberta
from helpers.tokenizers import ODD
from relpos_fairseq.conversion.ledger import LOST, NEUTRAL, USED, Ledger, Recorded
from relpos_fairseq.conversion.reading import read, read_encoder


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
    ledger.mark("keys", USED, config.read)
    assert ledger.named("keys", USED).keys() == {"a", "b"}
    assert ledger.lost == ["tensor t: not read here", "config key c (3): not read here", "file f: not read here"]
    ledger.mark("tensors", NEUTRAL, {"t": "a buffer", "u": "absent"})
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
    assert relpos("export", "transformers", made["ours"], made["exported"]) == 0
    assert relpos("convert", made["marian"], "--to", "same", "--out", folder / "en-de") == 0
    assert relpos("export", "transformers", folder / "en-de" / "model.pt", made["translation"]) == 0
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
