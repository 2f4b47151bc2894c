"""Query rows in blocks: exact, memory linear in T, for every scheme, training and inference.

Each block forms its logits from vectors over the distances that it meets (`toeplitz`), so there is
neither a (T, S) index nor a (T, T, D) tensor.  Where more than one block is needed, a block keeps
nothing for its backward pass but its inputs and is computed again there (dropout included, whose
random state is replayed).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from relpos_fairseq.attention import tiles
from relpos_fairseq.attention.formula import logits
from relpos_fairseq.attention.inputs import AttentionInputs, drop, probabilities
from relpos_fairseq.attention.sheared import Sheared
from relpos_fairseq.attention.step import attend_step, serves
from relpos_fairseq.attention.toeplitz import unshear
from relpos_fairseq.relations import DistanceRelation

name = "blocked"

# Elements of one block's logits: 8 MiB in fp32 stays near a CPU's cache; a GPU wants more work.
BLOCK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 26}
LEAST_ROWS = 16


def refusal(inputs: AttentionInputs) -> str | None:
    """Why these inputs cannot be evaluated, or None."""
    for term in inputs.terms:
        if term.relation is None or isinstance(term.relation, DistanceRelation):
            continue
        odd = [field for field in term.present if field not in ("static", "gate", "reset")]
        if odd:
            return f"{' and '.join(odd)} over {term.relation}"
    return None


def attend(inputs: AttentionInputs, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
    """Output (B, H, T, Dv) and, where asked, probabilities (B, H, T, S) after dropout."""
    if serves(inputs.terms, inputs.positions):
        return _kept(attend_step(inputs), need_weights)
    rows = block_rows(inputs)
    tgt_len = inputs.positions.tgt_len
    # Tiles are views of one buffer, which torch.compile, making operations pure, takes apart.
    pure = torch.compiler.is_compiling()
    if not need_weights and not pure and tiles.refusal(inputs) is None:
        return tiles.attend(inputs), None
    if rows >= tgt_len:
        return _kept(_attend_block(inputs), need_weights)
    outputs, weights = [], []
    for start in range(0, tgt_len, rows):
        block = inputs.rows(start, min(start + rows, tgt_len))
        if torch.is_grad_enabled():
            out, probs = checkpoint(_attend_block, block, use_reentrant=False)
        else:
            out, probs = _attend_block(block)
        outputs.append(out)
        if need_weights:
            weights.append(probs)
    return torch.cat(outputs, dim=2), torch.cat(weights, dim=2) if need_weights else None


def block_rows(inputs: AttentionInputs) -> int:
    """How many query rows one block has: fixed by shape and device alone."""
    batch, heads, tgt_len = inputs.q.shape[:3]
    budget = BLOCK_ELEMENTS.get(inputs.q.device.type, BLOCK_ELEMENTS["cuda"])
    rows = budget // (batch * heads * inputs.k.size(2))
    return tgt_len if rows >= tgt_len else max(rows // LEAST_ROWS * LEAST_ROWS, LEAST_ROWS)


def _kept(result: tuple[Tensor, Tensor], need_weights: bool) -> tuple[Tensor, Tensor | None]:
    return result if need_weights else (result[0], None)


def _attend_block(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    products = Sheared(inputs)
    probs = probabilities(logits(products), inputs.excluded(), inputs.key_padding is not None)
    probs = drop(probs, inputs.dropout)
    out = probs @ inputs.v.to(inputs.exact)
    for term in inputs.terms:
        if term.value_vectors is not None:
            vectors = products.over_distances(term.value_vectors, term)  # (H|1, L, D)
            out = out + unshear(probs) @ vectors
    return out.to(inputs.v.dtype), probs
