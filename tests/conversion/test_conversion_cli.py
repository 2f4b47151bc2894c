"""`relpos convert`, and training that begins from another model's positions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from helpers.commands import call, load
from helpers.conversion import ROWS, as_plain, fairseq_roberta, model_of
from helpers.formats import STYLES
from helpers.roberta import ARCH, MASKED_LM, OPTIMIZE, write_packed
from relpos_fairseq.conversion.report import Probe
from relpos_fairseq.formats.base import FORMATS, read_encoder
from relpos_fairseq.formats.exported import TYPES
from relpos_fairseq.formats.huggingface_folder import FAMILIES
from relpos_fairseq.formats.on_load import prepare
from relpos_fairseq.models.building import build_roberta, outputs_of


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The RoBERTa of fairseq as three releases wrote it: style to (path, model)."""
    folder = tmp_path_factory.mktemp("plain")
    return {style: fairseq_roberta(folder, style) for style in STYLES}


def printed_difference(text: str) -> float:
    """What the command says of logits."""
    return float(re.search(r"Maximum logit difference: (\S+)", text).group(1))


@pytest.mark.parametrize("style", STYLES)
def test_fairseqs_roberta_becomes_ours(ways, plain, style):
    path, model = plain[style]
    text = ways.convert(path, to="learned+m4")
    assert "exact     yes" in text and printed_difference(text) < 1e-5
    source = read_encoder(ways / "ours")
    probe = Probe.draw(ROWS, 20, False)
    ours = outputs_of(build_roberta(source.values, source.state), probe.tokens, None)
    theirs = outputs_of(model, probe.tokens, None)
    for name in ("logits", "classification"):
        apart = (ours[name] - theirs[name])[probe.real if name == "logits" else slice(None)]
        assert apart.abs().max() < 1e-5
    assert ways.told("ours", "conversion.json")["source"] == f"fairseq's roberta: {style}.pt"


def test_fairseqs_tools_load_what_was_written(ways, plain):
    from fairseq import checkpoint_utils

    path, _ = plain["legacy"]
    words = "".join(f"w{number} 1\n" for number in range(ROWS - 5))
    (path.parent / "dict.txt").write_text(words)
    ways.convert(path, "ours", "--approximate", to="m4")
    assert (ways / "ours/dict.txt").read_text() == words
    given = [str(ways / "ours/model.pt")], {"data": str(ways / "ours")}
    models, cfg, task = checkpoint_utils.load_model_ensemble_and_task(*given)
    assert cfg.model.position_scheme == "m4"
    assert task.mask_idx == ROWS - 1
    assert models[0].eval()(torch.tensor([[0, 5, 6, 2]]))[0].shape == (1, 4, ROWS)


def test_to_and_fro_by_the_command(ways, plain):
    ways.convert(plain["dataclass"][0], "first.pt", to="learned+tupe")
    assert "--fill tile or --fill interpolate" in ways.refused("first.pt", "--positions", "31", to="learned+tupe")
    assert printed_difference(ways.convert("first.pt", "second.pt", "--positions", "31", "--fill", "tile")) < 1e-5
    assert load(ways / "second.pt")["cfg"]["model"]["max_positions"] == 31


SMALLER = ("--position-sandwich-dim", "8")
# The first scheme, the conversion, what it says, and the least difference, or the largest of an exact one.
MEASURED = {
    "dropped": ("", "m4", (), ["learned is dropped", "the mean of the dropped positions is added to ev"], 1e-3),
    # Not an error that asks for a report, nor silently another function.
    "another option": ("learned+sandwich", "learned+sandwich", SMALLER, ["sandwich: sandwich_dim 8 instead of"], 1e-4),
}


@pytest.mark.parametrize("name", MEASURED)
def test_approximations_are_asked_for_and_measured(name, ways, plain):
    first, to, options, losses, least = MEASURED[name]
    source = plain["legacy"][0]
    if first:
        ways.convert(source, "first", "--approximate", to=first)
        source = ways / "first/model.pt"
    error = ways.refused(source, *options, to=to)
    assert losses[0] in error and "--approximate" in error
    text = ways.convert(source, "ours", *options, "--approximate", to=to)
    assert "exact     no" in text and f"lost      {losses[0]}" in text and losses[-1] in text
    assert printed_difference(text) > least and "KL divergence" in text


def test_what_holds_for_short_inputs_is_compared_on_them(ways, plain):
    ways.convert(plain["legacy"][0], "first", "--approximate", "--init", "own", to="transformer_xl")
    text = ways.convert("first/model.pt", "ours", "--clamp-len", "5", to="transformer_xl")
    assert "holds for inputs of up to 6 tokens (clamp_len)" in text and "exact     yes" in text
    assert printed_difference(text) < 1e-5


def test_numbers_of_16_bits_are_rounded_and_that_is_no_fault(ways, plain):
    checkpoint = torch.load(plain["legacy"][0], weights_only=False)
    checkpoint["model"] = {key: value.bfloat16() for key, value in checkpoint["model"].items()}
    torch.save(checkpoint, ways / "half.pt")
    assert "exact     yes" in ways.convert("half.pt", "ours", "--position-scale", "5", to="learned+m4")


REFUSED = {
    "short.pt --to m4": "is truncated or no checkpoint: copy it again",
    "other.pt --to m4": "other.pt holds no model, and is none of what is read here: bert, ",
    "absent.pt --to m4": "does not exist",
    "empty --to m4": "has no config.json",
    "plain.pt --to m4 --out plain.pt": "would be overwritten",
    "plain.pt --to m4 --out there": "exists: remove it",
    "plain.pt --to m5": "unknown position scheme 'm5'",
    "plain.pt --to learned+rope --position-clip-distance 3": "does not apply",
    "plain.pt --to learned --head x": "--head chooses",
    "plain.pt --to same --fill tile": "source has 20 positions, and 20 are",
    "plain.pt --to rope --fill tile --positions 30 --approximate": "tile: no table over absolute positio",
    "plain.pt --to same --init own": "--init own: no table is new",
    "plain.pt --to hf-roberta --fill tile": "--fill: convert to a scheme first",
    "plain.pt --to hf-roberta --init own": "--init own: convert to a scheme",
    "plain.pt --to hf-roberta --positions 9": "--positions: convert to",
    "plain.pt --to learned --data empty": "holds neither dict.txt",
}


def test_bad_input_is_one_line(shell, tmp_path, plain):
    before = plain["legacy"][0].read_bytes()
    (tmp_path / "plain.pt").write_bytes(before)
    (tmp_path / "short.pt").write_bytes(before[:-2000])
    torch.save({"weights": 1}, tmp_path / "other.pt")
    (tmp_path / "empty").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "there/x").touch()
    for line, said in REFUSED.items():
        given = "" if "--out" in line else "--out refused"
        assert said in shell.refused(f"convert {line} {given}"), line
        assert not (tmp_path / "refused").exists() and not list(tmp_path.glob(".*")), line
    assert (tmp_path / "plain.pt").read_bytes() == before


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    """Text for masked_lm."""
    return write_packed(tmp_path_factory.mktemp("packed"))


def train(packed: Path, save_dir: Path, length: int, *more: str | Path) -> str:
    """Train a tiny model for two updates."""
    sizes = ("--tokens-per-sample", length, "--max-update", "2", *more)
    return call("train", packed, *ARCH, *MASKED_LM, *OPTIMIZE, "--save-dir", save_dir, *sizes)


@pytest.fixture(scope="module")
def pretrained(packed, tmp_path_factory) -> dict[str, Path]:
    """Plain and ours, on the text's dictionary, trained at 16 tokens: name to checkpoint."""
    folder = tmp_path_factory.mktemp("pretrained")
    clip = ("--position-clip-distance", "8")
    runs = {"learned": (), "m4": clip}
    for scheme, options in runs.items():
        train(packed, folder / scheme, 16, "--position-scheme", scheme, *options)
    paths = {scheme: folder / scheme / "checkpoint_last.pt" for scheme in runs}
    paths["plain"] = folder / "plain.pt"
    torch.save(as_plain(load(paths["learned"])), paths["plain"])
    return paths


def test_training_converts_a_plain_roberta_on_load(packed, pretrained, tmp_path):
    start = ("--finetune-from-model", pretrained["plain"])
    output = train(packed, tmp_path, 16, "--position-scheme", "m4m", *start)
    assert "(fairseq's roberta) on load" in output
    assert "WARNING | relpos_fairseq.formats.on_load | conversion: lost" in output
    assert "learned is dropped" in output and "biases of q and k shifted as m4m starts" in output
    again = train(packed, tmp_path, 16, "--position-scheme", "m4m", *start, "--max-update", "3")
    assert "conversion:" not in again, "a resume converts nothing"
    assert "3 updates" in again or "num_updates: 3" in again


def test_an_exact_conversion_on_load_starts_where_the_source_stood(packed, pretrained, tmp_path):
    start = ("--finetune-from-model", pretrained["plain"], "--lr", "0", "--segment-encoding", "head")
    output = train(packed, tmp_path, 16, "--position-scheme", "learned+rel_scalar", *start)
    assert "conversion: exact     yes" in output
    kept, made = load(pretrained["plain"])["model"], load(tmp_path / "checkpoint_last.pt")["model"]
    for key, value in kept.items():
        if "embed_positions" not in key and not key.endswith("sentence_encoder.version"):
            assert torch.equal(value, made[key]), key
    tables = [value for key, value in made.items() if "self_attn.position." in key]
    assert tables and not any(table.any() for table in tables)


def test_some_layers_of_a_plain_roberta_are_converted(packed, pretrained, tmp_path):
    start = ("--finetune-from-model", pretrained["plain"], "--lr", "0", "--segment-encoding", "head")
    output = train(packed, tmp_path, 16, "--position-scheme", "learned+m4", "--encoder-layers-to-keep", "1", *start)
    assert "conversion: exact     yes" in output
    made = load(tmp_path / "checkpoint_last.pt")
    name = "encoder.sentence_encoder.layers.{}.fc1.weight"
    assert torch.equal(made["model"][name.format(0)], load(pretrained["plain"])["model"][name.format(1)])
    assert made["cfg"]["model"]["encoder_layers"] == 1


def test_restore_file_never_converts(packed, pretrained, tmp_path):
    reset = ("--reset-optimizer", "--reset-dataloader", "--reset-meters", "--reset-lr-scheduler")
    with pytest.raises(ValueError, match="--finetune-from-model converts fairseq's RoBERTa"):
        restore = ("--restore-file", pretrained["plain"])
        train(packed, tmp_path / "a", 16, "--position-scheme", "m4", *restore, *reset)
    with pytest.raises(ValueError, match=r"trained with \[m4 .* the flags say \[learned "):
        restore = ("--restore-file", pretrained["m4"])
        train(packed, tmp_path / "b", 16, "--position-scheme", "learned", *restore, *reset)
    with pytest.raises(ValueError, match="is a folder: give the model.pt in it"):
        train(packed, tmp_path / "run", 16, "--finetune-from-model", tmp_path)


def test_longer_input_than_in_pretraining(packed, pretrained, tmp_path):
    """Huang's Table 4: 512 and clip 256, fine-tuned at 704; here 16 and 8, at 22."""
    clip = ("--position-clip-distance", "8")
    options = ("--finetune-from-model", pretrained["m4"], "--position-scheme", "m4", *clip)
    output = train(packed, tmp_path / "m4", 22, *options)
    assert "2 updates" in output or "num_updates: 2" in output


TOO_LONG = "knows 16 absolute positions and 22 are wanted.*fill"


@pytest.mark.parametrize(
    ("source", "scheme", "changes", "said"),
    [
        ("plain", "m4", {"layer_norm_eps": 1e-12}, "layer_norm_eps 1e-05, and the flags say 1e-12: give --layer"),
        ("plain", "m4", {"encoder_attention_heads": 4}, "encoder_attention_heads 2, and the flags say 4"),
        ("plain", "learned", {"max_positions": 22}, TOO_LONG),
        ("learned", "learned", {"max_positions": 22}, TOO_LONG),
    ],
)
def test_flags_that_contradict_the_checkpoint_are_named(source, scheme, changes, said, pretrained):
    """As loading does for --finetune-from-model, for a model with other flags."""
    path = pretrained[source]
    given = read_encoder(path)
    model = model_of(given.values | changes | {"position_scheme": scheme}, given.rows)
    with pytest.raises(ValueError, match=said):
        prepare(load(path), str(path), model, converts=True)


@pytest.mark.parametrize("kind", [*FAMILIES, "marian", *TYPES, "mbart", None])
def test_one_format_at_most_recognises_a_folder(kind, tmp_path):
    found = [one.name for one in FORMATS if one.recognises(tmp_path, {"model_type": kind, "model": {}, "vocab": 1})]
    assert len(found) == (kind not in ("mbart", None))


@pytest.mark.parametrize("keys", [("model",), ("model", "vocab", "opt"), ("vocab", "opt"), ("model", "vocab"), ()])
def test_one_format_at_most_recognises_a_file(keys, tmp_path):
    file = tmp_path / "model.pt"
    file.write_bytes(b"")
    found = [one.name for one in FORMATS if one.recognises(file, dict.fromkeys((*keys, "model_type"), "bert"))]
    expected = "checkpoints of OpenNMT-py" if "opt" in keys else "RoBERTas of fairseq's and ours"
    assert found == [expected] * bool(keys)
