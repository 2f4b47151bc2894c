"""What follows self-attention in a decoder's layer, for a step of decoding: one call of the kernel in C."""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from relpos_fairseq.attention.native import layer as kernel
from relpos_fairseq.attention.native.step import StepCall
from relpos_fairseq.nn.packed import for_kernel, is_hooked, is_plain

CHANGES = ("attn_ln", "c_attn", "ffn_layernorm", "w_resid")  # options of fairseq's layers that the kernel has not
LINEAR = {"attention_out": ("self_attn", "out_proj"), "inner": ("fc1",), "outer": ("fc2",)}
CROSS_LINEAR = {"query": ("encoder_attn", "q_proj"), "cross_out": ("encoder_attn", "out_proj")}
NORMS = {"attention_norm": ("self_attn_layer_norm",), "final_norm": ("final_layer_norm",)}
CROSS_NORM = {"cross_norm": ("encoder_attn_layer_norm",)}


class Form(NamedTuple):
    """What a layer has of its own: the kernel's arguments, and what must outlive its calls."""

    state: list
    call: kernel.LayerCall


class LayerRest:
    """Residual sums, norms, cross-attention and feed-forward of a decoder's layer whose linear layers are packed.

    Args:
        layer: fairseq's, for which `serves` is True.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self._form: Form | None = None

    @classmethod
    def serves(cls, layer: Any) -> bool:
        """Return whether the kernel computes what a layer does, and nothing waits for a part of it."""
        return cls(layer)._current() is not None

    def _is_plain(self, norms: list[Any]) -> bool:
        """Return whether the kernel computes what the layer does beside its linear layers; no hook waits for it."""
        layer = self.layer
        others = (layer.self_attn, layer.encoder_attn, layer.dropout_module, layer.activation_dropout_module)
        return (
            all(getattr(layer, name) is None for name in CHANGES)
            and layer.activation_fn in (torch.relu, nn.functional.relu)
            and not layer.cross_self_attention
            and all(map(_is_affine, norms))
            and not any(map(is_hooked, (*norms, *others)))
            and not _has_any_global_hook()
        )

    def __reduce__(self) -> tuple:  # addresses are not copied
        return type(self), (self.layer,)

    def form_for(self, x: Tensor) -> Form | None:
        """Return what the kernel needs of the layer for a step's input (1, B, E), or None: it cannot take that now."""
        layer = self.layer
        drops = layer.dropout_module.apply_during_inference or layer.activation_dropout_module.apply_during_inference
        return self._current() if len(x) == 1 and is_plain(x) and not (layer.training or drops) else None

    def __call__(self, form: Form, x: Tensor, attended: Tensor, cross: StepCall | None) -> Tensor:
        """Return the layer's output (1, B, E).

        Args:
            form: what `form_for` returned.
            x: (1, B, E) the layer's input.
            attended: (B, E) what self-attention's heads found.
            cross: what `CrossAttention.step_call` returns; None: there is no source.
        """
        return kernel.layer(form.call, x.reshape(attended.shape).contiguous(), attended, cross).view(x.shape)

    def _current(self) -> Form | None:
        """Return the kernel's arguments for the weights as they are now, or None if it does not read them."""
        linear, norms = _parts(self.layer)
        packed = {name: for_kernel(part) for name, part in linear.items()}
        if None in packed.values() or not self._is_plain([*norms.values()]):
            return None
        parts = [part for norm in norms.values() for part in (norm.weight.data_ptr(), norm.bias.data_ptr())]
        state = [*packed.values(), *parts]
        form = self._form
        if form is None or form.state != state:
            args: dict[str, Any] = {name: one.arg for name, one in packed.items() if one is not None}
            args |= {name: kernel.norm_arg(norm) for name, norm in norms.items()}
            form = Form(state, kernel.LayerCall(normalize_before=self.layer.normalize_before, **args))
            self._form = form
        return form


def _parts(layer: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the linear layers and the norms of a decoder's layer by their names in the kernel's arguments."""
    kinds = (LINEAR, NORMS) if layer.encoder_attn is None else (LINEAR | CROSS_LINEAR, NORMS | CROSS_NORM)
    linear, norms = ({name: reduce(_child, path, layer) for name, path in kind.items()} for kind in kinds)
    return linear, norms


def _child(module: nn.Module, name: str) -> Any:
    return module._modules[name]  # an attribute is found more slowly


def _is_affine(norm: nn.Module) -> bool:
    """Return whether a norm is torch's, over the last dimension, with a weight and a bias in fp32."""
    if type(norm) is not nn.LayerNorm or len(norm.normalized_shape) != 1 or norm.bias is None:
        return False
    return norm.weight.dtype is norm.bias.dtype is torch.float32 and norm.weight.stride() == norm.bias.stride() == (1,)
