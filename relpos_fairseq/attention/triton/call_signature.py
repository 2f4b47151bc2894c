"""The form of an attention call: what kernels are compiled for, without the call's numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.positions import Positions
from relpos_fairseq.relations import Relation, Segments
from relpos_fairseq.terms import Decay, PositionTerms, Reset

TABLES = (
    "query_vectors",
    "query_offset",
    "key_vectors",
    "content_offset",
    "gate",
    "trilinear",
    "static",
    "value_vectors",
)


@dataclass(frozen=True)
class TermSignature:
    """A term without its numbers.

    Args:
        relation: its own.
        product: the same.
        tables: name, heads, channels (0: none), and whether it learns.
        factors: rows of the batch and heads (1 or all), of queries and keys, rank, learns.
        reset: heads, whether each row has a first token of its own, learns.
        decay: whether heads have gates of their own, and learns.
    """

    relation: Relation | None
    product: bool
    tables: tuple[tuple[str, int, int, bool], ...]
    factors: tuple[tuple[bool, bool, bool, bool], int, bool] | None
    reset: tuple[bool, bool, bool] | None
    decay: tuple[bool, bool] | None


@dataclass(frozen=True)
class CallSignature:
    """A call without its numbers; calls that differ in device and length alone are equal.

    Args:
        dtype: of q, k and v.
        dim: channels of q and k, as vectors meet them, and of values.
        heads: 1, or 2 for more.
        terms: their forms.
        scale: of the content.
        masks: whether there are causal, key_padding, documents; the window.
        dropout: of probabilities.
        rotated: channels of the queries that the content meets, where others than vectors do.
        grads: whether q, k and v want gradients.
        wide: whether each term has vectors for so many distances that they are met by tiles.
        tf32: products of fp32 are formed in it.
        device: where it runs; not compared.
        length: T, where queries begin, and keys after the last of them; not compared.
    """

    dtype: torch.dtype
    dim: tuple[int, int]
    heads: int
    terms: tuple[TermSignature, ...]
    scale: float
    masks: tuple[bool, bool, bool, int]
    dropout: float
    rotated: int
    grads: tuple[bool, bool, bool]
    wide: tuple[bool, ...]
    tf32: bool
    device: str = field(compare=False, repr=False)
    length: tuple[int, int, int] = field(compare=False, repr=False)


def signature_of(inputs: AttentionInputs, wide: tuple[bool, ...], tf32: bool) -> CallSignature:
    """Return the form of a call."""
    positions, graph = inputs.positions, torch.is_grad_enabled()
    masks = (inputs.causal, inputs.key_padding is not None, inputs.documents is not None)
    return CallSignature(
        inputs.q.dtype,
        (inputs.q.size(-1), inputs.v.size(-1)),
        min(inputs.q.size(1), 2),
        tuple(_form(term, graph) for term in inputs.terms),
        float(inputs.scale),
        (*masks, inputs.window or 0),
        inputs.dropout,
        inputs.content_q.size(-1) if inputs.rotated else 0,
        tuple(graph and x.requires_grad for x in (inputs.q, inputs.k, inputs.v)),
        wide,
        tf32,
        str(inputs.q.device),
        (positions.tgt_len, positions.query_start, positions.src_len - positions.query_stop),
    )


def _form(term: PositionTerms, graph: bool) -> TermSignature:
    tables, factors, reset = [], None, None
    for name in TABLES:
        if (table := getattr(term, name)) is not None:
            channels = table.size(-1) if name not in ("gate", "static") else 0
            tables.append((name, min(table.size(0), 2), channels, graph and table.requires_grad))
    if term.static_factors is not None:
        query, key = term.static_factors
        many = tuple(x.size(axis) > 1 for x in (query, key) for axis in (0, 1))
        factors = (many, query.size(-1), graph and (query.requires_grad or key.requires_grad))
    if (given := term.reset) is not None:
        reset = (given.row.numel() > 1, given.first.numel() > 1, graph and given.row.requires_grad)
    decay = None
    if term.decay is not None:  # of a causal call, which reads the past's sums alone
        past = term.decay.past
        decay = (past.size(1) > 1, graph and past.requires_grad)
    return TermSignature(term.relation, term.product, tuple(tables), factors, reset, decay)


class RandomCall:
    """Calls of a trial, in fp64 on the CPU, of numbers that the trial's type holds exactly.

    Args:
        trial: its form.
        length: T, where queries begin, and keys after the last of them.
        batch: rows.
    """

    def __init__(self, trial: CallSignature, length: tuple[int, int, int], batch: int) -> None:
        self.trial, self.batch = trial, batch
        self.tgt_len, self.start, after = length
        self.src_len = self.start + self.tgt_len + after
        self.generator = torch.Generator().manual_seed(self.tgt_len)
        self.leaves: dict[str, Tensor] = {}

    def inputs(self) -> AttentionInputs:
        """The call; tensors that want gradients are in `leaves`."""
        trial = self.trial
        lengths = {"q": self.tgt_len, "k": self.src_len, "v": self.src_len}
        content = {
            name: self._content(name, lengths[name], trial.dim[name == "v"], learns)
            for name, learns in zip("qkv", trial.grads, strict=True)
        }
        if trial.rotated:
            content["content_q"] = self._content("content_q", self.tgt_len, trial.rotated, trial.grads[0])
            content["content_k"] = self._content("content_k", self.src_len, trial.rotated, trial.grads[1])
        causal, padded, documents, window = trial.masks
        slots = torch.arange(self.src_len)
        padding = None
        if padded:  # at the end, at the beginning, everywhere
            ends = (self.src_len - self.src_len // 4, self.src_len // 5, 0)
            hidden = (slots >= ends[0], slots < ends[1], slots >= 0)
            padding = torch.stack(hidden)[: self.batch]
        terms = tuple(self._term(number, form) for number, form in enumerate(trial.terms))
        segments = None
        if any(isinstance(form.relation, Segments) for form in trial.terms):
            segments = (slots > self.src_len // 3).long().expand(self.batch, -1)
        positions = Positions(self.tgt_len, self.src_len, self.start, segments=segments)
        return AttentionInputs(
            **content,
            terms=terms,
            positions=positions,
            scale=trial.scale,
            causal=causal,
            key_padding=padding,
            window=window or None,
            documents=(slots // 13).expand(self.batch, -1) if documents else None,
        )

    def _leaf(self, name: str, value: Tensor, learns: bool) -> Tensor:
        value = value.to(self.trial.dtype).double()
        if learns:
            self.leaves[name] = value = value.requires_grad_()
        return value

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator, dtype=torch.float64)

    def _content(self, name: str, length: int, dim: int, learns: bool) -> Tensor:
        drawn = self.normal(length, self.batch, self.trial.heads, dim)
        return self._leaf(name, drawn.permute(1, 2, 0, 3), learns)  # as fairseq lays it out

    def _term(self, number: int, form: TermSignature) -> PositionTerms:
        given: dict = {"relation": form.relation, "product": form.product}
        for name, heads, channels, learns in form.tables:
            rows = () if name.endswith("_offset") else (form.relation.size,)
            drawn = self.normal(heads, *rows, *((channels,) if channels else ()))
            if form.product and name in ("query_vectors", "key_vectors"):
                drawn *= self.trial.dim[0] ** -0.5
            elif name in ("gate", "trilinear"):
                drawn = 1 + 0.3 * drawn
            given[name] = self._leaf(f"{number}.{name}", drawn, learns)
        if form.factors is not None:
            (q_rows, q_heads, k_rows, k_heads), rank, learns = form.factors
            sizes = ((q_rows, q_heads, self.tgt_len), (k_rows, k_heads, self.src_len))
            given["static_factors"] = tuple(
                self._leaf(f"{number}.factors of {side}", drawn * rank**-0.25, learns)
                for side, drawn in (
                    (side, self.normal(*self._many(rows, heads), length, rank))
                    for side, (rows, heads, length) in zip("qk", sizes, strict=True)
                )
            )
        if form.reset is not None:
            by_head, by_row, learns = form.reset
            thetas = (
                self._leaf(f"{number}.{name}", self.normal(self._many(False, by_head)[1]), learns)
                for name in ("row", "column")
            )
            first = torch.arange(self.batch if by_row else 1) % self.src_len
            given["reset"] = Reset(*thetas, first)
        if form.decay is not None:
            by_head, learns = form.decay
            gates = self.normal(self.batch, self._many(False, by_head)[1], self.src_len)
            sums = torch.nn.functional.logsigmoid(gates + 2).cumsum(-1).float().double()
            if learns:  # as gates' sums have it, single precision whatever the trial's type
                self.leaves[f"{number}.decay"] = sums = sums.requires_grad_()
            given["decay"] = Decay(sums)
        return PositionTerms(**given)

    def _many(self, rows: bool, heads: bool) -> tuple[int, int]:
        return self.batch if rows else 1, self.trial.heads if heads else 1
