"""An exported model that generates is opened in a process of its own; what differs there is not published."""

from __future__ import annotations

from functools import partial

import pytest

from helpers import FULL
from helpers.exported import GENERATING as MODELS
from helpers.exported import computing_otherwise, generating, spoilt_before
from helpers.formats import change, change_checkpoint, tensors
from relpos_fairseq.export import transformers_folder
from relpos_fairseq.models.building import build_generating

LM, XL, TRANSLATION = "relpos_transformer_lm", "relpos_transformer_xl", "relpos_transformer"


@pytest.mark.parametrize("text", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_what_was_compared_is_said(kind, text, ways):
    generating(kind, ways.here, text)
    said = ways.export("model.pt")
    auto = "AutoModelForSeq2SeqLM" if kind == TRANSLATION else "AutoModelForCausalLM"
    assert f"opened by {auto} of transformers" in said
    parts = ["ids"] * text + ["logits", "logits with its cache", "loss", "generate"]
    parts += ["its pipeline"] * (text and kind != TRANSLATION)
    assert f": {', '.join(parts[:-1])} and {parts[-1]} are ours" in said
    assert ("ids of 6 sentences equal" in said) == text


@pytest.mark.parametrize(
    ("scheme", "positions"), [("learned", 4), ("learned+shaw", 7), ("sinusoidal", 12), ("fox", 20), ("cable", 20)]
)
def test_models_of_any_length_are_opened(scheme, positions, ways):
    """No input is longer than the model's."""
    generating(LM, ways.here, scheme=scheme, tokens_per_sample=positions)
    assert "generate and its pipeline are ours" in ways.export("model.pt") or positions < 6


ADAPTIVE = {"adaptive_softmax_cutoff": "8,16", "adaptive_input": True, "adaptive_input_cutoff": "8,16"}
ADAPTIVE |= {"share_decoder_input_output_embed": False}


@pytest.mark.parametrize("kind", [LM, XL])
def test_adaptive_embeddings_are_exported(kind, ways):
    """Their parts are counted as rows; a graph, as of test_onnx.py, has them as one table."""
    checkpoint = generating(kind, ways.here, **ADAPTIVE)
    assert "logits with its cache, generate and its pipeline are ours" in ways.export("model.pt")
    if FULL:
        pytest.importorskip("onnxruntime")
        ways.run("export", "onnx", checkpoint, "--out", ways / "graphs")


@pytest.mark.parametrize(
    ("kind", "more"),
    [(LM, {"tokens_per_sample": n}) for n in (1, 2, 5, 39)]
    + [(TRANSLATION, {"max_source_positions": n, "max_target_positions": 53 - n}) for n in (3, 50)],
)
def test_short_tables_have_a_way_back(kind, more, ways):
    generating(kind, ways.here, scheme="learned", **more)
    ways.export("model.pt")
    ways.convert("out", "back")


def test_a_beam_is_no_wider_than_fairseqs():
    values = MODELS[TRANSLATION] | {"position_scheme": "m4"}
    model = build_generating(TRANSLATION, values, (5, 5))
    assert transformers_folder.search_of(model).num_beams == 4


@pytest.mark.parametrize("side", ["en", "de"])
def test_a_mask_in_one_dictionary_is_no_symbol_of_the_other(side, ways):
    """A tokenizer of transformers has one id of it, and leaves out that id where it decodes."""
    generating(TRANSLATION, ways.here)
    path = ways / f"text/dict.{side}.txt"
    lines = path.read_text().splitlines()
    place = next(n for n, line in enumerate(lines) if line.startswith("w")) + 1
    path.write_text("".join(f"{line}\n" for line in [*lines[:place], "<mask> 1", *lines[place + 1 :]]))
    ways.export("model.pt")


def test_numbers_that_are_none_are_named(ways):
    checkpoint, name = generating(LM, ways.here), "decoder.layers.0.fc1.bias"
    change_checkpoint(checkpoint, lambda state: state["model"][name].__setitem__(0, float("nan")))
    assert f"{checkpoint} holds {name}, which is not finite (NaN" in ways.unexported()


def settings(languages: object = ("en", "de"), bpe: str = "none") -> dict:
    return {"settings": {"languages": languages, "tokenizer": "moses", "bpe": bpe}}


SPOILT_TEXT = {
    "settings": ({"settings": None}, "manifest.json is not the JSON that is expected (settings is null,"),
    "languages": (settings(5), "languages is 5"),
    "others": (settings(["fr", "de"]), "is of fr and de"),
    "bpe": (settings(bpe="x"), "bpe is 'x', which no"),
    "level": ({"level": "bpe"}, "manifest.json: level is 'bpe', which no version writes"),
    "merges": (settings(bpe="subword-nmt"), "bpe.codes is not a file of merges of subword-nmt"),
}


@pytest.mark.parametrize("spoilt", SPOILT_TEXT)
def test_odd_text_is_one_line_that_names_it(spoilt, ways):
    facts, said = SPOILT_TEXT[spoilt]
    generating(TRANSLATION, ways.here)
    change(ways / "text/manifest.json", **facts)
    (ways / "text/bpe.codes").write_text("#version: 0.2\na\n")
    error = ways.unexported()
    assert said in error and f"{ways / 'text'}/" in error and error.count("\n") == 1


def test_whole_words_need_no_units(ways):
    generating(TRANSLATION, ways.here)
    change(ways / "text/manifest.json", **settings())
    assert "ParallelText of this package, ids of 6 sentences" in ways.export("model.pt")


BIAS, ALL = "model.decoder.layers.0.fc1.bias", list(range(1, 24))
HEAVIER = tensors({BIAS: lambda state: state[BIAS] + 1})


def misspelt(folder, kind, side: str = "en") -> None:
    path = folder / "text" / (f"dict.{side}.txt" if kind == TRANSLATION else "dict.txt")
    path.write_text(path.read_text().replace("man,", "men,"))


def recoded(folder, kind, line: str) -> None:
    names = {TRANSLATION: "ForSeq2SeqLM", LM: "ForCausalLM", XL: "WithMemoryForCausalLM"}
    computing_otherwise(folder, f"RelPos{names[kind]}", line)


SPOILT = {
    "weights": (lambda folder, _: HEAVIER(folder), "its logits differ from ours by"),
    "search": (lambda f, _: change(f / "generation_config.json", suppress_tokens=ALL), "its generate takes a token"),
    "ids": (misspelt, "its ids are"),
    "target": (partial(misspelt, side="de"), "its ids of its output are"),
    "nothing": (lambda folder, _: (folder / "config.json").write_text("{}"), "transformers does not open it: "),
}
# The folder's own code may compute something else; the process ends with it, so all models are each night's.
CODE = {
    "cache": (
        partial(recoded, line="if how.get('use_cache'): found.logits = found.logits + 1"),
        "its logits with its cache differ from ours by",
    ),
    "loss": (partial(recoded, line="found.loss = found.loss and found.loss * 2"), "its loss differ from ours by"),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, one) for kind in MODELS for one in SPOILT if one != "target" or kind == TRANSLATION),
        *([(kind, one) for kind in MODELS for one in CODE] if FULL else [(XL, "cache")]),
    ],
)
def test_what_differs_is_not_exported(kind, name, ways, monkeypatch, request):
    spoil, said = (SPOILT | CODE)[name]
    if name in SPOILT:
        request.getfixturevalue("opener_stays")
    spoilt_before(monkeypatch, transformers_folder, "check_generating", lambda folder: spoil(folder, kind))
    generating(kind, ways.here)
    error = ways.unexported()
    assert "is not written" in error and said in error
