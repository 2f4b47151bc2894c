"""Read a transformers folder of BERT, RoBERTa, XLM-R, DistilBERT or DeBERTa: config, tensors by our names, vocabulary.

transformers 4 (tested: 4.46.3) has relative kinds of positions, 5 no longer has them. What the folder holds is written
into a ledger as it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relpos_fairseq.conversion.layouts import ENCODER, State
from relpos_fairseq.conversion.report import ConversionError
from relpos_fairseq.formats import distilbert, hf_deberta, names
from relpos_fairseq.formats.names import Names
from relpos_fairseq.formats.transformers_folder import AS_TIED, ledger_of, read_weights
from relpos_fairseq.formats.vocabulary import Vocabulary, of_folder
from relpos_fairseq.heads import CHOICES, TOKENS, Head, head_of, problem_named
from relpos_fairseq.saved.ledger import KEPT, NEUTRAL, USED, Ledger, Recorded
from relpos_fairseq.schemes import named_elsewhere


@dataclass(frozen=True)
class Family:
    """Describe how BERT, RoBERTa and DeBERTa differ in Hugging Face's library.

    Args:
        name: `model_type` of its config.
        stem: what the names of its classes begin with.
        prefix: what the encoder's names begin with in a model with a head.
        padded: positions count from the row after padding's, as fairseq's do.
        rows: names of its tensors without the prefix, and ours.
        dense: those of its classifier of sequences.
        tables: those of positions and token types.
        reads: sets BERT's keys in its config.
    """

    name: str
    stem: str
    prefix: str
    padded: bool
    rows: dict[str, str]
    dense: dict[str, str]
    tables: dict[str, str] = field(default_factory=lambda: names.TABLES)
    reads: Callable[[dict[str, Any]], None] | None = None

    def classifier(self, head: Head | None) -> dict[str, str]:
        """Return the names of a head's tensors whose names begin with `classifier`, and ours."""
        if head is TOKENS:
            return names.TOKEN_CLASSIFIER
        return names.POOLED if head is CHOICES and self.dense is names.DENSE else self.dense

    def whole(self, plain: str) -> str:
        """Return a tensor's name in a model with a head."""
        return self.prefix * plain.startswith(("embeddings.", "encoder.", "pooler.", "transformer.")) + plain

    def plain(self, name: str) -> str:
        """Return a tensor's name without the prefix, as today's library has it."""
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        return name.removeprefix(self.prefix)


(DISENTANGLED,) = named_elsewhere("transformers' model_type")
_DISTILLED = (names.DISTILBERT, names.PRE_CLASSIFIER, names.TABLES, distilbert.read_config)
_DEBERTAS = (names.DEBERTA, names.POOLED, names.DEBERTA_TABLES, hf_deberta.read_config)
FAMILIES = {
    one.name: one
    for one in (
        Family("bert", "Bert", "bert.", False, names.BERT, names.POOLED),
        Family("roberta", "Roberta", "roberta.", True, names.ROBERTA, names.DENSE),
        Family("xlm-roberta", "XLMRoberta", "roberta.", True, names.ROBERTA, names.DENSE),
        Family("distilbert", "DistilBert", "distilbert.", False, *_DISTILLED),
        Family(DISENTANGLED, "Deberta", f"{DISENTANGLED}.", False, *_DEBERTAS),
        Family(f"{DISENTANGLED}-v2", "DebertaV2", f"{DISENTANGLED}.", False, *_DEBERTAS),
    )
}
_NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_NEEDED += ("max_position_embeddings", "type_vocab_size")
LM_WEIGHT, LM_BIAS = "encoder.lm_head.weight", "encoder.lm_head.bias"
SCHEMES = named_elsewhere("transformers")  # its position_embedding_type to our schemes
KINDS = SCHEMES | dict.fromkeys([hf_deberta.KIND], named_elsewhere("transformers' model_type")[DISENTANGLED])
# fairseq's gelu is the exact one, and its gelu_accurate the approximation by tanh.
ACTIVATIONS = {
    "gelu": "gelu",
    "relu": "relu",
    "tanh": "tanh",
    "gelu_new": "gelu_accurate",
    "gelu_pytorch_tanh": "gelu_accurate",
}


@dataclass
class Folder:
    """Hold a folder that was read and checked.

    Args:
        path: the folder.
        family: BERT, RoBERTa, XLM-R or DeBERTa.
        config: its config.json.
        head: the head that its config names; None: none.
        state: its tensors by our names, in its own order of rows.
        kept: tensors that no model here reads, by the library's names.
        ledger: what became of everything that it holds.
        vocabulary: the order of its rows in fairseq's dictionary.
        notes: assumptions and omissions that the user should know.
        apart: what an exact conversion of it says nothing of.
    """

    path: Path
    family: Family
    config: Recorded
    head: Head | None
    state: State
    kept: dict[str, Tensor]
    ledger: Ledger
    vocabulary: Vocabulary = field(default_factory=lambda: Vocabulary([], []))
    notes: list[str] = field(default_factory=list)
    apart: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """`absolute`, `relative_key`, `relative_key_query` or `disentangled`."""
        return kind_of(self.config)

    @property
    def tied(self) -> bool:
        """Whether its library projects onto its embedding, whatever weights of an output projection it holds."""
        legacy = self.config.get("legacy", True)  # DeBERTa's own masked LM knows the embedding alone
        return self.config.get("tie_word_embeddings", True) or not legacy

    @property
    def offset(self) -> int:
        """Rows of the position table before position 0."""
        return self.config.get("pad_token_id", 1) + 1 if self.family.padded else 0

    @property
    def max_positions(self) -> int:
        """Positions of an input that its tables cover."""
        return self.config["max_position_embeddings"] - (self.offset if self.kind == "absolute" else 0)


def read_folder(path: Path, config: Recorded) -> Folder:
    """Read and check a folder, whose config.json has been read.

    Raises:
        ConversionError: a file is missing or truncated, the model is no BERT or RoBERTa encoder,
            or config, weights and vocabulary contradict each other.
    """
    family = FAMILIES[config["model_type"]]
    head = head_of(config, str(path))
    if family.reads:
        family.reads(config)
    _check_config(config, path)
    weights = read_weights(path)
    folder = Folder(path, family, config, head, {}, {}, ledger_of(path, config, weights))
    _read_tensors(folder, weights)
    folder.vocabulary = of_folder(path, config, folder.notes)
    padding = folder.vocabulary.rows[1]
    if family.padded and padding != config.get("pad_token_id", 1):
        raise ConversionError(
            f"{path}: <pad> is {padding} to the tokenizer and {config['pad_token_id']} to config.json, from which "
            f"positions count: they do not belong together"
        )
    folder.ledger.mark("files", USED, folder.vocabulary.files)
    return folder


def kind_of(config: dict[str, Any]) -> str:
    """Return the kind of positions of a config."""
    return config.get("position_embedding_type", "absolute")


def _check_config(config: dict[str, Any], path: Path) -> None:
    padded = FAMILIES[config["model_type"]].padded
    if "special_ids" in config:
        config["type_vocab_size"] = config.get("type_vocab_size") or 1  # DeBERTa has none where it says 0
    config.setdefault("type_vocab_size", 1 if padded else 2)
    for key in _NEEDED:
        if not config.get(key):
            raise ConversionError(
                f"{path}/config.json has {key} {config.get(key)!r}: a whole number from 1 on is needed"
            )
    if config["hidden_size"] % config["num_attention_heads"]:
        raise ConversionError(
            f"{path}/config.json: hidden_size {config['hidden_size']} is no multiple of "
            f"num_attention_heads {config['num_attention_heads']}"
        )
    if padded and config.get("pad_token_id", 1) is None:
        raise ConversionError(f"{path}/config.json has pad_token_id None: RoBERTa counts from it, give its number")
    if config["max_position_embeddings"] < 5:
        raise ConversionError(f"{path} has {config['max_position_embeddings']} positions: a text needs more")
    problem_named(config, str(path))
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise ConversionError(f"{path} is a decoder: only encoders are converted")
    if config.get("pruned_heads"):
        raise ConversionError(f"{path} has pruned heads, which fairseq's layers cannot express")
    for value, known, key in (
        (kind_of(config), KINDS if "special_ids" in config else SCHEMES, "position_embedding_type"),
        (config.get("hidden_act", "gelu"), ACTIVATIONS, "hidden_act"),
        *[(config.get("pooler_hidden_act", "gelu"), ACTIVATIONS, "pooler_hidden_act")] * ("special_ids" in config),
    ):
        if value not in known:
            raise ConversionError(f"{path}/config.json: {key} {value!r} is none of {', '.join(known)}")
    if padded and config.get("hidden_act", "gelu") != "gelu":
        raise ConversionError(
            f"{path}/config.json: hidden_act {config['hidden_act']!r}: RoBERTa's LM head keeps "
            f"gelu, and fairseq has one activation for layers and head"
        )


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Map our names of the tensors whose sizes config.json says to their shapes."""
    width, length = config["hidden_size"], config["max_position_embeddings"]
    shapes = {
        f"{ENCODER}.embed_tokens.weight": (config["vocab_size"], width),
        "token_types": (config["type_vocab_size"], width),
    }
    if kind_of(config) == hf_deberta.KIND:
        return shapes | hf_deberta.shapes(config)
    if kind_of(config) == "absolute":
        return shapes | {"positions": (length, width)}
    table = (2 * length - 1, width // config["num_attention_heads"])
    return shapes | {f"distances.{layer}": table for layer in range(config["num_hidden_layers"])}


def _read_tensors(folder: Folder, weights: dict[str, Tensor]) -> None:
    """Sort the tensors of a folder into what is read here, what is kept, and what says nothing.

    Raises:
        ConversionError: one is none of these or not finite, or one is missing or of another shape.
    """
    family, config, ledger, state = folder.family, folder.config, folder.ledger, folder.state
    plain = {name: family.plain(name) for name in weights}
    rows = dict(family.rows)
    if any(name.startswith("classifier.") for name in plain.values()):
        rows |= family.classifier(folder.head)
    rows |= {} if config.get("legacy", True) else names.DEBERTA_LM
    shapes, says_nothing = _shapes(config), dict(names.NEUTRAL)
    says_nothing |= dict.fromkeys(names.PRE_TRAINING, "of the pre-training; the library does not read it")
    every = Names({t: o for t, o in (rows | family.tables).items() if o != "positions" or o in shapes})
    if "positions" not in shapes:
        says_nothing[names.POSITIONS] = "not read with these positions"
    unknown, copies = [], {}
    for name, value in weights.items():
        if not torch.isfinite(value).all():
            raise ConversionError(f"{folder.path}: {name} holds NaN or infinite values: copy the folder again")
        value = value.float() if value.is_floating_point() else value  # sums in half precision would round
        parts = {plain[name]: value}
        if ".in_proj." in plain[name]:
            parts = hf_deberta.parts(plain[name], value, config["num_attention_heads"])
        found = {every.ours(part): one for part, one in parts.items()}
        if plain[name] in names.COPIES:
            copies[name] = value
        elif folder.tied and list(found) == [LM_WEIGHT]:
            ledger.mark("tensors", NEUTRAL, [name], AS_TIED)
        elif None not in found:
            if twice := next((ours for ours in found if ours in state), None):
                raise ConversionError(f"{folder.path}: {name} and another tensor are both {twice}: remove one")
            state |= found
            ledger.mark("tensors", USED, [name])
        elif template := names.matching(plain[name], says_nothing):
            ledger.mark("tensors", NEUTRAL, [name], says_nothing[template])
        elif names.matching(plain[name], names.KEPT):
            folder.kept[family.whole(plain[name])] = value
            ledger.mark("tensors", KEPT, [name], "no model here reads it")
        else:
            unknown.append(name)
    for name, value in copies.items():
        ours = names.COPIES[plain[name]]
        read = state.setdefault(ours, value)
        if torch.equal(read, value):
            verdict, why = (USED, "") if read is value else (NEUTRAL, f"repeats {every.theirs(ours)}")
            ledger.mark("tensors", verdict, [name], why)
    left = ledger.named("tensors", NEUTRAL)
    if any(names.matching(plain[name], names.PRE_TRAINING) for name in left):
        folder.notes.append("the mask decoder that it was pre-trained with is left out")
    if "special_ids" in config and not ledger.keys.get("type_vocab_size"):  # a DeBERTa without token types
        state.setdefault("token_types", torch.zeros(config["type_vocab_size"], config["hidden_size"]))
    _check_tensors(folder, Names(rows), every, shapes, unknown)


def _check_tensors(folder: Folder, rows: Names, every: Names, shapes: dict[str, tuple], unknown: list[str]) -> None:
    """Check that every tensor is there, of the config's shape, and none unknown.

    Args:
        folder: the folder.
        rows: names of its tensors but the tables of positions and token types.
        every: names of all its tensors.
        shapes: shapes by our names.
        unknown: tensors without a name here.
    """
    state, family, layers = folder.state, folder.family, folder.config["num_hidden_layers"]

    def called(ours: str) -> str:
        return family.whole(every.theirs(ours) or ours)

    needed = (*(name for name in rows.every(layers) if name.startswith(f"{ENCODER}.")), *shapes)
    missing = [name for name in needed if name not in state]
    if missing:
        raise ConversionError(
            f"{folder.path} lacks {len(missing)} tensors of a {family.name} of {layers} "
            f"layers ({called(sorted(missing)[0])}): its config and weights do not belong together"
        )
    for name, shape in shapes.items():
        if tuple(state[name].shape) != shape:
            raise ConversionError(
                f"{folder.path}: {called(name)} is {tuple(state[name].shape)}, and its config says {shape}"
            )
    known = {*rows.every(layers), *shapes}
    unknown = sorted([*unknown, *(called(name) for name in state if name not in known)])
    if unknown:
        raise ConversionError(
            f"{folder.path} holds {len(unknown)} tensors that no {family.name} has here "
            f"({unknown[0]}): another head or architecture than is converted"
        )
    heads = {name.rpartition(".out_proj.")[0] for name in state if "_heads." in name and ".out_proj." in name}
    heads |= {"encoder.lm_head" for name in state if name.startswith("encoder.lm_head.dense.")}
    for name in rows.every(layers):
        optional = (LM_BIAS, *[LM_WEIGHT] * folder.tied)  # zeros, and the embedding
        if any(name.startswith(f"{head}.") for head in heads) and name not in {*state, *optional}:
            raise ConversionError(
                f"{folder.path}: the head lacks {called(name)}: its file is incomplete, or config.json does not name "
                f"its class in architectures"
            )
