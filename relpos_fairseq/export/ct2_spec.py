"""Fill CTranslate2's specification of a transformer from a `relpos_transformer`, positions included.

CTranslate2 knows four forms of positions: a table added to the input; rotations of adjacent channels; vectors for
clipped distances, one table for all heads of a layer (Shaw); and T5's bias by bucket, a table per layer. T5's buckets
are exact below half of their number. A table whose logarithmic half repeats the value at the largest distance therefore
expresses any function of distance: exact up to `reach`, constant beyond.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fairseq.modules.quantization.scalar.modules import IntLinear
from torch import Tensor, nn

from relpos_fairseq.core.calls import layer_terms
from relpos_fairseq.core.placement import Placement
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.relations import DistanceRelation
from relpos_fairseq.core.rotation import Rotary
from relpos_fairseq.core.terms import PositionTerms
from relpos_fairseq.inference.ct2 import engine
from relpos_fairseq.io.errors import UserError

# 4.8.1 and 4.8.2 read layer 0's bias by distance in every layer.
REMEDY = "relpos export onnx exports it"
HELD = {"query_vectors", "value_vectors", "static"}
DEFAULT_LENGTH = 1024  # rows of tables that a scheme does not limit itself; the engine's own cut


@dataclass(frozen=True)
class LayerForm:
    """The positions of one layer in CTranslate2's forms; absent parts are None.

    Args:
        keys: (2K + 1, D) vectors by clipped distance, multiplied with the query.
        values: (2K + 1, D) vectors added to the values; zeros where a scheme has only keys.
        bias: (rows, H) in the order of T5's buckets.
        reach: distance up to which the bias is exact.
    """

    keys: Tensor | None = None
    values: Tensor | None = None
    bias: Tensor | None = None
    reach: int = 0


@dataclass(frozen=True)
class StackForm:
    """The positions of an encoder or decoder in CTranslate2's forms.

    Args:
        added: (N, E) added to the input's embedding, or None.
        rotary: the rotation, or None.
        layers: the positions of each layer.
    """

    added: Tensor | None
    rotary: Rotary | None
    layers: tuple[LayerForm, ...]

    @property
    def relative(self) -> bool:
        """Whether attention has positions; the engine then adds none to the input."""
        return self.rotary is not None or any(layer.keys is not None or layer.bias is not None for layer in self.layers)


@torch.no_grad()
def stack_form(placement: Placement, attentions: list[Any], name: str) -> StackForm:
    """Read the positions of a stack from its schemes and its layers' self-attention.

    Raises:
        UserError: names what CTranslate2 cannot hold, and the export that can.
    """
    plan = placement.plan
    length = plan.longest or max(plan.shape.max_positions, DEFAULT_LENGTH)
    positions = Positions(length, length)
    context, source = placement.context(positions), torch.zeros(length, 1, plan.shape.embed_dim)
    rotating = [scheme for scheme in placement.shared if scheme.rotates]
    terms = [
        layer_terms(attention.position, context.of_layer(layer), source, None)
        for layer, attention in enumerate(attentions)
    ]
    problem = _problem(terms, rotating)
    turning = [scheme for layer in range(len(attentions)) for scheme in placement.shared_by(layer)]
    if any(turning.count(scheme) < len(attentions) for scheme in rotating):
        problem = problem or "a rotation in some of its layers"
    layers: tuple[LayerForm, ...] = ()
    if problem is None:
        layers = tuple(_layer_form(own, plan.shape.num_heads, plan.shape.causal) for own in terms)
        if len({(layer.keys is None, layer.bias is None) for layer in layers}) > 1:
            problem = "vectors or a bias in some of its layers"
    added = placement.embed(positions)
    form = StackForm(None if added is None else added[0].float(), rotating[0].rotary() if rotating else None, layers)
    if problem is None and added is not None and form.relative:
        problem = "a position added to the input beside one in attention"
    if problem is not None:
        raise UserError(
            f"CTranslate2 cannot hold the {name}'s position scheme {plan.name}: it has {problem}; "
            f"relpos export onnx holds every scheme"
        )
    return form


def _problem(terms: list[tuple[PositionTerms, ...]], rotating: list[Any]) -> str | None:
    """Return the first part of the terms that the engine cannot hold, in words, or None."""
    every = list(itertools.chain(*terms))
    for term in every:
        unknown = [name for name in term.present if name not in HELD]
        if unknown:
            return unknown[0]
        if term.present and not isinstance(term.relation, DistanceRelation):
            return f"a relation that is not of distance ({type(term.relation).__name__})"
        for name in ("query_vectors", "value_vectors"):
            if name in term.present and getattr(term, name).size(0) > 1:
                return f"{name} of each head (--position-share heads or both has them in common)"
        if rotating and term.has_vectors:
            return "vectors beside a rotation"
        if term.has_vectors and any("static" in other.present for other in every):
            return "vectors beside a bias"  # the engine then reads layer 0's bias in every layer
    if any(scheme.rotary() is None for scheme in rotating):
        return "a rotation of its own kind"
    if any(scheme.rotary().channels < scheme.shape.head_dim for scheme in rotating):
        return "channels that are not rotated"
    return None


def _layer_form(terms: tuple[PositionTerms, ...], heads: int, causal: bool) -> LayerForm:
    """Sum a layer's terms, by distance."""
    keys = _by_distance(terms, "query_vectors")
    values = _by_distance(terms, "value_vectors", least=0 if keys is None else len(keys) // 2)
    if values is not None and (keys is None or len(keys) < len(values)):
        keys = _by_distance(terms, "query_vectors", least=len(values) // 2)
    given = next((part for part in (keys, values) if part is not None), None)
    if given is not None:
        keys, values = (torch.zeros_like(given) if part is None else part for part in (keys, values))
        keys, values = keys[:, 0], values[:, 0]
    static = _by_distance(terms, "static")
    if static is None:
        return LayerForm(keys, values)
    reach = len(static) // 2
    past = _bucketed(static[: reach + 1].flip(0))
    bias = past if causal else torch.cat([past, _bucketed(static[reach:])])
    return LayerForm(keys, values, bias.expand(-1, heads).contiguous(), reach)


def _by_distance(terms: tuple[PositionTerms, ...], name: str, least: int = 0) -> Tensor | None:
    """Sum a field of terms at distances -K..K, beyond which it is constant: (2K + 1, H|1, ...)."""
    given: list[Any] = [term for term in terms if name in term.present]
    if not given:
        return None
    reach = max(1, least, *(max(-term.relation.lowest, term.relation.highest) for term in given))
    distance = torch.arange(-reach, reach + 1)
    tables = [getattr(term, name)[:, term.relation.of_distance(distance)] for term in given]
    return sum(table.float() for table in tables).transpose(0, 1)


def _bucketed(values: Tensor) -> Tensor:
    """Return values (K + 1, H) of distances 0..K as 2K buckets: 0..K-1 exactly, then K's value K times."""
    tail = values[-1:].expand(len(values) - 1, -1)
    return torch.cat([values[:-1], tail])


def transformer_spec(model: Any, source: Any, target: Any) -> Any:
    """Return the `TransformerSpec` of a RelPosTransformerModel, given both dictionaries.

    Raises:
        UserError: a part that CTranslate2 does not know, by name.
    """
    engine()
    from ctranslate2.specs.transformer_spec import TransformerSpec

    _refuse(model)
    decoder = model.decoder
    spec = TransformerSpec(_stack(model.encoder, "encoder"), _stack(decoder, "decoder"))
    spec.register_source_vocabulary(_words(source))
    spec.register_target_vocabulary(_words(target))
    spec.config.decoder_start_token = spec.config.eos_token
    spec.config.add_source_eos = not model.encoder.skips_end
    spec.config.layer_norm_epsilon = decoder.layers[0].final_layer_norm.eps
    return spec


def _refuse(model: Any) -> None:
    if not hasattr(model, "encoder") or not hasattr(model.encoder, "positions"):
        raise UserError(
            f"a {type(model).__name__} is no relpos_transformer: CTranslate2 takes translation "
            f"models alone; relpos export onnx and relpos export transformers take the others"
        )
    decoder = model.decoder
    problems = {
        "adaptive softmax": decoder.adaptive_softmax is not None,
        "a projection of its embeddings, of --quant-noise-pq": decoder.quant_noise is not None,
        "weights and outputs that it rounds, of --quant-noise-scalar": any(
            isinstance(part, IntLinear) for part in model.modules()
        ),
        "no cross-attention": any(layer.encoder_attn is None for layer in decoder.layers),
        "narrower inputs or outputs of the decoder": decoder.project_in_dim is not None
        or decoder.project_out_dim is not None,
    }
    for name, found in problems.items():
        if found:
            raise UserError(f"CTranslate2 cannot hold this model: it has {name}; {REMEDY}")


def _words(dictionary: Any) -> list[str]:
    return ["<blank>" if word == dictionary.pad_word else word for word in dictionary.symbols]


def _activation(layer: Any) -> Any:
    from ctranslate2.specs.common_spec import Activation

    known = {
        "relu": Activation.RELU,
        "gelu": Activation.GELU,
        "gelu_accurate": Activation.GELUTanh,
        "gelu_fast": Activation.GELUTanh,
        "silu": Activation.SWISH,
        "tanh": Activation.Tanh,
    }
    name = getattr(layer.activation_fn, "__name__", str(layer.activation_fn))
    if name not in known:
        raise UserError(f"CTranslate2 does not know --activation-fn {name}: {REMEDY}")
    return known[name]


def _stack(stack: Any, name: str) -> Any:
    from ctranslate2.specs import transformer_spec as specs

    layers = [stack.layers[index] for index in range(len(stack.layers))]
    attentions = [layer.self_attn for layer in layers]
    form = stack_form(stack.positions, attentions, name)
    first = attentions[0]
    kind = {"encoder": specs.TransformerEncoderSpec, "decoder": specs.TransformerDecoderSpec}[name]
    spec = kind(
        len(layers),
        first.num_heads,
        pre_norm=layers[0].normalize_before,
        no_final_norm=stack.layer_norm is None,
        activation=_activation(layers[0]),
        layernorm_embedding=stack.layernorm_embedding is not None,
        relative_position=any(layer.keys is not None for layer in form.layers),
        relative_attention_bias=any(layer.bias is not None for layer in form.layers),
        **_rotation(form.rotary),
    )
    spec.scale_embeddings = float(stack.embed_scale)
    embeddings = spec.embeddings[0] if name == "encoder" else spec.embeddings
    embeddings.weight = _array(stack.embed_tokens.weight)
    if not form.relative:
        none = np.zeros((DEFAULT_LENGTH, first.embed_dim), np.float32)
        spec.position_encodings.encodings = none if form.added is None else _array(form.added)
    for part in ("layer_norm", "layernorm_embedding"):
        if getattr(stack, part) is not None:
            _norm(getattr(spec, part), getattr(stack, part))
    if name == "decoder":
        _linear(spec.projection, stack.output_projection)
    for own, layer, positions in zip(spec.layer, layers, form.layers, strict=True):
        _layer(own, layer, positions)
    return spec


def _rotation(rotary: Rotary | None) -> dict[str, Any]:
    if rotary is None:
        return {}
    found = {"rotary_dim": rotary.channels, "rotary_interleave": rotary.adjacent, "rotary_base": rotary.base}
    if rotary.slower == 1:
        return found
    from ctranslate2.specs.attention_spec import RotaryScalingType

    return found | {"rotary_scaling_type": RotaryScalingType.Linear, "rotary_scaling_factor": rotary.slower}


def _layer(spec: Any, layer: Any, positions: Any) -> None:
    attention = layer.self_attn
    # The engine multiplies q.k by 1/sqrt(D); another scale goes into the query's projection.
    factor = attention.scale * math.sqrt(attention.head_dim)
    own = spec.self_attention
    _fused(own.linear[0], attention.q_proj, attention.k_proj, attention.v_proj, factor=factor)
    _linear(own.linear[1], attention.out_proj)
    _norm(own.layer_norm, layer.self_attn_layer_norm)
    if positions.keys is not None:
        own.relative_position_keys = _array(positions.keys)
        own.relative_position_values = _array(positions.values)
    if positions.bias is not None:
        own.relative_attention_bias = _array(positions.bias)
        own.relative_attention_max_distance = np.dtype("int32").type(2 * positions.reach)
    if hasattr(spec, "attention"):
        cross = layer.encoder_attn
        _linear(spec.attention.linear[0], cross.q_proj)
        _fused(spec.attention.linear[1], cross.k_proj, cross.v_proj)
        _linear(spec.attention.linear[2], cross.out_proj)
        _norm(spec.attention.layer_norm, layer.encoder_attn_layer_norm)
    _linear(spec.ffn.linear_0, layer.fc1)
    _linear(spec.ffn.linear_1, layer.fc2)
    _norm(spec.ffn.layer_norm, layer.final_layer_norm)


def _fused(spec: Any, *parts: nn.Linear, factor: float = 1.0) -> None:
    """Concatenate projections, the first one multiplied by `factor`."""
    factors = [factor] + [1.0] * (len(parts) - 1)
    for name in ("weight", "bias"):
        setattr(spec, name, np.concatenate([_array(getattr(p, name)) * f for p, f in zip(parts, factors, strict=True)]))


def _linear(spec: Any, module: Any) -> None:
    spec.weight = _array(module.weight)
    if module.bias is not None:
        spec.bias = _array(module.bias)


def _norm(spec: Any, module: Any) -> None:
    spec.gamma, spec.beta = _array(module.weight), _array(module.bias)


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy().copy()
