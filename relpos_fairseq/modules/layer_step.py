"""A decoder's layer in a step of decoding: one call of the kernel in C, with self-attention or with what it found."""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import torch
from fairseq.modules import FairseqDropout
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from relpos_fairseq.attention.native import layer as kernel
from relpos_fairseq.attention.native.step import StepCall
from relpos_fairseq.core.placement import PositionContext
from relpos_fairseq.nn.decoding_cache import DecodingCache
from relpos_fairseq.nn.packed import for_kernel, is_hooked, is_plain, product_for_kernel

CHANGES = ("attn_ln", "c_attn", "ffn_layernorm", "w_resid")  # options of fairseq's layers that the kernel has not
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
LINEAR = {"attention_out": ("self_attn", "out_proj"), "inner": ("fc1",), "outer": ("fc2",)}
CROSS_LINEAR = {"query": ("encoder_attn", "q_proj"), "cross_out": ("encoder_attn", "out_proj")}
NORMS = {"attention_norm": ("self_attn_layer_norm",), "final_norm": ("final_layer_norm",)}
CROSS_NORM = {"cross_norm": ("encoder_attn_layer_norm",)}


class Form(NamedTuple):
    """What a layer has of its own, and what must outlive its calls; a copy of it is None.

    Args:
        state: what changes with it.
        kept: the norms' numbers, which other numbers may replace.
        call: the kernel's arguments.
        attends: whether the kernel has self-attention's projections.
    """

    state: list
    kept: list[Tensor]
    call: kernel.LayerCall
    attends: bool

    def __reduce__(self) -> tuple:  # addresses are not copied
        return type(None), ()


class Coming(NamedTuple):
    """A decoder's coming step without padding, as each of its layers is given it.

    Args:
        x: (1, B, E) of the layer's input, whose numbers are not read.
        context: the positions.
        encoder_out: (S, B, E) the source, or None.
        encoder_padding: (B, S) or None.
        state: the sequence's, as fairseq keeps it.
    """

    x: Tensor
    context: PositionContext
    encoder_out: Tensor | None
    encoder_padding: Tensor | None
    state: dict


class LayerStep:
    """Steps of decoding of a layer whose linear layers are packed.

    Args:
        layer: fairseq's, for which `serves` is True.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self._form: Form | None = None

    @classmethod
    def serves(cls, layer: Any) -> bool:
        """Return whether the kernel computes what a layer does, and no hook is on a part of it."""
        return cls(layer)._current() is not None

    def _is_plain(self, norms: list[Any]) -> bool:
        """Return whether the kernel computes what the layer does beside its linear layers; no hook is on it."""
        layer = self.layer
        others = (layer.self_attn, layer.encoder_attn, layer.dropout_module, layer.activation_dropout_module)
        return (
            all(getattr(layer, name) is None for name in CHANGES)
            and layer.activation_fn in (torch.relu, nn.functional.relu)
            and not layer.cross_self_attention
            and all(map(is_affine, norms))
            and not any(map(is_hooked, (*norms, *others)))
            and not _has_any_global_hook()
        )

    def __reduce__(self) -> tuple:  # addresses are not copied
        return type(self), (self.layer,)

    def _form_for(self, x: Tensor, cache: DecodingCache) -> Form | None:
        """Return what the kernel needs of the layer for a step's input (1, B, E), or None: it cannot take that now."""
        layer = self.layer
        dropped = drops(layer.dropout_module) or drops(layer.activation_dropout_module)
        if len(x) > 1 or layer.training or dropped or not is_plain(x):
            return None
        if cache.form is None:
            cache.form = self._current()
        return cache.form

    def __call__(
        self,
        x: Tensor,
        context: PositionContext,
        new_padding: Tensor | None,
        encoder_out: Tensor | None,
        encoder_padding: Tensor | None,
        state: dict,
    ) -> Tensor | None:
        """Return the layer's output (1, B, E), or None where the kernel does not evaluate this step.

        What it needs of the layer is found in a sequence's first step, and stands in the cache for all: other weights
        or hooks count from the next sequence on, as they would not fit the keys that are there.

        Args:
            x: (1, B, E) the layer's input; longer ones are no step.
            context: the positions.
            new_padding: (B, 1) or None.
            encoder_out: (S, B, E) the source, or None.
            encoder_padding: (B, S) or None.
            state: the sequence's, as fairseq keeps it.
        """
        layer = self.layer
        cache = layer.self_attn.cache(state)
        form = self._form_for(x, cache)
        if form is None:
            return None
        cross, serves = self._cross(x, encoder_out, encoder_padding, state)
        if not serves:
            return None
        attention: Any = layer.self_attn.step_call(x, context, new_padding, cache) if form.attends else None
        if attention is None:
            query = layer.self_attn_layer_norm(x) if layer.normalize_before else x
            attention = layer.self_attn.heads(query, context, new_padding, cache)[0]
        return kernel.layer(form.call, x.reshape(-1, x.size(-1)).contiguous(), attention, cross).view(x.shape)

    def _cross(
        self, x: Tensor, encoder_out: Tensor | None, encoder_padding: Tensor | None, state: dict
    ) -> tuple[StepCall | None, bool]:
        """Return the kernel's arguments of attention to the source, None without any, and whether it serves."""
        attention = self.layer.encoder_attn
        if encoder_out is None or attention is None:
            return None, True
        call = attention.step_call(x, encoder_out, encoder_padding, state)
        return call, call is not None

    def serves_until(self, coming: Coming) -> int:
        """Return up to how many keys `prepared` serves a layer's steps, the coming one first, or 0."""
        x, context, source, padding, state = coming
        cache = self.layer.self_attn.cache(state)
        form = self._form_for(x, cache)
        if form is None or not form.attends or not self._cross(x, source, padding, state)[1]:
            return 0
        return self.layer.self_attn.serves_until(x, context, cache)

    def prepared(self, coming: Coming) -> tuple[kernel.LayerCall, Any]:
        """Return the kernel's arguments for a step that `serves_until` names, and what must outlive them.

        Its input and output are left open.
        """
        x, context, source, padding, state = coming
        cache = self.layer.self_attn.cache(state)
        attention = self.layer.self_attn.step_call(x, context, None, cache)
        cross, _ = self._cross(x, source, padding, state)
        return kernel.prepared(cache.form.call, x.size(1), attention, cross), (attention, cross)

    def _current(self) -> Form | None:
        """Return the kernel's arguments for the weights as they are now, or None if it does not read them."""
        linear, norms = _parts(self.layer)
        packed = {name: for_kernel(part) for name, part in linear.items()}
        if None in packed.values() or not self._is_plain([*norms.values()]):
            return None
        attention = self.layer.self_attn
        projections = [_child(attention, name) for name in PROJECTIONS]
        packed["queries_keys_values"] = product_for_kernel(projections, attention.queries_keys_values)
        kept = [part.detach() for norm in norms.values() for part in (norm.weight, norm.bias)]
        parts = [*(part.data_ptr() for part in kept), *(norm.eps for norm in norms.values())]
        state = [*packed.values(), *parts, self.layer.normalize_before]
        form = self._form
        if form is None or form.state != state:
            args: dict[str, Any] = {name: one.arg for name, one in packed.items() if one is not None}
            args |= {name: kernel.norm_arg(norm) for name, norm in norms.items()}
            call = kernel.LayerCall(normalize_before=self.layer.normalize_before, **args)
            form = Form(state, kept, call, "queries_keys_values" in args)
            self._form = form
        return form


def _parts(layer: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the linear layers and the norms of a decoder's layer by their names in the kernel's arguments."""
    kinds = (LINEAR, NORMS) if layer.encoder_attn is None else (LINEAR | CROSS_LINEAR, NORMS | CROSS_NORM)
    linear, norms = ({name: reduce(_child, path, layer) for name, path in kind.items()} for kind in kinds)
    return linear, norms


def _child(module: nn.Module, name: str) -> Any:
    return module._modules[name]  # an attribute is found more slowly


def drops(dropout: FairseqDropout) -> bool:
    """Return whether a module drops what it is given, itself in training mode or not."""
    return bool(dropout.p > 0 and (dropout.training or dropout.apply_during_inference))


def is_affine(norm: nn.Module) -> bool:
    """Return whether a norm is torch's, over the last dimension, with a weight and a bias in fp32."""
    if type(norm) is not nn.LayerNorm or len(norm.normalized_shape) != 1 or norm.bias is None:
        return False
    return norm.weight.dtype is norm.bias.dtype is torch.float32 and norm.weight.stride() == norm.bias.stride() == (1,)
