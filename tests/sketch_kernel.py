"""A sketch of a fused kernel: what a GPU backend will need of the terms, and no more.

`lower` turns the terms of a call into one band of distances with two constant tails, by vectors
and slices alone; `forward` is a Triton kernel with an online softmax over that form.  It proves
that the interface of terms over relations carries a fused kernel without a change to any scheme;
it is no backend (no backward pass, no memory, no dropout).

    s_ij  = q~_i.k~_j * (G_low | G_d | G_high)
          + (RL_i + CL_j | B_{i,d} | RH_i + CH_j)      for d < low | low <= d <= high | d > high
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from relpos_fairseq.attention import AttentionInputs


@dataclass
class Lowered:
    """One band and two tails, for N = B * H rows of heads.

    Args:
        q: (N, T, D'), scaled, static factors appended.
        k: (N, T, D').
        band: (N, T, W) what is added at distance low + w.
        rows: (N, 2, T) what is added to the left and right tail by query.
        columns: (N, 2, T) the same by key.
        gate: (N, W + 2) factors of q.k: left tail, band, right tail.
        low: distance of the band's first column.
    """

    q: Tensor
    k: Tensor
    band: Tensor
    rows: Tensor
    columns: Tensor
    gate: Tensor
    low: int


def lower(inputs: AttentionInputs) -> Lowered:
    """Terms over distance relations as a band and two tails."""
    batch, heads, length, _ = inputs.q.shape
    relations = [term.relation for term in inputs.terms if term.relation is not None]
    low = max(1 - length, min((r.lowest for r in relations), default=0))
    high = min(length - 1, max((r.highest for r in relations), default=0))
    width = high - low + 1
    q, k = inputs.content_q if inputs.rotated else inputs.q, inputs.k
    k = inputs.content_k if inputs.rotated else k
    q = q * inputs.scale
    band = inputs.q.new_zeros(batch, heads, length, width)
    rows, columns = (inputs.q.new_zeros(batch, heads, 2, length) for _ in range(2))
    gate = inputs.q.new_ones(heads, width + 2)
    for term in inputs.terms:
        if term.content_offset is not None:
            offset = term.content_offset[None, :, None] * inputs.scale
            columns = columns + (offset @ inputs.k.transpose(-1, -2))
            band = band + _aligned(
                (offset @ inputs.k.transpose(-1, -2)).transpose(-1, -2), low, width
            )
        if term.relation is None:
            continue
        window = term.relation.window(low - 1, high + 1, inputs.positions.device)
        if term.gate is not None:
            gate = gate * term.gate[:, window]
        if term.static is not None:
            added = term.static[:, window][None, :, None]
            band = band + added[..., 1:-1]
            rows = rows + added[..., [0, -1]].transpose(-1, -2)
        if term.query_vectors is not None:
            query = inputs.q
            if term.query_offset is not None:
                query = query + term.query_offset[None, :, None]
            product = (query * inputs.scale) @ term.query_vectors[:, window].transpose(-1, -2)
            band = band + product[..., 1:-1]
            rows = rows + product[..., [0, -1]].transpose(-1, -2)
        if term.key_vectors is not None:
            product = (inputs.k * inputs.scale) @ term.key_vectors[:, window].transpose(-1, -2)
            band = band + _aligned(product[..., 1:-1], low, width)
            columns = columns + product[..., [0, -1]].transpose(-1, -2)
    for term in inputs.terms:
        if term.static_factors is not None:
            left, right = (f.expand(batch, heads, -1, -1) for f in term.static_factors)
            q, k = torch.cat([q, left], -1), torch.cat([k, right], -1)
    flat = [x.flatten(0, 1).contiguous() for x in (q, k, band, rows, columns)]
    return Lowered(*flat, gate.repeat(batch, 1).contiguous(), low)


def _aligned(by_key: Tensor, low: int, width: int) -> Tensor:
    """(B, H, T, W|1) products of keys, read at key i + low + w: (B, H, T, W)."""
    length = by_key.size(2)
    columns = by_key.expand(-1, -1, -1, width)
    parts = []
    for w in range(width):
        distance = low + w
        moved = torch.zeros_like(columns[..., w])
        begin, end = max(0, -distance), min(length, length - distance)
        moved[..., begin:end] = columns[..., begin + distance : end + distance, w]
        parts.append(moved)
    return torch.stack(parts, dim=-1)


@triton.jit
def _kernel(
    q_ptr, k_ptr, v_ptr, band_ptr, row_ptr, column_ptr, gate_ptr, padding_ptr, out_ptr,
    length, low, width, heads,
    D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(1)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d, dv = tl.arange(0, D), tl.arange(0, DV)
    inside = i < length
    q = tl.load(q_ptr + (n * length + i[:, None]) * D + d[None, :], mask=inside[:, None], other=0.0)
    left = tl.load(row_ptr + 2 * n * length + i, mask=inside, other=0.0)
    right = tl.load(row_ptr + (2 * n + 1) * length + i, mask=inside, other=0.0)
    gate_left = tl.load(gate_ptr + n * (width + 2))
    gate_right = tl.load(gate_ptr + n * (width + 2) + width + 1)
    top = tl.full((ROWS,), -1e30, tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DV), tl.float32)
    for start in range(0, length, KEYS):
        j = start + tl.arange(0, KEYS)
        there = j < length
        k = tl.load(
            k_ptr + (n * length + j[:, None]) * D + d[None, :], mask=there[:, None], other=0.0
        )
        v = tl.load(
            v_ptr + (n * length + j[:, None]) * DV + dv[None, :], mask=there[:, None], other=0.0
        )
        padded = tl.load(padding_ptr + (n // heads) * length + j, mask=there, other=1)
        below = tl.load(column_ptr + 2 * n * length + j, mask=there, other=0.0)
        above = tl.load(column_ptr + (2 * n + 1) * length + j, mask=there, other=0.0)
        w = j[None, :] - i[:, None] - low
        banded = (w >= 0) & (w < width) & inside[:, None] & there[None, :]
        near = tl.load(band_ptr + (n * length + i[:, None]) * width + w, mask=banded, other=0.0)
        factor = tl.load(gate_ptr + n * (width + 2) + 1 + w, mask=banded, other=1.0)
        tail = tl.where(w < 0, left[:, None] + below[None, :], right[:, None] + above[None, :])
        factor = tl.where(banded, factor, tl.where(w < 0, gate_left, gate_right))
        s = tl.dot(q, tl.trans(k)) * factor + tl.where(banded, near, tail)
        seen = there[None, :] & (padded[None, :] == 0)
        if CAUSAL:
            seen = seen & (j[None, :] <= i[:, None])
        s = tl.where(seen, s, -1e30)
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.where(seen, tl.exp(s - new_top[:, None]), 0.0)
        shrink = tl.exp(top - new_top)
        mass = mass * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p, v)
        top = new_top
    out = acc / tl.maximum(mass, 1e-30)[:, None]
    tl.store(out_ptr + (n * length + i[:, None]) * DV + dv[None, :], out, mask=inside[:, None])


def forward(inputs: AttentionInputs, rows: int = 16, keys: int = 16) -> Tensor:
    """Output (B, H, T, D) of square self-attention by the sketch kernel."""
    low = lower(inputs)
    batch, heads, length, dim = inputs.v.shape
    width = max(16, triton.next_power_of_2(low.q.size(-1)))
    q, k = (torch.nn.functional.pad(x, (0, width - x.size(-1))).float() for x in (low.q, low.k))
    v = torch.nn.functional.pad(inputs.v.flatten(0, 1), (0, 16 - dim)).float().contiguous()
    padding = inputs.key_padding
    if padding is None:
        padding = torch.zeros(batch, length, dtype=torch.bool)
    parts = (x.float().contiguous() for x in (low.band, low.rows, low.columns, low.gate))
    out = torch.empty_like(v)
    _kernel[(triton.cdiv(length, rows), batch * heads)](
        q.contiguous(), k.contiguous(), v, *parts, padding.int().contiguous(), out,
        length, low.low, low.band.size(-1), heads,
        D=width, DV=16, ROWS=rows, KEYS=keys, CAUSAL=inputs.causal,
    )  # fmt: skip
    return out[..., :dim].view(batch, heads, length, dim)
