"""Attention of decoder over encoder: fairseq's parameters and results, computed faster.

fairseq computes all probabilities.  This module computes them where they are asked for, and in training
on a CPU, where torch's scaled_dot_product_attention with dropout would compute them too, more slowly;
elsewhere it calls that function.  In generation the source is projected and cached once for all beams of
a sentence, whose queries attend to it together, so that reordering beams copies nothing.  A step on a
CPU is evaluated by the kernel in C, where it is compiled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from fairseq.modules import MultiheadAttention
from torch import Tensor

from relpos_fairseq.attention import AttentionInputs, native
from relpos_fairseq.attention.native.step import StepCall
from relpos_fairseq.attention.sdpa import sound_kernels
from relpos_fairseq.attention.step import StepTables
from relpos_fairseq.core.positions import Positions, is_captured
from relpos_fairseq.nn.packed import products

SOURCES = "relpos_sources"  # key in fairseq's incremental state: (B,) number of each row's source


def repeats(sources: Tensor | None, rows: int) -> int:
    """Return how many successive rows read the same source: the greatest that divides all runs in `sources` (B,).

    `sources` holds the number of each row's source.  Without one number for each of `rows` rows, the result is 1.
    """
    if sources is None or len(sources) != rows:
        return 1
    counts = torch.unique_consecutive(sources, return_counts=True)[1]
    return math.gcd(*counts.tolist())


def regroup(order: Tensor, beams: int, sources: int) -> tuple[Tensor | None, int]:
    """Return which cached sources to keep when beam search selects rows, where `beams` successive rows share a source.

    Args:
        order: (B',) row that each new row continues.
        beams: number of rows of each source before the selection.
        sources: number of sources before the selection.

    Returns:
        (U',) sources to select, or None where all stay in place; and the number of rows of each afterwards.
    """
    kept = order // beams
    if len(order) % beams:
        return kept, 1
    by_source = kept.view(-1, beams)
    if not bool((by_source == by_source[:, :1]).all()):
        return kept, 1
    kept = by_source[:, 0]
    still = len(kept) == sources and torch.equal(kept, torch.arange(sources, device=kept.device))
    return (None if still else kept), beams


@dataclass(frozen=True)
class Prepared:
    """The kernel's arguments for a step of `batch` rows, and what must outlive its calls; a copy of it is None."""

    batch: int
    call: StepCall | None
    kept: list | None

    def __reduce__(self) -> tuple:  # addresses are not copied
        return type(None), ()


class CrossAttention(MultiheadAttention):
    """Attend from decoder states (T, B, E) to encoder outputs (S, B, E'), cached once for each source sentence."""

    joined = {"keys_values": ("k_proj", "v_proj")}
    keys_values: Any = None  # their one product, where the layers are packed or in int8

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict | None = None,
        need_weights: bool = True,
        static_kv: bool = True,
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from decoder states to encoder outputs, as fairseq's attention with static keys.

        Args:
            query: (T, B, E).
            key: (S, B, E') encoder outputs, read by the first step of decoding only.
            value: not read; part of fairseq's signature.
            key_padding_mask: (B, S) True at padding.
            incremental_state: fairseq's decoding cache.
            need_weights: return probabilities, the mean over heads (B, T, S).
            static_kv: not read; part of fairseq's signature.
            attn_mask: must be None.
            before_softmax: must be False.
            need_head_weights: return the probabilities of each head (H, B, T, S).

        Raises:
            ValueError: a mask is given, or logits are asked for.
        """
        if attn_mask is not None or before_softmax:
            raise ValueError("cross-attention takes no attn_mask and gives no logits")
        tgt_len, batch, _ = query.shape
        k, v, padding, beams = self._source(key, key_padding_mask, incremental_state, batch)
        rows = self.q_proj(query.reshape(-1, self.embed_dim))  # (T B, E)
        weighs = need_weights or need_head_weights
        if incremental_state is not None and tgt_len == 1 and not weighs and not is_captured():
            step = self._step(rows.view(batch, self.num_heads, 1, self.head_dim), incremental_state)
            if native.serves_step(step):
                found = native.step.attend_token(step).view(batch, self.embed_dim)
                return self.out_proj(found).view(query.shape), None
        q = rows.view(tgt_len, batch // beams, beams, self.num_heads, self.head_dim)
        q = q.permute(1, 3, 2, 0, 4).flatten(2, 3)  # (U, H, beams T, D)
        out, probs = self._attend(q, k, v, padding, weighs)
        split = (batch // beams, self.num_heads, beams, tgt_len, -1)
        out = out.view(split).permute(3, 0, 2, 1, 4).reshape(-1, self.embed_dim)
        if probs is not None:
            probs = probs.view(split).permute(1, 0, 2, 3, 4).flatten(1, 2)  # (H, B, T, S)
            probs = probs if need_head_weights else probs.mean(dim=0)
        return self.out_proj(out).view(tgt_len, batch, self.embed_dim), probs

    def _source(
        self, key: Tensor | None, padding: Tensor | None, state: dict | None, batch: int
    ) -> tuple[Tensor, Tensor, Tensor | None, int]:
        """Return keys and values (U, H, S, D) of U sources, their padding (U, S), and how many rows share a source."""
        cache = self._get_input_buffer(state) if state is not None else {}
        if not cache:
            if key is None:
                raise ValueError("the first step of cross-attention needs the encoder's outputs, got none")
            beams = 1 if state is None else repeats(state.get(SOURCES), batch)
            key = key[:, ::beams]
            if padding is not None:
                padding = padding[::beams].bool()
            rows = key.reshape(-1, key.size(-1))  # (S U, E')
            both = products((self.k_proj, self.v_proj), self.keys_values, rows)
            k, v = (self._heads(part, key.shape) for part in both)
            if state is None:
                return k, v, padding, beams
            cache = {"prev_key": k.contiguous(), "prev_value": v.contiguous(), "beams": beams}
            cache["prev_key_padding_mask"] = padding
            self._set_input_buffer(state, cache)
        elif cache.get("places") is not None:
            _gather(cache, cache["places"])
        return (cache["prev_key"], cache["prev_value"], cache["prev_key_padding_mask"], cache["beams"])

    def step_call(self, query: Tensor, key: Tensor, padding: Tensor | None, state: dict) -> StepCall | None:
        """Return the kernel's arguments for a step, but for queries and output; None: it does not serve.

        The arguments are those of `forward`; of queries (1, B, E), their number and type count.
        """
        cache, batch = self._get_input_buffer(state), query.size(1)
        if not cache:
            self._source(key, padding, state, batch)
            cache = self._get_input_buffer(state)
        if not cache["prev_key"].dtype is cache["prev_value"].dtype is query.dtype:
            return None
        if cache.get("call") is None or cache["call"].batch != batch:
            step = self._step(cache["prev_key"].new_empty(batch, self.num_heads, 1, self.head_dim), state)
            cache["call"] = Prepared(
                batch, *(native.step.arguments(step) if native.serves_step(step) else (None, None))
            )
        call: StepCall | None = cache["call"].call
        return call

    def sources(self, state: dict) -> tuple[Tensor, Tensor | None]:
        """Return where the keys of each source lie, (U,), and the padding there, (U', S) or None; after `step_call`."""
        cache = self._get_input_buffer(state)
        places, padding = cache.get("places"), cache["prev_key_padding_mask"]
        places = torch.arange(len(cache["prev_key"])) if places is None else places
        return places, padding if padding is not None and padding.any() else None

    def _step(self, q: Tensor, state: dict) -> AttentionInputs:
        """Return the inputs of a step for queries (B, H, 1, D), from which `beams` successive rows read a source."""
        cache, batch = self._get_input_buffer(state), q.size(0)
        k, v, padding = (cache[f"prev_{name}"] for name in ("key", "value", "key_padding_mask"))
        length, places = k.size(2), cache.get("places")
        sources = k.size(0) if places is None else len(places)
        if batch != cache["beams"] * sources:  # the kernel reads where it is told
            raise ValueError(
                f"incremental_state holds {cache['beams'] * sources} rows and there are {batch} queries: select "
                f"rows by reorder_incremental_state, or take a fresh state for another batch"
            )
        if cache.get("step") is None:
            rows = torch.arange(batch, device=q.device) // cache["beams"]
            rows = rows if places is None else places[rows]
            hidden = None if padding is None or not padding.any() else padding[rows]
            tables = StepTables((), self.scaling, torch.promote_types(q.dtype, torch.float32), q.device, length)
            cache["call"] = None
            cache["step"] = {"key_rows": rows[:, None], "key_padding": hidden, "step_tables": tables}
        active = self.training or self.dropout_module.apply_during_inference
        return AttentionInputs(
            q,
            k,
            v,
            (),
            Positions(1, length, length - 1),
            self.scaling,
            dropout=self.dropout_module.p if active else 0.0,
            **cache["step"],
        )

    def _heads(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """Split (S U, E) by head, where `shape` is (S, U, E'): (U, H, S, D)."""
        return rows.view(*shape[:2], self.num_heads, self.head_dim).permute(1, 2, 0, 3)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output (U, H, L, D), and probabilities (U, H, L, S) before dropout or None."""
        active = self.training or self.dropout_module.apply_during_inference
        dropout = self.dropout_module.p if active else 0.0
        if need_weights or (dropout and q.device.type == "cpu"):
            return self._explicit(q, k, v, padding, dropout)
        mask = None if padding is None else ~padding[:, None, None]
        with sound_kernels(mask):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=self.scaling)
        return out, None

    def _explicit(
        self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, dropout: float
    ) -> tuple[Tensor, Tensor]:
        """Return output and probabilities by explicit matrix products, with softmax in at least fp32, as in fairseq."""
        sources, heads, rows, dim = q.shape
        q, k, v = (part.reshape(sources * heads, -1, dim) for part in (q, k, v))
        if padding is None:
            logits = torch.bmm(q * self.scaling, k.transpose(1, 2))
        else:
            bias = q.new_zeros(sources, 1, 1, k.size(1))
            bias = bias.masked_fill(padding[:, None, None], float("-inf"))
            bias = bias.expand(-1, heads, 1, -1).reshape(sources * heads, 1, -1)
            logits = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=self.scaling)
        probs = logits.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
        kept = F.dropout(probs, dropout) if dropout else probs
        out = torch.bmm(kept.to(v.dtype), v).view(sources, heads, rows, dim)
        return out, probs.view(sources, heads, rows, -1)

    def share(self, state: dict, beams: int) -> None:
        """Let `beams` successive rows read each cached source from now on, instead of one."""
        if cache := self._get_input_buffer(state):
            cache |= {"beams": beams, "step": None, "call": None}

    def reorder_incremental_state(self, incremental_state: dict, new_order: Tensor) -> dict:
        self.reorder(incremental_state, new_order)
        return incremental_state

    def reorder(
        self, state: dict, order: Tensor, regrouped: tuple[Tensor | None, int] | None = None
    ) -> tuple[Tensor | None, int] | None:
        """Select rows of the cached sources, as beam search does, and return what `regroup` returned.

        Args:
            state: fairseq's decoding cache.
            order: (B',) row that each new row continues.
            regrouped: the result of the layer before, which reads the same sources; None in the first.
        """
        cache = self._get_input_buffer(state)
        if not cache:
            return regrouped
        if regrouped is None:
            places = cache.get("places")
            regrouped = regroup(order, cache["beams"], cache["prev_key"].size(0) if places is None else len(places))
        kept, beams = regrouped
        if kept is not None or beams != cache["beams"]:
            cache |= {"step": None, "call": None}
        cache["beams"] = beams
        if kept is not None:
            places = kept if cache.get("places") is None else cache["places"][kept]
            if 2 * len(places) > cache["prev_key"].size(0):  # the others' room is small beside a copy at every end
                cache["places"] = places
            else:
                _gather(cache, places)
        return regrouped


def _gather(cache: dict, places: Tensor) -> None:
    """Let the cached sources be those of some rows alone."""
    for name in ("prev_key", "prev_value", "prev_key_padding_mask"):
        if cache[name] is not None:
            cache[name] = cache[name].index_select(0, places)
    cache |= {"places": None, "step": None, "call": None}
