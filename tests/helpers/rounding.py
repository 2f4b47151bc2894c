"""The rounding that a computation must be allowed, whatever the processor, from its own numbers.

Monte Carlo arithmetic (Parker 1997): the computation runs in fp64, and each operation errs at
random as one of a coarser precision may.  A product errs by its own rounding.  A sum of n terms t
with the result s errs by the rounding of its n partial sums, whose squares add up to
n (s^2 / 3 + sum(t^2) / 2): the first part where terms have one sign, the second where signs are
random (Higham and Mary, 2019 and 2020, bound both).  So a result that vanishes
because terms cancel still has an error of the size of what cancels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class Rounded(TorchDispatchMode):
    """Let the operations inside err as those of a coarser precision may.

    Args:
        epsilon: of the coarser type; a rounding's root mean square is epsilon / sqrt(12).
        seed: of the errors.
    """

    def __init__(self, epsilon: float, seed: int) -> None:
        super().__init__()
        self.unit = epsilon / 12**0.5
        self.generator = torch.Generator().manual_seed(seed)
        self.rules: dict[object, Callable[..., Tensor]] = {
            **dict.fromkeys(ROUNDED_ONCE, _one_rounding),
            aten.bmm.default: _products,
            aten.mm.default: _products,
            aten.addmm.default: _sum_and_products,
            aten.cumsum.default: _running_sums,
            aten.sum.dim_IntList: _sums,
            aten.scatter_add.default: _scattered,
            aten.index_put.default: _put,
            aten._softmax.default: _softmax,
            aten._softmax_backward_data.default: _softmax_backward,
        }

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        """Run the operation, and add its error where it rounds."""
        if function is aten._softmax_backward_data.default:
            upstream, probs, *rest = args  # a backward pass must not see that they do not sum to 1
            args = (upstream, probs / probs.sum(-1, keepdim=True), *rest)
        result = function(*args, **(kwargs or {}))
        if function in EXACT or not _is_real(result):
            return result
        if function not in self.rules:
            raise NotImplementedError(f"no rule for the rounding of {function}: add one")
        variance = self.rules[function](result, *args)
        noise = torch.randn(result.shape, generator=self.generator, dtype=result.dtype)
        return result + self.unit * variance.sqrt() * noise


def _operations(names: str) -> set[object]:
    return {getattr(getattr(aten, name), overload) for name, overload in (part.split(".") for part in names.split())}


# Operations that move numbers, or select among them; and those whose result is rounded once.
EXACT = _operations("""
    view.default transpose.int expand.default detach.default unsqueeze.default _unsafe_view.default
    _to_copy.default masked_fill.Scalar new_zeros.default gather.default index.Tensor squeeze.dim
    zeros_like.default clone.default where.self scalar_tensor.default randn.generator slice.Tensor select.int
    permute.default slice_backward.default select_backward.default neg.default abs.default maximum.default
    minimum.default clamp_min.default t.default flip.default relu.default
    threshold_backward.default clamp.default floor.default ceil.default cat.default unbind.int stack.default
    sgn.default sign.default masked_fill_.Scalar copy_.default zero_.default
""")
ROUNDED_ONCE = _operations("""
    mul.Tensor mul.Scalar add.Tensor add.Scalar sub.Tensor rsub.Scalar div.Tensor div.Scalar reciprocal.default
    sqrt.default pow.Tensor_Scalar exp.default log.default log1p.default sigmoid.default sigmoid_backward.default
""")


def _is_real(result: object) -> bool:
    return isinstance(result, Tensor) and result.is_floating_point()


def _sum_of(count: float | Tensor, result: Tensor, squares: Tensor) -> Tensor:
    """The variance, in units, of a sum: terms, their sum, the sum of their squares."""
    return count * (result.square() / 3 + squares / 2)


def _one_rounding(result: Tensor, *_: object) -> Tensor:
    return result.square()


def _products(result: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return _sum_of(left.size(-1), result, left.square() @ right.square())


def _sum_and_products(result: Tensor, start: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return _sum_of(left.size(-1) + 1, result, start.square() + left.square() @ right.square())


def _running_sums(result: Tensor, terms: Tensor, dim: int) -> Tensor:
    count = torch.ones_like(terms).cumsum(dim)
    return _sum_of(count, result, terms.square().cumsum(dim))


def _sums(result: Tensor, terms: Tensor, dims: list[int], keep: bool = False) -> Tensor:
    count = terms.numel() / max(1, result.numel())
    return _sum_of(count, result, terms.square().sum(dims, keep))


def _scattered(result: Tensor, start: Tensor, dim: int, index: Tensor, terms: Tensor) -> Tensor:
    squares = torch.zeros_like(start).scatter_add(dim, index, terms.square())
    count = torch.zeros_like(start).scatter_add(dim, index, torch.ones_like(terms))
    return _sum_of(count, result, squares)


def _put(result: Tensor, start: Tensor, index: list, terms: Tensor, accumulate: bool = False) -> Tensor:
    if not accumulate:
        return torch.zeros_like(result)
    squares = aten.index_put(torch.zeros_like(start), index, terms.square(), True)
    count = aten.index_put(torch.zeros_like(start), index, torch.ones_like(terms), True)
    return _sum_of(count, result, squares)


def _softmax(result: Tensor, logits: Tensor, dim: int, *_: object) -> Tensor:
    """A fused kernel keeps a row's log-sum-exp, and reads probabilities as 2 ** (logit - it).

    Both are rounded twice, once for the other base; the sum inside has the row's length.
    """
    included = logits.abs() < 1e100
    argument = torch.where(included, logits, 0.0)
    top = torch.where(included, logits, -1e9).amax(dim, keepdim=True).clamp(min=-1e8)
    top = torch.where(top > -1e8, top, 0.0)  # a row without a key
    return result.square() * (1 + 2 * argument.square() + 2 * top.square() + result.size(dim) / 3)


def _softmax_backward(result: Tensor, upstream: Tensor, probs: Tensor, dim: int, *_: object) -> Tensor:
    terms = upstream * probs
    mean = terms.sum(dim, keepdim=True)
    of_mean = _sum_of(probs.size(dim), mean, terms.square().sum(dim, keepdim=True))
    return probs.square() * (upstream.square() + mean.square() + of_mean)
