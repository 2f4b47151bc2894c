"""`relpos convert` of Transformer-XL's original `model.pt`, held against its formula written anew."""

from __future__ import annotations

import json
import os

import pytest
import torch

from helpers import transformer_xl_original
from helpers.commands import load, relpos
from relpos_fairseq.formats.pickles import UnknownObject, safe_unpickle
from relpos_fairseq.formats.transformer_xl_original import is_original_xl

SYMBOLS = ["<eos>", "the", "of", "<unk>", *(f"w{number}" for number in range(16))]
CASES = [
    ({}, {}),
    ({"attn_type": 1}, {}),
    ({"attn_type": 1, "clamp_len": 3, "pre_lnorm": True}, {}),
    ({"clamp_len": 3, "pre_lnorm": True, "embed": 4}, {"pickle_protocol": 4}),
    ({"same_length": True, "cutoffs": (6, 11)}, {"_use_new_zipfile_serialization": False}),
    ({"cutoffs": (6, 11), "div_val": 2, "tied": False}, {}),
    ({"cutoffs": (6, 11), "div_val": 2, "attn_type": 1, "mem_len": 0}, {}),
    ({"attn_type": 2, "mem_len": 7}, {}),
    ({"attn_type": 2, "same_length": True, "cutoffs": (6, 11)}, {}),
    ({"attn_type": 3, "mem_len": 7}, {}),
    ({"attn_type": 3, "mem_len": 0}, {}),
    *(
        ({"cutoffs": (6, 11), "div_val": div, "embed": embed}, {})
        for div, embed in ((3, 9), (3, 10), (2, 4), (1, 4), (2, 13))
    ),
]


def converted(folder, out, *more: object) -> int:
    return relpos("convert", folder / "model.pt", "--to", "same", "--out", out, *more)


def segments() -> list[list[int]]:
    drawn = torch.randint(len(SYMBOLS), (3, 5), generator=torch.Generator().manual_seed(2))
    return drawn.tolist()


@pytest.mark.parametrize(("options", "saved"), CASES)
def test_every_released_model_is_the_same_here(tmp_path, capsys, options, saved):
    """Log-probabilities over three segments with memory; the file's own code is not there."""
    from fairseq import checkpoint_utils

    theirs = transformer_xl_original.model(len(SYMBOLS), **options)
    transformer_xl_original.save(theirs, tmp_path / "model.pt", **saved)
    transformer_xl_original.save(transformer_xl_original.corpus(SYMBOLS), tmp_path / "cache.pt", **saved)
    assert converted(tmp_path, tmp_path / "out") == 0, capsys.readouterr().err
    out = tmp_path / "out"
    (model,), cfg, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(out / "model.pt")], arg_overrides={"data": str(out)}
    )
    model = model.double().eval()
    model.load_state_dict(load(out / "model.pt")["model"])  # fairseq loads fp32
    places = [task.dictionary.index(word.replace("<eos>", "</s>")) for word in SYMBOLS]
    memory = None
    for segment, wanted in zip(segments(), transformer_xl_original.run(theirs, segments()), strict=True):
        output = model(torch.tensor([[places[one] for one in segment]]), memory=memory)
        memory = output[1]["memory"]
        softmax = model.decoder.adaptive_softmax
        found = output[0] if softmax is None else softmax.get_log_prob(output[0], None)
        found = found[0].log_softmax(-1)
        torch.testing.assert_close(found[:, places], wanted, rtol=0, atol=1e-10)
        new = [place for place in range(len(task.dictionary)) if place not in places]
        assert found[:, new].exp().sum() == 0


@pytest.mark.parametrize("upper", [3, 7, 12])
def test_both_unknown_words_stay_apart(tmp_path, capsys, upper):
    """`<UNK>` is a word like others where there is `<unk>`."""
    symbols = [*SYMBOLS[:upper], "<UNK>", *SYMBOLS[upper:-1]]
    theirs = transformer_xl_original.model(len(symbols))
    transformer_xl_original.save(theirs, tmp_path / "model.pt")
    transformer_xl_original.save(transformer_xl_original.corpus(symbols), tmp_path / "cache.pt")
    assert converted(tmp_path, tmp_path / "out") == 0, capsys.readouterr().err
    words = (tmp_path / "out" / "dict.txt").read_text().splitlines()
    assert words == [f"{one} 1" for one in symbols if one not in ("<eos>", "<unk>")]


def test_a_state_dict_is_read_too(tmp_path, capsys):
    """It says neither memory nor segment, and the command says so."""
    theirs = transformer_xl_original.model(len(SYMBOLS))
    torch.save(theirs.state_dict(), tmp_path / "model.pt")
    (tmp_path / "vocab.txt").write_text("".join(f"{symbol}\n" for symbol in SYMBOLS))
    assert converted(tmp_path, tmp_path / "out") == 0
    assert "a state_dict says neither memory" in capsys.readouterr().out


def test_a_state_dict_says_too_little_of_absolute_positions(tmp_path, capsys):
    torch.save(transformer_xl_original.model(len(SYMBOLS), 3).state_dict(), tmp_path / "model.pt")
    assert converted(tmp_path, tmp_path / "out") == 2
    assert "attn_type 3 and does not say its segment and memory" in capsys.readouterr().err


class Harmful:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple:
        return os.system, ("touch harmed",)


@pytest.mark.parametrize("zipped", [True, False])
def test_nothing_of_a_file_is_run(tmp_path, monkeypatch, capsys, zipped):
    monkeypatch.chdir(tmp_path)
    theirs = transformer_xl_original.model(len(SYMBOLS))
    theirs.harm = Harmful()
    transformer_xl_original.save(theirs, tmp_path / "model.pt", _use_new_zipfile_serialization=zipped)
    transformer_xl_original.save(transformer_xl_original.corpus(SYMBOLS), tmp_path / "cache.pt")
    assert converted(tmp_path, tmp_path / "out") == 0, capsys.readouterr().err
    assert isinstance(safe_unpickle(tmp_path / "model.pt").harm, UnknownObject)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attn_type": 3, "pre_lnorm": True}, "attn_type 3 and has pre_lnorm, under which its"),
        ({"attn_type": 2, "clamp_len": 7}, "attn_type 2 and clamps positions at 7, short of"),
    ],
)
def test_what_is_not_converted_is_said(tmp_path, capsys, options, said):
    transformer_xl_original.save(transformer_xl_original.model(len(SYMBOLS), **options), tmp_path / "model.pt")
    assert converted(tmp_path, tmp_path / "out") == 2
    assert said in capsys.readouterr().err


def test_outputs_that_were_not_compared_are_not_called_exact(tmp_path, capsys):
    """Relpos runs no code of the file: the report and conversion.json say that outputs were not compared."""
    transformer_xl_original.save(transformer_xl_original.model(len(SYMBOLS)), tmp_path / "model.pt")
    transformer_xl_original.save(transformer_xl_original.corpus(SYMBOLS), tmp_path / "cache.pt")
    assert converted(tmp_path, tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert "outputs were not compared on this machine" in said and "exact" not in said
    told = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert told["compared"].startswith("no: ") and told["differences"] == {}


def test_a_path_makes_no_released_model(tmp_path):
    """One of the names may stand in the options of any checkpoint."""
    torch.save({"cfg": {"encoder_embed_path": "word_embeddings.vec"}}, tmp_path / "model.pt")
    assert not is_original_xl(tmp_path / "model.pt")
    transformer_xl_original.save(transformer_xl_original.model(len(SYMBOLS)), tmp_path / "model.pt")
    assert is_original_xl(tmp_path / "model.pt")


def test_other_errors_are_one_line(tmp_path, capsys):
    transformer_xl_original.save(transformer_xl_original.model(len(SYMBOLS)), tmp_path / "model.pt")
    (tmp_path / "vocab.txt").write_text("one\ntwo\n")
    (tmp_path / "empty").mkdir()
    for more, said in (
        ((), "vocab.txt has 2 types, and the model 20"),
        (("--data", tmp_path / "none"), "none does not exist: give a folder"),
        (("--data", tmp_path / "empty"), "neither cache.pt nor vocab.txt"),
    ):
        assert converted(tmp_path, tmp_path / "out", *more) == 2
        assert said in capsys.readouterr().err
    (tmp_path / "vocab.txt").write_text("\n".join(SYMBOLS))
    assert converted(tmp_path, tmp_path / "out", "--positions", 9) == 2
    assert "--positions says nothing here" in capsys.readouterr().err
    (tmp_path / "vocab.txt").write_text("the\n" * len(SYMBOLS))
    assert converted(tmp_path, tmp_path / "out") == 2
    assert "'the' cannot be a word" in capsys.readouterr().err
    names = ("word_emb.emb_layers", "dec_attn")
    torch.save(dict.fromkeys(names, torch.zeros(1)), tmp_path / "model.pt")
    assert converted(tmp_path, tmp_path / "out") == 2
    assert "is no whole released Transformer-XL" in capsys.readouterr().err
