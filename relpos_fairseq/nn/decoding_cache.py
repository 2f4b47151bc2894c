"""The cache of one self-attention between the steps of incremental decoding.

Keys and values stand in buffers (B, H, capacity, ...) that grow by doubling: a step writes its own
slot and copies nothing else.  Concatenating at every step would read and write all earlier keys, at
several times the cost of attention itself.  Slots from `length` on are never read.  With gradients
enabled nothing is written in place and tensors are concatenated: autograd may have kept the earlier
keys for the queries' gradients, even where the keys themselves need none.

Beam search selects rows at every step.  Where attention reads keys by their rows (`AttentionInputs.key_rows`), no key
is moved: `places` says in which row each lies, so that hypotheses share what they have in common.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor

from relpos_fairseq.attention.inputs import of_rows
from relpos_fairseq.attention.step import StepTables, form_clipped_key_products, supports_step
from relpos_fairseq.core.placement import DecodingTerms, capacity_for
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.terms import PositionTerms


class DecodingCache:
    """Keys, values, log gates and padding of all tokens so far, and the terms of the layer's own schemes.

    Attributes:
        length: number of slots that are filled.
        padding: (B, length) True at padding, or None where there is none.
        position: the terms of the layer's own schemes.
        places: (B, length) row of the buffers in which each slot of each row lies, or None: the same row.
        is_read_by_rows: whether attention reads keys by their places.
        decided_by: the tables for which that was decided.
        form: what the kernel in C needs of the layer, or None.
    """

    def __init__(self) -> None:
        self.length = 0
        self.padding: Tensor | None = None
        self.places: Tensor | None = None
        self.is_read_by_rows = False
        self.decided_by: StepTables | None = None
        self.form: Any = None
        self.position = DecodingTerms()
        self._tables: StepTables | None = None
        # Products of the first `_with_products` keys with the clipped ends of tables.
        self._products: Tensor | None = None
        self._with_products = 0
        self._buffers: dict[str, Tensor] = {}

    @property
    def rows(self) -> int | None:
        """Number of rows of the batch, or None while the cache is empty."""
        if self.places is not None:
            return len(self.places)
        return next((buffer.size(0) for buffer in self._buffers.values()), None)

    def key_rows(self) -> Tensor:
        """Return the row of the buffers in which each slot of each row lies: (B, length)."""
        if self.places is not None:
            return self.places
        rows = next(iter(self._buffers.values())).size(0)
        return torch.arange(rows)[:, None].expand(-1, self.length)

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers by name: (B, H, capacity, ...) each, whose slots from `length` on hold nothing."""
        self._gather()
        return self._buffers

    @property
    def kept(self) -> dict[str, torch.dtype]:
        """The types of what is kept, by name."""
        return {name: buffer.dtype for name, buffer in self._buffers.items()}

    def tables(
        self, terms: tuple[PositionTerms, ...], positions: Positions, like: Tensor, scale: float
    ) -> StepTables | None:
        """Return the terms' tables as the last query reads them, in the type and on the device of `like`.

        The result is None where the call is no step of decoding, or gradients are enabled.
        """
        if torch.is_grad_enabled() or not supports_step(terms, positions):
            return None
        if self._tables is None or not self._tables.fit(terms, positions.src_len):
            exact = torch.promote_types(like.dtype, torch.float32)
            length = capacity_for(positions.src_len)
            self._tables = StepTables(terms, scale, exact, like.device, length)
        return self._tables

    def clipped_key_products(self, tables: StepTables | None, k: Tensor, coming: int = 0) -> Tensor | None:
        """Return a step's `AttentionInputs.clipped_key_products` for keys (B, H, S, D), or None if it needs none.

        Keys within the near part of a table have no product yet, and attention does not read their slots.
        The products of several keys are computed together, once the first of them leaves the near part.

        Args:
            tables: of the step.
            k: the keys.
            coming: how many of the last are not written yet, which are fewer than the near part has.
        """
        if tables is None or not tables.products:
            return None
        buffer, first, stop = self._products, self._with_products, k.size(2)
        if not _fits(buffer, k.size(0), stop):
            like = k.new_empty(*k.shape[:2], 0, len(tables.products), dtype=tables.exact)
            self._products = buffer = _grown(buffer, like, first, stop)
        if first <= stop - min(part.keys for part in tables.products):
            count = stop - coming - first
            fresh = form_clipped_key_products(tables.terms, k.narrow(2, first, count))
            if fresh is not None:
                buffer.narrow(2, first, count).copy_(fresh)
            self._with_products = stop - coming
        return buffer.narrow(2, 0, stop)

    def begin(self, like: dict[str, Tensor]) -> None:
        """Make room in an empty cache for tensors like those of a token, (B, H, 1, ...) each by name."""
        for name, part in like.items():
            self._with_room(name, part, 1)

    def append(self, new: dict[str, Any], padding: Tensor | None) -> dict[str, Any]:
        """Append the keys, values and so on of new tokens.

        Args:
            new: (B, H, T, ...) tensors by name, `key` among them, or None where the layer has no such tensor;
                the same names at every step.
            padding: (B, T) True at padding among the new tokens, or None.

        Returns:
            (B, H, S, ...) tensors of all tokens by name, or None: views, valid until the next append, whose slots lie
            in the rows that `places` names.

        Raises:
            ValueError: the new tokens have another number of rows than the earlier ones.
        """
        rows, count = new["key"].size(0), new["key"].size(2)
        self._check_rows(rows)
        if torch.is_grad_enabled() or not self.is_read_by_rows:
            self._gather()
        start, stop = self.length, self.length + count
        for name, part in new.items():
            if part is None:
                continue
            if torch.is_grad_enabled():
                past = [self._buffers[name][:, :, :start]] if name in self._buffers else []
                self._buffers[name] = torch.cat([*past, part], dim=2)
            else:
                self._with_room(name, part, stop)[:rows, :, start:stop].copy_(part)
        self._append_padding(padding, new["key"], start)
        self._lengthen(rows, count)
        return {name: None if part is None else self._buffers[name].narrow(2, 0, stop) for name, part in new.items()}

    def reserve(self, rows: int) -> dict[str, Tensor]:
        """Append a token of `rows` rows without padding and return what `append` does; the caller writes its slot.

        Raises:
            ValueError: as `append`.
        """
        self._check_rows(rows)
        for name, buffer in list(self._buffers.items()):
            self._with_room(name, buffer[:1, :, :1].expand(rows, -1, -1, *buffer.shape[3:]), self.length + 1)
        self._lengthen(rows, 1)
        return {name: buffer.narrow(2, 0, self.length) for name, buffer in self._buffers.items()}

    def _check_rows(self, rows: int) -> None:
        if self.rows not in (None, rows):
            raise ValueError(
                f"incremental_state holds {self.rows} rows and the new tokens have {rows}: select "
                f"rows by reorder_incremental_state, or take a fresh state for another batch"
            )

    def _with_room(self, name: str, part: Tensor, slots: int) -> Tensor:
        """Return the buffer for tensors like `part` (B, H, T, ...), with room for so many slots of its rows."""
        buffer = self._buffers.get(name)
        if not _fits(buffer, part.size(0), slots):
            self._gather()  # all of them, which have one capacity: rows of finished sentences do not grow
            self._buffers[name] = buffer = _grown(self._buffers.get(name), part, self.length, slots)
        return buffer

    def _lengthen(self, rows: int, count: int) -> None:
        if self.places is not None:
            own = torch.arange(rows)[:, None].expand(rows, count)
            self.places = torch.cat([self.places, own], dim=1)
        self.length += count

    def _append_padding(self, padding: Tensor | None, key: Tensor, earlier: int) -> None:
        if padding is None and self.padding is None:
            return
        if padding is None:
            padding = key.new_zeros(key.size(0), key.size(2), dtype=torch.bool)
        if self.padding is None:
            self.padding = key.new_zeros(key.size(0), earlier, dtype=torch.bool)
        self.padding = torch.cat([self.padding, padding.bool()], dim=1)

    def reorder(self, order: Tensor, spares: dict) -> None:
        """Select rows of the batch, as beam search does.

        Args:
            order: (B',) row that each new row continues.
            spares: free buffers by kind, which the layers of a model share: a reorder copies rows into a free
                buffer, and the buffer from which it copied becomes free.
        """
        if self.padding is not None:
            self.padding = self.padding.index_select(0, order)
        if self._buffers and self.is_read_by_rows and not torch.is_grad_enabled():
            self.places = self.key_rows().index_select(0, order)
            return
        self._gather()
        for name, buffer in self._buffers.items():
            self._buffers[name] = _selected(buffer, order, self.length, spares)
        if self._products is not None:
            self._products = _selected(self._products, order, self._with_products, spares)

    def _gather(self) -> None:
        """Move every slot into the row that it belongs to."""
        if self.places is None:
            return
        for name, buffer in self._buffers.items():
            self._buffers[name] = of_rows(buffer[:, :, : self.length], self.places)
        if self._products is not None:
            known = self.places[:, : self._with_products]
            self._products = of_rows(self._products[:, :, : self._with_products], known)
        self.places = None


def _fits(buffer: Tensor | None, rows: int, slots: int) -> TypeGuard[Tensor]:
    """Return whether a buffer has room for so many rows and slots, and may be written."""
    return buffer is not None and buffer.size(0) >= rows and buffer.size(2) >= slots and _writable(buffer)


def _writable(buffer: Tensor) -> bool:
    """Tell whether torch allows writes: a tensor made in inference mode may be changed only there."""
    return torch.is_inference_mode_enabled() or not buffer.is_inference()


def _grown(buffer: Tensor | None, part: Tensor, filled: int, needed: int) -> Tensor:
    """Return a buffer for at least `needed` slots, with the first `filled` slots of the old one."""
    batch, heads, _, *rest = part.shape
    stored = 0 if buffer is None else buffer.size(0)
    grown = part.new_empty(max(batch, stored), heads, capacity_for(needed), *rest)
    if buffer is not None:
        grown[:stored, :, :filled] = buffer[:, :, :filled]
    return grown


def _selected(buffer: Tensor, order: Tensor, filled: int, spares: dict) -> Tensor:
    """Return selected rows of a buffer, in the spare buffer of its kind if that is large enough."""
    if torch.is_grad_enabled() or buffer.requires_grad:
        return buffer[:, :, :filled].index_select(0, order)
    kind = (*buffer.shape[1:], buffer.dtype, buffer.device)
    spare = spares.pop(kind, None)
    if spare is None or spare.size(0) < len(order) or not _writable(spare):
        spare = buffer.new_empty(len(order), *buffer.shape[1:])
    fresh = spare[: len(order)]
    torch.index_select(buffer[:, :, :filled], 0, order, out=fresh[:, :, :filled])
    spares[kind] = buffer
    return fresh
