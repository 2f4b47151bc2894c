"""The positions of an encoder or a decoder: which scheme stands where, evaluated once a pass.

    added, context = placement.of(tokens, padding_idx, eos_idx)

What layers share, and what is added to the input, belongs to the `Placement`, which evaluates it
once a forward pass; a layer's own tables belong to the layer's attention.  Every layer takes the
`PositionContext` as an argument, so that activation recomputation and torch.compile see the same
values.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from relpos_fairseq.plan import PositionPlan
from relpos_fairseq.positions import Positions, index_in_sentence, index_of_tokens
from relpos_fairseq.scheme import (
    PositionMismatchError,
    PositionScheme,
    SchemeOptions,
)
from relpos_fairseq.schemes.segments import SegmentHead, SegmentInput
from relpos_fairseq.stack import DecodingTerms, SchemeStack
from relpos_fairseq.terms import PositionTerms

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PositionContext:
    """What a layer's attention needs of positions.

    Args:
        positions: where queries and keys stand.
        causal: keys in a query's future are excluded.
        shared: the terms that all layers share.
        rotation: the scheme that transforms queries and keys, with its prepared part, or None.
        memory: (M, B, E) input of the key and value projections for the slots before the
            queries' tokens, or None; the positions count these slots.
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


class Placement(nn.Module):
    """The schemes that all layers share, and the identity that checkpoints carry."""

    def __init__(self, plan: PositionPlan) -> None:
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
        """Build the schemes that layer `layer` has for itself."""
        schemes = _build(self.plan, layer)
        for scheme in schemes:
            for name in scheme.common_parameters:
                key = f"{scheme.name}.{name}"
                setattr(scheme, name, self._common.setdefault(key, getattr(scheme, name)))
        return schemes

    def of(
        self,
        tokens: Tensor,
        padding_idx: int,
        eos_idx: int,
        *,
        query_start: int = 0,
        segments: Tensor | None = None,
        decoding: DecodingTerms | None = None,
    ) -> tuple[Tensor | None, PositionContext]:
        """Evaluate for a batch what its model needs of positions.

        Args:
            tokens: (B, S) token ids of all keys.
            padding_idx: id of padding.
            eos_idx: id of a sentence's end.
            query_start: slot of the first query.
            segments: (B, S) segment numbers or None.
            decoding: what decoding keeps between steps, or None.

        Returns:
            (B|1, T, E) to add to the queries' embeddings or None, and the context of all layers.

        Raises:
            ValueError: a segment number that the tables do not have.
        """
        positions = self.positions(
            tokens, padding_idx, eos_idx, query_start=query_start, segments=segments
        )
        return self.embed(positions), self.context(positions, decoding)

    def positions(
        self,
        tokens: Tensor,
        padding_idx: int,
        eos_idx: int,
        *,
        query_start: int = 0,
        segments: Tensor | None = None,
    ) -> Positions:
        """Return where the tokens stand; arguments and errors as of `of`."""
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
        """Tell whether every token's index is its slot: no token follows padding (B, S).

        Padding itself then reads tables as tokens do, so they must have rows for it.
        """
        follows = padding[:, :-1] & ~padding[:, 1:]
        return padding.size(1) <= self.plan.shape.max_positions and not bool(follows.any())

    @property
    def _needs_index(self) -> bool:
        resets = any(plan.options.reset_cls for plan in self.plan.members)
        return self.plan.absolute or resets

    def embed(self, positions: Positions) -> Tensor | None:
        """Return (B|1, T, E) to add to the queries' embeddings, or None."""
        return self.shared.embed(positions)

    def context(
        self, positions: Positions, decoding: DecodingTerms | None = None
    ) -> PositionContext:
        """Evaluate what all layers share.

        Args:
            positions: where queries and keys stand.
            decoding: what decoding keeps between steps, or None.
        """
        if decoding is None:
            prepared, terms = self.shared.evaluate(positions)
        else:
            prepared, terms = decoding.evaluate(self.shared, positions)
        return PositionContext(
            positions=positions,
            causal=self.plan.shape.causal,
            shared=terms,
            rotation=self.shared.rotation(prepared),
        )

    def check_before(self, owner: nn.Module) -> None:
        """Compare checkpoints with this scheme before the layers of `owner` load their tables."""
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


def _check_segments(segments: Tensor, count: int) -> None:
    low, high = int(segments.min()), int(segments.max())
    if low < 0 or high >= count:
        raise ValueError(
            f"segments must be in 0..{count - 1}, got {low if low < 0 else high} (--num-segments)"
        )


def encode_text(text: str) -> Tensor:
    """Return text as character codes (int64, so that averaging checkpoints keeps them)."""
    return torch.tensor(list(text.encode()), dtype=torch.long)


def decode_text(codes: Tensor) -> str:
    """Return the text of `encode_text`."""
    return bytes(codes.tolist()).decode()


def _segment_options(plan: PositionPlan) -> SchemeOptions:
    return SchemeOptions(
        share=plan.segment_share, scale=plan.scale_constant, num_segments=plan.num_segments
    )


def _build(plan: PositionPlan, layer: int | None) -> SchemeStack:
    """Build the members that stand in a layer, or (None) those that layers share."""
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
