"""BERT, RoBERTa and DeBERTa as Hugging Face's library computes them, from its own tensors.

An oracle of conversions: it shares nothing with relpos_roberta, knows no table of names, and outlives
the releases of transformers that have relative positions.  Devlin et al. 2018; the relative kinds as
in `BertSelfAttention.forward` of transformers 4.44.2:

    relative_key          (q_i.k_j + q_i.E_{i-j}) / sqrt(d)
    relative_key_query    (q_i.k_j + q_i.E_{i-j} + k_j.E_{i-j}) / sqrt(d)

and DeBERTa's `disentangled_attention_bias`, whose tensors `weights_of` renames:

    (q_i.k_j + q_i.(W_K E_r) + k_j.(W_Q E_r + b)) / sqrt(C d),  r = clamp(bucket(i - j) + K)
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from relpos_fairseq.formats.huggingface_folder import read_folder
from relpos_fairseq.formats.transformers_folder import read_config, read_weights
from relpos_fairseq.saved.model import SavedModel

KIND = "disentangled"  # as hf_deberta calls it

_ACTIVATIONS = {"gelu": F.gelu, "tanh": torch.tanh, "gelu_new": lambda x: F.gelu(x, approximate="tanh")}


def weights_of(folder: Path, config: dict[str, Any], prefix: str) -> dict[str, Tensor]:
    """Return a folder's tensors as `Reference` reads them: DeBERTa's layers by BERT's names, v1's in_proj cut."""
    found = {}
    for name, value in read_weights(folder).items():
        name = prefix + name.removeprefix(prefix) if name.split(".")[0] in ("encoder", "embeddings", "pooler") else name
        for theirs, berts in (("query_proj", "query"), ("key_proj", "key"), ("value_proj", "value")):
            name = name.replace(f"self.{theirs}.", f"self.{berts}.")
        for theirs, berts in (("q_bias", "query.bias"), ("v_bias", "value.bias"), ("pos_proj", "pos_key_proj")):
            name = name.replace(f"self.{theirs}", f"self.{berts}")
        name = name.replace("self.pos_q_proj", "self.pos_query_proj")
        if not name.endswith("in_proj.weight"):
            found[name] = value
            continue
        for number, part in enumerate(("query", "key", "value")):
            rows = value.unflatten(0, (config["num_attention_heads"], 3, -1))[:, number].flatten(0, 1)
            found[name.replace("in_proj", part)] = rows
        found[name.replace("in_proj.weight", "key.bias")] = torch.zeros(len(rows))
    found.setdefault(f"{prefix}embeddings.token_type_embeddings.weight", torch.zeros(2, config["hidden_size"]))
    return found


class Reference:
    """A model of a folder.

    Args:
        config: its config.json.
        weights: its tensors by the library's names, the encoder's with `prefix`.
        prefix: `bert.` or `roberta.`.
    """

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor], prefix: str) -> None:
        self.config, self.prefix = config, prefix
        self.weights = {name: value.double() for name, value in weights.items()}
        self.kind = config.get("position_embedding_type") or "absolute"
        self.padded = "roberta" in config["model_type"]
        self.act = _ACTIVATIONS[config.get("hidden_act", "gelu")]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        eps = self.config.get("layer_norm_eps", 1e-12)
        return F.layer_norm(x, (x.size(-1),), weight, bias, eps)

    def features(self, tokens: Tensor, padding: Tensor, types: Tensor) -> Tensor:
        """Last hidden states (B, T, E) of (B, T) tokens and types; padding stands on the right."""
        base = f"{self.prefix}embeddings."
        x = self.weights[f"{base}word_embeddings.weight"][tokens]
        x = x + self.weights[f"{base}token_type_embeddings.weight"][types]
        biased = self.kind == KIND and self.config.get("position_biased_input", True)
        if self.kind == "absolute" or biased:
            offset = self.config.get("pad_token_id", 1) + 1 if self.padded else 0
            index = torch.arange(tokens.size(1)) + offset
            x = x + self.weights[f"{base}position_embeddings.weight"][index]
        x = self._norm(x, f"{base}LayerNorm")
        for layer in range(self.config["num_hidden_layers"]):
            x = self._layer(x, padding, f"{self.prefix}encoder.layer.{layer}.")
        return x

    def _layer(self, x: Tensor, padding: Tensor, name: str) -> Tensor:
        attended = self._attention(x, padding, f"{name}attention.self.")
        attended = self._linear(attended, f"{name}attention.output.dense")
        x = self._norm(attended + x, f"{name}attention.output.LayerNorm")
        inner = self.act(self._linear(x, f"{name}intermediate.dense"))
        return self._norm(self._linear(inner, f"{name}output.dense") + x, f"{name}output.LayerNorm")

    def _attention(self, x: Tensor, padding: Tensor, name: str) -> Tensor:
        batch, length, width = x.shape
        heads = self.config["num_attention_heads"]
        q, k, v = (
            self._linear(x, name + part).view(batch, length, heads, -1).transpose(1, 2)
            for part in ("query", "key", "value")
        )
        scores = q @ k.transpose(-1, -2)
        if self.kind == KIND:
            scores = self._disentangled(scores, q, k, name)
        elif self.kind != "absolute":
            slot = torch.arange(length)
            distance = slot[:, None] - slot[None, :] + self.config["max_position_embeddings"] - 1
            vectors = self.weights[f"{name}distance_embedding.weight"][distance]  # (T, T, D)
            scores = scores + torch.einsum("bhld,lrd->bhlr", q, vectors)
            if self.kind == "relative_key_query":
                scores = scores + torch.einsum("bhrd,lrd->bhlr", k, vectors)
        scores = scores / math.sqrt(width // heads)
        scores = scores.masked_fill(padding[:, None, None], -math.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)

    def _disentangled(self, scores: Tensor, q: Tensor, k: Tensor, name: str) -> Tensor:
        """Add DeBERTa's terms to (B, H, T, T); further divided so that sqrt(d) makes sqrt(C d)."""
        config, encoder = self.config, f"{self.prefix}encoder."
        table = self.weights[f"{encoder}rel_embeddings.weight"]
        if config.get("norm_rel_ebd", "none") == "layer_norm":
            table = self._norm(table, f"{encoder}LayerNorm")
        content = config.get("share_att_key")
        slot = torch.arange(q.size(2))
        offset = slot[:, None] - slot[None, :]
        if config.get("position_buckets", -1) > 0:
            given = config.get("max_relative_positions", -1)
            farthest = given if given > 0 else config["max_position_embeddings"]  # before buckets
            offset = _log_bucket(offset, config["position_buckets"], farthest)
        half = len(table) // 2
        row = (offset + half).clamp(0, 2 * half - 1)  # (T, T)
        terms = config["pos_att_type"]
        for term, part, x in (("c2p", "key", q), ("p2c", "query", k)):
            if term not in terms:
                continue
            full = name + (part if content else f"pos_{part}_proj")
            bias = self.weights.get(f"{full}.bias")
            vectors = F.linear(table, self.weights[f"{full}.weight"], bias)
            vectors = vectors.unflatten(1, (q.size(1), -1))[row]  # (T, T, H, D)
            form = "bhid,ijhd->bhij" if term == "c2p" else "bhjd,ijhd->bhij"
            scores = scores + torch.einsum(form, x, vectors)
        return scores / math.sqrt(1 + sum(term in terms for term in ("c2p", "p2c")))

    def outputs(self, tokens: Tensor, padding: Tensor, types: Tensor) -> dict[str, Tensor]:
        """Features, and the logits of every head that there is."""
        x = self.features(tokens, padding, types)
        found = {"features": x}
        name, within, norm, act = "cls.predictions", "transform.", "LayerNorm", self.act
        if self.padded:
            name, within, norm, act = "lm_head", "", "layer_norm", F.gelu
        if f"{name}.{within}dense.weight" in self.weights:
            inner = self._norm(act(self._linear(x, f"{name}.{within}dense")), f"{name}.{within}{norm}")
            tied = self.weights[f"{self.prefix}embeddings.word_embeddings.weight"]
            weight = self.weights.get(f"{name}.decoder.weight", tied)
            bias = self.weights.get(f"{name}.bias", self.weights.get(f"{name}.decoder.bias"))
            found["logits"] = F.linear(inner, weight, bias)
        if "classifier.weight" in self.weights:
            act = _ACTIVATIONS[self.config.get("pooler_hidden_act", "tanh")]
            pooled = act(self._linear(x[:, 0], f"{self.prefix}pooler.dense"))
            found["classification"] = self._linear(pooled, "classifier")
        elif "classifier.dense.weight" in self.weights:
            pooled = torch.tanh(self._linear(x[:, 0], "classifier.dense"))
            found["classification"] = self._linear(pooled, "classifier.out_proj")
        if "qa_outputs.weight" in self.weights:
            found["spans"] = self._linear(x, "qa_outputs")
        return found


def _log_bucket(offset: Tensor, buckets: int, farthest: int) -> Tensor:
    """DeBERTa's buckets of i - j: exact up to buckets / 2, then logarithmic, signed."""
    middle = buckets // 2
    away = offset.abs().clamp(min=middle - 1)
    far = torch.log(away / middle) / torch.log(torch.tensor((farthest - 1) / middle))
    coarse = (torch.ceil(far * (middle - 1)) + middle) * offset.sign()
    return torch.where(away <= middle, offset, coarse.long())


def formula(source: SavedModel, tokens: Tensor, segments: Tensor | None) -> dict[str, Tensor]:
    """Outputs of the library's equations, written anew, in fairseq's order of rows; transformers' are the same."""
    read = read_folder(source.path, read_config(source.path))
    rows = torch.tensor(source.origin.rows)
    types = torch.zeros_like(tokens) if segments is None else segments
    if len(read.state["token_types"]) == 1:
        types = torch.zeros_like(tokens)
    weights = weights_of(source.path, read.config, read.family.prefix)
    found = Reference(read.config, weights, read.family.prefix).outputs(rows[tokens], tokens == 1, types)
    if "logits" in found:
        logits = found["logits"][..., rows.clamp(min=0)]
        logits[..., rows < 0] = 0
        found["logits"] = logits
    theirs = source.outputs(tokens, segments)
    assert theirs.keys() == found.keys()
    for name, value in theirs.items():
        apart = (value - found[name])[tokens != 1] if value.dim() == 3 else value - found[name]
        assert apart.abs().max() < 1e-5
    return found
