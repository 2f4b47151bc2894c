"""A folder's tokenizer survives every way: conversion, training, the way back, and the export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from conversion.test_conversion_huggingface import bert
from conversion.test_conversion_translation import marian

from helpers.commands import relpos
from helpers.exported import write_checkpoint
from helpers.tokenizers import lines as odd_lines
from relpos_fairseq.conversion import ConversionError
from relpos_fairseq.formats.base import read
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.models.relpos_roberta import RelPosRobertaModel
from relpos_fairseq.text import load_tokenizer
from relpos_fairseq.text.assets import copy_assets
from relpos_fairseq.text.dictionary import read_dictionary

TEXTS = ["A bad cab", "covid19 and [E1]a bad Covid19", "ab\u00e9 \u6771 ab", "b[E1]covid19, a"]
WAYS = {
    "plain": ({"do_lower_case": True}, {}),
    "accents": ({"strip_accents": False, "tokenize_chinese_chars": False}, {}),
    "added": ({"additional_special_tokens": ["[E1]"]}, {"covid19": 38, "[E1]": 39}),
    "other names": ({f"{name}_token": f"@{name}" for name in ("cls", "sep", "mask")}, {}),
}


def ids(tokenizer, texts=TEXTS) -> list[list[int]]:
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


@pytest.mark.parametrize("name", WAYS)
def test_ids_survive(name, tmp_path):
    config, added = WAYS[name]
    folder, ours, trained = (tmp_path / part for part in ("folder", "ours", "trained"))
    bert(folder, "absolute")
    pieces = (folder / "vocab.txt").read_text().split("\n")[: 38 if added else 40]
    text = "\n".join(pieces) + "\n"
    for token in filter(config.get, ("cls_token", "sep_token", "mask_token")):
        text = text.replace(f"[{token[:-6].upper()}]", config[token])
    (folder / "vocab.txt").write_text(text)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "added_tokens.json").write_text(json.dumps(added))
    first = transformers.AutoTokenizer.from_pretrained(folder)
    assert relpos("convert", folder, "--to", "same", "--out", ours) == 0
    state = torch.load(ours / "model.pt", weights_only=True)
    del state["conversion"]  # as training does
    trained.mkdir()
    torch.save(state, trained / "checkpoint_best.pt")
    copy_assets(ours, trained)
    for checkpoint in (ours / "model.pt", trained / "checkpoint_best.pt"):
        back = checkpoint.with_name("back")
        assert relpos("convert", checkpoint, "--to", "hf-bert", "--out", back) == 0
        again = transformers.AutoTokenizer.from_pretrained(back)
        assert ids(again) == ids(first)
        assert again("a", "b")["input_ids"] == first("a", "b")["input_ids"]
        assert again.mask_token_id == first.mask_token_id and again.model_max_length == 24
    assert relpos("export", "transformers", trained / "checkpoint_best.pt", "--out", tmp_path / "out") == 0
    symbols = ["<s>", "<pad>", "</s>", "<unk>", *read_dictionary(trained / "text" / "dict.txt"), "<mask>"]
    named = {number: symbol for symbol, number in load_tokenizer(trained / "text").numbers.items()}
    expected = [[symbols.index(named[number]) for number in row] for row in ids(first)]
    assert ids(transformers.AutoTokenizer.from_pretrained(tmp_path / "out")) == expected


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "sentencepiece"])
def test_a_trained_models_tokenizer_is_found_beside_it(kind, tmp_path, capsys):
    """As `relpos fill` finds it; the folder's fill-mask pipeline gives what fill gives."""
    _, checkpoint = write_checkpoint(tmp_path, kind, "learned")
    assert relpos("convert", checkpoint, "--to", "hf-bert", "--out", tmp_path / "out") == 0
    line = "the <mask>, née Zoë"
    (tmp_path / "lines.txt").write_text(f"{line}\n")
    capsys.readouterr()
    assert relpos("fill", checkpoint, tmp_path / "lines.txt", "--jsonl", "--top-k", "3", "--cpu") == 0
    ours = json.loads(capsys.readouterr().out)["filled"]
    pipeline = transformers.pipeline("fill-mask", model=str(tmp_path / "out"), device="cpu")
    theirs = pipeline(line.replace("<mask>", pipeline.tokenizer.mask_token), top_k=10)
    theirs = [one["score"] for one in theirs if one["token"] > 3]
    for one, score in zip(ours, theirs, strict=False):
        assert one["probability"] == pytest.approx(score, abs=1e-5)


def test_the_hub_fills_as_the_command(tmp_path, capsys) -> None:
    """Odd lines with a <mask> in them."""
    _, checkpoint = write_checkpoint(tmp_path, "bpe", "rel_scalar")
    lines = [f"{line[:20]} <mask>{line[20:]}" for line in ["the dog", *odd_lines()] if "<mask>" not in line]
    (tmp_path / "in.txt").write_bytes("".join(f"{line}\n" for line in lines).encode())
    capsys.readouterr()
    assert relpos("fill", checkpoint, tmp_path / "in.txt", "--jsonl", "--top-k", "3", "--cpu") == 0
    found = [json.loads(line) for line in capsys.readouterr().out.split("\n")[:-1]]
    hub = RelPosRobertaModel.from_pretrained(tmp_path, checkpoint.name)
    assert [one["source"] for one in found] == lines
    every = [text for text, _, _ in hub.fill_mask(lines[0], 10**6)]
    assert len(every) == len(hub.dictionary) - hub.dictionary.nspecial - 1
    with pytest.raises(ValueError, match="topk must be >= 1, got 0"):
        hub.fill_mask(lines[0], 0)
    for line, one in zip(lines, found, strict=True):
        assert [best["text"] for best in one["filled"]] == [text for text, _, _ in hub.fill_mask(line, 3)]


def test_a_checkpoint_without_text_is_told_so(tmp_path, capsys):
    _, checkpoint = write_checkpoint(tmp_path, "bpe", "learned")
    shutil.rmtree(tmp_path / "text")
    assert relpos("convert", checkpoint, "--to", "hf-bert", "--out", tmp_path / "out") == 0
    assert f"no tokenizer beside {checkpoint}: the folder gets none; --data names" in capsys.readouterr().out
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_ids_are_compared_with_transformers(tmp_path, capsys):
    """Where it is installed; another release's own way with a folder is said."""
    bert(Path(tmp_path / "folder"), "absolute")
    assert relpos("convert", tmp_path / "folder", "--to", "same", "--out", tmp_path / "ours") == 0
    said = f"texts equal AutoTokenizer's (transformers {transformers.__version__})\n"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("piece", ["", " ", "a b", "\u2028", "\x85", "\x1c", "\u3000", "1 #fairseq:overwrite"])
def test_whatever_is_a_piece_goes_there_and_back(piece, tmp_path):
    """An empty line of vocab.txt too, which no text gives: what is written can be read by every command."""
    folder, ours = tmp_path / "folder", tmp_path / "ours"
    bert(folder, "absolute")
    pieces = (folder / "vocab.txt").read_text().split("\n")
    (folder / "vocab.txt").write_text("\n".join([*pieces[:30], piece, *pieces[31:]]), newline="\n")
    assert relpos("convert", folder, "--to", "learned+m4", "--out", ours) == 0
    assert len(read_dictionary(ours / "dict.txt")) == 35
    for number, command in enumerate((["--to", "same"], ["--to", "hf-bert"])):
        assert relpos("convert", ours, *command, "--out", tmp_path / f"back{number}") == 0
    assert relpos("export", "transformers", ours / "model.pt", "--out", tmp_path / "out") == 0
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "back1")
    assert again.convert_ids_to_tokens(30) == piece
    assert ids(again) == ids(transformers.AutoTokenizer.from_pretrained(folder))


@pytest.mark.parametrize("symbol", ["", "a\nb", "a\rb", "\ud800"])
def test_what_no_dictionary_holds_is_refused_by_name(symbol, tmp_path):
    marian(tmp_path / "first")
    path = tmp_path / "first" / "vocab.json"
    numbers = json.loads(path.read_text())
    path.write_text(json.dumps({symbol if number == 9 else name: number for name, number in numbers.items()}))
    with pytest.raises(ConversionError) as error:
        read(tmp_path / "first")
    said = f"symbol {symbol!r} cannot be a word of fairseq's dictionary: it is empty, or holds"
    said = f"{path} is not the JSON that is expected (\\ud800 is half of a character)" if symbol == "\ud800" else said
    assert said in str(error.value)


@pytest.mark.parametrize(("length", "expected"), [(9, 9), (9.0, 9), (99, 24), (int(1e30), 24), (1e30, 24), (None, 24)])
def test_settings_come_back_and_are_in_exports(length, expected, tmp_path):
    """No input is longer than the model's own."""
    bert(tmp_path / "first", "absolute")
    settings = {"padding_side": "left", "truncation_side": "left", "pad_to_multiple_of": 8, "chat_template": "{{ a }}"}
    told = json.dumps(settings | {"model_max_length": length, "tokenizer_class": "BertTokenizer"})
    (tmp_path / "first" / "tokenizer_config.json").write_text(told)
    assert relpos("convert", tmp_path / "first", "--to", "learned+m4", "--out", tmp_path / "ours") == 0
    assert relpos("convert", tmp_path / "ours", "--to", "hf-bert", "--out", tmp_path / "back") == 0
    assert relpos("export", "transformers", tmp_path / "ours" / "model.pt", "--out", tmp_path / "out") == 0
    for part in ("back", "out"):
        said = json.loads((tmp_path / part / "tokenizer_config.json").read_text())
        assert {key: said[key] for key in settings} == settings
        again = transformers.AutoTokenizer.from_pretrained(tmp_path / part)
        assert (again.model_max_length, again.padding_side, again.truncation_side) == (expected, "left", "left")
        assert len(again("a " * 99, truncation=True)["input_ids"]) == expected


@pytest.mark.parametrize("key", ["padding_side", "truncation_side", "model_max_length"])
def test_settings_that_no_tokenizer_has_are_named(key, tmp_path):
    bert(tmp_path, "absolute")
    for value in ("up", 0, [], float("nan"), True):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({key: value}))
        with pytest.raises(UserError) as error:
            read(tmp_path)
        assert f"{tmp_path / 'tokenizer_config.json'}: {key} must be " in str(error.value)
        assert str(error.value).endswith(repr(value))
