"""A folder's tokenizer survives every way: conversion, training, the way back, and the export."""

from __future__ import annotations

import json
import shutil

import pytest
import transformers

from helpers.exported import write_checkpoint
from helpers.formats import bert, change_checkpoint
from helpers.tokenizers import lines as odd_lines
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
def test_ids_survive(name, ways):
    config, added = WAYS[name]
    folder = ways / "first"
    bert(folder)
    pieces = (folder / "vocab.txt").read_text().split("\n")[: 38 if added else 40]
    text = "\n".join(pieces) + "\n"
    for token in filter(config.get, ("cls_token", "sep_token", "mask_token")):
        text = text.replace(f"[{token[:-6].upper()}]", config[token])
    (folder / "vocab.txt").write_text(text)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "added_tokens.json").write_text(json.dumps(added))
    first = transformers.AutoTokenizer.from_pretrained(folder)
    said = ways.convert()
    assert f"texts equal AutoTokenizer's (transformers {transformers.__version__})\n" in said
    shutil.copytree(ways / "ours", ways / "trained", ignore=shutil.ignore_patterns("*"))
    copy_assets(ways / "ours", ways / "trained")
    shutil.copy(ways / "ours/model.pt", ways / "trained/best.pt")
    change_checkpoint(ways / "trained/best.pt", lambda state: state.pop("conversion"))  # as training does
    for number, checkpoint in enumerate(("ours/model.pt", "trained/best.pt")):
        ways.back(checkpoint, f"back{number}")
        again = ways.tokenizer(f"back{number}")
        assert ids(again) == ids(first)
        assert again("a", "b")["input_ids"] == first("a", "b")["input_ids"]
        assert again.mask_token_id == first.mask_token_id and again.model_max_length == 24
    ways.export("trained/best.pt")
    symbols = ["<s>", "<pad>", "</s>", "<unk>", *read_dictionary(ways / "trained/text/dict.txt"), "<mask>"]
    named = {number: symbol for symbol, number in load_tokenizer(ways / "trained/text").numbers.items()}
    expected = [[symbols.index(named[number]) for number in row] for row in ids(first)]
    assert ids(ways.tokenizer("out")) == expected


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "sentencepiece"])
def test_a_trained_models_tokenizer_is_found_beside_it(kind, ways):
    """As `relpos fill` finds it; the folder's fill-mask pipeline gives what fill gives."""
    _, checkpoint = write_checkpoint(ways.here, kind, "learned")
    ways.back("model.pt", "out")
    line = "the <mask>, née Zoë"
    (ways / "lines.txt").write_text(f"{line}\n")
    [ours] = ways.lines("fill", checkpoint, ways / "lines.txt", "--jsonl", "--top-k", "3", "--cpu")
    pipeline = transformers.pipeline("fill-mask", model=str(ways / "out"), device="cpu")
    theirs = pipeline(line.replace("<mask>", pipeline.tokenizer.mask_token), top_k=10)
    theirs = [one["score"] for one in theirs if one["token"] > 3]
    for one, score in zip(ours["filled"], theirs, strict=False):
        assert one["probability"] == pytest.approx(score, abs=1e-5)


def test_the_hub_fills_as_the_command(ways) -> None:
    """Odd lines with a <mask> in them."""
    _, checkpoint = write_checkpoint(ways.here, "bpe", "rel_scalar")
    lines = [f"{line[:20]} <mask>{line[20:]}" for line in ["the dog", *odd_lines()] if "<mask>" not in line]
    (ways / "in.txt").write_bytes("".join(f"{line}\n" for line in lines).encode())
    found = ways.lines("fill", checkpoint, ways / "in.txt", "--jsonl", "--top-k", "3", "--cpu")
    hub = RelPosRobertaModel.from_pretrained(ways.here, checkpoint.name)
    assert [one["source"] for one in found] == lines
    every = [text for text, _, _ in hub.fill_mask(lines[0], 10**6)]
    assert len(every) == len(hub.dictionary) - hub.dictionary.nspecial - 1
    with pytest.raises(ValueError, match="topk must be >= 1, got 0"):
        hub.fill_mask(lines[0], 0)
    for line, one in zip(lines, found, strict=True):
        assert [best["text"] for best in one["filled"]] == [text for text, _, _ in hub.fill_mask(line, 3)]


def test_a_checkpoint_without_text_is_told_so(ways):
    _, checkpoint = write_checkpoint(ways.here, "bpe", "learned")
    shutil.rmtree(ways / "text")
    said = ways.back("model.pt")
    assert f"no tokenizer beside {checkpoint}: the folder gets none; --data names" in said
    assert not (ways / "back/tokenizer.json").exists()


@pytest.mark.parametrize("piece", ["", " ", "a b", "\u2028", "\x85", "\x1c", "\u3000", "1 #fairseq:overwrite"])
def test_whatever_is_a_piece_goes_there_and_back(piece, ways):
    """An empty line of vocab.txt too, which no text gives: what is written can be read by every command."""
    bert(ways / "first")
    pieces = (ways / "first/vocab.txt").read_text().split("\n")
    (ways / "first/vocab.txt").write_text("\n".join([*pieces[:30], piece, *pieces[31:]]), newline="\n")
    ways.convert(to="learned+m4")
    assert len(read_dictionary(ways / "ours/dict.txt")) == 35
    ways.convert("ours", "again")
    ways.back()
    ways.export()
    again = ways.tokenizer("back")
    assert again.convert_ids_to_tokens(30) == piece
    assert ids(again) == ids(ways.tokenizer("first"))


@pytest.mark.parametrize(("length", "expected"), [(9, 9), (9.0, 9), (99, 24), (int(1e30), 24), (1e30, 24), (None, 24)])
def test_settings_come_back_and_are_in_exports(length, expected, ways):
    """No input is longer than the model's own."""
    bert(ways / "first")
    settings = {"padding_side": "left", "truncation_side": "left", "pad_to_multiple_of": 8, "chat_template": "{{ a }}"}
    ways.tell(file="tokenizer_config.json", model_max_length=length, **settings)
    ways.convert(to="learned+m4")
    ways.back()
    ways.export()
    for part in ("back", "out"):
        said = ways.told(part, "tokenizer_config.json")
        assert {key: said[key] for key in settings} == settings
        again = ways.tokenizer(part)
        assert (again.model_max_length, again.padding_side, again.truncation_side) == (expected, "left", "left")
        assert len(again("a " * 99, truncation=True)["input_ids"]) == expected
