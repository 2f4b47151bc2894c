"""CTranslate2's description of a `relpos_transformer`, filled from the model's tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor, nn

from relpos_fairseq.export.ct2_positions import DEFAULT_LENGTH, StackForm, stack_form
from relpos_fairseq.export.extras import ExportError, require
from relpos_fairseq.rotation import Rotary

# 4.8.1 and 4.8.2 read layer 0's bias by distance in every layer.
LEAST = "4.8.3"
REMEDY = "relpos export onnx exports it"


def engine() -> Any:
    """Import CTranslate2.

    Raises:
        ExportError: it is absent or too old.
    """
    return require("ctranslate2", "ct2", LEAST)


def transformer_spec(model: nn.Module, source: Any, target: Any) -> Any:
    """Return the `TransformerSpec` of a RelPosTransformerModel, given both dictionaries.

    Raises:
        ExportError: a part that CTranslate2 does not know, by name.
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


def _refuse(model: nn.Module) -> None:
    if not hasattr(model, "encoder") or not hasattr(model.encoder, "positions"):
        raise ExportError(
            f"a {type(model).__name__} is no relpos_transformer: CTranslate2 takes translation "
            f"models alone; relpos export onnx and relpos export transformers take the others"
        )
    decoder = model.decoder
    problems = {
        "adaptive softmax": decoder.adaptive_softmax is not None,
        "no cross-attention": any(layer.encoder_attn is None for layer in decoder.layers),
        "narrower inputs or outputs of the decoder": decoder.project_in_dim is not None
        or decoder.project_out_dim is not None,
    }
    for name, found in problems.items():
        if found:
            raise ExportError(f"CTranslate2 cannot hold this model: it has {name}; {REMEDY}")


def _words(dictionary: Any) -> list[str]:
    return ["<blank>" if word == dictionary.pad_word else word for word in dictionary.symbols]


def _activation(layer: nn.Module) -> Any:
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
        raise ExportError(f"CTranslate2 does not know --activation-fn {name}: {REMEDY}")
    return known[name]


def _stack(stack: nn.Module, name: str) -> Any:
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
        spec.position_encodings.encodings = _table(form, first.embed_dim)
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
    found: dict[str, Any] = {"rotary_dim": rotary.channels, "rotary_interleave": rotary.adjacent}
    found["rotary_base"] = rotary.base
    if rotary.slower != 1:
        from ctranslate2.specs.attention_spec import RotaryScalingType

        found |= {"rotary_scaling_type": RotaryScalingType.Linear}
        found |= {"rotary_scaling_factor": rotary.slower}
    return found


def _table(form: StackForm, width: int) -> np.ndarray:
    if form.added is None:
        return np.zeros((DEFAULT_LENGTH, width), np.float32)
    return _array(form.added)


def _layer(spec: Any, layer: nn.Module, positions: Any) -> None:
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
    """Lay projections under each other, the first one multiplied by `factor`."""
    factors = [factor] + [1.0] * (len(parts) - 1)
    spec.weight = np.concatenate([_array(p.weight) * f for p, f in zip(parts, factors, strict=True)])
    spec.bias = np.concatenate([_array(p.bias) * f for p, f in zip(parts, factors, strict=True)])


def _linear(spec: Any, module: nn.Module) -> None:
    spec.weight = _array(module.weight)
    if module.bias is not None:
        spec.bias = _array(module.bias)


def _norm(spec: Any, module: nn.Module) -> None:
    spec.gamma, spec.beta = _array(module.weight), _array(module.bias)


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy().copy()
