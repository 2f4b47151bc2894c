"""Evaluate the kernel's call (call.h) densely by torch, from the addresses that the call has.

This stands for the compiled library in tests of the Python code around it: operands are read at the
addresses of the call, and results are written there.  Gradients are autograd's.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from relpos_fairseq.attention import native
from relpos_fairseq.attention.native.call import CONTENT, OPERANDS, TABLES, Call

NUMBERS = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}
INTEGERS = {torch.uint8: ctypes.c_uint8, torch.int64: ctypes.c_int64}
Libraries = dict[torch.dtype, "Formula"]


def use_formula(monkeypatch: pytest.MonkeyPatch) -> Libraries:
    """Put the formula in place of compiled libraries, for a test."""
    libraries = {dtype: Formula(dtype) for dtype in NUMBERS}
    monkeypatch.setattr(native.build, "problem", lambda dtype: None)
    monkeypatch.setattr(native.call, "entry", lambda dtype, name, _: getattr(libraries[dtype], name))
    return libraries


class Formula:
    """A library of one type of numbers.

    Args:
        dtype: torch.float32 or torch.float64.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """Keep the type; `calls` counts."""
        self.dtype = dtype
        self.calls = {"forward": 0, "backward": 0}

    def relpos_groups(self, call: Call) -> int:
        """Each row of the batch is a group of its own."""
        return call.batch

    def relpos_forward(self, call: Call) -> int:
        """Write out, row_max and row_sum."""
        self.calls["forward"] += 1
        given = self.operands(call)
        logits = added(call, given, self.masks(call))
        row_max = logits.amax(-1)
        row_max = torch.where(row_max.isinf(), 0.0, row_max)
        rows = (call.batch, call.heads, call.tgt_len)
        self.at(call.row_max, rows).copy_(row_max)
        self.at(call.row_sum, rows).copy_((logits - row_max[..., None]).exp().sum(-1))
        shape = (*rows, call.value_dim)
        self.strided(call.out, shape).copy_(output(call, given, logits))
        return 0

    def relpos_backward(self, call: Call) -> int:
        """Write every gradient that is asked for."""
        self.calls["backward"] += 1
        # An operation runs below autograd; a thread begins above it.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self._backward, call).result()

    def _backward(self, call: Call) -> int:
        given = {name: x.clone().requires_grad_() for name, x in self.operands(call).items()}
        logits = added(call, given, self.masks(call))
        out = output(call, given, logits)
        shape = (call.batch, call.heads, call.tgt_len, call.value_dim)
        grads = torch.autograd.grad(out, list(given.values()), self.strided(call.dout, shape), allow_unused=True)
        written = {}
        for (name, x), grad in zip(given.items(), grads, strict=True):
            place = getattr(call, f"d{name}")
            grad = torch.zeros_like(x) if grad is None else grad
            if name in CONTENT:
                if place.data:
                    self.strided(place, x.shape).copy_(grad)
            elif place:  # one table, one address
                written[place] = grad + written.get(place, 0)
                self.at(place, x.shape).copy_(written[place])
        return 0

    def operands(self, call: Call) -> dict[str, Tensor]:
        """Copies of what the call points to, by name, a row for each head of each batch row."""
        given = {}
        heads = (call.batch, call.heads)
        for name in OPERANDS:
            place = getattr(call, name)
            if not place.data:
                continue
            if name in TABLES:
                shape = (call.heads, *table_shape(call, name))
                strides = (place.head_stride, *contiguous(shape[1:]))
                table = torch.as_strided(self.flat(place.data, reach(shape, strides)), shape, strides)
                given[name] = table.expand(call.batch, *shape).clone()
            elif name == "decay":
                given[name] = self.strided(place, (*heads, 3, call.src_len)).clone()
            else:
                length = call.tgt_len if name in ("q", "content_q", "query_factors") else call.src_len
                channels = {"v": call.value_dim, "query_factors": call.rank, "key_factors": call.rank}
                shape = (*heads, length, channels.get(name, call.dim))
                given[name] = self.strided(place, shape).clone()
        return given

    def masks(self, call: Call) -> dict[str, Tensor]:
        """What has no gradients."""
        found = {}
        shape = (call.batch, call.src_len)
        for name, dtype, size in (
            ("key_padding", torch.uint8, shape),
            ("documents", torch.int64, shape),
            ("first_token", torch.int64, (call.batch if call.first_token_per_row else 1,)),
        ):
            if getattr(call, name):
                found[name] = self.at(getattr(call, name), size, dtype)
        return found

    def strided(self, place, shape: tuple[int, ...]) -> Tensor:
        """A view of (B, H, length, channels)."""
        strides = (place.batch_stride, place.head_stride, place.row_stride, 1)
        return torch.as_strided(self.flat(place.data, reach(shape, strides)), shape, strides)

    def at(self, address: int, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """A view of contiguous numbers."""
        count = int(np.prod(shape))
        return self.flat(address, count, dtype).view(shape)

    def flat(self, address: int, count: int, dtype: torch.dtype | None = None) -> Tensor:
        """A view of `count` numbers."""
        kind = INTEGERS[dtype] if dtype else NUMBERS[self.dtype]
        return torch.from_numpy(np.ctypeslib.as_array((kind * count).from_address(address)))


def reach(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Numbers from the first to the last that strides reach."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


def table_shape(call: Call, name: str) -> tuple[int, ...]:
    """Of one head."""
    if name in ("static", "gate"):
        return (call.tgt_len + call.src_len - 1,)
    if name == "reset":
        return (2,)
    if name == "content_offset":
        return (call.dim,)
    return (call.width, call.value_dim if name == "value_vectors" else call.dim)


def distances(call: Call) -> Tensor:
    """(T, S) of j - i."""
    return torch.arange(call.src_len) - torch.arange(call.query_start, call.query_start + call.tgt_len)[:, None]


def read(call: Call, table: Tensor) -> Tensor:
    """A table of vectors (B, H, W, D) for every pair: (B, H, T, S, D)."""
    if call.unclipped:
        assert call.low == -(call.query_start + call.tgt_len - 1) and call.width == call.tgt_len + call.src_len - 1
    return table[:, :, (distances(call) - call.low).clamp(0, call.width - 1)]


def added(call: Call, given: dict[str, Tensor], masks: dict[str, Tensor]) -> Tensor:
    """(B, H, T, S) logits, -inf where a key is excluded."""
    get = given.get
    q, k = given["q"], given["k"]
    cq, ck = get("content_q", q), get("content_k", k)
    pairs = cq[:, :, :, None] * ck[:, :, None]
    if "trilinear" in given:
        pairs = pairs * read(call, given["trilinear"])
    content = pairs.sum(-1) * call.scale
    everywhere = distances(call) + call.query_start + call.tgt_len - 1
    if "gate" in given:
        content = content * given["gate"][:, :, everywhere]
    if "product_query" in given:
        content = content * (read(call, given["product_query"]) * q[:, :, :, None]).sum(-1)
        content = content * (read(call, given["product_key"]) * k[:, :, None]).sum(-1)
    if "content_offset" in given:
        content = content + (given["content_offset"][:, :, None] * k).sum(-1)[:, :, None] * call.scale
    held = torch.zeros_like(content)
    parts = []
    if "query_vectors" in given:
        parts.append((1, (read(call, given["query_vectors"]) * q[:, :, :, None]).sum(-1) * call.scale))
    if "key_vectors" in given:
        parts.append((1, (read(call, given["key_vectors"]) * k[:, :, None]).sum(-1) * call.scale))
    if "static" in given:
        parts.append((2, given["static"][:, :, everywhere]))
    if "query_factors" in given:
        parts.append((4, given["query_factors"] @ given["key_factors"].transpose(-1, -2)))
    if "decay" in given:
        past, future, weight = given["decay"][:, :, :, None].unbind(2)  # (B, H, 1, S)
        of_query = slice(call.query_start, call.query_start + call.tgt_len)
        own = [x[:, :, 0, of_query, None] for x in (past, future, weight)]
        parts.append((0, own[2] * torch.where(distances(call) > 0, future - own[1], own[0] - past)))
    for bit, part in parts:
        if call.reset_replaces & bit:
            held = held + part
        else:
            content = content + part
    if call.reset_replaces:
        held = replaced(call, held, given["reset"], masks["first_token"])
    return hidden(call, content + held, masks)


def replaced(call: Call, held: Tensor, numbers: Tensor, first: Tensor) -> Tensor:
    """The first token's row and column, reset."""
    slots = torch.arange(call.src_len)
    is_first = (slots == first[:, None])[:, None]  # (B|1, 1, S)
    row = is_first[:, :, call.query_start : call.query_start + call.tgt_len, None]
    column = torch.where(is_first[:, :, None], numbers[..., 1, None, None], held)
    return torch.where(row, numbers[..., 0, None, None], column)


def hidden(call: Call, logits: Tensor, masks: dict[str, Tensor]) -> Tensor:
    """-inf where a key is excluded."""
    distance = distances(call)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if call.causal:
        seen = seen & (distance <= 0)
    if call.window:
        seen = seen & (distance > -call.window)
    seen = seen[None, None]
    if "key_padding" in masks:
        seen = seen & (masks["key_padding"] == 0)[:, None, None]
    if "documents" in masks:
        documents = masks["documents"]
        own = documents[:, call.query_start : call.query_start + call.tgt_len, None]
        seen = seen & (own == documents[:, None])[:, None]
    return logits.masked_fill(~seen, -torch.inf)


def output(call: Call, given: dict[str, Tensor], logits: Tensor) -> Tensor:
    """(B, H, T, Dv)."""
    empty = logits.isinf().all(-1, keepdim=True)
    probs = logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    if call.drop_threshold:
        probs = probs * kept(call) * (65536 / (65536 - call.drop_threshold))
    out = probs @ given["v"]
    if "value_vectors" in given:
        out = out + (probs[..., None] * read(call, given["value_vectors"])).sum(-2)
    return out


def kept(call: Call) -> Tensor:
    """(B, H, T, S) cells that dropout keeps: Philox-4x32-7, 16 bits a cell.

    Counted by (key / 8, query, head); key t of eight takes half t % 2 of word
    t / 4 + 2 (t / 2 % 2).
    """
    groups = -(-call.src_len // 8)
    counter = np.zeros((4, call.batch * call.heads, call.tgt_len, groups), dtype=np.uint64)
    counter[0] = np.arange(groups)
    counter[1] = np.arange(call.tgt_len)[:, None]
    counter[2] = np.arange(call.batch * call.heads)[:, None, None]
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    keys = [call.seed & 0xFFFFFFFF, call.seed >> 32 & 0xFFFFFFFF]
    for _ in range(7):
        a, b = counter[0] * np.uint64(0xD2511F53), counter[2] * np.uint64(0xCD9E8D57)
        counter = np.stack(
            [
                (b >> half) ^ counter[1] ^ np.uint64(keys[0]),
                b & low,
                (a >> half) ^ counter[3] ^ np.uint64(keys[1]),
                a & low,
            ]
        )
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    halves = [counter[t // 4 + 2 * (t // 2 % 2)] >> np.uint64(16 * (t % 2)) for t in range(8)]
    bits = np.stack(halves, -1) & np.uint64(0xFFFF)
    bits = bits.reshape(call.batch, call.heads, call.tgt_len, groups * 8)[..., : call.src_len]
    return torch.from_numpy(bits >= call.drop_threshold)
