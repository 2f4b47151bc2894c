"""Placement: the position schemes of an encoder or decoder, evaluated once a forward pass.

    added, context = placement.of(tokens, padding_idx, eos_idx)

A `PositionPlan` (plan.py) says which schemes stand where.  A `Placement` builds them: it holds what is added
to the input and what all layers share, and evaluates both once a forward pass; the tables of one layer
belong to that layer's attention, as a `SchemeStack`.  Every layer takes the `PositionContext` as an
argument, so that activation recomputation and torch.compile see the same values.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from relpos_fairseq.core.options import SchemeOptions
from relpos_fairseq.core.plan import PositionPlan, decode_text, encode_text
from relpos_fairseq.core.positions import (
    Positions,
    RandomizedPositions,
    index_in_sentence,
    index_of_tokens,
    is_captured,
    is_exported,
)
from relpos_fairseq.core.scheme import PositionMismatchError, PositionScheme
from relpos_fairseq.core.terms import Decay, PositionTerms
from relpos_fairseq.schemes.segments import SegmentHead, SegmentInput

logger = logging.getLogger(__name__)
_longest: ContextVar[int | None] = ContextVar("longest", default=None)
LEAST_CAPACITY = 32  # decoding makes room for 32, 64, 128, ... tokens
Rotation = tuple[PositionScheme, Any]  # a scheme that transforms queries and keys, and what it prepared


class Evaluated(NamedTuple):
    """What the members of a `SchemeStack` return for some positions.

    Args:
        prepared: what each member's `prepare` returned.
        by_member: the terms of each member.
    """

    prepared: tuple[Any, ...]
    by_member: tuple[tuple[PositionTerms, ...], ...]

    @property
    def terms(self) -> tuple[PositionTerms, ...]:
        """The terms of all members."""
        return sum(self.by_member, ())

    def at(self, positions: Positions) -> Evaluated:
        """Return a copy in which position_factors (tables) are replaced by their rows at `positions`."""
        if all(term.position_factors is None for term in self.terms):
            return self
        return self._replace(by_member=tuple(tuple(term.at(positions) for term in own) for own in self.by_member))


class SchemeStack(nn.ModuleList):
    """The members of a hybrid that stand at one place: in a layer, or shared by all layers.

    Args:
        schemes: the members.
        layer: the layer in which they stand; 0 also where layers share them.
    """

    __call__: Callable[..., Any]

    def __init__(self, schemes: Iterable[PositionScheme] = (), layer: int = 0) -> None:
        super().__init__(schemes)
        self.layer = layer

    def __iter__(self) -> Iterator[PositionScheme]:
        return super().__iter__()  # type: ignore[return-value]

    def embed(self, positions: Positions) -> Tensor | None:
        """Sum what the members add to the input: (B|1, T, E), or None if no member adds anything."""
        return _sum(scheme.embed(positions) for scheme in self)

    def evaluate(self, positions: Positions) -> Evaluated:
        """Return the members' terms for some positions, and what they prepared for them."""
        return self.terms_of(self.prepare(positions), positions).at(positions)

    def prepare(self, positions: Positions) -> tuple[Any, ...]:
        """Return what each member's `prepare` returns."""
        return tuple(scheme.prepare(positions) for scheme in self)

    def terms_of(self, prepared: tuple[Any, ...], positions: Positions) -> Evaluated:
        """Return the members' terms from what `prepare` returned; their position_factors stay tables."""
        pairs = zip(self, prepared, strict=True)
        return Evaluated(prepared, tuple(scheme.terms(part, positions) for scheme, part in pairs))

    def gates(self, source: Tensor, padding: Tensor | None) -> dict[str, Tensor | None]:
        """Sum the members' log gates for a layer's input, with their weights, as decoding caches them.

        Attention sums them over slots, so that padding between a query and a key must have open gates.

        Args:
            source: (S, B, E).
            padding: (B, S) True at padding, or None.
        """
        gates = _sum(scheme.log_gates(source) for scheme in self)  # (B, H|1, S, sides)
        if gates is not None and padding is not None:
            gates = gates.masked_fill(padding[:, None, :, None], 0.0)
        return {"log_gates": gates, "gate_weights": _sum(scheme.gate_weights(source) for scheme in self)}

    def gated(self, source: Tensor, padding: Tensor | None) -> tuple[PositionTerms, ...]:
        """Return what `gates` returns as a tuple of one term, or of none."""
        return decay_of(self.gates(source, padding))


def _sum(parts: Iterable[Tensor | None]) -> Tensor | None:
    """Sum the tensors that are not None, or return None if all are."""
    found = [part for part in parts if part is not None]
    return sum(found[1:], found[0]) if found else None


def decay_of(tensors: Mapping[str, Tensor | None]) -> tuple[PositionTerms, ...]:
    """Return the log gates among tensors, by the names of `gates`, as a tuple of one term, or () without any."""
    gates = tensors["log_gates"]
    return () if gates is None else (PositionTerms(decay=Decay.of_gates(gates, tensors["gate_weights"])),)


def rotation_of(pairs: Iterable[Rotation]) -> Rotation | None:
    """Return the first scheme that rotates queries and keys, with what its `prepare` returned, or None."""
    return next((pair for pair in pairs if pair[0].rotates), None)


@dataclass(frozen=True)
class PositionContext:
    """What a layer's attention needs of positions.

    Args:
        positions: where queries and keys stand.
        causal: keys in a query's future are excluded.
        shared: the terms that all layers share.
        rotation: the scheme that transforms queries and keys, with what it prepared, or None.
        memory: (M, B, E) input of the key and value projections for the M slots before the
            queries' tokens, or None; the positions count these slots.
        window: how many slots a query sees, the last of them its own; None: all.
        documents: (B, S) document number of each slot, or None; other documents are excluded.
        parts: (shared, rotation) of each part of a plan whose layers differ; `of_layer` chooses.
        tokens: (N,) places in (T B) of the tokens that are no padding, if what layers compute of each token is
            computed of these alone; None: of all.
    """

    positions: Positions
    causal: bool
    shared: tuple[PositionTerms, ...] = ()
    rotation: Rotation | None = None
    memory: Tensor | None = None
    window: int | None = None
    documents: Tensor | None = None
    parts: tuple[tuple[tuple[PositionTerms, ...], Rotation | None], ...] = ()
    tokens: Tensor | None = None

    def of_layer(self, layer: int) -> PositionContext:
        """Return the context of one layer, counted from 0."""
        if not self.parts:
            return self
        shared, rotation = self.parts[layer % len(self.parts)]
        return replace(self, shared=shared, rotation=rotation, parts=())

    def unpad(self, x: Tensor) -> Tensor:
        """Return of x (T, B, E) or (T B, E) what layers compute of: the rows (N, E) of `tokens`, or x."""
        return x if self.tokens is None else x.reshape(-1, x.size(-1)).index_select(0, self.tokens)

    def pad(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """Return the shape (T, B, E) of rows that `unpad` returned, zeros at padding."""
        if self.tokens is None:
            return rows.view(shape)
        return rows.new_zeros(shape[0] * shape[1], shape[2]).index_copy_(0, self.tokens, rows).view(shape)


@contextlib.contextmanager
def generation_of(length: int | None) -> Iterator[None]:
    """Scale rotations that depend on the number of tokens by `length` tokens in the `with` block."""
    token = _longest.set(length)
    try:
        yield
    finally:
        _longest.reset(token)


def _generation() -> int | None:
    """Return the number of tokens of `generation_of`; None outside it, and where code is traced."""
    return None if is_captured() else _longest.get()


class DecodingTerms:
    """The terms of one stack, kept between the steps of decoding.

    Schemes prepare for more tokens than there are, so that what they prepared serves many steps.  Where
    slots are positions, a step's factors stay tables, which attention reads at the last position.
    """

    def __init__(self) -> None:
        self.longest = _generation()
        self._capacity = 0
        self._gradients = False
        self._last = Evaluated((), ())
        self._moving = True
        self._limited: list[PositionScheme] = []

    def evaluate(self, schemes: SchemeStack, positions: Positions) -> Evaluated:
        """Return what `SchemeStack.evaluate` returns, from earlier steps where possible; factors may stay tables."""
        if any(scheme.by_length for scheme in schemes):
            return schemes.evaluate(positions)
        # What was prepared without gradients cannot serve a step that needs them.
        if self._capacity < positions.src_len or self._gradients != torch.is_grad_enabled():
            self._keep(schemes, self._prepare(schemes, positions), positions)
        elif self._moving:
            self._keep(schemes, self._last.prepared, positions)
        else:
            for scheme in self._limited:
                scheme.check_length(positions)
        in_order = positions.token_index is None and positions.randomized is None
        return self._last if positions.is_step and in_order else self._last.at(positions)

    def _keep(self, schemes: SchemeStack, prepared: tuple[Any, ...], positions: Positions) -> None:
        self._last = schemes.terms_of(prepared, positions)
        # A reset, and factors that a scheme read itself, change with the query.
        self._moving = any(term.reset is not None or term.static_factors is not None for term in self._last.terms)
        members = zip(schemes, self._last.by_member, strict=True)
        self._limited = [scheme for scheme, own in members if any(term.position_factors for term in own)]

    def _prepare(self, schemes: SchemeStack, positions: Positions) -> tuple[Any, ...]:
        self._capacity = length = capacity_for(positions.src_len)
        self._gradients = torch.is_grad_enabled()
        start = length - positions.tgt_len
        return schemes.prepare(replace(positions, src_len=length, query_start=start))


def capacity_for(length: int) -> int:
    """Return the number of tokens for which decoding prepares terms when `length` tokens are reached."""
    return max(LEAST_CAPACITY, 1 << (length - 1).bit_length())


class Placement(nn.Module):
    """The schemes that all layers of an encoder or decoder share, and the description in its checkpoints."""

    scheme_version: Tensor

    def __init__(self, plan: PositionPlan) -> None:
        super().__init__()
        self.plan = plan
        self._common: dict[str, nn.Parameter] = {}  # a plain dict: the layers register them
        self.shared = _build(plan, layer=None)
        if plan.segment_encoding == "input":
            self.shared.append(SegmentInput(plan.shape, _segment_options(plan)))
        # "version" in the name keeps fairseq's moving average of weights from averaging it.
        self.register_buffer("scheme_version", encode_text(plan.describe()))
        self._random = RandomizedPositions(plan.random_range, plan.shape.seed_name)
        self._always_random = plan.always_random

    def layer_schemes(self, layer: int) -> SchemeStack:
        """Build the schemes that belong to one layer, counted from 0, and are not shared."""
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
        """Evaluate the positions of a batch: what is added to its embeddings, and the layers' context.

        Args:
            tokens: (B, S) token ids of all keys.
            padding_idx: id of padding.
            eos_idx: id of a sentence's end.
            query_start: slot of the first query.
            segments: (B, S) segment numbers or None.
            decoding: the shared terms of earlier steps of decoding, or None.

        Returns:
            (B|1, T, E) to add to the queries' embeddings or None, and the context of all layers.

        Raises:
            ValueError: a segment number beyond the tables.
        """
        positions = self.positions(tokens, padding_idx, eos_idx, query_start=query_start, segments=segments)
        if decoding is None and self._random.limit and (self.training or self._always_random):
            positions = self._randomize(positions)
        return self.embed(positions), self.context(positions, decoding)

    def positions(
        self, tokens: Tensor, padding_idx: int, eos_idx: int, *, query_start: int = 0, segments: Tensor | None = None
    ) -> Positions:
        """Return the positions of a batch of tokens; see `of` for arguments and errors."""
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

    def _randomize(self, positions: Positions) -> Positions:
        """Return a copy of `positions` in which schemes read randomly drawn positions in place of slots."""
        if is_exported():
            raise ValueError(
                "--position-random-at always: a graph cannot hold the positions of every length; "
                "export with --position-random-at training"
            )
        sample = self._random.sample(positions.src_len, by_batch=self.training)
        sentence = positions.sentence_index
        if sentence is not None:
            sentence = sample.to(sentence.device)[sentence]
        return replace(positions, randomized=sample, sentence_index=sentence)

    def _in_place(self, padding: Tensor) -> bool:
        """Tell whether every token's index is its slot, because no token follows padding (B, S).

        Padding then reads tables at its own slots, so that the tables must have rows for these.
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
        """True if some member reads the number of real tokens in each row."""
        return any(plan.scheme.counts_tokens(plan.options) for plan in self.plan.members)

    def embed(self, positions: Positions) -> Tensor | None:
        """Return (B|1, T, E) to add to the queries' embeddings, or None."""
        return self.shared.embed(positions)

    def context(self, positions: Positions, decoding: DecodingTerms | None = None) -> PositionContext:
        """Evaluate the schemes that layers share, and return the context of all layers.

        Args:
            positions: where queries and keys stand.
            decoding: the shared terms of earlier steps of decoding, or None.  Rotations that depend on the number
                of tokens are then scaled by the generation's (`generation_of`), or the longest input of the flags.

        Raises:
            RuntimeError: torch.jit.trace, which would take this input's lengths for all.
        """
        if torch.jit.is_tracing():
            raise RuntimeError(
                "torch.jit.trace would record the lengths of this input for all: call "
                "torch.export.export, or relpos export onnx"
            )
        if self.counts_tokens:
            longest = _generation() if decoding is None else decoding.longest or self.plan.shape.max_positions
            positions = replace(positions, longest=longest)
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

    def _part(self, found: Evaluated, plan: PositionPlan) -> tuple[tuple[PositionTerms, ...], Rotation | None]:
        """Return the terms and the rotation of those shared members that serve the layers of one part of the plan."""
        every = zip(self.shared, found.prepared, found.by_member, strict=True)
        mine = [member for member in every if _stands(member[0], plan)]
        terms = sum((terms for _, _, terms in mine), ())
        return terms, rotation_of((scheme, prepared) for scheme, prepared, _ in mine)

    def shared_by(self, layer: int) -> list[PositionScheme]:
        """Return the shared members that serve a layer, counted from 0."""
        plan = self.plan.of_layer(layer)
        return [scheme for scheme in self.shared if _stands(scheme, plan)]

    def check_before(self, owner: nn.Module) -> None:
        """Log what they are, and check a checkpoint's schemes and options before the layers of `owner` load theirs."""
        logger.info("positions of %s: %s", self.plan.shape.seed_name or "model", self.plan.describe())
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
        if key in state_dict:  # flags may name options of which the checkpoint says nothing
            state_dict = {**state_dict, key: self.scheme_version}
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _stands(scheme: PositionScheme, plan: PositionPlan) -> bool:
    """Tell whether a shared scheme serves the layers of a plan; segments serve all layers."""
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
    """Build the members that belong to one layer, or, if `layer` is None, those that layers share."""
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
