"""Sum the terms of all schemes field by field, into the tables that the kernels read.

Both kernels, in C and in Triton, read vectors and scalars by distance.  A table over distances is
read over a `Window`: every distance of the window has a row of its own, and the first and last row
also stand for all distances beyond them, the clipped ends.  `lower` reads every table of every term
over such a window and sums the terms field by field, so that a kernel sees one table of query_vectors,
one of key_vectors and so on, whatever the schemes are.  Logits that are products of two factors are
joined into one pair of factors, and a reset becomes two numbers a head.

Everything is formed under autograd, and nothing has a size of T x S.  `why_not_lowered` names the terms that
have no such form: they remain for the backends `blocked` and `reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from relpos_fairseq.attention.inputs import AttentionInputs, distances_of, required
from relpos_fairseq.core.positions import Positions, is_captured
from relpos_fairseq.core.relations import Clipped, DistanceRelation, Segments
from relpos_fairseq.core.terms import Decay, PositionTerms

VECTORS = ("query_vectors", "key_vectors", "trilinear", "value_vectors")
SCALARS = ("static", "gate")
OF_VECTORS, OF_SCALARS, OF_FACTORS = 1, 2, 4  # the summands of the logits that terms add to, as bits
NOTHING = 8  # the numbers of a reset are added, and no summand is replaced
HALF_PARTS = 3  # numbers of 8 bits or more that together hold the 24 bits of single precision
Factors = tuple[Tensor, Tensor]  # (B|1, H|1, T, r) of queries, (B|1, H|1, S, r) of keys


def why_not_lowered(inputs: AttentionInputs) -> str | None:
    """Return what a call has that no kernel has a form for, or None.

    - Content of another width than the queries and keys that vectors are multiplied with.
    - Contextual positions: each needs the logits of all keys after it.
    - Mixed heads: a kernel has one head's logits at a time.
    - Several decays without a causal mask.
    - Several product terms, or several trilinear ones: a kernel multiplies or replaces content once.
    - Resets of several first tokens: a kernel replaces one row and one column.
    - Dense biases, which are no function of the distance.
    - Distances between positions drawn at random: they are not the distances of slots.
    - Tables over a relation that is none of distances.  `static` over pairs of segments is served, as factors.
    """
    width, content = inputs.q.size(-1), inputs.q if inputs.content_q is None else inputs.content_q
    if content.size(-1) != width and any(term.uses_unrotated_qk for term in inputs.terms):
        return f"content of {content.size(-1)} channels beside vectors of {width}"
    products = trilinear = decays = 0
    reset = None
    for term in inputs.terms:
        if term.contextual is not None:
            return "contextual positions, which need all logits of a row first"
        if term.mixing is not None:
            return "logits that are mixed over heads"
        products += term.product
        trilinear += term.trilinear is not None
        decays += term.decay is not None and not inputs.causal
        if term.reset is not None:
            first = term.reset.first
            if reset is not None and first is not reset:
                if is_captured() or (first != reset).any():  # a graph cannot compare values
                    return "resets of several first tokens"
            reset = first
        if term.dense_bias is not None:
            return "logits by row (dense_bias), which no table over distances holds"
        if term.relation is None:
            continue
        if isinstance(term.relation, DistanceRelation):
            if inputs.positions.randomized is not None:
                return "distances between positions drawn at random (--position-random-range)"
            continue
        odd = [name for name in term.present if name not in ("static", "reset")]
        if odd or not is_segments(term):
            return f"{' and '.join(odd) or 'static'} over {term.relation}"
    for name, count in (("product", products), ("trilinear", trilinear), ("decay", decays)):
        if count > 1:
            return f"{count} {name} terms"
    return None


# -------------------------------------------------------------------------------- Tables over a window


@dataclass(frozen=True)
class Window:
    """The distances low..high of a table's rows; smaller distances read the first row, larger ones the last."""

    low: int
    high: int

    @property
    def width(self) -> int:
        """The number of distances in the window."""
        return self.high - self.low + 1

    def equals(self, other: Window) -> bool:
        """Return whether both windows are the same, also where torch.compile knows their ends only as symbols."""
        return self.low == other.low and self.high == other.high

    @classmethod
    def visible(cls, inputs: AttentionInputs) -> Window:
        """Return the distances of the pairs of a call that no causal mask or window excludes."""
        low, high = inputs.positions.lowest_distance, inputs.positions.highest_distance
        if inputs.causal:
            high = min(high, 0)
        if inputs.window is not None:
            low = max(low, 1 - inputs.window)
        return cls(low, high)

    @classmethod
    def over(cls, relations: Sequence[DistanceRelation], distances: Window) -> Window:
        """Return the smallest window outside of which none of the relations changes its id, for a call's `distances`.

        Where a relation still changes at the call's lowest or highest distance, the window reaches one
        distance further than the call, so that no pair is at a clipped end.
        """
        low = min([relation.lowest for relation in relations] or [distances.low])  # as torch.compile knows it
        high = max([relation.highest for relation in relations] or [distances.high])
        low = low if low > distances.low else distances.low - 1
        high = high if high < distances.high else distances.high + 1
        return cls(low, max(high, low + 1))


SAME_EVERYWHERE = Window(0, 1)  # for a vector that is the same at all distances


def table_by_distance(table: Tensor, relation: DistanceRelation, window: Window, positions: Positions) -> Tensor:
    """Expand a table (H|1, R, ...) over ids to one row for each distance of a window: (H|1, width, ...)."""
    if isinstance(relation, Clipped):
        return _slice_clipped(table, relation, window)
    if is_captured():  # only on a CPU, where index_select sums its gradient in a fixed order
        ids = relation.window(window.low, window.high, positions.device)
        return table.index_select(1, ids)
    ids, sources = positions.once(("rows", relation, window), lambda: _ids_of(relation, window, positions.device))
    return _SelectRows.apply(table, ids, sources)


def _slice_clipped(table: Tensor, relation: Clipped, window: Window) -> Tensor:
    """Expand a table over clipped distances to the distances of a window: slice its rows, then repeat the end rows."""
    first, last = window.low + relation.past, window.high + relation.past
    top = table.size(1) - 1
    begin, end = min(max(first, 0), top), max(min(last, top), 0) + 1
    before, after = max(-first, 0), max(last - top, 0)
    if begin > 0 or end <= top:
        table = table[:, begin:end]
    return _RepeatEnds.apply(table, before, after) if before or after else table


class _RepeatEnds(torch.autograd.Function):
    """Pad a table (H|1, R, ...) with `before` more copies of its first row and `after` more copies of its last.

    Unlike torch's replicate padding, this sums the gradients of the copies in one reduction.
    """

    @staticmethod
    def forward(ctx, table: Tensor, before: int, after: int) -> Tensor:
        ctx.ends = before, after
        sides = (before, after) if table.dim() == 2 else (0, 0, before, after)
        return functional.pad(table, sides, mode="replicate")

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        before, after = ctx.ends
        last = grad.size(1) - after - 1  # the last row of the table
        if last == before:
            return grad.sum(1, keepdim=True), None, None
        parts = (
            grad[:, : before + 1].sum(1, keepdim=True),
            grad[:, before + 1 : last],
            grad[:, last:].sum(1, keepdim=True),
        )
        return torch.cat(parts, dim=1), None, None


def _ids_of(relation: DistanceRelation, window: Window, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the ids (width,) of the window's distances, and the distances (R, m) of each id, padded with `width`."""
    ids = relation.window(window.low, window.high, torch.device("cpu"))
    counts = torch.bincount(ids, minlength=relation.size)
    sources = torch.full((relation.size, int(counts.max())), window.width)
    order = torch.argsort(ids, stable=True)
    rank = torch.arange(window.width) - (counts.cumsum(0) - counts)[ids[order]]
    sources[ids[order], rank] = order
    return ids.to(device), sources.to(device)


class _SelectRows(torch.autograd.Function):
    """Select table[:, ids] with a deterministic gradient; that of torch's index_select uses atomics on a GPU."""

    @staticmethod
    def forward(ctx, table: Tensor, ids: Tensor, sources: Tensor) -> Tensor:
        ctx.save_for_backward(sources)
        return table.index_select(1, ids)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (sources,) = ctx.saved_tensors
        nothing = grad.new_zeros(grad.size(0), 1, *grad.shape[2:])
        return torch.cat([grad, nothing], dim=1)[:, sources].sum(2), None, None


# ----------------------------------------------------------------------------------------------- Factors


def is_segments(term: PositionTerms) -> bool:
    """Return whether a term's scalars are read by pairs of segments, which kernels evaluate as factors."""
    return isinstance(term.relation, Segments) and term.static is not None


def rank_of(term: PositionTerms, dtype: torch.dtype) -> int:
    """Return the rank r of all factors of a term, as `factors_of` forms them in a type; 0 if it has none."""
    rank = 0 if term.static_factors is None else term.static_factors[0].size(-1)
    if term.decay is not None:
        rank += 2 * _parts(dtype)
    if isinstance(term.relation, Segments) and term.static is not None:
        rank += term.relation.count
    return rank


def factors_of(term: PositionTerms, inputs: AttentionInputs, dtype: torch.dtype) -> list[Factors]:
    """Return the pairs of factors f_i, g_j whose products f_i.g_j a term adds to the logits."""
    pairs = [] if term.static_factors is None else [term.static_factors]
    if isinstance(term.relation, Segments) and term.static is not None:
        pairs.append(_segment_factors(term.static, term.relation.count, inputs))
    if term.decay is not None and inputs.causal:
        pairs.append(_decay_factors(term.decay, inputs, dtype))
    return [(of_queries.to(dtype), of_keys.to(dtype)) for of_queries, of_keys in pairs]


def concatenate_ranks(one: Tensor, other: Tensor) -> Tensor:
    """Concatenate factors (B|1, H|1, L, r) and (B|1, H|1, L, r') to (B|1, H|1, L, r + r')."""
    common = torch.broadcast_shapes(one.shape[:2], other.shape[:2])
    return torch.cat([part.expand(*common, -1, -1) for part in (one, other)], dim=-1)


def _parts(dtype: torch.dtype) -> int:
    """Return into how many numbers of a type a sum of log gates is split: 3 in half precision, else 1."""
    return HALF_PARTS if dtype.itemsize < 4 else 1


def _decay_factors(decay: Decay, inputs: AttentionInputs, dtype: torch.dtype) -> Factors:
    """Return the factors of a causal decay w_i (past_i - past_j), or past_i - past_j: (w_i past_i, w_i).(1, -past_j).

    In half precision, sums are split into three parts whose total is as exact as single precision
    (rank 6 instead of 2): a product with 1 rounds nothing, and kernels add in single precision.  A weight
    is rounded once, for its query's sum and all its keys'.
    """

    def split(sums: Tensor) -> Tensor:
        parts, rest = [], sums
        for _ in range(_parts(dtype)):
            parts.append(rest.to(dtype))
            rest = (rest - parts[-1]).detach()  # the first part has the gradient
        return torch.stack(parts, dim=-1)  # (B, H|1, S, n)

    of_key = split(decay.past)
    one = torch.ones_like(of_key)
    if decay.weight is None:
        of_query = torch.cat([of_key, one], dim=-1)
    else:
        weight = decay.weight.to(dtype)
        of_query = torch.cat([split(decay.past * weight), weight[..., None] * one], dim=-1)
    return inputs.positions.query_rows(of_query, axis=2), torch.cat([one, -of_key], dim=-1)


def _decay_rows(decay: Decay, dtype: torch.dtype) -> Tensor:
    """Return past, future and weight of a decay, by slot: (B|1, H|1, 3, S)."""
    future = torch.zeros_like(decay.past) if decay.future is None else decay.future
    weight = torch.ones_like(decay.past) if decay.weight is None else decay.weight
    return torch.stack(torch.broadcast_tensors(*(x.to(dtype) for x in (decay.past, future, weight))), dim=2)


def _segment_factors(table: Tensor, count: int, inputs: AttentionInputs) -> Factors:
    """Return the factors of a table of segment pairs (H|1, n^2): its rows for queries, unit vectors for keys."""
    positions = inputs.positions
    of_key = functional.one_hot(required(positions.segments), count).to(inputs.exact)  # (B, S, n)
    of_query = positions.query_rows(of_key)  # (B, T, n)
    rows = table.to(inputs.exact).view(1, -1, count, count)
    return of_query[:, None] @ rows, of_key[:, None]


# ------------------------------------------------------------------------------------------------ Resets


def folds_offset(inputs: AttentionInputs) -> bool:
    """Return whether u in u.k may be added to the content's query: nothing multiplies or rotates the content."""
    multiplied = any(term.gate is not None or term.product or term.trilinear is not None for term in inputs.terms)
    return not multiplied and not inputs.rotated


def summands_of(term: PositionTerms) -> int:
    """Return as bits to which summands (vectors, scalars, factors) a term adds; v.a_r of query_offset v is a scalar."""
    vectors = not term.product and (term.query_vectors is not None or term.key_vectors is not None)
    factors = term.static_factors is not None or is_segments(term) or term.decay is not None
    scalars = term.static is not None and not is_segments(term) or term.query_offset is not None
    return OF_VECTORS * vectors + OF_SCALARS * scalars + OF_FACTORS * factors


class Resets:
    """Combine the resets of a call into one, with two logits for each head: the first token's row and column.

    A kernel adds three summands (of vectors, scalars, factors), and a reset replaces whole summands.
    Where one term of a summand is reset and another is not, it is replaced for both.  What the
    other term adds in that row and that column comes back as factors of rank 2:

        f_i.g_j = [i is first] row_j + [i is not first] column_i [j is first]

    Args:
        inputs: a call, of which terms may be reset.

    Attributes:
        held: the terms that are reset.
        replaced: bits of the replaced summands; NOTHING if there are none; 0 if no term is reset.
        first: (B|1,) slot of the first token, or None.
        mixes_tables: whether terms without a reset lose tables that must come back as factors.
        clears_factors: whether factors that are reset are set to 0 in the first token's row and column,
            since they share a product with factors that are not reset.
    """

    def __init__(self, inputs: AttentionInputs) -> None:
        self.inputs = inputs
        self.held = [term for term in inputs.terms if term.reset is not None and summands_of(term)]
        replaced = free = 0
        for term in inputs.terms:
            if term.reset is None:
                free |= summands_of(term)
            else:
                replaced |= summands_of(term)
        if needs_offset_table(inputs):
            free |= OF_VECTORS  # u goes into the table of key_vectors
        shared = replaced & free
        self.mixes_tables = bool(shared & ~OF_FACTORS)
        if self.mixes_tables:
            replaced |= OF_VECTORS | OF_SCALARS
        self.clears_factors = bool(replaced & OF_FACTORS and shared)
        if self.clears_factors:
            replaced &= ~OF_FACTORS
        self.replaced = replaced or (NOTHING if self.held else 0)
        self._resets = [required(term.reset) for term in self.held]
        self.first = self._resets[0].first if self._resets else None

    def numbers(self) -> Tensor:
        """Return the logits that the reset puts into the first token's row and column, summed over terms: (H|1, 2)."""
        pairs = (torch.broadcast_tensors(reset.row, reset.column) for reset in self._resets)
        logits = [torch.stack(both, dim=-1).to(self.inputs.exact) for both in pairs]
        return sum(logits[1:], logits[0])

    def cleared(self, factors: Factors) -> Factors:
        """Return a pair of factors, changed so that their product is 0 in the first token's row and column."""
        of_queries, of_keys = factors
        positions = self.inputs.positions
        other = (~self._is_first()).to(of_queries.dtype)  # (B|1, S)
        return (of_queries * positions.query_rows(other)[:, None, :, None], of_keys * other[:, None, :, None])

    def kept(self, dtype: torch.dtype) -> Factors:
        """Return factors that restore what terms without a reset add in the first token's row and column."""
        inputs = self.inputs
        of_key = self._is_first()[:, None].to(inputs.exact)  # (B|1, 1, S)
        of_query = inputs.positions.query_rows(of_key.transpose(1, 2)).transpose(1, 2)
        row, column = self._row_and_column()  # (B|1, H|1, S) and (B|1, H|1, T)
        of_queries = torch.stack(torch.broadcast_tensors(of_query, (1 - of_query) * column), -1)
        of_keys = torch.stack(torch.broadcast_tensors(row, of_key), -1)
        return of_queries.to(dtype), of_keys.to(dtype)

    def _is_first(self) -> Tensor:
        """Return (B|1, S), True at the first token."""
        positions = self.inputs.positions
        slots = torch.arange(positions.src_len, device=positions.device)
        return slots == required(self.first)[:, None]

    def _row_and_column(self) -> tuple[Tensor, Tensor]:
        """Return what terms without a reset add in the first token's row (B|1, H|1, S) and column (B|1, H|1, T)."""
        positions, place = self.inputs.positions, required(self.first)
        distances = torch.arange(positions.src_len, device=positions.device) - place[:, None]  # (B|1, S) from the token
        q, k, _, _ = self.inputs.exact_pairs()
        row = self._added(_at(q, place - positions.query_start), k, distances)
        column = self._added(q, _at(k, place), -distances[:, positions.query_start : positions.query_stop])
        return row, column

    def _added(self, q: Tensor, k: Tensor, distance: Tensor) -> Tensor:
        """Return what terms without a reset add for pairs of a query and a key: (B|1, H|1, L).

        Args:
            q: (B, H, L, D) queries, or one.
            k: (B, H, L, D) keys, or one.
            distance: (B|1, L) of each pair.
        """
        inputs, exact, scale = self.inputs, self.inputs.exact, self.inputs.scale
        total = q.new_zeros(1, 1, distance.size(-1))
        for term in inputs.terms:
            if term.content_offset is not None and not folds_offset(inputs):
                total = total + scale * (term.content_offset.to(exact)[None, :, None] * k).sum(-1)
            if term.reset is not None or term.relation is None or is_segments(term):
                continue
            read = _reader(term, distance, exact)
            if term.query_vectors is not None and not term.product:
                query = q
                if term.query_offset is not None:
                    query = q + term.query_offset.to(exact)[None, :, None]
                total = total + scale * (query * read("query_vectors")).sum(-1)
            if term.key_vectors is not None and not term.product:
                total = total + scale * (k * read("key_vectors")).sum(-1)
            if term.static is not None:
                total = total + read("static")
        return total


def _reader(term: PositionTerms, distance: Tensor, dtype: torch.dtype) -> Callable[[str], Tensor]:
    """Return a function that reads a term's table (H|1, R, ...) by distances (B|1, L): (B|1, H|1, L, ...)."""
    ids = distances_of(term).of_distance(distance)
    return lambda name: getattr(term, name).to(dtype)[:, ids].transpose(0, 1)


def _at(x: Tensor, place: Tensor) -> Tensor:
    """Return row place[b] (B|1,) of each x[b] of (B, H, L, D), clamped to the rows that exist: (B, H, 1, D)."""
    index = place.clamp(0, x.size(2) - 1).expand(x.size(0))
    return x[torch.arange(x.size(0), device=x.device), :, index][:, :, None]


# ---------------------------------------------------------------------------------------------- The sums


@dataclass
class Lowered:
    """The terms of one call, summed field by field.

    Args:
        vectors: window of the tables of vectors.
        scalars: window of `static` and `gate`.
        tensors: by the names of `PositionTerms`.
            Over `vectors`: query_vectors, key_vectors, trilinear (H|1, W, D), value_vectors
            (H|1, W, Dv), and the two tables of a product term, product_query and product_key.
            Over `scalars`: static, gate (H|1, W').
            content_offset (H|1, D), which is added to the content's queries.
            decay (B|1, H|1, 3, S): past, future and weight of a decay without a causal mask.
            The two static_factors: query_factors (B|1, H|1, T, r), key_factors (B|1, H|1, S, r).
            reset (H|1, 2): the logits of the first token's row and of its column.
        first: (B|1,) slot of the reset's first token, or None.
        reset_replaces: bits of the summands that the reset replaces (see `Resets`), 0 without one.
    """

    vectors: Window
    scalars: Window
    tensors: dict[str, Tensor] = field(default_factory=dict)
    first: Tensor | None = None
    reset_replaces: int = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor to the sum under `name`, or start that sum with it."""
        known = self.tensors.get(name)
        self.tensors[name] = tensor if known is None else known + tensor

    def add_factors(self, of_queries: Tensor, of_keys: Tensor) -> None:
        """Append a pair of factors to those so far, along the rank dimension."""
        for name, factors in (("query_factors", of_queries), ("key_factors", of_keys)):
            known = self.tensors.get(name)
            self.tensors[name] = factors if known is None else concatenate_ranks(known, factors)


def lower(
    inputs: AttentionInputs,
    vectors: Window,
    scalars: Window,
    dtype: torch.dtype,
    apart: Callable[[PositionTerms], bool] = lambda term: False,
) -> Lowered:
    """Sum the terms of a call field by field, into operands of a kernel, where `why_not_lowered` returns None.

    Args:
        inputs: the call.
        vectors: window of tables of vectors.
        scalars: window of tables of scalars.
        dtype: type of vectors and factors; scalars, and what multiplies, are as exact as logits.
        apart: tells the terms whose query_vectors and key_vectors the caller lowers itself.
    """
    low, resets = Lowered(vectors, scalars), Resets(inputs)
    for term in inputs.terms:
        _add_vectors(low, term, inputs, dtype, apart(term))
        _add_scalars(low, term, inputs)
        if term.decay is not None and not inputs.causal:
            low.tensors["decay"] = _decay_rows(term.decay, inputs.exact)
        for factors in factors_of(term, inputs, dtype):
            if term.reset is not None and resets.clears_factors:
                factors = resets.cleared(factors)
            low.add_factors(*factors)
    if resets.held:
        low.tensors["reset"] = resets.numbers()
        low.first, low.reset_replaces = resets.first, resets.replaced
        if resets.mixes_tables:
            low.add_factors(*resets.kept(dtype))
    return low


def relations_of_vectors(
    inputs: AttentionInputs, apart: Callable[[PositionTerms], bool] = lambda term: False
) -> list[DistanceRelation]:
    """Return the relations by which terms read tables of vectors, without tables that `apart` leaves to the caller."""
    found = []
    for term in inputs.terms:
        names = VECTORS[2:] if apart(term) else VECTORS
        if any(getattr(term, name) is not None for name in names):
            found.append(distances_of(term))
    return found


def needs_offset_table(inputs: AttentionInputs) -> bool:
    """Return whether a content_offset u of some term must be added to key_vectors, where it gives u.k."""
    given = any(term.content_offset is not None for term in inputs.terms)
    return given and not folds_offset(inputs)


def _add_vectors(low: Lowered, term: PositionTerms, inputs: AttentionInputs, dtype: torch.dtype, apart: bool) -> None:
    """Add a term's tables of vectors (H|1, W, D) over the window of vectors, and its offsets."""
    exact, known = inputs.exact, {}

    def read(name: str, dtype: torch.dtype) -> Tensor:
        given = getattr(term, name)
        if (id(given), dtype) not in known:  # one table may serve queries and keys
            # Its gradient is summed in the more exact of both types.
            table = given.to(torch.promote_types(given.dtype, dtype))
            table = table_by_distance(table, distances_of(term), low.vectors, inputs.positions).to(dtype)
            known[id(given), dtype] = table
        return known[id(given), dtype]

    if term.product:
        # A product of three passes the range of half precision.
        low.tensors["product_query"] = read("query_vectors", exact)
        low.tensors["product_key"] = read("key_vectors", exact)
    elif not apart:
        if term.query_vectors is not None:
            table = read("query_vectors", dtype)
            if term.query_offset is not None:
                table = table.contiguous()  # once: this product and the kernel keep it
                _add_query_offset(low, table.to(exact), term.query_offset, inputs)
            low.add("query_vectors", table)
        if term.key_vectors is not None:
            low.add("key_vectors", read("key_vectors", dtype))
    if term.value_vectors is not None:
        low.add("value_vectors", read("value_vectors", dtype))
    if term.trilinear is not None:
        low.add("trilinear", read("trilinear", exact))
    if term.content_offset is not None:
        if folds_offset(inputs):
            low.add("content_offset", term.content_offset.to(exact))
        else:
            offset = term.content_offset.to(dtype)[:, None]  # (H|1, 1, D)
            low.add("key_vectors", offset.expand(-1, low.vectors.width, -1))


def _add_query_offset(low: Lowered, table: Tensor, offset: Tensor, inputs: AttentionInputs) -> None:
    """Add scale v.a_d, one number for each distance, to `static`."""
    column = offset.to(inputs.exact)[..., None] * inputs.scale  # (H|1, D, 1)
    products = (table @ column)[..., 0]  # (H|1, W)
    if not low.scalars.equals(low.vectors):
        clipped = Clipped(-low.vectors.low, low.vectors.high)
        products = table_by_distance(products, clipped, low.scalars, inputs.positions)
    low.add("static", products)


def _add_scalars(low: Lowered, term: PositionTerms, inputs: AttentionInputs) -> None:
    """Add a term's `static` over the window of scalars (H|1, W'), and multiply by its `gate`."""
    if is_segments(term):
        return
    for name in SCALARS:
        table = getattr(term, name)
        if table is None:
            continue
        table = table_by_distance(table.to(inputs.exact), distances_of(term), low.scalars, inputs.positions)
        known = low.tensors.get(name)
        if known is not None:
            table = known + table if name == "static" else known * table
        low.tensors[name] = table
