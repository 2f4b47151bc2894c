"""`relpos convert` of Transformer-XL's original `model.pt`, held against its formula written anew."""

from __future__ import annotations

import pytest
import torch

from helpers import transformer_xl_original as original
from helpers.commands import Malicious, load
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


def save(folder, *given, symbols=SYMBOLS, saved=None, **options):
    """A random model and its vocabulary, as the released code writes them."""
    theirs = original.model(len(symbols), *given, **options)
    original.save(theirs, folder / "model.pt", **saved or {})
    original.save(original.corpus(symbols), folder / "cache.pt", **saved or {})
    return theirs


def segments() -> list[list[int]]:
    drawn = torch.randint(len(SYMBOLS), (3, 5), generator=torch.Generator().manual_seed(2))
    return drawn.tolist()


@pytest.mark.parametrize(("options", "saved"), CASES)
def test_every_released_model_is_the_same_here(ways, options, saved):
    """Log-probabilities over three segments with memory; the file's own code is not there."""
    from fairseq import checkpoint_utils

    theirs, out = save(ways.here, saved=saved, **options), ways / "ours"
    ways.convert("model.pt")
    (model,), cfg, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(out / "model.pt")], arg_overrides={"data": str(out)}
    )
    model = model.double().eval()
    model.load_state_dict(load(out / "model.pt")["model"])  # fairseq loads fp32
    places = [task.dictionary.index(word.replace("<eos>", "</s>")) for word in SYMBOLS]
    new = [place for place in range(len(task.dictionary)) if place not in places]
    memory = None
    for segment, wanted in zip(segments(), original.run(theirs, segments()), strict=True):
        output = model(torch.tensor([[places[one] for one in segment]]), memory=memory)
        memory = output[1]["memory"]
        softmax = model.decoder.adaptive_softmax
        found = output[0] if softmax is None else softmax.get_log_prob(output[0], None)
        found = found[0].log_softmax(-1)
        torch.testing.assert_close(found[:, places], wanted, rtol=0, atol=1e-10)
        assert found[:, new].exp().sum() == 0


@pytest.mark.parametrize("upper", [3, 7, 12])
def test_both_unknown_words_stay_apart(ways, upper):
    """`<UNK>` is a word like others where there is `<unk>`."""
    symbols = [*SYMBOLS[:upper], "<UNK>", *SYMBOLS[upper:-1]]
    save(ways.here, symbols=symbols)
    ways.convert("model.pt")
    words = (ways / "ours/dict.txt").read_text().splitlines()
    assert words == [f"{one} 1" for one in symbols if one not in ("<eos>", "<unk>")]


def test_a_state_dict_is_read_too(ways):
    """It says neither memory nor segment, and the command says so."""
    torch.save(original.model(len(SYMBOLS)).state_dict(), ways / "model.pt")
    (ways / "vocab.txt").write_text("".join(f"{symbol}\n" for symbol in SYMBOLS))
    assert "a state_dict says neither memory" in ways.convert("model.pt")


@pytest.mark.parametrize("zipped", [True, False])
def test_nothing_of_a_file_is_run(ways, monkeypatch, zipped):
    monkeypatch.chdir(ways.here)
    theirs = save(ways.here)
    theirs.harm = Malicious()
    original.save(theirs, ways / "model.pt", _use_new_zipfile_serialization=zipped)
    ways.convert("model.pt")
    assert isinstance(safe_unpickle(ways / "model.pt").harm, UnknownObject)
    assert not (ways / "ran").exists()


def test_outputs_that_were_not_compared_are_not_called_exact(ways):
    """Relpos runs no code of the file: the report and conversion.json say that outputs were not compared."""
    save(ways.here)
    said = ways.convert("model.pt")
    assert "outputs were not compared on this machine" in said and "exact" not in said
    told = ways.told("ours", "conversion.json")
    assert told["compared"].startswith("no: ") and told["differences"] == {}


def test_a_path_makes_no_released_model(tmp_path):
    """One of the names may stand in the options of any checkpoint."""
    torch.save({"cfg": {"encoder_embed_path": "word_embeddings.vec"}}, tmp_path / "model.pt")
    assert not is_original_xl(tmp_path / "model.pt")
    save(tmp_path)
    assert is_original_xl(tmp_path / "model.pt")
