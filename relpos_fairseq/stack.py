"""The positions of one stack of layers (an encoder or a decoder).

Where a scheme lives: what layers share, and what acts on the input, belongs to the stack and is
evaluated once a forward pass; a layer's own tables belong to the layer's attention.  Both reach
attention through an explicit `PositionContext`, an argument of every layer, so that activation
recomputation and torch.compile see the same values.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from relpos_fairseq.config import PositionPlan
from relpos_fairseq.positions import Positions, index_in_sentence, index_of_tokens
from relpos_fairseq.scheme import (
    PositionMismatchError,
    PositionScheme,
    SchemeOptions,
    SchemeStack,
)
from relpos_fairseq.schemes.segments import SegmentHead, SegmentInput
from relpos_fairseq.terms import PositionTerms

logger = logging.getLogger(__name__)

LEAST_CAPACITY = 32  # decoding makes room for 32, 64, 128, ... tokens


@dataclass(frozen=True)
class PositionContext:
    """What a layer's attention is told about positions.

    Args:
        positions: where queries and keys stand.
        causal: keys in a query's future are excluded.
        shared: the terms that all layers share.
        rotation: the scheme that transforms queries and keys, with its prepared part, or None.
        memory: (M, B, E) what stands before the queries' tokens, as key and value projections
            meet it, or None; the positions count its slots.
        window: how many slots a query sees, the last of them its own; None: all.
        documents: (B, S) document number of each slot, or None; other documents are excluded.
    """

    positions: Positions
    causal: bool
    shared: tuple[PositionTerms, ...] = ()
    rotation: tuple[PositionScheme, Any] | None = None
    memory: Tensor | None = None
    window: int | None = None
    documents: Tensor | None = None


class StackPositions(nn.Module):
    """The schemes that a stack's layers share, and the identity that its checkpoints carry."""

    def __init__(self, plan: PositionPlan) -> None:
        """Build what is shared by the layers of `plan`."""
        super().__init__()
        self.plan = plan
        self._common: dict[str, nn.Parameter] = {}  # a plain dict: the layers register them
        self.shared = _build(plan, layer=None)
        if plan.segment_encoding == "input":
            self.shared.append(SegmentInput(plan.shape, _segment_options(plan)))
        # "version" in the name keeps fairseq's moving average of weights from averaging it.
        self.register_buffer("scheme_version", encode_text(plan.describe()))
        logger.info("positions of %s: %s", plan.shape.seed_name or "model", plan.describe())

    def layer_schemes(self, layer: int) -> SchemeStack:
        """The schemes that layer `layer` has for itself."""
        schemes = _build(self.plan, layer)
        for scheme in schemes:
            for name in scheme.common_parameters:
                key = f"{scheme.name}.{name}"
                setattr(scheme, name, self._common.setdefault(key, getattr(scheme, name)))
        return schemes

    def positions(
        self,
        tokens: Tensor,
        padding_idx: int,
        eos_idx: int,
        *,
        query_start: int = 0,
        segments: Tensor | None = None,
    ) -> Positions:
        """Where the tokens stand.

        Args:
            tokens: (B, S) token ids of all keys.
            padding_idx: id of padding.
            eos_idx: id of a sentence's end.
            query_start: slot of the first query.
            segments: (B, S) segment numbers or None.

        Raises:
            ValueError: a segment number that the tables do not have.
        """
        if segments is not None:
            _check_segments(segments, self.plan.num_segments)
        padding = tokens.eq(padding_idx) if self._needs_index else None
        if padding is not None and self._in_place(padding):
            padding = None
        sentence = None
        if any(scheme.counts_sentences for scheme in self.shared):
            sentence = index_in_sentence(tokens, padding_idx, eos_idx, self.plan.shape.causal)
        return Positions(
            tgt_len=tokens.size(1) - query_start,
            src_len=tokens.size(1),
            query_start=query_start,
            token_index=index_of_tokens(padding),
            sentence_index=sentence,
            segments=segments,
            device=tokens.device,
        )

    def _in_place(self, padding: Tensor) -> bool:
        """Whether every token's index is its slot: no token follows padding (B, S).

        Padding itself then reads tables as tokens do, so they must have rows for it.
        """
        follows = padding[:, :-1] & ~padding[:, 1:]
        return padding.size(1) <= self.plan.shape.max_positions and not bool(follows.any())

    @property
    def _needs_index(self) -> bool:
        resets = any(plan.options.reset_cls for plan in self.plan.members)
        return self.plan.absolute or resets

    def embed(self, positions: Positions) -> Tensor | None:
        """(B|1, T, E) to add to the queries' embeddings, or None."""
        return self.shared.embed(positions)

    def context(self, positions: Positions, cache: dict | None = None) -> PositionContext:
        """Evaluate what layers share.

        Args:
            positions: where queries and keys stand.
            cache: decoding's store for content-free parts, or None outside decoding.
        """
        prepared, terms = cached_terms(self.shared, positions, cache)
        return PositionContext(
            positions=positions,
            causal=self.plan.shape.causal,
            shared=terms,
            rotation=self.shared.rotation(prepared),
        )

    def check_before(self, owner: nn.Module) -> None:
        """Hold checkpoints against this scheme before the layers of `owner` load their tables."""
        owner.register_load_state_dict_pre_hook(self._check_owner)

    def _check_owner(self, owner: nn.Module, state_dict: dict, prefix: str, *rest: Any) -> None:
        self._check_identity(state_dict, f"{prefix}positions.")

    def _check_identity(self, state_dict: dict, prefix: str) -> None:
        saved = state_dict.get(f"{prefix}scheme_version")
        if saved is not None and decode_text(saved) != self.plan.describe():
            raise PositionMismatchError(
                f"checkpoint and flags disagree on {prefix.rstrip('.') or 'positions'}: the "
                f"checkpoint was trained with [{decode_text(saved)}], the flags say "
                f"[{self.plan.describe()}]: give the checkpoint's flags"
            )

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs) -> None:
        self._check_identity(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def prepare_cached(schemes: SchemeStack, positions: Positions, cache: dict | None) -> tuple:
    """Prepare, or in decoding reuse what was prepared for some longer length.

    What was prepared without gradients has none to give to a step that wants them.
    """
    if cache is None:
        return schemes.prepare(positions)
    gradients = torch.is_grad_enabled()
    if cache.get("capacity", 0) < positions.src_len or cache["gradients"] != gradients:
        capacity = capacity_for(positions.src_len)
        ahead = replace(positions, src_len=capacity, query_start=capacity - positions.tgt_len)
        cache.update(capacity=capacity, gradients=gradients, prepared=schemes.prepare(ahead))
    return cache["prepared"]


def cached_terms(
    schemes: SchemeStack, positions: Positions, cache: dict | None
) -> tuple[tuple, tuple[PositionTerms, ...]]:
    """What the schemes prepare, and their terms; in decoding both are kept.

    Only factors and a reset depend on where the query stands: terms without them are the same at
    every step that the prepared parts serve.
    """
    earlier = None if cache is None else cache.get("prepared")
    prepared = prepare_cached(schemes, positions, cache)
    if cache is None:
        return prepared, schemes.terms(prepared, positions)
    if prepared is not earlier or any(
        term.static_factors is not None or term.reset is not None for term in cache["terms"]
    ):
        cache["terms"] = schemes.terms(prepared, positions)
    return prepared, cache["terms"]


def capacity_for(length: int) -> int:
    """How many tokens decoding makes room for, once it holds `length`."""
    return max(LEAST_CAPACITY, 1 << (length - 1).bit_length())


def _check_segments(segments: Tensor, count: int) -> None:
    low, high = int(segments.min()), int(segments.max())
    if low < 0 or high >= count:
        raise ValueError(
            f"segments must be in 0..{count - 1}, got {low if low < 0 else high} (--num-segments)"
        )


def encode_text(text: str) -> Tensor:
    """Text as a tensor of character codes (int64, so that averaging checkpoints keeps it)."""
    return torch.tensor(list(text.encode()), dtype=torch.long)


def decode_text(codes: Tensor) -> str:
    """The text of `encode_text`."""
    return bytes(codes.tolist()).decode()


def _segment_options(plan: PositionPlan) -> SchemeOptions:
    return SchemeOptions(
        share=plan.segment_share, scale=plan.scale_constant, num_segments=plan.num_segments
    )


def _build(plan: PositionPlan, layer: int | None) -> SchemeStack:
    """The members that live in a layer, or (None) those that layers share."""
    where = "shared" if layer is None else str(layer)
    shape = replace(plan.shape, seed_name=f"{plan.shape.seed_name}.{where}")
    schemes = [
        member.scheme(shape, member.options)
        for member in plan.members
        if member.across_layers == (layer is None)
    ]
    if plan.segment_encoding == "head":
        if (plan.segment_share in ("layers", "both")) == (layer is None):
            schemes.append(SegmentHead(shape, _segment_options(plan)))
    return SchemeStack(schemes)
