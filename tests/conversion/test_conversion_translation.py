"""Marian's and OpenNMT-py's translation models become ours, held against their own formulas."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from math import isnan, nan

import pytest
import torch
import transformers

from helpers.formats import change_tensors, marian, opennmt
from relpos_fairseq.conversion.report import ConversionError, ConversionReport, Fidelity, Probe, compare_and_log
from relpos_fairseq.saved.model import SavedModel
from relpos_fairseq.text.assets import SentencePieceText, read_text

pytestmark = pytest.mark.usefixtures("no_grad")


def ours(folder, source, target):
    """Logits of a converted checkpoint."""
    model, _ = SavedModel.open(folder / "model.pt").build_anyway(folder)
    return model.double()(source, None, target)[0]


def rows_of(folder, language: str, symbols: list[str], pad: str = "<pad>") -> torch.Tensor:
    """The number in `symbols` of each of our rows, -1 for none."""
    lines = (folder / f"dict.{language}.txt").read_text(encoding="utf-8").splitlines()
    names = ["<s>", pad, "</s>", "<unk>", *(line.rpartition(" ")[0] for line in lines)]
    return torch.tensor([symbols.index(name) if name in symbols else -1 for name in names])


@pytest.mark.parametrize(
    ("own", "values"), [(False, {}), (True, {"scale_embedding": False, "activation_function": "relu"})]
)
def test_marian_equals_transformers(ways, own, values):
    model = marian(ways / "first", own, **values)
    said = ways.convert()
    assert "exact     yes" in said and "compared  with MarianMTModel of transformers" in said
    vocabulary = ways.told("first", "vocab.json")
    rows = rows_of(ways / "ours", "en", sorted(vocabulary, key=vocabulary.get))
    draw = torch.Generator().manual_seed(3)
    source, target = torch.randint(4, len(rows), (2, 3, 9), generator=draw)
    source[:, -1], source[1, -3:], target[:, 0] = 2, torch.tensor([2, 1, 1]), 2
    begun = rows[target]
    begun[:, 0] = model.config.decoder_start_token_id
    torch.set_default_dtype(torch.float64)  # transformers' causal mask needs it
    try:
        given = {"input_ids": rows[source], "attention_mask": (source != 1).long(), "decoder_input_ids": begun}
        theirs = model.double()(**given).logits
    finally:
        torch.set_default_dtype(torch.float32)
    found = ours(ways / "ours", source, target)
    assert (found[..., rows >= 0] - theirs[..., rows[rows >= 0]]).abs().max() < 1e-5
    assert (found[..., rows < 0] < -9e3).all() and (rows < 0).sum() == 1  # <s>


@pytest.mark.parametrize("tied", [True, False])
def test_marians_output_projection_is_the_embedding_where_it_is_tied(tied, ways):
    marian(ways / "first")
    change_tensors(ways / "first", {"lm_head.weight": lambda state: torch.randn_like(state["model.shared.weight"])})
    ways.tell(tie_word_embeddings=tied)
    said = ways.convert()
    assert "exact     yes" in said and "compared  with MarianMTModel of transformers" in said
    assert ("lm_head.weight" in ways.ledger()["tensors"]["used"]) != tied


def test_marians_number_of_padding_is_not_read(ways):
    """Without one transformers takes 58100, which this model has not; the conversion's tensors are the same."""
    marian(ways / "first")
    ways.convert()
    whole = torch.load(ways / "ours/model.pt", weights_only=False)["model"]
    config = json.loads((ways / "first/config.json").read_text())
    del config["pad_token_id"]
    (ways / "first/config.json").write_text(json.dumps(config))
    shutil.rmtree(ways / "ours")
    assert "compared  no" in ways.convert()
    found = torch.load(ways / "ours/model.pt", weights_only=False)["model"]
    assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)


def test_a_token_that_was_added_to_marian_is_lost_by_name(ways):
    marian(ways / "first")
    tokens = {"0": {"content": "</s>"}, "40": {"content": "<sep>"}}
    ways.tell(file="tokenizer_config.json", added_tokens_decoder=tokens)
    said = ways.convert()
    assert "lost      config key added_tokens_decoder 40 ('<sep>')" in said and "exact     no" in said


@pytest.mark.slow
def test_marian_is_exported_though_it_lacks_a_symbol(ways):
    """Whose logit, -1e4, is neither compared nor the size of the others, and whose row has an int8 scale of its own."""
    marian(ways / "first")
    ways.convert()
    ways.run("export", "ct2", ways / "ours/model.pt", "--out", ways / "ct2")
    ways.run("export", "onnx", ways / "ours/model.pt", "--out", ways / "onnx", "--quantization", "int8")
    assert "logits, logits with its cache, loss and generate are ours" in ways.export()


def test_marian_translates_as_transformers_does(ways, caplog):
    model = marian(ways / "first")
    ways.convert()
    tokenizer = transformers.MarianTokenizer.from_pretrained(ways / "first")
    lines = ["the old cat sees a house", ">>fra<< the dog sees", "a tree <unk> xyz"]
    text = read_text(ways / "ours", "en")
    assert isinstance(text, SentencePieceText)
    for line in lines:
        symbols = tokenizer.tokenize(line)
        assert text.encode(line) == symbols or "<unk>" in line
    quoted = ">>fra<< >> the dog <<"
    assert text.encode(quoted) == [">>fra<<", *text.encode(">> the dog <<")]
    for line in (">> the dog << sees", ">>eng<< the dog", ">>eng<< again"):  # no code that the model knows
        assert text.encode(line) == text.processor.encode(line, out_type=str)
    said = [record.getMessage() for record in caplog.records if "language" in record.getMessage()]
    assert said == [">>eng<< names no language of this model (>>fra<<): it is read as text"]
    (ways / "in").write_text("\n".join(lines[:2]) + "\n")
    given = ("--beam", "3", "--max-len-b", "12", "--cpu")
    mine = ways.run("translate", ways / "ours/model.pt", ways / "in", *given).splitlines()
    pad = model.config.pad_token_id
    inputs = tokenizer(lines[:2], return_tensors="pt", padding=True)
    how = {"num_beams": 3, "early_stopping": True, "max_new_tokens": 13, "min_new_tokens": 1, "do_sample": False}
    theirs = model.generate(**inputs, **how, bad_words_ids=[[pad]], forced_eos_token_id=0)
    assert mine == tokenizer.batch_decode(theirs, skip_special_tokens=True)
    assert (theirs == 0).any(1).all() and len(set(mine)) > 1


WAVES = {"position_encoding": True}


@pytest.mark.parametrize("values", [{}, WAVES | {"add_qkvbias": True}, WAVES | {"max_relative_positions": 0}])
def test_opennmt_equals_its_formula(ways, values):
    model = opennmt(**values)
    model.save(ways / "step_5.pt")
    said = ways.convert("step_5.pt")
    assert "takes </s> for padding" in said
    assert "outputs were not compared on this machine: relpos does not run OpenNMT-py" in said and "exact" not in said
    sides = zip(("src", "tgt"), model.symbols, strict=True)
    rows = [rows_of(ways / "ours", side, symbols, pad="<blank>") for side, symbols in sides]
    draw = torch.Generator().manual_seed(3)
    source, target = (torch.randint(4, len(one), (2, 7), generator=draw) for one in rows)
    source[:, -1], source[1, -3:], target[:, 0] = 2, torch.tensor([2, 1, 1]), 2
    theirs_source = rows[0][source.masked_fill(source == 2, 1)]
    theirs_target = rows[1][target]
    theirs_target[:, 0] = model.symbols[1].index("<s>")
    theirs = model.double()(theirs_source, theirs_target)
    found = ours(ways / "ours", source, target)
    assert (found - theirs[..., rows[1]]).abs().max() < 1e-5
    left = torch.stack([source[0], source[1].roll(2)])  # padding on the left changes nothing
    assert (ours(ways / "ours", left, target) - found).abs().max() < 1e-10


def test_without_transformers_outputs_are_not_called_exact(ways, monkeypatch):
    marian(ways / "first")
    monkeypatch.setitem(sys.modules, "transformers", None)
    said = ways.convert()
    assert "outputs were not compared on this machine: transformers does not import" in said
    assert "exact" not in said


def test_opennmt_translates(ways):
    model = opennmt()
    model.save(ways / "step_5.pt")
    ways.convert("step_5.pt")
    lines = ["w1 w2 w3", "w4 w0 w0 w8"]
    (ways / "in").write_text("\n".join(lines) + "\n")
    given = ("--beam", "1", "--max-len-b", "6", "--cpu")
    mine = [line.split() for line in ways.run("translate", ways / "ours/model.pt", ways / "in", *given).splitlines()]
    source, target = model.symbols
    for line, found in zip(lines, mine, strict=True):
        numbers = torch.tensor([[source.index(word) for word in line.split()]])
        assert found == [target[n] for n in model.greedy(numbers, 6)[0]]


def test_one_language_on_both_sides_has_two_dictionaries(ways):
    model = opennmt()
    model.opt.src_lang = model.opt.tgt_lang = "en"
    model.save(ways / "step_5.pt")
    ways.convert("step_5.pt")
    made = [(ways / "ours" / f"dict.{side}.txt").read_text() for side in ("src", "tgt")]
    assert "x 1" not in made[0] and "x 1" in made[1]


def test_nan_is_not_exact():
    sizes = {"logits": 1.0, "features": 1.0}
    first = Fidelity({"logits": nan, "features": 0.0}, sizes, None, None, 3)
    last = replace(first, largest={"features": 0.0, "logits": nan})
    assert isnan(first.relative) and isnan(last.relative)
    probe = Probe.draw(9, 5, False)
    outputs = [{"logits": torch.full((*probe.tokens.shape, 9), value)} for value in (1.0, nan)]
    with pytest.raises(ConversionError, match="should be exact, and differs by nan"):
        compare_and_log(ConversionReport("", ""), lambda: outputs, probe, print)
