"""Vectors over many distances in Triton: the reference's values and gradients, in linear memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cases import Case, build
from helpers.scheme_calls import gradients, remaker

pytest.importorskip("triton", reason="triton is not installed")
from relpos_fairseq.attention import AttentionInputs
from relpos_fairseq.attention import triton as backend
from relpos_fairseq.attention.triton import kernel_args, operands
from relpos_fairseq.core.positions import Positions, index_of_tokens

pytestmark = pytest.mark.skipif(not backend.interpreted(), reason="fp64 is for the interpreter (TRITON_INTERPRET=1)")
EXACT = {"rtol": 1e-9, "atol": 1e-9}
WIDE = ("transformer_xl", "shaw_keys", "m4", "deberta")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_args, "long_table_launch_of", lambda *_, **__: kernel_args.Launch(16, 16, 4, 1))
    monkeypatch.setattr(operands, "STORED_DISTANCES", 8)


def make_call(case: Case, tgt_len: int, memory: int = 0, causal: bool = False, mask: str = "none"):
    """A call in fp64 whose tables are as long as the input, and what remakes it."""
    src_len = tgt_len + memory
    batch = 2 if mask == "padding" else 1
    clipped = {"m2", "m3", "m4", "shaw", "shaw_keys", "deberta", "rel_scalar"}
    unclipped = {"position_clip_distance": "0"} if clipped & set(case.scheme.split("+")) else {}
    case = Case(case.scheme, unclipped | case.flags)
    stack, layer = build(case, causal=causal, heads=2, dim=4, longest=src_len)
    generator = torch.Generator().manual_seed(src_len)

    def draw(length: int) -> Tensor:
        size = (batch, length, 2, 4)
        return torch.randn(size, generator=generator, dtype=torch.float64).transpose(1, 2)

    padding, chosen = None, {}
    if mask == "padding":
        padding = torch.zeros(batch, src_len, dtype=torch.bool)
        padding[0, -9:], padding[1, :18] = True, True
        chosen["key_padding"] = padding
    elif mask == "window":
        chosen["window"] = 21
    positions = Positions(tgt_len, src_len, memory, token_index=index_of_tokens(padding))
    q, k, v = draw(tgt_len), draw(src_len), draw(src_len)
    inputs = AttentionInputs(q, k, v, (), positions, stack.plan.scale, causal=causal, **chosen)
    remake = remaker(inputs, stack, layer)
    return remake(q, k, v), [*stack.parameters(), *layer.parameters()], remake


def compare(inputs: AttentionInputs, parameters: list, remake) -> None:
    """Values and all gradients of the kernels and of the reference."""
    assert backend.refusal(inputs) is None
    assert {"query_vectors", "key_vectors"} & set(operands.operands_of(inputs).tensors)
    expected, wanted = gradients(inputs, "reference", parameters, remake)
    got, found = gradients(inputs, "triton", parameters, remake)
    torch.testing.assert_close(got, expected, **EXACT)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
@pytest.mark.parametrize("scheme", WIDE)
def test_equals_the_reference(scheme: str, causal: bool) -> None:
    """Tiles on, before and behind the diagonal, and memory that shifts it inside them."""
    compare(*make_call(Case(scheme), 33, 14 if causal else 0, causal))


@pytest.mark.parametrize(("length", "memory"), [(1, 17), (16, 0), (20, 30)])
@pytest.mark.slow
def test_lengths(length: int, memory: int) -> None:
    """A single query, one tile exactly, and more memory than queries."""
    compare(*make_call(Case("m4"), length, memory))


@pytest.mark.parametrize(
    ("case", "mask"),
    [
        (Case("transformer_xl"), "padding"),
        (Case("m4"), "window"),
        (Case("m4", {"position_reset_cls": "on"}), "none"),
        (Case("m4", {"position_clip_distance": "12"}), "none"),
        (Case("shaw"), "none"),
        (Case("transformer_xl+m2+t5"), "none"),
        (Case("m3+shaw_keys", {"position_clip_distance": "6"}), "none"),
        (Case("rope+m4"), "none"),
        (Case("transformer_xl", {"position_query_bias": "off"}), "none"),
        (Case("m4", {"position_share": "none"}), "padding"),
    ],
    ids=str,
)
@pytest.mark.slow
def test_options(case: Case, mask: str) -> None:
    """Masks, resets, far distances that share a vector, and what else may be in a tile."""
    compare(*make_call(case, 36, causal=mask == "window", mask=mask))
