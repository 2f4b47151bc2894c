"""Inputs that no one tries: a batch without rows, one channel, 257 channels, a step of decoding.

Every backend equals the reference in values and all gradients, or refuses in words.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.scheme_calls import weighted
from relpos_fairseq.attention import BACKENDS, AttentionInputs, api, attend, native, triton
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.relations import Clipped
from relpos_fairseq.core.terms import PositionTerms, Reset
from relpos_fairseq.modules.cross_attention import CrossAttention

UNSERVED = {"reference"} | ({"triton"} if not triton.interpreted() else set())
UNSERVED |= {"native"} if native.build.problem() else set()
KINDS = ("none", "vectors", "trilinear", "product", "factors")
SHAPES = {
    "no rows": {"batch": 0},
    "no rows, masked": {"batch": 0, "causal": True, "key_padding": torch.zeros(0, 5).bool()},
    "no rows, a step": {"batch": 0, "tgt_len": 1, "start": 4, "causal": True},
    "one channel": {"dim": 1},
    "one channel, a step": {"dim": 1, "tgt_len": 1, "start": 4, "causal": True},
    "257 channels": {"dim": 257},
}


def make_call(kind: str, batch: int = 2, dim: int = 4, tgt_len: int = 5, start: int = 0, **options) -> AttentionInputs:
    """A call of five keys in fp64; all tensors want gradients."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_()

    q, k, v = (draw(batch, 2, length, dim) for length in (tgt_len, 5, 5))
    clipped, vectors = Clipped(2, 2), {}
    for name in ("query_vectors", "key_vectors", "value_vectors", "trilinear"):
        vectors[name] = draw(2, 5, dim)
    both = {name: vectors[name] for name in ("query_vectors", "key_vectors")}
    reset = Reset(draw(2), draw(2), torch.zeros(1, dtype=torch.long))
    factors = (draw(1, 2, tgt_len, 3), draw(1, 2, 5, 3))
    terms = {
        "none": (),
        "vectors": (
            PositionTerms(clipped, **both, value_vectors=vectors["value_vectors"]),
            PositionTerms(clipped, static=draw(1, 5)),
        ),
        "trilinear": (PositionTerms(clipped, trilinear=vectors["trilinear"]),),
        "product": (PositionTerms(clipped, **both, product=True),),
        "factors": (PositionTerms(clipped, draw(1, 5, dim), static_factors=factors, reset=reset),),
    }
    positions = Positions(tgt_len, 5, start)
    return AttentionInputs(q, k, v, terms[kind], positions, 0.5, **options)


def results(inputs: AttentionInputs, backend: str) -> list[Tensor]:
    """Output and every gradient."""
    out, _ = attend(inputs, backend)
    return [out, *torch.autograd.grad(weighted(out), inputs.tensors(), materialize_grads=True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(shape: str, kind: str) -> None:
    """Or refuses: SDPA what has terms, Triton more than 128 channels."""
    inputs = make_call(kind, **SHAPES[shape])
    expected = results(inputs, "reference")
    for backend in set(BACKENDS) - UNSERVED:
        known = api._MODULES.get(backend)
        if known is not None and known.refusal(inputs) is not None:
            assert backend == "sdpa" and kind != "none" or "257" in shape and backend == "triton"
            continue
        for one, other in zip(results(inputs, backend), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, msg=backend)


@pytest.mark.parametrize("backend", sorted(set(BACKENDS) - UNSERVED))
def test_dropout_of_no_rows(backend: str) -> None:
    """Nothing to draw; gradients of tables are 0."""
    kind = "none" if backend == "sdpa" else "vectors"
    out, *gradients = results(make_call(kind, batch=0, dropout=0.3), backend)
    assert out.shape == (0, 2, 5, 4)
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("training", [False, True])
def test_a_source_without_tokens(training: bool) -> None:
    """Attention over no key adds nothing: the output projection's bias, and finite gradients."""
    module = CrossAttention(8, 2, kdim=6, vdim=6, encoder_decoder_attention=True, dropout=0.1)
    module.train(training)
    source = torch.zeros(0, 3, 6, requires_grad=True)
    out, _ = module(torch.randn(4, 3, 8), source, source, static_kv=True, need_weights=False)
    assert torch.equal(out, module.out_proj.bias.expand_as(out))
    out.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())
