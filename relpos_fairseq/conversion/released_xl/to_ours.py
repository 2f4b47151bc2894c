"""A released model's tensors and options as those of `relpos_transformer_xl`.

Types that fairseq's dictionary adds have no embedding and so low a bias that they have no
probability.  Embedding and adaptive softmax are tied no longer: fairseq has no projection between
a tied first band and the outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from relpos_fairseq.conversion.layouts import State
from relpos_fairseq.conversion.released_xl.model import Released, embeddings, projections
from relpos_fairseq.conversion.report import ConversionError
from relpos_fairseq.conversion.vocabulary import Vocabulary, take_rows
from relpos_fairseq.models.transformer_xl.window_positions import KINDS
from relpos_fairseq.schemes import named_elsewhere

NEVER = -1e4  # exp of it is 0 in fp32, and fp16 holds it
SEGMENT, MEMORY = 128, 0  # where a state_dict does not say
_LAYER = {
    "dec_attn.o_net.weight": "self_attn.out_proj.weight",
    "dec_attn.layer_norm.weight": "self_attn_layer_norm.weight",
    "dec_attn.layer_norm.bias": "self_attn_layer_norm.bias",
    "pos_ff.CoreNet.0.weight": "fc1.weight",
    "pos_ff.CoreNet.0.bias": "fc1.bias",
    "pos_ff.CoreNet.3.weight": "fc2.weight",
    "pos_ff.CoreNet.3.bias": "fc2.bias",
    "pos_ff.layer_norm.weight": "final_layer_norm.weight",
    "pos_ff.layer_norm.bias": "final_layer_norm.bias",
}


def values_of(released: Released, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the options of our config and of the task (`tokens_per_sample`)."""
    state, width = released.state, released.width
    kind = f"attn_type {released.attn_type}"
    values = {
        "decoder_embed_dim": width,
        "decoder_ffn_embed_dim": len(state["layers.0.pos_ff.CoreNet.0.weight"]),
        "decoder_layers": released.layers,
        "decoder_attention_heads": released.heads,
        "decoder_normalize_before": released.pre_norm,
        "no_decoder_final_norm": True,
        "no_attention_bias": True,
        "output_bias": True,
        "dropout": released.dropout[0],
        "activation_dropout": released.dropout[0],
        "attention_dropout": released.dropout[1],
        "mem_len": MEMORY if released.mem_len is None else released.mem_len,
        "same_length": released.same_length,
        "tokens_per_sample": released.segment or SEGMENT,
    }
    if released.absolute:
        values |= {"position_scheme": "none", "window_positions": KINDS[released.attn_type - 1]}
    else:
        values["position_scheme"] = named_elsewhere("transformer-xl")[kind]
    if released.attn_type == 0:
        values |= {"position_query_bias": "shared", "clamp_len": str(released.clamp_len)}
    elif released.attn_type == 1:
        values["position_clip_distance"] = str(_reach(released))
    first = embeddings(state)[0].size(1)
    if not released.cutoffs:
        tied = torch.equal(embeddings(state)[0], state["crit.out_layers.0.weight"])
        sizes = {"decoder_input_dim": first, "decoder_output_dim": first}
        return values | sizes | {"share_decoder_input_output_embed": tied}
    cutoffs = ",".join(str(end + vocabulary.rows.count(-1)) for end in released.cutoffs)
    values |= {"adaptive_input": True, "decoder_input_dim": first}
    values |= {f"adaptive_{side}_cutoff": cutoffs for side in ("input", "softmax")}
    return values | {
        "adaptive_input_factor": _factor(released, first),
        "adaptive_softmax_factor": _factor(released, width),
    }


def _factor(released: Released, width: int) -> float:
    """The largest by which widths may fall, from `width` on, and hold those of all bands.

    Raises:
        ConversionError: a band is wider than `width`.
    """
    bands = [released.band_width(number) for number in range(1, len(released.bands))]
    for factor in range(width, 0, -1):
        if all(width // factor ** (n + 1) >= band for n, band in enumerate(bands)):
            return float(factor)
    raise ConversionError(f"{released.path}: bands of its vocabulary are {bands} wide, and ours at most {width}")


def _reach(released: Released) -> int:
    """Distance at and beyond which the learned table has one row."""
    rows = released.state["r_emb"].size(1)
    reach = (min(rows, released.clamp_len) if released.clamp_len else rows) - 1
    if reach < 1:
        raise ConversionError(f"{released.path}: its table has one distance alone")
    return reach


def state_of(released: Released, vocabulary: Vocabulary) -> State:
    """Return the tensors under our names; positions' buffers are missing.

    Raises:
        ConversionError: the end of a line or the unknown word stands behind the first band.
    """
    if any(row >= released.bands[0][1] for row in vocabulary.rows[:4]):
        raise ConversionError(f"{released.path}: <eos> and <unk> must lie in the first band")
    found = {}
    for layer in range(released.layers):
        prefix, target = f"layers.{layer}.", f"decoder.layers.{layer}."
        found |= {target + new: released.state[prefix + old] for old, new in _LAYER.items()}
        parts = projections(released, layer)
        found |= {f"{target}self_attn.{name}_proj.weight": part for name, part in zip("qkv", parts, strict=True)}
        if released.absolute:
            continue
        place = f"{target}self_attn.position.0."
        found |= {place + name: value for name, value in _positions(released, layer).items()}
    if released.attn_type == 3:
        rows = released.state["r_emb"].flatten(2)  # (layers, max_klen, width)
        found["decoder.window.table"] = rows[:, rows.size(1) - released.reach :]
    words = _adaptive if released.cutoffs else _plain
    return {name: value.clone() for name, value in (found | words(released, vocabulary)).items()}


def _positions(released: Released, layer: int) -> State:
    state = released.state
    if released.attn_type == 0:
        return {
            "projection": state[f"layers.{layer}.dec_attn.r_net.weight"],
            "content_bias": state["r_w_bias"],
            "position_bias": state["r_r_bias"],
        }
    reach = _reach(released)  # distances reach .. 0; those of future keys are never read
    vectors = state["r_emb"][layer, -reach - 1 :].transpose(0, 1)  # (H, reach + 1, D)
    scalars = state["r_bias"][layer, -reach - 1 :].t()
    return {
        "key_table": pad(vectors, (0, 0, 0, reach)),
        "content_bias": state["r_w_bias"][layer],
        "bias_table": pad(scalars, (0, reach)),
    }


def _plain(released: Released, vocabulary: Vocabulary) -> State:
    state, rows = released.state, vocabulary.rows
    found = {
        "decoder.embed_tokens.weight": take_rows(embeddings(state)[0], rows),
        "decoder.output_projection.weight": take_rows(state["crit.out_layers.0.weight"], rows),
        "decoder.output_projection.bias": take_rows(state["crit.out_layers.0.bias"], rows, NEVER),
    }
    if "word_emb.emb_projs.0" in state:
        found["decoder.project_in_dim.weight"] = state["word_emb.emb_projs.0"]
        found["decoder.project_out_dim.weight"] = state["crit.out_projs.0"].t()
    return found


def _adaptive(released: Released, vocabulary: Vocabulary) -> State:
    state, found = released.state, {}
    bands = [vocabulary.rows[: released.cutoffs[0] + vocabulary.rows.count(-1)]]
    bands += [list(range(start, end)) for start, end in released.bands[1:]]
    eye = torch.eye(released.width, dtype=state["crit.cluster_weight"].dtype)
    first = embeddings(state)[0].size(1)
    factors = [(width, int(_factor(released, width))) for width in (first, released.width)]
    for number, (band, (start, end)) in enumerate(zip(bands, released.bands, strict=True)):
        single = "crit.out_layers.1.weight" not in state
        own, offset = (0, start) if single else (number, 0)
        local = [row - start if row >= 0 else -1 for row in band]
        take = slice(offset, offset + end - start)
        # Channels that our bands have more than the released ones are 0.
        entering, leaving = ((0, width // factor**number - released.band_width(number)) for width, factor in factors)
        embedding = state[f"word_emb.emb_layers.{own}.weight"][take]
        spread = state.get(f"word_emb.emb_projs.{own}", eye)  # (width, d)
        place = f"decoder.embed_tokens.embeddings.{number}."
        found[f"{place}0.weight"] = pad(take_rows(embedding, local), entering)
        found[f"{place}1.weight"] = pad(spread, entering)
        weight = take_rows(state[f"crit.out_layers.{own}.weight"][take], local)
        bias = take_rows(state[f"crit.out_layers.{own}.bias"][take], local, NEVER)
        inner = state.get(f"crit.out_projs.{number}", eye).t()  # (d, width)
        if number == 0:
            # The released code gives band i the i-th column from the end.
            weight = torch.cat([weight, state["crit.cluster_weight"].flip(0)]) @ inner
            bias = torch.cat([bias, state["crit.cluster_bias"].flip(0)])
            found["decoder.adaptive_softmax.head.0.weight"] = weight
            found["decoder.adaptive_softmax.head.1.bias"] = bias
            continue
        place = f"decoder.adaptive_softmax.tail.{number - 1}."
        found[f"{place}0.weight"] = pad(inner, (0, 0, *leaving))
        found |= {f"{place}2.weight": pad(weight, leaving), f"{place}3.bias": bias}
    return found
