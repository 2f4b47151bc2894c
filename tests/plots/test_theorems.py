"""Chen2021's theorems 1 and 2: ranks by hand, and what the command prints."""

from __future__ import annotations

import pytest
import torch

from helpers.commands import relpos_job
from relpos_fairseq.plots.theorems import Sizes, construction, gradients, ranks

SIZES = Sizes(width=12, head_dim=3, rank=5, length=9)


def test_ranks_are_the_theorems():
    assert ranks(SIZES, 1) == {"A_a": 3, "content": 3, "positions": 5, "A_r": 8, "A_r as constructed": 8}
    full = ranks(Sizes(width=12, head_dim=3, rank=8, length=9), 2)
    assert (full["A_a"], full["A_r"], full["A_r as constructed"]) == (3, 9, 9)


def test_construction_is_the_proofs():
    """Ones at the first d_h places of the content's diagonal, at the last d_p of the positions'."""
    x, w, positions = construction(SIZES)
    content = (w @ x).T @ (w @ x)
    assert torch.equal(content.diag(), torch.tensor([1.0] * 3 + [0.0] * 6).double())
    own = positions.T @ positions
    assert torch.equal(own.diag(), torch.tensor([0.0] * 4 + [1.0] * 5).double())
    assert content.sum() == 3 and own.sum() == 5


def test_gradients_are_equal():
    assert gradients(SIZES, 1) == 0.0


def test_command(capsys):
    relpos_job("theorems", "--width", "12", "--head-dim", "3", "--rank", "5", "--length", "9")
    said = capsys.readouterr().out
    assert "theorem 1" in said and "A_r as constructed" in said and "= 8" in said


def test_sizes_that_the_theorem_excludes():
    with pytest.raises(ValueError, match="d_h < d_p <= n, got --head-dim 3, --rank 3"):
        Sizes(width=12, head_dim=3, rank=3, length=9)
    with pytest.raises(ValueError, match="0 < d_h < d"):
        Sizes(width=3, head_dim=3, rank=4, length=9)
