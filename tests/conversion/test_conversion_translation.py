"""Marian's and OpenNMT-py's translation models become ours, held against their own formulas."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from math import isnan, nan

import pytest
import sentencepiece
import torch
import transformers
from safetensors.torch import load_file, save_file

from helpers.commands import relpos
from helpers.conversion import shake
from helpers.opennmt import SPECIAL, OpenNMT
from relpos_fairseq.conversion.report import ConversionError, ConversionReport, Fidelity, Probe, compare_and_log
from relpos_fairseq.saved.model import SavedModel
from relpos_fairseq.text.assets import SentencePieceText, read_text

LINES = [
    f"the {a} {b} sees a {c}"
    for a in ("old", "new", "big")
    for b in ("cat", "dog", "horse")
    for c in ("house", "mouse", "tree", "boat")
]


@pytest.fixture
def convert(capsys):
    """The command: arguments to its exit status and what it printed."""

    def run(*arguments):
        status = relpos("convert", *arguments)
        said = capsys.readouterr()
        return status, said.out + said.err

    return run


def marian(folder, own_vocabularies: bool = False, **values):
    """A random Marian model with its tokenizer."""
    folder.mkdir()
    (folder / "lines").write_text("\n".join(LINES) + "\n")
    vocabulary = {"</s>": 0, "<unk>": 1}
    for side in ("source", "target"):
        sentencepiece.SentencePieceTrainer.train(
            input=str(folder / "lines"),
            model_prefix=str(folder / side),
            vocab_size=27,
            model_type="unigram",
            minloglevel=2,
        )
        (folder / f"{side}.model").rename(folder / f"{side}.spm")
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{side}.spm"))
        for number in range(3, 27):
            vocabulary.setdefault(pieces.id_to_piece(number), len(vocabulary))
        (folder / f"{side}.vocab").unlink()
    (folder / "lines").unlink()
    vocabulary[">>fra<<"] = len(vocabulary)
    pad = vocabulary["<pad>"] = len(vocabulary)
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    told = {"source_lang": "en", "target_lang": "fr", "separate_vocabs": own_vocabularies}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    more = {}
    if own_vocabularies:
        (folder / "target_vocab.json").write_text(json.dumps(vocabulary))
        more["share_encoder_decoder_embeddings"] = False
    config = transformers.MarianConfig(
        vocab_size=pad + 1,
        d_model=16,
        encoder_layers=2,
        decoder_layers=3,
        encoder_ffn_dim=24,
        decoder_ffn_dim=20,
        encoder_attention_heads=2,
        decoder_attention_heads=4,
        max_position_embeddings=40,
        pad_token_id=pad,
        eos_token_id=0,
        decoder_start_token_id=pad,
        forced_eos_token_id=None,
        **more | {"scale_embedding": True, "activation_function": "swish"} | values,
    )
    torch.manual_seed(1)
    model = transformers.MarianMTModel(config).eval()
    waves = model.model.encoder.embed_positions.weight.clone()
    shake(model)
    with torch.no_grad():
        for stack in (model.model.encoder, model.model.decoder):
            stack.embed_positions.weight.copy_(waves)
        model.final_logits_bias.normal_()
        model.final_logits_bias[0, 0] += 6  # most sentences end
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def ours(folder, source, target):
    """Logits of a converted checkpoint."""
    model, _ = SavedModel.open(folder / "model.pt").build_anyway(folder)
    return model.double()(source, None, target)[0]


def rows_of(folder, language: str, symbols: list[str], special: dict[str, str]) -> torch.Tensor:
    """The number in `symbols` of each of our rows, -1 for none."""
    lines = (folder / f"dict.{language}.txt").read_text(encoding="utf-8").splitlines()
    names = [special.get(n, n) for n in ("<s>", "<pad>", "</s>", "<unk>")]
    names += [line.rpartition(" ")[0] for line in lines]
    return torch.tensor([symbols.index(name) if name in symbols else -1 for name in names])


@pytest.mark.parametrize(
    ("own", "values"), [(False, {}), (True, {"scale_embedding": False, "activation_function": "relu"})]
)
@torch.no_grad()
def test_marian_equals_transformers(tmp_path, convert, own, values):
    model = marian(tmp_path / "marian", own, **values)
    status, said = convert(tmp_path / "marian", "--to", "same", "--out", tmp_path / "out")
    assert status == 0 and "exact     yes" in said and "compared  with MarianMTModel of transformers" in said
    vocabulary = json.loads((tmp_path / "marian" / "vocab.json").read_text())
    rows = rows_of(tmp_path / "out", "en", sorted(vocabulary, key=vocabulary.get), {})
    draw = torch.Generator().manual_seed(3)
    source, target = torch.randint(4, len(rows), (2, 3, 9), generator=draw)
    source[:, -1], source[1, -3:], target[:, 0] = 2, torch.tensor([2, 1, 1]), 2
    begun = rows[target]
    begun[:, 0] = model.config.decoder_start_token_id
    torch.set_default_dtype(torch.float64)  # transformers' causal mask needs it
    try:
        theirs = model.double()(
            input_ids=rows[source], attention_mask=(source != 1).long(), decoder_input_ids=begun
        ).logits
    finally:
        torch.set_default_dtype(torch.float32)
    found = ours(tmp_path / "out", source, target)
    assert (found[..., rows >= 0] - theirs[..., rows[rows >= 0]]).abs().max() < 1e-5
    assert (found[..., rows < 0] < -9e3).all() and (rows < 0).sum() == 1  # <s>


@pytest.mark.parametrize("tied", [True, False])
def test_marians_output_projection_is_the_embedding_where_it_is_tied(tied, tmp_path, convert):
    marian(tmp_path / "marian")
    file, path = tmp_path / "marian" / "model.safetensors", tmp_path / "marian" / "config.json"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": torch.randn_like(tensors["model.shared.weight"])}, file, {"format": "pt"})
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": tied}))
    status, said = convert(tmp_path / "marian", "--to", "same", "--out", tmp_path / "out")
    assert status == 0 and "exact     yes" in said and "compared  with MarianMTModel of transformers" in said
    became = json.loads((tmp_path / "out" / "conversion.json").read_text())["ledger"]["tensors"]
    assert ("lm_head.weight" in became["used"]) != tied


def test_a_token_that_was_added_to_marian_is_lost_by_name(tmp_path, convert):
    marian(tmp_path / "marian")
    path = tmp_path / "marian" / "tokenizer_config.json"
    tokens = {"0": {"content": "</s>"}, "40": {"content": "<sep>"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens_decoder": tokens}))
    status, said = convert(tmp_path / "marian", "--to", "same", "--out", tmp_path / "out")
    assert status == 0 and "lost      config key added_tokens_decoder 40 ('<sep>')" in said and "exact     no" in said


@pytest.mark.slow
def test_marian_is_exported_though_it_lacks_a_symbol(tmp_path, convert, capsys):
    """Whose logit, -1e4, is neither compared nor the size of the others, and whose row has an int8 scale of its own."""
    marian(tmp_path / "marian")
    assert convert(tmp_path / "marian", "--to", "same", "--out", tmp_path / "ours")[0] == 0
    model = tmp_path / "ours" / "model.pt"
    assert relpos("export", "ct2", model, "--out", tmp_path / "ct2") == 0
    assert relpos("export", "onnx", model, "--out", tmp_path / "onnx", "--quantization", "int8") == 0
    assert relpos("export", "transformers", model, "--out", tmp_path / "hf") == 0
    assert "logits, logits with its cache, loss and generate are ours" in capsys.readouterr().out


@torch.no_grad()
def test_marian_translates_as_transformers_does(tmp_path, convert, capsys, caplog):
    folder = tmp_path / "marian"
    model = marian(folder)
    assert convert(folder, "--to", "same", "--out", tmp_path / "out")[0] == 0
    tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
    lines = ["the old cat sees a house", ">>fra<< the dog sees", "a tree <unk> xyz"]
    text = read_text(tmp_path / "out", "en")
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
    (tmp_path / "in").write_text("\n".join(lines[:2]) + "\n")
    given = ("--beam", "3", "--max-len-b", "12", "--cpu")
    assert relpos("translate", tmp_path / "out" / "model.pt", tmp_path / "in", *given) == 0
    mine = capsys.readouterr().out.splitlines()
    pad = model.config.pad_token_id
    inputs = tokenizer(lines[:2], return_tensors="pt", padding=True)
    theirs = model.generate(
        **inputs,
        num_beams=3,
        early_stopping=True,
        max_new_tokens=13,
        min_new_tokens=1,
        bad_words_ids=[[pad]],
        do_sample=False,
        forced_eos_token_id=0,
    )
    assert mine == tokenizer.batch_decode(theirs, skip_special_tokens=True)
    assert (theirs == 0).any(1).all() and len(set(mine)) > 1


@pytest.mark.parametrize(
    "values",
    [{}, {"position_encoding": True, "add_qkvbias": True}, {"position_encoding": True, "max_relative_positions": 0}],
)
@torch.no_grad()
def test_opennmt_equals_its_formula(tmp_path, convert, values):
    model = opennmt(**values)
    model.save(tmp_path / "step_5.pt")
    status, said = convert(tmp_path / "step_5.pt", "--to", "same", "--out", tmp_path / "out")
    assert status == 0 and "takes </s> for padding" in said
    assert "outputs were not compared on this machine: relpos does not run OpenNMT-py" in said and "exact" not in said
    special = {"<pad>": "<blank>"}
    rows = [
        rows_of(tmp_path / "out", side, symbols, special)
        for side, symbols in zip(("src", "tgt"), model.symbols, strict=True)
    ]
    draw = torch.Generator().manual_seed(3)
    source, target = (torch.randint(4, len(one), (2, 7), generator=draw) for one in rows)
    source[:, -1], source[1, -3:], target[:, 0] = 2, torch.tensor([2, 1, 1]), 2
    theirs_source = rows[0][source.masked_fill(source == 2, 1)]
    theirs_target = rows[1][target]
    theirs_target[:, 0] = model.symbols[1].index("<s>")
    theirs = model.double()(theirs_source, theirs_target)
    found = ours(tmp_path / "out", source, target)
    assert (found - theirs[..., rows[1]]).abs().max() < 1e-5
    left = torch.stack([source[0], source[1].roll(2)])  # padding on the left changes nothing
    assert (ours(tmp_path / "out", left, target) - found).abs().max() < 1e-10


def test_without_transformers_outputs_are_not_called_exact(tmp_path, convert, monkeypatch):
    marian(tmp_path / "marian")
    monkeypatch.setitem(sys.modules, "transformers", None)
    status, said = convert(tmp_path / "marian", "--to", "same", "--out", tmp_path / "out")
    assert status == 0 and "outputs were not compared on this machine: transformers does not import" in said
    assert "exact" not in said


def opennmt(**values) -> OpenNMT:
    """A random model; source and target have words of their own."""
    torch.manual_seed(1)
    words = [f"w{number}" for number in range(9)]
    model = OpenNMT([*SPECIAL[:2], *words], [*SPECIAL, *reversed(words), "x", "y"], **values).eval()
    shake(model)
    return model


@torch.no_grad()
def test_opennmt_translates(tmp_path, convert, capsys):
    model = opennmt()
    model.save(tmp_path / "step_5.pt")
    assert convert(tmp_path / "step_5.pt", "--to", "same", "--out", tmp_path / "out")[0] == 0
    lines = ["w1 w2 w3", "w4 w0 w0 w8"]
    (tmp_path / "in").write_text("\n".join(lines) + "\n")
    given = ("--beam", "1", "--max-len-b", "6", "--cpu")
    assert relpos("translate", tmp_path / "out" / "model.pt", tmp_path / "in", *given) == 0
    mine = [line.split() for line in capsys.readouterr().out.splitlines()]
    source, target = model.symbols
    for line, found in zip(lines, mine, strict=True):
        numbers = torch.tensor([[source.index(word) for word in line.split()]])
        assert found == [target[n] for n in model.greedy(numbers, 6)[0]]


def test_one_language_on_both_sides_has_two_dictionaries(tmp_path, convert):
    model = opennmt()
    model.opt.src_lang = model.opt.tgt_lang = "en"
    model.save(tmp_path / "step_5.pt")
    assert convert(tmp_path / "step_5.pt", "--to", "same", "--out", tmp_path / "out")[0] == 0
    made = [(tmp_path / "out" / f"dict.{side}.txt").read_text() for side in ("src", "tgt")]
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


def test_what_is_no_transformer_of_ours_is_refused(tmp_path, convert):
    out = ("--out", tmp_path / "out")
    for values, told in (
        ({"layer_norm": "rms"}, "--layer_norm rms of OpenNMT-py has no counterpart"),
        ({"copy_attn": True}, "--copy_attn True"),
        ({"max_relative_positions": 0}, "has no positions at all"),
    ):
        path = tmp_path / "bad.pt"
        opennmt(**values).save(path)
        status, said = convert(path, "--to", "same", *out)
        assert status == 2 and told in said
    rotary = opennmt()
    rotary.opt.max_relative_positions = -1
    rotary.save(path)
    assert "positions -1 of OpenNMT-py is not converted" in convert(path, "--to", "same", *out)[1]
    opennmt().save(path)
    assert "with --to same alone" in convert(path, "--to", "m4", *out)[1]
    assert "needs 4 at least" in convert(path, "--to", "same", "--positions", "3", *out)[1]
    assert "--fill says nothing here" in convert(path, "--to", "same", "--fill", "tile", *out)[1]
    checkpoint = torch.load(path, weights_only=False)
    checkpoint["vocab"] = {"src": {"fields": 1}, "tgt": {}}
    torch.save(checkpoint, path)
    assert "tools/convertv2_v3.py" in convert(path, "--to", "same", *out)[1]
    marian(tmp_path / "marian")
    (tmp_path / "marian" / "vocab.json").unlink()
    assert "vocab.json: No such file or directory" in convert(tmp_path / "marian", "--to", "same", *out)[1]
    assert not (tmp_path / "out").exists()
