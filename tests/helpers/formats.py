"""Tiny random models of other libraries, each in one row of `FORMATS`, and the ways between formats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

from helpers import transformer_xl_original as original
from helpers.commands import relpos
from helpers.conversion import fairseq_roberta, shake
from helpers.exported import write_checkpoint
from helpers.opennmt import SPECIAL, OpenNMT

HEAD = "sentence_classification_head"
LETTERS = [chr(number) for number in range(ord("a"), ord("z") + 1)]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *"012345678"]
MORE_PIECES = ["[PAD]", "[unused0]", *PIECES[1:5], *"abcdefghij", *(f"##{letter}" for letter in LETTERS[:-2])]
WORDPIECES = [*PIECES[:5], *LETTERS, *(f"##{letter}" for letter in LETTERS)]
TEXTS = [f"the {a} {b}s a {c}" for a in ("old", "new") for b in ("see", "hear") for c in ("house", "horse", "mouse")]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
SIZES |= {"vocab_size": len(PIECES), "max_position_embeddings": 30}
DEBERTA = {"relative_attention": True, "position_biased_input": False, "pad_token_id": 0}
OWN = {  # of a family
    "Roberta": {"type_vocab_size": 1, "pad_token_id": 1},
    "XLMRoberta": {"type_vocab_size": 1, "pad_token_id": 1},
    "Deberta": DEBERTA,
    "DebertaV2": DEBERTA,
    "DistilBert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24},
}
NAMES = {"id2label": {0: "neg", 1: "neu", 2: "pos"}, "label2id": {"neg": 0, "neu": 1, "pos": 2}}
BOTH = ["c2p", "p2c"]
DEBERTAS = {
    "v1": ("Deberta", {"pos_att_type": BOTH, "max_relative_positions": -1}),
    "v1-c2p": ("Deberta", {"pos_att_type": ["c2p"], "max_relative_positions": 5}),
    "v2-own": ("DebertaV2", {"pos_att_type": BOTH, "max_relative_positions": 7, "type_vocab_size": 2}),
    "v3": (
        "DebertaV2",
        {"pos_att_type": BOTH[::-1], "share_att_key": True, "position_buckets": 4, "max_relative_positions": 16}
        | {"norm_rel_ebd": "layer_norm"},
    ),
    "v2-absolute": ("DebertaV2", {"relative_attention": False, "position_biased_input": True}),
    "v3-p2c-input": ("DebertaV2", {"pos_att_type": ["p2c"], "share_att_key": True, "position_biased_input": True}),
}


def encoder(folder: Path, cls: str, pieces: list[str] | None = PIECES, **values: Any):
    """A random model of a class of transformers, with a vocabulary of WordPiece, or without a tokenizer."""
    family = re.match(r"(.*?)(For|Model)", cls)[1]
    more = {"add_pooling_layer": values.pop("pooled")} if "pooled" in values else {}
    sizes = SIZES if family != "DistilBert" else {"vocab_size": 40, "max_position_embeddings": 30}
    config = getattr(transformers, f"{family}Config")(**sizes | OWN.get(family, {}) | values)
    model = getattr(transformers, cls)(config, **more).eval()
    shake(model)
    model.save_pretrained(folder)
    if pieces:
        (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
        of = "DistilBert" if family == "DistilBert" else "Bert"
        change(folder / "tokenizer_config.json", tokenizer_class=f"{of}Tokenizer")
    return model


def bert(folder: Path, kind: str = "absolute", suffix: str = "ForMaskedLM", **values: Any):
    """A random BERT of other options than the defaults, with words of several pieces."""
    sizes = {"max_position_embeddings": 24, "layer_norm_eps": 1e-6, "hidden_act": "gelu_new"}
    return encoder(folder, f"Bert{suffix}", MORE_PIECES, **sizes, **values, position_embedding_type=kind)


def roberta(folder: Path, kind: str = "absolute", suffix: str = "ForMaskedLM", rows: float = 0, **values: Any):
    """A random RoBERTa without files of a tokenizer; its rows before position 0 and its token type are neutral."""
    values |= {"max_position_embeddings": 26, "position_embedding_type": kind}
    model = encoder(folder, f"Roberta{suffix}", None, **values)
    with torch.no_grad():
        model.roberta.embeddings.position_embeddings.weight[:2] = rows
        model.roberta.embeddings.token_type_embeddings.weight.zero_()  # as in the released models
    model.save_pretrained(folder)
    return model


def deberta(folder: Path, name: str, cls: str = "ForMaskedLM"):
    """A random DeBERTa without a tokenizer."""
    stem, values = DEBERTAS[name]
    return encoder(folder, f"{stem}{cls}", None, max_position_embeddings=24, **values)


def marian(folder: Path, own_vocabularies: bool = False, **values: Any):
    """A random Marian model with its tokenizer."""
    folder.mkdir()
    vocabulary = {"</s>": 0, "<unk>": 1}
    lines = [f"the {a} {b} sees a {c}" for a in ("old", "new", "big") for b in ("cat", "dog", "horse") for c in ENDS]
    for side in ("source", "target"):
        sentencepieces(folder / f"{side}.spm", lines, 27)
        read = sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{side}.spm"))
        for number in range(3, 27):
            vocabulary.setdefault(read.id_to_piece(number), len(vocabulary))
    vocabulary[">>fra<<"] = len(vocabulary)
    pad = vocabulary["<pad>"] = len(vocabulary)
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    told = {"source_lang": "en", "target_lang": "fr", "separate_vocabs": own_vocabularies}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    if own_vocabularies:
        (folder / "target_vocab.json").write_text(json.dumps(vocabulary))
        values["share_encoder_decoder_embeddings"] = False
    sizes = {"vocab_size": pad + 1, "d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 24}
    sizes |= {"decoder_ffn_dim": 20, "encoder_attention_heads": 2, "decoder_attention_heads": 4}
    sizes |= {"max_position_embeddings": 40, "pad_token_id": pad, "eos_token_id": 0, "decoder_start_token_id": pad}
    sizes |= {"forced_eos_token_id": None, "scale_embedding": True, "activation_function": "swish"}
    torch.manual_seed(1)
    model = transformers.MarianMTModel(transformers.MarianConfig(**sizes | values)).eval()
    waves = model.model.encoder.embed_positions.weight.clone()
    shake(model)
    with torch.no_grad():
        for stack in (model.model.encoder, model.model.decoder):
            stack.embed_positions.weight.copy_(waves)
        model.final_logits_bias.normal_()
        model.final_logits_bias[0, 0] += 6  # most sentences end
    model.save_pretrained(folder)
    return model


ENDS = ("house", "mouse", "tree", "boat")


def sentencepieces(file: Path, texts: list[str], size: int, **more: Any) -> None:
    """A model of sentencepiece that is trained on texts."""
    with file.open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=model, vocab_size=size, minloglevel=2, **more
        )


def opennmt(**values: Any) -> OpenNMT:
    """A random model; source and target have words of their own."""
    torch.manual_seed(1)
    words = [f"w{number}" for number in range(9)]
    model = OpenNMT([*SPECIAL[:2], *words], [*SPECIAL, *reversed(words), "x", "y"], **values).eval()
    shake(model)
    return model


def wordpiece(folder: Path) -> None:
    """BERT's tokenizer of letters."""
    (folder / "vocab.txt").write_text("\n".join(WORDPIECES) + "\n")


def bpe(folder: Path) -> None:
    """RoBERTa's tokenizer."""
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(TEXTS, vocab_size=300, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    made.save_model(str(folder))


def pieces(folder: Path, **more: Any) -> None:
    """XLM-R's tokenizer."""
    sentencepieces(folder / "sentencepiece.bpe.model", TEXTS, more.pop("vocab_size", 22), **more)


def with_template(folder: Path, template: str, kind: str = "pair") -> None:
    """Give the folder a tokenizer.json that joins pairs so: A, B, ^ for [CLS], and | for [SEP], each with its type."""
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    names = {"|": "[SEP]", "^": "[CLS]"}
    state = told(folder / "tokenizer.json")
    state["post_processor"][kind] = [
        {"SpecialToken" if one in names else "Sequence": {"id": names.get(one, one), "type_id": int(number)}}
        for one, number in zip(template[::2], template[1::2], strict=True)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(state))


def _file(name: str, save: Callable[[Path], object]) -> Callable[[Path], Path]:
    """A format that is a file in a folder."""

    def make(folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        save(folder / name)
        return folder / name

    return make


def _xl(path: Path) -> None:
    original.save(original.model(20), path)
    path.with_name("vocab.txt").write_text("".join(f"w{number}\n" for number in range(20)))


def _exported(checkpoint: Callable[[Path], Path]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        source = checkpoint(folder.with_name(f"{folder.name}-of"))
        assert relpos("export", "transformers", source, "--out", folder) == 0
        return folder

    return make


def _translation(folder: Path) -> Path:
    marian(folder.with_name("en-fr"))
    assert relpos("convert", folder.with_name("en-fr"), "--to", "same", "--out", folder) == 0
    return folder / "model.pt"


def folder_of(make: Callable, *given: Any, **values: Any) -> Callable[[Path], Path]:
    """A format that is a folder."""
    return lambda folder: make(folder, *given, **values) and folder


STYLES = ("argparse", "legacy", "dataclass")
OURS = _file("model.pt", lambda path: write_checkpoint(path.parent, "wordpiece", "learned", classes=3))
# How a source of each format is made below a folder, which is what `relpos convert` is given.
FORMATS: dict[str, Callable[[Path], Path]] = {
    "bert": folder_of(encoder, "BertForMaskedLM"),
    "bert classes": folder_of(encoder, "BertForSequenceClassification", **NAMES),
    "bert without a head": folder_of(encoder, "BertModel"),
    "bert relative": folder_of(encoder, "BertForMaskedLM", position_embedding_type="relative_key_query"),
    "distilbert": folder_of(encoder, "DistilBertForMaskedLM"),
    "deberta": folder_of(deberta, "v1"),
    "deberta v2": folder_of(deberta, "v2-own"),
    "deberta v3": folder_of(deberta, "v3"),
    "marian": folder_of(marian),
    "opennmt": _file("step_1.pt", lambda path: opennmt(max_relative_positions=3).save(path)),
    "xl": _file("model.pt", _xl),
    **{style: _file(f"{style}.pt", lambda path: fairseq_roberta(path.parent, path.stem)) for style in STYLES},
    "ours": OURS,
    "exported": _exported(OURS),
    "translation": _exported(_translation),
}


def told(path: Path) -> dict:
    """A file of JSON."""
    return json.loads(path.read_text())


def change(path: Path, within: str = "", **values: Any) -> None:
    """Give a file of JSON, or the object of a key in it, other values."""
    state = told(path) if path.exists() else {}
    (state[within] if within else state).update(values)
    path.write_text(json.dumps(state))


def change_tensors(folder: Path, values: dict | None = None, but: str = "$^") -> None:
    """Give a folder's weights other tensors, and leave those out of which a pattern is found in the name."""
    path = folder / "model.safetensors"
    state = load_file(path)
    made = {name: make(state) if callable(make) else make for name, make in (values or {}).items()}
    state = {name: value for name, value in state.items() if not re.search(but, name)} | made
    save_file(state, path, {"format": "pt"})


def change_checkpoint(path: Path, change: Callable[[dict], object]) -> None:
    """Let a function change what a checkpoint holds."""
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


# Damages: what spoils a source, by a function of its path.
Damage = Callable[[Path], object]


def config(**values: Any) -> Damage:
    """Values of config.json."""
    return lambda source: change(source / "config.json", **values)


def tensors(values: dict | None = None, but: str = "$^") -> Damage:
    """Tensors that are others, and tensors that are missing."""
    return lambda source: change_tensors(source, values, but)


def without(name: str) -> Damage:
    """A file that is missing."""
    return lambda source: (source / name).unlink()


def text(name: str, content: str) -> Damage:
    """A file of other content."""
    return lambda source: (source / name).write_text(content)


def checkpoint(change: Callable[[dict], object]) -> Damage:
    """A checkpoint that holds something else."""
    return lambda source: change_checkpoint(source, change)


class Ways:
    """What `relpos` makes of one folder after another in `here`; names and paths are of sources in it."""

    def __init__(self, here: Path, capsys: pytest.CaptureFixture) -> None:
        self.here, self._capsys = here, capsys

    def __truediv__(self, name: str) -> Path:
        return self.here / name

    def run(self, *words: object, status: int = 0) -> str:
        """Run a command; what it prints, or its error."""
        self._capsys.readouterr()
        found, said = relpos(*words), self._capsys.readouterr()
        assert found == status, said.err
        return said.err if status else said.out

    def lines(self, *words: object) -> list[dict]:
        """Run a command that prints lines of JSON."""
        return [json.loads(line) for line in self.run(*words).split("\n")[:-1]]

    def convert(self, source: str | Path = "first", out: str = "ours", *more: object, to: str = "same") -> str:
        """Run `relpos convert`; what it prints."""
        return self.run("convert", self / source, "--to", to, "--out", self / out, *more)

    def back(self, source: str | Path = "ours", out: str = "back", *more: object, to: str = "hf-bert") -> str:
        """Run `relpos convert` to a folder of transformers; what it prints."""
        return self.convert(source, out, *more, to=to)

    def export(self, source: str | Path = "ours/model.pt", out: str = "out", *more: object) -> str:
        """Run `relpos export transformers`; what it prints."""
        return self.run("export", "transformers", self / source, "--out", self / out, *more)

    def refused(self, source: str | Path = "first", *more: object, to: str = "same") -> str:
        """Run `relpos convert`, which fails, writes nothing and says so in one line, the result."""
        said = self.run("convert", self / source, "--to", to, "--out", self / "refused", *more, status=2)
        assert said.startswith("error: ") and said.count("\n") == 1
        assert not (self / "refused").exists() and not list(self.here.glob(".*"))
        return said

    def unexported(self, source: str | Path = "model.pt", *more: object) -> str:
        """Run `relpos export transformers`, which fails and writes nothing; its error."""
        said = self.run("export", "transformers", self / source, "--out", self / "refused", *more, status=2)
        assert not list(self.here.glob("*refused*"))
        return said

    def told(self, name: str, file: str = "config.json") -> dict:
        """A folder's config.json, or another file of JSON in it."""
        return told(self / name / file)

    def ledger(self, name: str = "ours") -> dict:
        """What a conversion tells of the tensors, keys and files of its source."""
        return self.told(name, "conversion.json")["ledger"]

    def tell(self, name: str = "first", file: str = "config.json", **values: Any) -> None:
        """Change a folder's config.json, or another file of JSON in it."""
        change(self / name / file, **values)

    def opened(self, name: str, auto: Any, **how: Any):
        """A folder's model, as transformers has it."""
        auto = getattr(transformers, auto) if isinstance(auto, str) else auto
        return auto.from_pretrained(self / name, trust_remote_code=True, **how).eval()

    def tokenizer(self, name: str):
        """A folder's tokenizer, as transformers has it."""
        return transformers.AutoTokenizer.from_pretrained(self / name, trust_remote_code=True)
