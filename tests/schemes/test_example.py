"""How a scheme is tested, in short: M4's equation once more, pair by pair, against two backends."""

import pytest
import torch

from cases import Case, build
from relpos_fairseq.attention import AttentionInputs, attend
from relpos_fairseq.core.positions import Positions


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_m4(backend: str) -> None:
    clip, length, dim = 2, 5, 4
    placement, layer = build(Case("m4", {"position_clip_distance": str(clip)}), heads=1, dim=dim)
    positions = Positions(tgt_len=length, src_len=length)
    q, k, v = torch.randn(3, 1, 1, length, dim, dtype=torch.float64)  # each (B, H, T, D)
    terms = placement.context(positions).shared + layer.evaluate(positions).terms
    call = AttentionInputs(q, k, v, terms, positions, scale=dim**-0.5)
    output, _ = attend(call, backend)

    a, (qs, ks, vs) = layer[0].table[0].detach(), (x[0, 0] for x in (q, k, v))
    for i in range(length):
        rows = [a[min(max(j - i, -clip), clip) + clip] for j in range(length)]
        logits = [qs[i] @ ks[j] + qs[i] @ rows[j] + ks[j] @ rows[j] for j in range(length)]
        probs = (torch.stack(logits) / dim**0.5).softmax(0)
        assert torch.allclose(output[0, 0, i], probs @ vs, rtol=0, atol=1e-10)
