"""Multi-head self-attention over the positions of a `PositionContext`: projections, terms, rotation, cache."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from relpos_fairseq.attention import AttentionInputs, attend
from relpos_fairseq.attention.api import reads_key_rows, refuse_terms
from relpos_fairseq.attention.native import step
from relpos_fairseq.attention.native.layer import Step
from relpos_fairseq.attention.step import StepTables
from relpos_fairseq.core.calls import layer_call, layer_terms, rotated
from relpos_fairseq.core.placement import Placement, PositionContext, SchemeStack, decay_of
from relpos_fairseq.core.terms import PositionTerms
from relpos_fairseq.nn.decoding_cache import DecodingCache
from relpos_fairseq.nn.packed import products

Turns = tuple[Tensor | None, bool]  # cos and sin by slot, or None; and whether pairs are halves of the channels


class SelfAttention(nn.Module):
    """Multi-head self-attention whose logits and values depend on positions by the schemes' terms.

    Args:
        embed_dim: width E.
        num_heads: number of heads H.
        schemes: the position schemes of this layer alone.
        scale: the factor of q.k.
        dropout: dropout probability of attention probabilities.
        backend: name of the backend that evaluates attention, or auto.
    """

    position: SchemeStack
    joined = {"queries_keys_values": ("q_proj", "k_proj", "v_proj"), "keys_values": ("k_proj", "v_proj")}
    queries_keys_values: Any = None  # their one product, where the layers are packed or in int8
    keys_values: Any = None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        schemes: SchemeStack,
        scale: float,
        *,
        dropout: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        self.dropout, self.scale, self.backend = dropout, scale, backend
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (self.projection() for _ in range(4))
        self.position = schemes
        for scheme in schemes:
            scheme.read_content(self.q_proj, self.k_proj)
        self.reset_parameters()

    def projection(self) -> nn.Linear:
        """Return a projection of E to E channels."""
        return nn.Linear(self.embed_dim, self.embed_dim)

    def reset_parameters(self) -> None:
        """Initialise the projections as fairseq does."""
        for projection in (self.k_proj, self.v_proj, self.q_proj):
            nn.init.xavier_uniform_(projection.weight, gain=1 / math.sqrt(2))
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.out_proj.bias)

    def attend(
        self,
        query: Tensor,
        context: PositionContext,
        key_padding: Tensor | None = None,
        cache: DecodingCache | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from each of T tokens to these tokens, and to those of a cache or memory before them.

        The arguments are those of `heads`.

        Returns:
            (T, B, E) output, and probabilities or None.
        """
        rows, probs = self.heads(query, context, key_padding, cache, need_weights)
        return context.pad(self.out_proj(context.unpad(rows)), query.shape), probs

    def heads(
        self,
        query: Tensor,
        context: PositionContext,
        key_padding: Tensor | None = None,
        cache: DecodingCache | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what the heads found, side by side (T B, E), before their projection, and probabilities or None.

        Args:
            query: (T, B, E).
            context: the positions, and the terms and the rotation that layers share.
            key_padding: (B, T) True at padding of the new tokens; (B, M + T) where the context brings memory
                of M slots.
            cache: keys and values of earlier steps of decoding, to which this step's are appended.
            need_weights: return attention probabilities of every head: (B, H, T, S).
        """
        context = context.of_layer(self.position.layer)
        if cache is None:
            inputs = self._inputs(query, context, key_padding)
        else:
            inputs = self._step_inputs(query, context, key_padding, cache)
        out, probs = attend(inputs, self.backend, need_weights)
        return out.permute(2, 0, 1, 3).reshape(-1, self.embed_dim), probs

    def step_call(
        self, query: Tensor, context: PositionContext, new_padding: Tensor | None, cache: DecodingCache
    ) -> Step | None:
        """Return the kernel's arguments for a step; None: `heads` evaluates it.

        The kernel forms query, key and value, and writes the latter two in the room that the cache keeps for them.

        Args:
            query: (1, B, E), without gradients, in the cache's type.
            context: as in `heads`.
            new_padding: (B, 1) or None.
            cache: of the steps before.
        """
        context = context.of_layer(self.position.layer)
        served = self._served(query, context, new_padding, cache)
        if served is None:
            return None
        (terms, tables, turns), positions = served, context.positions
        _check_cached(cache.length + 1, positions.src_len)
        keys = cache.reserve(query.size(1))
        rows = cache.places
        inputs = AttentionInputs(
            q=keys["key"][: query.size(1), :, -1:],  # of its shape
            k=keys["key"],
            v=keys["value"],
            terms=terms,
            positions=positions,
            scale=self.scale,
            causal=context.causal,
            clipped_key_products=cache.clipped_key_products(tables, keys["key"], coming=1),
            step_tables=tables,
            key_rows=torch.arange(query.size(1))[:, None] if rows is None else rows,
        )
        call, kept = step.arguments(inputs)
        return Step(call, *turns, kept)

    def serves_until(self, query: Tensor, context: PositionContext, cache: DecodingCache) -> int:
        """Return up to how many keys the arguments of `step_call` differ in that number and the last key alone, or 0.

        The arguments are those of `step_call`, without padding.
        """
        context = context.of_layer(self.position.layer)
        served = self._served(query, context, None, cache)
        if served is None or served[1].products or any(scheme.by_length for scheme in self.position):
            return 0
        _, tables, (turn, _) = served
        turned = [] if turn is None else [context.positions.query_start + len(turn)]
        return min([tables.length, *turned, *(keys.size(1) for _, keys in tables.factors)])

    def _served(
        self, query: Tensor, context: PositionContext, new_padding: Tensor | None, cache: DecodingCache
    ) -> tuple[tuple[PositionTerms, ...], StepTables, Turns] | None:
        """Return terms, tables and turns of a step that `step_call` serves, or None; its context is the layer's own."""
        if cache.padding is not None or new_padding is not None:
            return None
        if any(part is not None for part in (context.memory, context.window, context.documents)):
            return None
        turns = _turns(context)
        if context.rotation is not None and turns[0] is None:
            return None
        if not cache.kept and self.position.gates(query, None)["log_gates"] is None:
            like = self._one_key(query)
            cache.begin({"key": like, "value": like})
        if cache.kept != {"key": query.dtype, "value": query.dtype}:
            return None
        terms = context.shared + cache.position.evaluate(self.position, context.positions).terms
        tables = cache.tables(terms, context.positions, query, self.scale)
        if tables is None or not tables.hold_all(terms):
            return None
        if context.rotation is not None and any(term.uses_unrotated_qk for term in terms):
            return None
        if tables is not cache.decided_by:
            like = self._one_key(query)
            keys = like.expand(-1, -1, context.positions.src_len, -1)
            step = AttentionInputs(like, keys, keys, terms, context.positions, self.scale, step_tables=tables)
            cache.decided_by, cache.is_read_by_rows = tables, reads_key_rows(step, self.backend, with_layer=True)
        return (terms, tables, turns) if cache.is_read_by_rows else None

    def _one_key(self, query: Tensor) -> Tensor:
        """Return a tensor of a step's keys' shape (B, H, 1, D) and type for its input (1, B, E)."""
        return query.new_empty(self.head_dim).expand(query.size(1), self.num_heads, 1, -1)

    def _inputs(self, query: Tensor, context: PositionContext, key_padding: Tensor | None) -> AttentionInputs:
        """Project (T, B, E) and return the inputs of attention, with shared and own terms."""
        source = _source(query, context)
        terms = layer_terms(self.position, context, source, key_padding)
        return self._project(query, source, context, terms, key_padding)

    def _step_inputs(
        self, query: Tensor, context: PositionContext, new_padding: Tensor | None, cache: DecodingCache
    ) -> AttentionInputs:
        """Return the inputs of attention for the newest tokens of decoding, and append their keys to the cache."""
        positions = context.positions
        source = _source(query, context)
        terms = context.shared + cache.position.evaluate(self.position, positions).terms
        new = self._project(query, source, context, terms, None)
        _check_cached(cache.length + new.k.size(2), positions.src_len)
        gates = self.position.gates(source, new_padding)
        tensors = {"key": new.k, "content_key": new.content_k, "value": new.v} | gates
        keys = cache.append(tensors, new_padding)
        terms += decay_of(keys)
        tables = cache.tables(terms, positions, new.q, self.scale)
        inputs = replace(
            new,
            k=keys["key"],
            v=keys["value"],
            terms=terms,
            key_padding=cache.padding,
            content_k=keys["content_key"],
            clipped_key_products=cache.clipped_key_products(tables, keys["key"]),
            step_tables=tables,
            key_rows=cache.places,
        )
        if not cache.is_read_by_rows or cache.decided_by is not tables:  # more keys may be more than few
            cache.decided_by = tables
            cache.is_read_by_rows = (
                keys["log_gates"] is None and tables is not None and reads_key_rows(inputs, self.backend)
            )
        return inputs

    def _project(
        self,
        query: Tensor,
        source: Tensor,
        context: PositionContext,
        terms: tuple[PositionTerms, ...],
        key_padding: Tensor | None,
    ) -> AttentionInputs:
        """Return the inputs of attention for queries of the tokens (T, B, E) and keys of `source` (S, B, E)."""
        rows = context.unpad(query).reshape(-1, self.embed_dim)  # one product of two matrices
        if source is query:
            q, k, v = products((self.q_proj, self.k_proj, self.v_proj), self.queries_keys_values, rows)
        else:
            q, keys = self.q_proj(rows), source.reshape(-1, self.embed_dim)
            k, v = products((self.k_proj, self.v_proj), self.keys_values, keys)
        inputs = AttentionInputs(
            q=self._heads(context.pad(q, query.shape)),
            k=self._heads(context.pad(k, source.shape)),
            v=self._heads(context.pad(v, source.shape)),
            terms=terms,
            positions=context.positions,
            scale=self.scale,
            causal=context.causal,
            key_padding=key_padding,
            dropout=self.dropout if self.training else 0.0,
            window=context.window,
            documents=context.documents,
        )
        return rotated(inputs, context)

    def _heads(self, x: Tensor) -> Tensor:
        """Split (L, B, E) by head: (B, H, L, D)."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).permute(1, 2, 0, 3)


def _source(query: Tensor, context: PositionContext) -> Tensor:
    """Concatenate the memory's states and the tokens (T, B, E): (S, B, E)."""
    if context.memory is None:
        return query
    return torch.cat([context.memory.to(query), query])


def _turns(context: PositionContext) -> Turns:
    """Return cos and sin of a layer's turns from the query's slot on, (slots, P, 2) or None; and if by halves."""
    scheme, prepared = context.rotation or (None, None)
    found = None if scheme is None else scheme.turns(prepared, context.positions.query_start)
    return (None, False) if found is None else (torch.view_as_real(found[0]).contiguous(), found[1])


def _check_cached(cached: int, src_len: int) -> None:
    if cached != src_len:
        raise ValueError(
            f"incremental_state holds {cached} tokens with this step's, and prev_output_tokens has "
            f"{src_len}: pass one more token a step, or a fresh state for another batch"
        )


def check_backend(placement: Placement, schemes: SchemeStack, embed_dim: int, num_heads: int) -> None:
    """Raise an error where the backend that was named cannot evaluate a layer's schemes on any machine.

    Raises:
        ValueError: names the backend, the scheme and the term.
    """
    plan = placement.plan
    if plan.backend == "auto" or torch.get_default_device().type == "meta":  # meta tensors have no values
        return
    heads = torch.zeros(1, num_heads, 2, embed_dim // num_heads)
    tokens = torch.zeros(1, 2, dtype=torch.long)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):  # a scheme's dropout may draw random numbers
        positions = placement.positions(tokens, 1, 2, segments=tokens)
        context = placement.context(positions).of_layer(schemes.layer)
        call = layer_call(placement, schemes, context, heads, heads, heads, torch.zeros(2, 1, embed_dim))
        refuse_terms(plan.backend, plan.name, call)
