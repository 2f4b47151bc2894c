"""What follows self-attention in a decoder's layer, for a step of decoding: one call of the kernel in C."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from relpos_fairseq.attention.native import layer as kernel
from relpos_fairseq.attention.native.step import StepCall
from relpos_fairseq.nn.packed import for_kernel, is_plain

CHANGES = ("attn_ln", "c_attn", "ffn_layernorm", "w_resid")  # options of fairseq's layers that the kernel has not
LINEAR = {"attention_out": ("self_attn", "out_proj"), "inner": ("fc1",), "outer": ("fc2",)}
CROSS_LINEAR = {"query": ("encoder_attn", "q_proj"), "cross_out": ("encoder_attn", "out_proj")}
NORMS = {"attention_norm": ("self_attn_layer_norm",), "final_norm": ("final_layer_norm",)}
CROSS_NORM = {"cross_norm": ("encoder_attn_layer_norm",)}


class LayerRest:
    """Residual sums, norms, cross-attention and feed-forward of a decoder's layer whose linear layers are packed.

    Args:
        layer: fairseq's, for which `serves` is True.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self._form: tuple[list, kernel.LayerCall] | None = None

    @staticmethod
    def serves(layer: Any) -> bool:
        """Return whether the kernel computes what a layer does."""
        linear, norms = _parts(layer)
        return (
            all(for_kernel(part) is not None for part in linear.values())
            and all(map(_is_affine, norms.values()))
            and all(getattr(layer, name) is None for name in CHANGES)
            and layer.activation_fn in (torch.relu, nn.functional.relu)
            and not layer.cross_self_attention
        )

    def __reduce__(self) -> tuple:  # addresses are not copied
        return type(self), (self.layer,)

    def form_for(self, x: Tensor) -> kernel.LayerCall | None:
        """Return what the kernel needs of the layer for a step's input (1, B, E), or None: it cannot take that now."""
        layer = self.layer
        drops = layer.dropout_module.apply_during_inference or layer.activation_dropout_module.apply_during_inference
        return self._current() if len(x) == 1 and is_plain(x) and not (layer.training or drops) else None

    def __call__(self, form: kernel.LayerCall, x: Tensor, attended: Tensor, cross: StepCall | None) -> Tensor:
        """Return the layer's output (1, B, E).

        Args:
            form: what `form_for` returned.
            x: (1, B, E) the layer's input.
            attended: (B, E) what self-attention's heads found.
            cross: what `CrossAttention.step_call` returns; None: there is no source.
        """
        return kernel.layer(form, x.reshape(attended.shape), attended, cross).view(x.shape)

    def _current(self) -> kernel.LayerCall | None:
        """Return the kernel's arguments for the weights as they are now; None: it does not read them, or hooks wait."""
        linear, norms = _parts(self.layer)
        others = (self.layer.encoder_attn, self.layer.dropout_module, self.layer.activation_dropout_module)
        if _has_any_global_hook() or any(map(_is_hooked, (*linear.values(), *norms.values(), *others))):
            return None
        packed = {name: for_kernel(part) for name, part in linear.items()}
        if None in packed.values() or not all(map(_is_affine, norms.values())):
            return None
        parts = [part for norm in norms.values() for part in (norm.weight.data_ptr(), norm.bias.data_ptr())]
        state = [*packed.values(), *parts]
        if self._form is None or self._form[0] != state:
            args: dict[str, Any] = {name: one.arg for name, one in packed.items() if one is not None}
            args |= {name: kernel.norm_arg(norm) for name, norm in norms.items()}
            self._form = state, kernel.LayerCall(normalize_before=self.layer.normalize_before, **args)
        return self._form[1]


def _parts(layer: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the linear layers and the norms of a decoder's layer by their names in the kernel's arguments."""
    kinds = (LINEAR, NORMS) if layer.encoder_attn is None else (LINEAR | CROSS_LINEAR, NORMS | CROSS_NORM)
    linear, norms = ({name: reduce(_child, path, layer) for name, path in kind.items()} for kind in kinds)
    return linear, norms


def _child(module: nn.Module, name: str) -> Any:
    return module._modules[name]  # an attribute is found more slowly


def _is_hooked(module: nn.Module | None) -> bool:
    return module is not None and bool(module._forward_hooks or module._forward_pre_hooks)


def _is_affine(norm: nn.Module) -> bool:
    """Return whether a norm is torch's, over the last dimension, with a weight and a bias in fp32."""
    known = type(norm) is nn.LayerNorm and len(norm.normalized_shape) == 1 and norm.bias is not None
    return known and norm.weight.dtype is torch.float32
