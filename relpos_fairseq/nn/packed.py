"""Linear layers for inference on a CPU: packed once, or in int8 or bf16; layers that read one input are one product.

`pack` and `quantize` replace the `nn.Linear` layers of a model. A packed layer has the parameters that it had, under
their names, and computes as before where gradients are enabled; weights that change are packed anew. A layer in int8
or bf16 has no parameters: in int8 its weight has one scale a channel, and its input is quantized as it comes, with one
scale a row (where torch multiplies, a call).
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from relpos_fairseq.attention.native import layer as kernel
from relpos_fairseq.core.positions import is_captured
from relpos_fairseq.io.command import keep_freed_memory
from relpos_fairseq.io.errors import UserError

ROWS = 128  # for which oneDNN lays out a weight; from 32 rows on the layout hardly differs
NOISE = "fairseq.modules.quant_noise"  # whose hook acts in training alone
ENGINES = ("x86", "onednn", "fbgemm", "qnnpack")  # of int8, in the order in which they are taken


class PackedProduct:
    """The product of rows with the weights of linear layers that read the same input, packed.

    Args:
        layers: the layers; they keep their parameters.
    """

    def __init__(self, *layers: nn.Linear) -> None:
        self.layers = layers
        self._packed: tuple[list, ByKernel | ByOneDNN] | None = None

    def __reduce__(self) -> tuple:  # packed tensors are not copied or saved
        return type(self), self.layers

    def applies_to(self, rows: Tensor) -> bool:
        """Return True if rows can be multiplied so: on a CPU, in fp32 like the weights, without gradients."""
        weight: Any = self.layers[0]._parameters.get("weight")  # an attribute of a module is found more slowly
        return weight is not None and weight.dtype is torch.float32 and weight.is_cpu and is_plain(rows)

    def forget(self) -> None:
        """Pack the weights anew when they are used next: an optimizer may change them unseen, through `.data`."""
        self._packed = None

    def __call__(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return every layer's output of rows (..., E)."""
        found = self.packed.product(rows)
        return found.split([layer.out_features for layer in self.layers], -1) if len(self.layers) > 1 else (found,)

    @property
    def packed(self) -> ByKernel | ByOneDNN:
        """The weights as they are now."""
        state = [_version(part) for layer in self.layers for part in layer._parameters.values()]
        held = self._packed  # which another thread may forget
        if held is None or held[0] != state:
            weight, bias = side_by_side(self.layers)
            self._packed = held = state, (ByKernel if kernel.packs(weight) else ByOneDNN)(weight, bias)
        return held[1]


def is_plain(rows: Tensor) -> bool:
    """Return whether rows are on a CPU, in fp32, and nothing but their values matters: no gradient, no graph."""
    known = rows.dtype is torch.float32 and rows.is_cpu
    return known and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu") and not is_captured()


class ByKernel:
    """A weight (out, in) and a bias (out,) or None, packed for the kernel in C."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed = kernel.pack(weight, bias)

    def product(self, rows: Tensor) -> Tensor:
        """Return the output of rows (..., E)."""
        return kernel.linear(rows, self.packed)


class ByOneDNN:
    """A weight (out, in) and a bias (out,) or None, packed by oneDNN, where the kernel in C cannot be compiled."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS), bias

    def product(self, rows: Tensor) -> Tensor:
        """Return the output of rows (..., E)."""
        return torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")


def side_by_side(layers: Sequence[nn.Linear | ReducedLinear]) -> tuple[Tensor, Tensor | None]:
    """Return the weight and the bias of one layer whose outputs are those of all, which have biases alike."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return weight, torch.cat([bias.detach() for bias in biases]) if biases else None


def _version(part: Tensor | None) -> tuple[int, int] | None:
    """Return what changes with a tensor's values."""
    return None if part is None else (part.data_ptr(), 0 if part.is_inference() else part._version)


class PackedLinear(nn.Linear):
    """A linear layer with a packed copy of its weight."""

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.product = PackedProduct(self)
        self.train(layer.training)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the output of rows (..., E)."""
        if self.product.applies_to(rows):
            return self.product(rows)[0]
        if torch.is_grad_enabled():
            self.product.forget()
        return F.linear(rows, self.weight, self.bias)


class ReducedLinear(nn.Module):
    """Base class of a linear layer in fewer bits; `weight` and `bias` are what it computes with, in fp32."""

    kind: str  # a name of KINDS

    def __init__(self, *layers: nn.Linear | ReducedLinear) -> None:
        """Make one layer of those that read the same input, their outputs side by side."""
        super().__init__()
        weight, bias = side_by_side(layers)
        self.out_features, self.in_features = weight.shape
        self.take(weight.float(), None if bias is None else bias.float())
        self.train(layers[0].training)

    def take(self, weight: Tensor, bias: Tensor | None) -> None:
        """Keep a weight (out, in) and a bias (out,)."""
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:
        raise NotImplementedError

    @property
    def bias(self) -> Tensor | None:
        raise NotImplementedError

    @staticmethod
    def problem() -> str | None:
        """Return why this machine does not compute so, or None."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        raise UserError(f"a model in {self.kind} is not saved: save the one that it was made of")

    def _load_from_state_dict(self, *given: Any) -> None:
        raise UserError(f"a model in {self.kind} takes no weights: load them first, then quantize it")


class QuantizedLinear(ReducedLinear):
    """A linear layer in int8."""

    kind = "int8"

    @staticmethod
    def problem() -> str | None:
        known = torch.backends.quantized.supported_engines
        return None if any(one in known for one in ENGINES) else "this build of torch multiplies no integers"

    def take(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed = (IntegersByKernel if kernel.packs_integers(weight) else IntegersByTorch)(weight, bias)

    @property
    def weight(self) -> Tensor:
        return self.packed.weight

    @property
    def bias(self) -> Tensor | None:
        return self.packed.bias

    def forward(self, rows: Tensor) -> Tensor:
        """Return the output of rows (..., E), in their type."""
        return self.packed.product(rows.float()).to(rows.dtype)


class IntegersByKernel:
    """A weight (out, in) and a bias (out,) or None for the kernel in C, which quantizes the input row by row."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.bias = bias
        self.packed = kernel.pack_integers(*kernel.integers_of(weight), bias)

    def __reduce__(self) -> tuple:  # another machine has other panels
        return _integers, (*self.packed.integers, self.bias)

    @property
    def weight(self) -> Tensor:
        integers, scales = self.packed.integers
        return integers * scales[:, None]

    def product(self, rows: Tensor) -> Tensor:
        """Return the output of rows (..., E)."""
        return kernel.linear(rows.detach(), self.packed)


def _integers(integers: Tensor, scales: Tensor, bias: Tensor | None) -> IntegersByKernel | IntegersByTorch:
    """Return integers (out, in) with a scale an output as this machine multiplies by them."""
    weight = integers * scales[:, None]
    if not kernel.packs_integers(weight):
        return IntegersByTorch(weight, bias)
    found = IntegersByKernel.__new__(IntegersByKernel)
    found.bias, found.packed = bias, kernel.pack_integers(integers, scales, bias)
    return found


class IntegersByTorch:
    """A weight (out, in) and a bias (out,) or None for torch, which quantizes the input with one scale."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        known = torch.backends.quantized.supported_engines
        torch.backends.quantized.engine = next(one for one in ENGINES if one in known)
        scales = weight.abs().amax(1).clamp(min=1e-12) / 127
        zeros = torch.zeros(len(scales), dtype=torch.long)
        with warnings.catch_warnings():  # torch announces an end of these functions, and no other of its own
            warnings.simplefilter("ignore")
            integers = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        self.packed = torch.ops.quantized.linear_prepack(integers, bias)
        # Without these instructions pairs of products are added in 16 bits: inputs have 7 bits then.
        self.narrow = not torch.cpu._is_vnni_supported()

    @property
    def weight(self) -> Tensor:
        return torch.ops.quantized.linear_unpack(self.packed)[0].dequantize()

    @property
    def bias(self) -> Tensor | None:
        return torch.ops.quantized.linear_unpack(self.packed)[1]

    def product(self, rows: Tensor) -> Tensor:
        """Return the output of rows (..., E)."""
        return torch.ops.quantized.linear_dynamic(rows.contiguous(), self.packed, self.narrow)


class BFloat16Linear(ReducedLinear):
    """A linear layer in bf16, whose sums are in fp32."""

    kind = "bf16"

    @staticmethod
    def problem() -> str | None:
        x86 = platform.machine().lower() in ("x86_64", "amd64")  # where oneDNN would emulate it
        has = torch.cpu._is_avx512_bf16_supported() if x86 else torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return None if can_pack() and has else "this processor has no products of bf16, or this torch no oneDNN"

    def take(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16(), ROWS)
        self.rounded = None if bias is None else bias.bfloat16()

    def __getstate__(self) -> dict[str, Any]:  # packed tensors are not copied
        return self.__dict__ | {"packed": self.packed.to_dense()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.packed.bfloat16(), ROWS)

    @property
    def weight(self) -> Tensor:
        return self.packed.to_dense().float()

    @property
    def bias(self) -> Tensor | None:
        return None if self.rounded is None else self.rounded.float()

    def forward(self, rows: Tensor) -> Tensor:
        """Return the output of rows (..., E), in their type."""
        given = rows.bfloat16().contiguous()
        return torch.ops.mkldnn._linear_pointwise(given, self.packed, self.rounded, "none", [], "").to(rows.dtype)


KINDS: dict[str, type[ReducedLinear]] = {one.kind: one for one in (QuantizedLinear, BFloat16Linear)}


def is_hooked(module: nn.Module | None) -> bool:
    """Return whether something waits for what a module is given or finds, or stands in its place."""
    if module is None:
        return False
    return bool(module._forward_hooks or module._forward_pre_hooks) or "forward" in module.__dict__


def for_kernel(layer: nn.Module) -> kernel.Packed | None:
    """Return a linear layer's weights as the kernel in C reads them, as they are now; None: it does not read them."""
    found: Any = None
    if is_hooked(layer):
        return None
    if type(layer) is PackedLinear:
        weight = layer._parameters.get("weight")
        found = layer.product.packed if weight is not None and kernel.packs(weight) else None
    elif type(layer) is QuantizedLinear:
        found = layer.packed
    return found.packed if isinstance(found, ByKernel | IntegersByKernel) else None


def product_for_kernel(layers: Sequence[nn.Module], joined: Any) -> kernel.Packed | None:
    """Return the weights of layers' one product as the kernel in C reads them; None: there is none, or a hook waits."""
    if joined is None or joined.layers != tuple(layers) or any(map(is_hooked, layers)):
        return None
    if type(joined) is ReducedProduct:
        return for_kernel(joined.layer)
    weights = [layer._parameters.get("weight") for layer in layers]
    found = None if any(one is None or not kernel.packs(one) for one in weights) else joined.packed
    return found.packed if isinstance(found, ByKernel) else None


def can_pack() -> bool:
    """Return True if this machine's torch multiplies by oneDNN's packed weights."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def pack(model: nn.Module) -> None:
    """Replace the linear layers of a model on a CPU by packed ones, and join those of one input, in place."""
    if next(model.parameters()).device.type != "cpu":
        return
    keep_freed_memory()
    if not can_pack():
        return
    _replace(model, PackedLinear)
    _join(model, PackedLinear, PackedProduct)


def quantize(model: nn.Module, kind: str) -> None:
    """Replace the linear layers of a model on a CPU by layers in int8 or bf16, in place.

    Raises:
        UserError: another kind, no CPU, or this machine does not compute so.
    """
    if kind not in KINDS:
        raise UserError(f"--quantization {kind}: one of {', '.join(KINDS)}")
    if (device := next(model.parameters()).device.type) != "cpu":
        raise UserError(f"--quantization {kind} is for CPUs, and the model is on {device}: give --cpu")
    if problem := KINDS[kind].problem():
        raise UserError(f"--quantization {kind}: {problem}")
    if before := next((part.kind for part in model.modules() if isinstance(part, ReducedLinear)), None):
        raise UserError(f"--quantization {kind}: the model is in {before} already")
    keep_freed_memory()
    _replace(model, KINDS[kind])
    _join(model, KINDS[kind], ReducedProduct)


def prepare(model: nn.Module, quantization: str | None = None) -> None:
    """Make a model ready for inference, in place: in int8 or bf16 as `quantization` says, else packed on a CPU.

    Raises:
        UserError: as `quantize`.
    """
    if quantization is not None:
        quantize(model, quantization)
    pack(model)


class ReducedProduct:
    """The product of rows with the weights of layers in int8 or bf16 that read the same input."""

    def __init__(self, *layers: ReducedLinear) -> None:
        self.layers = layers
        self.sizes, self.layer = [layer.out_features for layer in layers], type(layers[0])(*layers)

    def forget(self) -> None:
        """Do nothing: weights in fewer bits are not trained."""

    def applies_to(self, rows: Tensor) -> bool:
        """Return True: fewer bits are all that is there."""
        return True

    def __call__(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return every layer's output of rows (..., E)."""
        return self.layer(rows).split(self.sizes, -1)


def _replace(model: nn.Module, kind: type[nn.Module]) -> None:
    """Replace linear layers but those with hooks; noise in training says nothing of layers that are not trained."""
    trains = kind is PackedLinear
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            before = [hook for hook in child._forward_pre_hooks.values() if trains or hook.__module__ != NOISE]
            hooks = [*before, *child._forward_hooks.values()]
            if type(child) in (nn.Linear, PackedLinear) and type(child) is not kind and not hooks:
                setattr(module, name, kind(child))


def _join(model: nn.Module, kind: type[nn.Module], product: type) -> None:
    """Let the projections of each attention that read the same rows be one product, and layers join what they can."""
    for module in model.modules():
        if join := getattr(module, "join", None):
            join()
        for name, parts in getattr(module, "joined", {}).items():
            layers = [getattr(module, part) for part in parts]
            alike = len({layer.bias is None for layer in layers if type(layer) is kind}) == 1
            if alike and all(type(layer) is kind for layer in layers):
                setattr(module, name, product(*layers))


def products(layers: Sequence[nn.Module], joined: Any, rows: Tensor) -> tuple[Tensor, ...]:
    """Return the outputs of layers that read the same rows, by their one product where there is one that applies."""
    if joined is not None and joined.layers == tuple(layers) and not any(map(is_hooked, layers)):
        if joined.applies_to(rows):
            return joined(rows)
        if torch.is_grad_enabled():
            joined.forget()
    return tuple(layer(rows) for layer in layers)
