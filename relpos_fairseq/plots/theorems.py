"""Check theorems 1 and 2 of Chen2021 (section 2.3) on random matrices, and on the construction of its proof.

    A_a = (X + P)^T W_Q^T W_K (X + P)               positions added to the input
    A_r = X^T W_Q^T W_K X + P'^T P'                 positions added to the logits, of rank d_p

Theorem 1: a loss of X + P has the same gradient at X and at P.  Theorem 2: rank A_a <= d_h for all
X, P and W; there are such that rank A_r = min(d_h + d_p, n) > d_h.  X is (d, n), W (d_h, d) and
P' (d_p, n).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from relpos_fairseq.io.progress import table


@dataclass(frozen=True)
class Sizes:
    """The sizes of the theorems' matrices.

    Raises:
        ValueError: the theorems exclude these sizes.
    """

    width: int  # d of the model
    head_dim: int  # d_h
    rank: int  # d_p of the positions
    length: int  # n

    def __post_init__(self) -> None:
        if not 0 < self.head_dim < self.width:
            raise ValueError(f"theorem 2 needs 0 < d_h < d, got --head-dim {self.head_dim} and --width {self.width}")
        if not self.head_dim < self.rank <= self.length:
            raise ValueError(
                f"theorem 2 needs d_h < d_p <= n, got --head-dim {self.head_dim}, --rank "
                f"{self.rank} and --length {self.length}"
            )


def rank(matrix: Tensor) -> int:
    """Return how many singular values are above rounding errors."""
    return int(torch.linalg.matrix_rank(matrix))


def construction(sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Return the X, W = W_Q = W_K and P' of theorem 2's proof: unit matrices padded by zeros."""
    x = torch.eye(sizes.width, sizes.length, dtype=torch.float64)
    w = torch.eye(sizes.head_dim, sizes.width, dtype=torch.float64)
    positions = torch.zeros(sizes.rank, sizes.length, dtype=torch.float64)
    positions[:, sizes.length - sizes.rank :] = torch.eye(sizes.rank, dtype=torch.float64)
    return x, w, positions


def ranks(sizes: Sizes, seed: int) -> dict[str, int]:
    """Return the ranks of A_a, and of A_r and its two terms, random and as constructed."""
    random = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=random, dtype=torch.float64)

    x, p = draw(sizes.width, sizes.length), draw(sizes.width, sizes.length)
    w_q, w_k = draw(sizes.head_dim, sizes.width), draw(sizes.head_dim, sizes.width)
    own = draw(sizes.rank, sizes.length)
    content, positions = (w_q @ x).T @ (w_k @ x), own.T @ own
    made_x, made_w, made_p = construction(sizes)
    made = (made_w @ made_x).T @ (made_w @ made_x) + made_p.T @ made_p
    return {
        "A_a": rank((w_q @ (x + p)).T @ (w_k @ (x + p))),
        "content": rank(content),
        "positions": rank(positions),
        "A_r": rank(content + positions),
        "A_r as constructed": rank(made),
    }


def gradients(sizes: Sizes, seed: int) -> float:
    """Return the largest difference of a loss' gradients at X and at P, through an attention."""
    random = torch.Generator().manual_seed(seed)
    size = (sizes.length, sizes.width)
    x, p = (torch.randn(size, generator=random, dtype=torch.float64) for _ in range(2))
    x.requires_grad_(), p.requires_grad_()
    mixed = torch.nn.functional.scaled_dot_product_attention(*[(x + p)[None]] * 3)
    mixed.tanh().square().sum().backward()
    return float((x.grad - p.grad).abs().max())


def report(sizes: Sizes, seed: int) -> str:
    """Return both theorems' numbers beside their bounds, as text."""
    found = ranks(sizes, seed)
    bound, most = sizes.head_dim, min(sizes.head_dim + sizes.rank, sizes.length)
    said = {
        "A_a": f"at most d_h = {bound}",
        "content": f"at most d_h = {bound}",
        "positions": f"at most d_p = {sizes.rank}",
        "A_r": f"at most min(d_h + d_p, n) = {most}",
        "A_r as constructed": f"min(d_h + d_p, n) = {most}",
    }
    return "\n".join(
        [
            "theorem 1: gradients at X and at P differ by at most "
            f"{gradients(sizes, seed):.1e} (d {sizes.width}, n {sizes.length})",
            f"theorem 2: d {sizes.width}, d_h {sizes.head_dim}, d_p {sizes.rank}, n {sizes.length}, seed {seed}",
            table([[name, found[name], said[name]] for name in found], ["matrix", "rank", "Chen2021"]),
        ]
    )
