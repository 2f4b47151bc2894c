"""An exported model that generates is opened in a process of its own; what differs there is not published."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import FULL
from helpers.commands import relpos
from helpers.lm_models import randomized
from relpos_fairseq.export import transformers_folder
from relpos_fairseq.models.building import build_generating
from relpos_fairseq.saved.checkpoint import OURS, checkpoint_of

DECODER = {"decoder_embed_dim": 16, "decoder_ffn_embed_dim": 24, "decoder_layers": 2, "decoder_attention_heads": 2}
MODELS = {
    "relpos_transformer": {
        **DECODER,
        "encoder_embed_dim": 16,
        "encoder_ffn_embed_dim": 24,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "max_source_positions": 20,
        "max_target_positions": 24,
    },
    "relpos_transformer_lm": {**DECODER, "share_decoder_input_output_embed": True, "tokens_per_sample": 20},
    "relpos_transformer_xl": {**DECODER, "tokens_per_sample": 6, "mem_len": 8},
}


def random_checkpoint(kind: str, folder, text: bool = True, scheme: str = "m4", **more):
    """A checkpoint of a random model of 24 symbols, with text beside it."""
    values = MODELS[kind] | {"position_scheme": scheme} | more
    model = randomized(build_generating(kind, values, (24, 24))).float()
    task = {"_name": OURS[kind].task}
    task |= {"source_lang": "en", "target_lang": "de"} if kind == "relpos_transformer" else {"tokens_per_sample": 20}
    made = checkpoint_of(kind, values, model.state_dict(), task)
    if text:
        (folder / "text").mkdir(parents=True)
        for name in ("dict.en.txt", "dict.de.txt") if kind == "relpos_transformer" else ("dict.txt",):
            words = [f"w{number}" for number in range(19)] + ["man,"]
            (folder / "text" / name).write_text("".join(f"{word} 1\n" for word in words[:: 1 if "de" in name else -1]))
    folder.mkdir(exist_ok=True)
    torch.save(made, folder / "model.pt")
    return folder / "model.pt"


@pytest.mark.parametrize("text", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_what_was_compared_is_said(kind, text, tmp_path, capsys):
    checkpoint = random_checkpoint(kind, tmp_path / "model", text)
    assert relpos("export", "transformers", checkpoint, "--out", tmp_path / "out") == 0
    auto = "AutoModelForSeq2SeqLM" if kind == "relpos_transformer" else "AutoModelForCausalLM"
    said = capsys.readouterr().out
    assert f"opened by {auto} of transformers" in said
    parts = ["ids"] * text + ["logits", "logits with its cache", "loss", "generate"]
    parts += ["its pipeline"] * (text and kind != "relpos_transformer")
    assert f": {', '.join(parts[:-1])} and {parts[-1]} are ours" in said
    assert ("ids of 6 sentences equal" in said) == text


@pytest.mark.parametrize(
    ("scheme", "positions"), [("learned", 4), ("learned+shaw", 7), ("sinusoidal", 12), ("fox", 20), ("cable", 20)]
)
def test_models_of_any_length_are_opened(scheme, positions, tmp_path, capsys):
    """No input is longer than the model's."""
    checkpoint = random_checkpoint(
        "relpos_transformer_lm", tmp_path / "model", scheme=scheme, tokens_per_sample=positions
    )
    assert relpos("export", "transformers", checkpoint, "--out", tmp_path / "out") == 0
    assert "generate and its pipeline are ours" in capsys.readouterr().out or positions < 6


ADAPTIVE = {"adaptive_softmax_cutoff": "8,16", "adaptive_input": True, "adaptive_input_cutoff": "8,16"}
ADAPTIVE |= {"share_decoder_input_output_embed": False}


@pytest.mark.parametrize("kind", ["relpos_transformer_lm", "relpos_transformer_xl"])
def test_adaptive_embeddings_are_exported(kind, tmp_path, capsys):
    """Their parts are counted as rows; a graph, as of test_onnx.py, has them as one table."""
    checkpoint = random_checkpoint(kind, tmp_path / "model", **ADAPTIVE)
    assert relpos("export", "transformers", checkpoint, "--out", tmp_path / "out") == 0
    assert "logits with its cache, generate and its pipeline are ours" in capsys.readouterr().out
    if FULL:
        pytest.importorskip("onnxruntime")
        assert relpos("export", "onnx", checkpoint, "--out", tmp_path / "graphs") == 0


@pytest.mark.parametrize(
    ("kind", "more"),
    [("relpos_transformer_lm", {"tokens_per_sample": n}) for n in (1, 2, 5, 39)]
    + [("relpos_transformer", {"max_source_positions": n, "max_target_positions": 53 - n}) for n in (3, 50)],
)
def test_short_tables_have_a_way_back(kind, more, tmp_path):
    checkpoint = random_checkpoint(kind, tmp_path / "model", scheme="learned", **more)
    assert relpos("export", "transformers", checkpoint, "--out", tmp_path / "out") == 0
    assert relpos("convert", tmp_path / "out", "--to", "same", "--out", tmp_path / "back") == 0


def test_a_beam_is_no_wider_than_fairseqs(tmp_path):
    values = MODELS["relpos_transformer"] | {"position_scheme": "m4"}
    model = build_generating("relpos_transformer", values, (5, 5))
    assert transformers_folder.search_of(model).num_beams == 4


@pytest.mark.parametrize("side", ["en", "de"])
def test_a_mask_in_one_dictionary_is_no_symbol_of_the_other(side, tmp_path):
    """A tokenizer of transformers has one id of it, and leaves out that id where it decodes."""
    checkpoint = random_checkpoint("relpos_transformer", tmp_path / "model")
    path = checkpoint.parent / "text" / f"dict.{side}.txt"
    lines = path.read_text().splitlines()
    place = next(n for n, line in enumerate(lines) if line.startswith("w")) + 1
    path.write_text("".join(f"{line}\n" for line in [*lines[:place], "<mask> 1", *lines[place + 1 :]]))
    assert relpos("export", "transformers", checkpoint, "--out", tmp_path / "out") == 0


def test_numbers_that_are_none_are_named(tmp_path, capsys):
    checkpoint = random_checkpoint("relpos_transformer_lm", tmp_path / "model")
    state = torch.load(checkpoint, weights_only=False)
    state["model"]["decoder.layers.0.fc1.bias"][0] = float("nan")
    torch.save(state, checkpoint)
    assert relpos("export", "transformers", checkpoint, "--out", tmp_path / "out") == 2
    assert f"{checkpoint} holds decoder.layers.0.fc1.bias, which is not finite (NaN" in capsys.readouterr().err


SPOILT_TEXT = {
    "settings": ({"settings": None}, "manifest.json is not the JSON that is expected (settings is null,"),
    "languages": ({"settings": {"languages": 5, "tokenizer": "moses", "bpe": "none"}}, "languages is 5"),
    "others": ({"settings": {"languages": ["fr", "de"], "tokenizer": "moses", "bpe": "none"}}, "is of fr and de"),
    "bpe": ({"settings": {"languages": ["en", "de"], "tokenizer": "moses", "bpe": "x"}}, "bpe is 'x', which no"),
    "level": ({"level": "bpe"}, "manifest.json: level is 'bpe', which no version writes"),
    "merges": (
        {"settings": {"languages": ["en", "de"], "tokenizer": "moses", "bpe": "subword-nmt"}},
        "bpe.codes is not a file of merges of subword-nmt",
    ),
}


@pytest.mark.parametrize("spoilt", SPOILT_TEXT)
def test_odd_text_is_one_line_that_names_it(spoilt, tmp_path, capsys):
    facts, said = SPOILT_TEXT[spoilt]
    checkpoint = random_checkpoint("relpos_transformer", tmp_path / "model")
    (checkpoint.parent / "text" / "manifest.json").write_text(json.dumps(facts))
    (checkpoint.parent / "text" / "bpe.codes").write_text("#version: 0.2\na\n")
    assert relpos("export", "transformers", checkpoint, "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert said in error and f"{checkpoint.parent / 'text'}/" in error and error.count("\n") == 1


def test_whole_words_need_no_units(tmp_path, capsys):
    checkpoint = random_checkpoint("relpos_transformer", tmp_path / "model")
    facts = {"settings": {"languages": ["en", "de"], "tokenizer": "moses", "bpe": "none"}}
    (checkpoint.parent / "text" / "manifest.json").write_text(json.dumps(facts))
    assert relpos("export", "transformers", checkpoint, "--out", tmp_path / "out") == 0
    assert "ParallelText of this package, ids of 6 sentences" in capsys.readouterr().out


SPOILT = {
    "weights": ("its logits differ from ours by",),
    "cache": (
        "its logits with its cache differ from ours by",
        "    if how.get('use_cache'): found.logits = found.logits + 1\n",
    ),
    "loss": ("its loss differ from ours by", "    found.loss = found.loss and found.loss * 2\n"),
    "search": ("its generate takes a token whose score is",),
    "ids": ("its ids are",),
    "target": ("its ids of its output are",),
    "nothing": ("transformers does not open it: ",),
}


CODE = [name for name, said in SPOILT.items() if len(said) > 1]  # the process ends with it; each night for all models


@pytest.mark.parametrize(
    ("kind", "spoilt"),
    [
        *(
            (kind, one)
            for kind in MODELS
            for one in SPOILT
            if one not in CODE and (one != "target" or kind == "relpos_transformer")
        ),
        *([(kind, one) for kind in MODELS for one in CODE] if FULL else [("relpos_transformer_xl", CODE[0])]),
    ],
)
def test_what_differs_is_not_exported(kind, spoilt, tmp_path, monkeypatch, capsys, request):
    """The folder is spoilt when it is whole, as a release or a file would."""
    if spoilt not in CODE:
        request.getfixturevalue("opener_stays")
    original = transformers_folder.check_generating

    def check(folder, *given):
        change(folder, kind, spoilt)
        return original(folder, *given)

    monkeypatch.setattr(transformers_folder, "check_generating", check)
    checkpoint = random_checkpoint(kind, tmp_path / "model")
    assert relpos("export", "transformers", checkpoint, "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "is not written" in error and SPOILT[spoilt][0] in error
    assert not (tmp_path / "out").exists()


def change(folder, kind, spoilt):
    """Spoil a written folder."""
    if spoilt == "weights":
        weights = load_file(folder / "model.safetensors")
        name = next(name for name in weights if name.endswith("decoder.layers.0.fc1.bias"))
        weights[name] += 1.0
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    if spoilt in ("cache", "loss"):  # the folder's own code may compute something else
        names = {"relpos_transformer": "ForSeq2SeqLM", "relpos_transformer_lm": "ForCausalLM"}
        name = f"RelPos{names.get(kind, 'WithMemoryForCausalLM')}"
        code = f"run = {name}.forward\ndef other(self, *given, **how):\n    found = run(self, *given, **how)\n"
        code += f"{SPOILT[spoilt][1]}    return found\n{name}.forward = other\n"
        with (folder / "relpos_code.py").open("a") as file:
            file.write(code)
    if spoilt == "search":
        config = json.loads((folder / "generation_config.json").read_text())
        config["suppress_tokens"] = list(range(1, 24))
        (folder / "generation_config.json").write_text(json.dumps(config))
    if spoilt in ("ids", "target"):
        name = {"ids": "dict.en.txt", "target": "dict.de.txt"}[spoilt] if kind == "relpos_transformer" else "dict.txt"
        path = folder / "text" / name
        path.write_text(path.read_text().replace("man,", "men,"))
    if spoilt == "nothing":
        (folder / "config.json").write_text("{}")
