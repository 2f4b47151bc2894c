"""What no model computes with is refused at reading, by name, of every format; what is lost is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from helpers import FULL, formats
from helpers import transformer_xl_original as original
from helpers.formats import FORMATS, Damage, change, checkpoint, config, encoder, opennmt, tensors, text, without
from relpos_fairseq.conversion import ConversionError
from relpos_fairseq.formats.base import read
from relpos_fairseq.formats.huggingface_folder import read_folder
from relpos_fairseq.formats.transformers_folder import _KEYS, _VALUES, read_config, read_weights
from relpos_fairseq.io.errors import UserError

NAMED = [
    *({"0": "a", "2": "c"}, {"1": "a", "2": "b", "3": "c"}, {"-1": "a", "0": "b", "1": "c"}, ["a", "b", "c"]),
    *({"neg": "a"}, {"0": 0, "1": "b", "2": "c"}, {"0": "a", "1": None, "2": "c"}, {"0": "a"}, {"0": ["x"]}),
    {str(number): "x" for number in range(4)},
]
# Format, the object in config.json, its key: values.
WRONG: dict[tuple[str, str, str], list] = {
    ("bert classes", "", "layer_norm_eps"): ["1e-12", None, -1.0, float("nan"), float("inf")],
    ("bert classes", "", "hidden_dropout_prob"): ["0.1", 2.0, None, True],
    ("bert classes", "", "attention_probs_dropout_prob"): ["0.1", 2.0],
    ("bert classes", "", "classifier_dropout"): ["x", -0.1],
    ("bert classes", "", "hidden_act"): [["gelu"], None, {}],
    ("bert classes", "", "model_type"): [["bert"], None, 5],
    ("bert classes", "", "position_embedding_type"): [["absolute"], "", {"a": 1}],
    ("bert classes", "", "num_attention_heads"): [True, 2.0, "2", 0, None],
    ("bert classes", "", "pad_token_id"): ["0", [0]],
    ("bert classes", "", "tie_word_embeddings"): ["no", 0],
    ("bert classes", "", "id2label"): NAMED,
    ("bert classes", "", "label2id"): [["a"], 5],
    ("deberta v3", "", "position_buckets"): ["256", None, 4.0],
    ("deberta v3", "", "max_relative_positions"): [None, "512"],
    ("deberta v3", "", "pos_att_type"): [5, [5], {}],
    ("deberta v3", "", "share_att_key"): ["yes"],
    ("deberta v3", "", "conv_kernel_size"): ["0", None],
    ("deberta v3", "", "type_vocab_size"): [None, -1],
    ("deberta v3", "", "pooler_hidden_act"): [None, "swish"],
    ("deberta v3", "", "norm_rel_ebd"): [None],
    ("exported", "", "id2label"): [NAMED[-1], NAMED[0]],
    ("exported", "", "values"): [5],
    ("exported", "", "pair_separators"): ["x"],
    ("exported", "values", "dropout"): ["0.1"],
    ("exported", "values", "layer_norm_eps"): [None],
    ("exported", "values", "encoder_layers"): [True],
    ("exported", "values", "activation_fn"): [[]],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Callable[[str, Path], Path]:
    """What writes a source of a format to a folder; the first of each is copied."""

    @cache
    def first(name: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("formats") / name.replace(" ", "-")
        return folder, MAKERS[name](folder).relative_to(folder)

    def copied(name: str, folder: Path) -> Path:
        shutil.copytree(first(name)[0], folder)
        return folder / first(name)[1]

    return copied


@pytest.mark.parametrize(("name", "within", "key"), WRONG)
def test_a_value_that_no_model_computes_with_is_named(name, within, key, made, ways):
    """One line names the file, the key and the value."""
    path = made(name, ways / "first") / "config.json"
    before = path.read_text()
    for value in WRONG[name, within, key]:
        change(path, within, **{key: value})
        said = ways.refused()
        assert said.startswith(f"error: {path}") and key in said and repr(value) in said
        assert "RELPOS_TRACEBACK" not in said
        path.write_text(before)


def shards(folder: Path) -> list[Path]:
    """Write a folder's weights as several files with an index."""
    state = load_file(folder / "model.safetensors")
    files = [folder / f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = {name: files[number % 2].name for number, name in enumerate(sorted(state))}
    for file in files:
        save_file({name: state[name] for name in index if index[name] == file.name}, file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "model.safetensors").unlink()
    return files


# What spoils a source, as helpers/formats.py has more of.


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def of_type(kind: torch.dtype) -> Damage:
    """Pickled weights, of which one has another type."""

    def damage(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        state["classifier.weight"] = state["classifier.weight"].to(kind)
        torch.save(state, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()

    return damage


def twice(own: str, other: str) -> Damage:
    """Two tensors of one name."""
    return tensors({other: lambda state: state[own] + 1})


def symbol(name: str) -> Damage:
    """A symbol of Marian's vocabulary."""

    def damage(folder: Path) -> None:
        numbers = formats.told(folder / "vocab.json")
        (folder / "vocab.json").write_text(json.dumps({name if n == 9 else one: n for one, n in numbers.items()}))

    return damage


def step(**values) -> Damage:
    """Another model of OpenNMT-py."""
    return lambda source: opennmt(**values).save(source)


def weight(change: Callable) -> Damage:
    """A weight of OpenNMT-py's."""
    name = "encoder.transformer.0.feed_forward.w_1.weight"
    return checkpoint(lambda state: state["model"].update({name: change(state["model"][name])}))


def xl(**options) -> Damage:
    """Another released Transformer-XL."""
    return lambda source: original.save(original.model(20, **options), source)


def flip(source: Path) -> None:
    """A bit of a Transformer-XL's first tensor."""
    content = bytearray(source.read_bytes())
    content[content.index(b"data/0FB") + 100] ^= 1
    source.write_bytes(content)


def words(lines: list[str]) -> Damage:
    """Another vocabulary beside a Transformer-XL."""
    return lambda source: (source.parent / "vocab.txt").write_text("".join(f"{line}\n" for line in lines))


def bare(source: Path) -> None:
    """A state_dict in place of a Transformer-XL, without a vocabulary."""
    torch.save(original.model(20, 3).state_dict(), source)
    (source.parent / "vocab.txt").unlink()


def of_kind(name: str) -> Damage:
    """A checkpoint of fairseq's; its translation models have `version` in their encoder and their decoder."""
    state = {f"{side}.{part}": torch.zeros(1) for side in ("encoder", "decoder") for part in ("version", "bias")}
    return lambda source: torch.save({"model": state, "cfg": {"model": {"_name": name}, "task": {}}}, source)


NOT_HELD = "symbol {!r} cannot be a word of fairseq's dictionary: it is empty, or holds".format
NO_TYPE = "classifier.weight is of the type {}, and weights are torch.float32".format
PARTS = {"talking_head": True, "conv_kernel_size": 3, "pos_att_type": "c2p|p2p"}
OTHERS = {"copy_attn": True, "parallel_residual": True, "aan_useffn": True, "num_kv": 2, "num_experts": 2}
OTHERS |= {"relative_positions_buckets": 8, "generator_function": "sparsemax", "encoder_type": "rnn"}
ROTARY = checkpoint(lambda state: vars(state["opt"]).update(max_relative_positions=-1))
GPT2 = ("model_type 'gpt2', and is none of ", "; marian of ", "; checkpoints of OpenNMT")
PART = dict.fromkeys(("word_emb.emb_layers", "dec_attn"), torch.zeros(1))
BIAS = "bert.encoder.layer.1.output.dense.bias"
NAN = {BIAS: torch.full((16,), torch.nan)}
TYPES = [torch.int8, torch.int64, torch.bool, torch.complex64, torch.uint8]
NORMS = ("bert.embeddings.LayerNorm.weight", "bert.embeddings.LayerNorm.gamma")
# Format, how a source of it is damaged, what is said, and more of the command.
REFUSED: list[tuple] = [
    ("bert", without("config.json"), "has no config.json"),
    ("bert", text("config.json", "{"), "config.json is not the JSON"),
    *(("bert", config(model_type="gpt2"), said) for said in GPT2),
    ("bert", config(num_hidden_layers=3), "lacks 16 tensors"),
    ("bert", config(num_hidden_layers=1), "tensors that no bert has here"),
    ("bert", config(vocab_size=50), "word_embeddings.weight is (40, 16)"),
    ("bert", config(vocab_size="many"), "vocab_size 'many': a whole number from 1 on"),
    ("bert", config(num_attention_heads=3), "no multiple of num_attention_heads 3"),
    ("bert", config(hidden_act="swish"), "hidden_act 'swish' is none of"),
    ("bert", config(position_embedding_type="rotary"), "'rotary' is none of absolute"),
    ("bert", config(is_decoder=True), "is a decoder"),
    ("bert relative", config(num_hidden_layers=3), "lacks 17 tensors"),
    ("bert", lambda f: shards(f)[1].unlink(), "lacks model-00002-of-00002.safetensors of the"),
    ("bert", lambda f: cut(shards(f)[0]), "is truncated or no file of weights"),
    ("bert", text("vocab.txt", "[UNK]\na\n"), "the tokenizer has no <s>, nor another name"),
    ("bert", config(architectures=5), "architectures must be a list of names, got 5"),
    ("bert", config(problem_type="ranking"), "problem_type 'ranking' is none of single_label_classification"),
    ("bert", config(max_position_embeddings=2), "has 2 positions"),
    ("bert", config(tie_word_embeddings=False), "the head lacks cls.predictions.decoder.weight"),
    ("bert", tensors(NAN), f"{BIAS} holds NaN"),
    ("bert", twice(*NORMS), "remove one"),
    ("bert classes", config(architectures=["BertForMultipleChoice"]), "multiple choice has 1 outputs, and the tens"),
    *(("bert classes", of_type(kind), NO_TYPE(kind)) for kind in TYPES),
    ("bert pairs", lambda f: None, "is a BertForNextSentencePrediction, whose head no model here has"),
    ("distilbert", tensors(but="layer.1.ffn.lin2.bias"), "distilbert.transformer.layer.1.ffn.lin2.bias"),
    ("deberta v2", tensors(but="token_type"), "lacks 1 tensors of a deberta-v2 of 2 layers (deberta.embeddings.t"),
    *(("deberta v3", config(**{key: value}), f"{key} {value!r} is a part of De") for key, value in PARTS.items()),
    ("marian", config(encoder_ffn_dim=-1), "encoder_ffn_dim -1: a whole number from 1 on"),
    ("marian", without("vocab.json"), "vocab.json: No such file or directory"),
    ("marian", twice("model.decoder.layers.0.fc1.bias", "decoder.layers.0.fc1.bias"), "remove one"),
    *(("marian", symbol(name), NOT_HELD(name)) for name in ("", "a\nb", "a\rb")),
    ("marian", symbol("\ud800"), "vocab.json is not the JSON that is expected (\\ud800 is half of a character)"),
    ("opennmt", step(layer_norm="rms"), "--layer_norm rms of OpenNMT-py has no counterpart"),
    *(("opennmt", step(**{key: value}), f"--{key} {value}") for key, value in OTHERS.items()),
    ("opennmt", step(max_relative_positions=0), "has no positions at all"),
    ("opennmt", ROTARY, "positions -1 of OpenNMT-py is not converted"),
    ("opennmt", step(), "with --to same alone", "--to", "m4"),
    ("opennmt", step(), "needs 4 at least", "--positions", "3"),
    ("opennmt", step(), "--fill says nothing here", "--fill", "tile"),
    ("opennmt", checkpoint(lambda s: s.update(vocab={"src": {"fields": 1}, "tgt": {}})), "tools/convertv2_v3.py"),
    ("opennmt", checkpoint(lambda s: s["vocab"]["src"].pop(0)), "src has 10 types, and the model 11"),
    ("opennmt", checkpoint(lambda s: s.pop("generator")), "step_1.pt has no generator.bias"),
    ("opennmt", checkpoint(lambda s: s["generator"].update(bias=torch.zeros(()))), "step_1.pt is not a checkpoint"),
    ("opennmt", weight(torch.Tensor.bool), "w_1.weight is a tensor of torch.bool, and must be one of floating-point"),
    ("opennmt", weight(lambda value: torch.zeros(3, 3)), "step_1.pt: the tensors do not fit"),
    ("opennmt", weight(lambda value: value * torch.nan), "not finite (NaN, infinite, or above"),
    ("xl", bare, "attn_type 3 and does not say its segment and memory"),
    ("xl", xl(attn_type=3, pre_lnorm=True), "attn_type 3 and has pre_lnorm, under which its"),
    ("xl", xl(attn_type=2, clamp_len=7), "attn_type 2 and clamps positions at 7, short of"),
    ("xl", flip, "the checksum of model/data/0 is another"),
    ("xl", words(["one", "two"]), "vocab.txt has 2 types, and the model 20"),
    ("xl", words(["the"] * 20), "'the' cannot be a word"),
    ("xl", xl(), "none does not exist: give a folder", "--data", "none"),
    ("xl", xl(), "neither cache.pt nor vocab.txt", "--data", "."),
    ("xl", xl(), "--positions says nothing here", "--positions", 9),
    ("xl", lambda source: torch.save(PART, source), "is no whole released Transformer-XL"),
    ("exported", text("text/tokenizer.json", "{"), "text/tokenizer.json is not"),
    *(("ours", of_kind(kind), f"holds a {kind}: only RoBERTa's encoder") for kind in ("transformer_lm", "lstm")),
    ("ours", of_kind("transformer"), "holds a transformer: only RoBERTa's encoder is converted"),
]
MAKERS = FORMATS | {"bert pairs": formats.folder_of(encoder, "BertForNextSentencePrediction")}


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=[f"{name}-{said}" for name, _, said, *_ in REFUSED])
def test_what_cannot_be_converted_is_one_line(number, made, ways, monkeypatch):
    name, damage, said, *more = REFUSED[number]
    source = made(name, ways / "first")
    (ways / "empty").mkdir()
    monkeypatch.chdir(ways / "empty")
    damage(source)
    error = ways.refused(source, *more)
    assert said in error and "RELPOS_TRACEBACK" not in error


SIDES = ["padding_side", "truncation_side", "model_max_length"]


@pytest.mark.parametrize("key", SIDES)
def test_settings_that_no_tokenizer_has_are_named(key, made, tmp_path):
    path = made("bert", tmp_path / "first") / "tokenizer_config.json"
    for value in ("up", 0, [], float("nan"), True):
        path.write_text(json.dumps({key: value}))
        with pytest.raises(UserError) as error:
            read(path.parent)
        assert f"{path}: {key} must be " in str(error.value) and str(error.value).endswith(repr(value))


ODD = (None, True, "", "1", [], [5], {}, {"a": 5}, -1, 0, 0.5, 2.5, float("nan"), float("inf"))


def test_the_table_answers_whatever_json_holds(tmp_path):
    for table, begin in ((_KEYS, {}), (_VALUES, {"values": {}})):
        for key in table:
            for value in ODD:
                told = {"values": {key: value}} if begin else {key: value}
                (tmp_path / "config.json").write_text(json.dumps(told))
                try:
                    assert read_config(tmp_path).keys() == told.keys()
                except ConversionError as error:
                    assert f"{key} {value!r}: " in str(error)


def test_sparse_and_quantized_weights_are_named(tmp_path):
    weight = torch.eye(4)
    for value in (weight.to_sparse(), torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8)):
        torch.save({"a.weight": value}, tmp_path / "pytorch_model.bin")
        with pytest.raises(ConversionError, match="a.weight is of the type torch"):
            read_weights(tmp_path)


def test_types_that_hold_the_same_are_read(tmp_path):
    """Floats of 8 bits as float32, exactly; whole numbers in buffers."""
    small = torch.randn(4, 4).to(torch.float8_e5m2)
    save_file({"a.weight": small, "embeddings.position_ids": torch.arange(4)}, tmp_path / "model.safetensors")
    found = read_weights(tmp_path)
    assert torch.equal(found["a.weight"], small.float()) and found["embeddings.position_ids"].dtype == torch.int64


def test_an_index_names_files(tmp_path):
    for value in (5, None, ["a"], "../a"):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": value}}))
        with pytest.raises(ConversionError, match="weight_map/a is .*must be a text|not a file beside it"):
            read_weights(tmp_path)


def test_sharded_and_pickled_weights_are_the_same(made, tmp_path):
    """Pickled ones hold those that are tied twice."""
    folder = made("bert relative", tmp_path / "first")
    model = transformers.BertForMaskedLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "pickled", safe_serialization=False)
    shutil.copy(folder / "vocab.txt", tmp_path / "pickled")
    whole = read_folder(folder, read_config(folder)).state
    shards(folder)
    for place in (folder, tmp_path / "pickled"):
        found = read_folder(place, read_config(place)).state
        assert whole.keys() == found.keys()
        for name, value in whole.items():
            assert torch.equal(value, found[name]), name


def lessened(value, dtype):
    """Tensors of a file in another type, however deep."""
    if isinstance(value, dict):
        return {name: lessened(part, dtype) for name, part in value.items()}
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16] if FULL else [torch.bfloat16])
@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"xl"}))  # a module, whose classes are its own repository's
def test_every_format_is_read_in_sixteen_bits(name, dtype, ways):
    path = FORMATS[name](ways / "source")
    for file in path.glob("*.safetensors") if path.is_dir() else ():
        save_file(lessened(load_file(file), dtype), file, {"format": "pt"})
    for file in path.glob("*.bin") if path.is_dir() else [path]:
        torch.save(lessened(torch.load(file, weights_only=False), dtype), file)
    said = ways.convert(path.relative_to(ways.here))
    assert ("compared  with" in said or name == "opennmt") and "exact     no" not in said  # which no library here runs
