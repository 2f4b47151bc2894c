"""The positions of an encoder or a decoder: which scheme stands where, evaluated once a pass.

    added, context = placement.of(tokens, padding_idx, eos_idx)

What layers share, and what is added to the input, belongs to the `Placement`, which evaluates it
once a forward pass; a layer's own tables belong to the layer's attention.  Every layer takes the
`PositionContext` as an argument, so that activation recomputation and torch.compile see the same
values.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from relpos_fairseq.drawn import RandomPositions
from relpos_fairseq.plan import PositionPlan, decode_text, encode_text
from relpos_fairseq.positions import Positions, index_in_sentence, index_of_tokens, is_captured, is_exported
from relpos_fairseq.scheme import PositionMismatchError, PositionScheme, SchemeOptions
from relpos_fairseq.schemes.segments import SegmentHead, SegmentInput
from relpos_fairseq.stack import DecodingTerms, Evaluated, PositionContext, SchemeStack, rotation_of

logger = logging.getLogger(__name__)


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
        self._random = RandomPositions(plan.random_range, plan.shape.seed_name)
        self._always_random = plan.always_random
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
        positions = self.positions(tokens, padding_idx, eos_idx, query_start=query_start, segments=segments)
        if decoding is None and self._random.limit and (self.training or self._always_random):
            positions = self._drawn(positions)
        return self.embed(positions), self.context(positions, decoding)

    def positions(
        self, tokens: Tensor, padding_idx: int, eos_idx: int, *, query_start: int = 0, segments: Tensor | None = None
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

    def _drawn(self, positions: Positions) -> Positions:
        """Return the same tokens at positions drawn at random."""
        if is_exported():
            raise ValueError(
                "--position-random-at always: a graph cannot hold the positions of every length; "
                "export with --position-random-at training"
            )
        drawn = self._random.draw(positions.src_len, anew=self.training)
        sentence = positions.sentence_index
        if sentence is not None:
            sentence = drawn.to(sentence.device)[sentence]
        return replace(positions, drawn=drawn, sentence_index=sentence)

    def _in_place(self, padding: Tensor) -> bool:
        """Tell whether every token's index is its slot: no token follows padding (B, S).

        Padding itself then reads tables as tokens do, so they must have rows for it.
        """
        if is_captured():
            return False
        if self.counts_tokens:
            return not bool(padding.any())
        follows = padding[:, :-1] & ~padding[:, 1:]
        return padding.size(1) <= self.plan.shape.max_positions and not bool(follows.any())

    @property
    def _needs_index(self) -> bool:
        resets = any(plan.options.reset_cls for plan in self.plan.members)
        return self.plan.absolute or resets or self.counts_tokens

    @property
    def counts_tokens(self) -> bool:
        """Whether some member must know how many tokens each row has."""
        return any(plan.scheme.counts_tokens(plan.options) for plan in self.plan.members)

    def embed(self, positions: Positions) -> Tensor | None:
        """Return (B|1, T, E) to add to the queries' embeddings, or None."""
        return self.shared.embed(positions)

    def context(self, positions: Positions, decoding: DecodingTerms | None = None) -> PositionContext:
        """Evaluate what all layers share.

        Args:
            positions: where queries and keys stand.
            decoding: what decoding keeps between steps, or None.

        Raises:
            RuntimeError: torch.jit.trace, which would take this input's lengths for all.
        """
        if torch.jit.is_tracing():
            raise RuntimeError(
                "torch.jit.trace would record the lengths of this input for all: call "
                "torch.export.export, or relpos export onnx"
            )
        if decoding is None:
            found = self.shared.evaluate(positions)
        else:
            found = decoding.evaluate(self.shared, positions)
        context = PositionContext(
            positions=positions,
            causal=self.plan.shape.causal,
            shared=found.terms,
            rotation=rotation_of(zip(self.shared, found.prepared, strict=True)),
        )
        return replace(context, parts=tuple(self._part(found, p) for p in self.plan.parts))

    def _part(self, found: Evaluated, plan: PositionPlan) -> tuple:
        """Return the terms and the rotation of those shared members that a part's layers have."""
        every = zip(self.shared, found.prepared, found.members, strict=True)
        mine = [found for found in every if _stands(found[0], plan)]
        terms = sum((terms for _, _, terms in mine), ())
        return terms, rotation_of((scheme, part) for scheme, part, _ in mine)

    def shared_by(self, layer: int) -> list[PositionScheme]:
        """Return those of the shared members that a layer, counted from 0, has."""
        plan = self.plan.of_layer(layer)
        return [scheme for scheme in self.shared if _stands(scheme, plan)]

    def check_before(self, owner: nn.Module) -> None:
        """Compare checkpoints with this scheme before the layers of `owner` load their tables."""
        owner.register_load_state_dict_pre_hook(self._check_owner)

    def _check_owner(self, owner: nn.Module, state_dict: dict, prefix: str, *rest: Any) -> None:
        self._check_identity(state_dict, f"{prefix}positions.")

    def _check_identity(self, state_dict: dict, prefix: str) -> None:
        saved = state_dict.get(f"{prefix}scheme_version")
        if saved is not None and not self.plan.agrees(decode_text(saved)):
            raise PositionMismatchError(
                f"checkpoint and flags disagree on {prefix.rstrip('.') or 'positions'}: the "
                f"checkpoint was trained with [{decode_text(saved)}], the flags say "
                f"[{self.plan.describe()}]: give the checkpoint's flags"
            )

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs) -> None:
        self._check_identity(state_dict, prefix)
        key = f"{prefix}scheme_version"
        if key in state_dict:  # flags may say more than the checkpoint
            state_dict = {**state_dict, key: self.scheme_version}
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _stands(scheme: PositionScheme, plan: PositionPlan) -> bool:
    """Tell whether the layers of a plan have a scheme, as they all have segments."""
    segments = isinstance(scheme, (SegmentHead, SegmentInput))
    return segments or any(type(scheme) is member.scheme for member in plan.members)


def _check_segments(segments: Tensor, count: int) -> None:
    if is_captured():
        return
    low, high = int(segments.min()), int(segments.max())
    if low < 0 or high >= count:
        raise ValueError(f"segments must be in 0..{count - 1}, got {low if low < 0 else high} (--num-segments)")


def _segment_options(plan: PositionPlan) -> SchemeOptions:
    return SchemeOptions(share=plan.segment_share, scale=plan.scale_constant, num_segments=plan.num_segments)


def _build(plan: PositionPlan, layer: int | None) -> SchemeStack:
    """Build the members that stand in a layer, or (None) those that layers share."""
    where = "shared" if layer is None else str(layer)
    shape = replace(plan.shape, seed_name=f"{plan.shape.seed_name}.{where}")
    schemes = [
        member.scheme.built(shape, member.options)
        for member in (plan if layer is None else plan.of_layer(layer)).members
        if member.across_layers == (layer is None)
    ]
    if plan.segment_encoding == "head":
        if (plan.segment_share in ("layers", "both")) == (layer is None):
            schemes.append(SegmentHead(shape, _segment_options(plan)))
    return SchemeStack(schemes, layer or 0)
