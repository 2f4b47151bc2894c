"""Positions: where the queries and keys of one attention call stand.

Slots are columns of the key matrix: key j stands at slot j, query row t at slot ``query_start + t``.
The *distance* from a query to a key is ``j - i`` (negative: the key lies in the past).  Padding on
either side leaves the real tokens of a row contiguous, so that distances between slots are distances
between tokens.  Only a scheme with absolute positions must know how many real tokens came before a
token: ``token_index`` holds that number.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_transforms = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: None)  # torch has no public name of it


def is_exported() -> bool:
    """Tell whether torch.export traces the code: sizes are symbols, and no value is known."""
    return getattr(torch.compiler, "is_exporting", bool)()


def is_captured() -> bool:
    """Tell whether torch.compile or torch.export traces the code, or torch.func transforms it: no value is known."""
    return torch.compiler.is_compiling() or is_transformed()


def is_transformed() -> bool:
    """Tell whether torch.func (vmap, grad, jvp, ...) transforms the code, to which plain operators alone are known."""
    return not torch.compiler.is_compiling() and _transforms() is not None


@dataclass(frozen=True)
class Positions:
    """Where the queries and keys of one attention call stand.

    Args:
        tgt_len: number of query rows T.
        src_len: number of key columns S.
        query_start: slot of the first query row; ``S - T`` where the queries are the last keys, which
            holds in training (0), in decoding with a cache (S - 1) and after M slots of memory (M).
        token_index: (B, S) index of each key among the real tokens of its row, or None where it
            equals the slot.  Values at padding are arbitrary but inside [0, S).
        sentence_index: (B, S) index of each token counted from its own sentence's start, or None.
        segments: (B, S) segment number of each token, or None.
        randomized: (S,) rising positions on the CPU that schemes read in place of the slots 0..S-1
            (`RandomizedPositions`), or None.  Masks count slots in either case.
        longest: number of tokens by which rotations that depend on it are scaled, the same throughout a
            generation; None: each row's own.
        device: device of the index tensors.
    """

    tgt_len: int
    src_len: int
    query_start: int = 0
    token_index: Tensor | None = None
    sentence_index: Tensor | None = None
    segments: Tensor | None = None
    randomized: Tensor | None = None
    longest: int | None = None
    device: torch.device = torch.device("cpu")
    _formed: dict = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise an error for lengths that contradict each other."""
        if self.tgt_len < 1 or self.src_len < 1:
            raise ValueError(
                f"positions need at least one query and one key, got tgt_len {self.tgt_len} and src_len {self.src_len}"
            )
        if not 0 <= self.query_start <= self.src_len - self.tgt_len:
            raise ValueError(
                f"query rows must stand on key slots: query_start {self.query_start} + tgt_len "
                f"{self.tgt_len} must lie in 0..{self.src_len}"
            )

    @property
    def query_stop(self) -> int:
        return self.query_start + self.tgt_len

    @property
    def lowest_distance(self) -> int:
        return -(self.query_stop - 1)

    @property
    def highest_distance(self) -> int:
        return self.src_len - 1 - self.query_start

    @property
    def is_step(self) -> bool:
        """Tell whether there is one query, on the last key: a step of incremental decoding."""
        return self.tgt_len == 1 and self.query_start == self.src_len - 1

    def once(self, key: Hashable, form: Callable[[], T]) -> T:
        """Return the result of `form()`, computed for the first layer that asks and cached for the others.

        All layers of a forward pass are given the same `Positions`, which live no longer than the
        pass.  Activation recomputation reads them again: the result of `form` may depend on `key`
        and on these positions alone, never on a parameter.

        Args:
            key: identifies the result: the caller, and everything it depends on beside the positions.
            form: computes the result.
        """
        if is_captured():
            return form()  # a symbolic size has no hash, and the compiler removes repeated work itself
        if key not in self._formed:
            self._formed[key] = form()
        return self._formed[key]

    def rows(self, start: int, stop: int) -> Positions:
        """Return positions of the same keys and the query rows [start, stop)."""
        return replace(self, tgt_len=stop - start, query_start=self.query_start + start)

    def keys(self, stop: int) -> Positions:
        """Return positions of the same query rows and the keys [0, stop)."""
        cut = {
            name: getattr(self, name)[:, :stop]
            for name in ("token_index", "sentence_index", "segments")
            if getattr(self, name) is not None
        }
        if self.randomized is not None:
            cut["randomized"] = self.randomized[:stop]
        return replace(self, src_len=stop, **cut)

    def distance(self) -> Tensor:
        """Return the distances j - i between slots: (T, S)."""
        key = torch.arange(self.src_len, device=self.device)
        query = torch.arange(self.query_start, self.query_stop, device=self.device)
        return key[None, :] - query[:, None]

    def slot_positions(self) -> Tensor:
        """Return the position that schemes read at each slot, (S,): the slot itself, or its randomized position."""
        positions = self.randomized
        if positions is None:
            return torch.arange(self.src_len, device=self.device)
        return self.once("slot_positions", lambda: positions.to(self.device))

    def position_distance(self) -> Tensor:
        """Return the distances j - i between the positions that schemes read: (T, S)."""
        positions = self.slot_positions()
        return positions - self.query_rows(positions, 0)[:, None]

    def last_index(self) -> Tensor:
        """Return the position of each row's last token: (B|1,)."""
        last = self.row_lengths() - 1
        return last if self.randomized is None else self.slot_positions()[last]

    def distance_range(self) -> tuple[int, int]:
        """Return the lowest and the highest distance between the positions that schemes read."""
        if self.randomized is None:
            return self.lowest_distance, self.highest_distance
        first, last = int(self.randomized[0]), int(self.randomized[-1])
        start, end = int(self.randomized[self.query_start]), int(self.randomized[self.query_stop - 1])
        return first - end, last - start

    @property
    def stop(self) -> int:
        """The last position that schemes read, plus 1: how many rows a table of positions needs."""
        return self.src_len if self.randomized is None else int(self.randomized[-1]) + 1

    def key_index(self) -> Tensor:
        """Return the position of each key's token in its row: (B|1, S)."""
        number = self.key_number()
        return number if self.randomized is None else self.slot_positions()[number]

    def key_number(self) -> Tensor:
        """Return each key's number among the real tokens of its row, from 0, never randomized: (B|1, S)."""
        if self.token_index is not None:
            return self.token_index
        return torch.arange(self.src_len, device=self.device)[None]

    def query_index(self) -> Tensor:
        """Return the position of each query's token in its row: (B|1, T)."""
        return self.query_rows(self.key_index())

    def query_rows(self, values: Tensor, axis: int = 1) -> Tensor:
        """Select, along `axis`, the values at the slots of the queries, (B, T), from values at all slots, (B, S)."""
        return values.narrow(axis, self.query_start, self.tgt_len)

    def rows_of_keys(self, table: Tensor) -> Tensor:
        """Read a table by the position of each key's token.

        Args:
            table: (heads, n, r) with a row for every position.

        Returns:
            (B|1, heads, S, r), a view of the table where positions are the slots.
        """
        if self.token_index is None and self.randomized is None:
            return table[None, :, : self.src_len]
        heads, rows, _ = table.shape
        flat = self.once(("rows of keys", heads, rows), lambda: self._row_numbers(heads, rows))
        return torch.nn.functional.embedding(flat, table.flatten(0, 1))

    def _row_numbers(self, heads: int, rows: int) -> Tensor:
        """Return for each key and head the row of its position in the heads' tables, concatenated: (B, heads, S)."""
        first = torch.arange(heads, device=self.device) * rows
        return self.key_index()[:, None] + first[:, None]

    def row_lengths(self) -> Tensor:
        """Return the number of real tokens of each row: (B|1,).

        A row of one token and padding behind it gives 2, as `index_of_tokens` gives that padding index 1.
        """
        if self.token_index is None:
            return torch.tensor([self.src_len], device=self.device)
        return self.token_index.amax(dim=1) + 1

    def scaling_lengths(self) -> Tensor:
        """Return the number of tokens by which rotations are scaled: (B|1,)."""
        return self.row_lengths() if self.longest is None else torch.tensor([self.longest], device=self.device)

    def longest_row(self) -> int:
        """Return the largest number in `row_lengths`: the real tokens of the longest row."""
        if self.token_index is None:
            return self.src_len
        return int(self.token_index.max()) + 1

    def first_slot(self) -> Tensor:
        """Return the slot of each row's first real token: (B|1,)."""
        if self.token_index is None:
            return torch.zeros(1, dtype=torch.long, device=self.device)
        # Only padding before the first token shares its index 0 (see index_of_tokens).
        zero = (self.token_index == 0).long()
        slots = torch.arange(self.src_len, device=self.device)
        return (zero * slots).amax(dim=1)


def index_of_tokens(padding: Tensor | None) -> Tensor | None:
    """Number each row's real tokens from 0.

    Args:
        padding: (B, S) True at padding, or None.

    Returns:
        (B, S) indices in [0, S), or None without padding.  Padding before the first token has
        index 0, padding after it at least 1: the last slot of index 0 is the first token.
    """
    if padding is None:
        return None
    seen = (~padding).long().cumsum(dim=1)
    index = (seen - 1).clamp(min=0)
    return torch.where(padding & (seen > 0), index.clamp(min=1), index)


def index_in_document(padding: Tensor | None, documents: Tensor | None, length: int) -> Tensor | None:
    """Number each document's real tokens from 0.

    Args:
        padding: (B, S') True at padding of the last S' <= `length` slots; there is none before them.
        documents: (B, length) number of each slot's document, which never falls, or None.
        length: number of slots S.

    Returns:
        (B, S) indices, or None where they are the slots.
    """
    if padding is not None:
        padding = torch.nn.functional.pad(padding, (length - padding.size(1), 0))
    index = index_of_tokens(padding)
    if documents is None:
        return index
    if index is None:
        index = torch.arange(length, device=documents.device).expand_as(documents)
    begins = torch.nn.functional.pad(documents.diff(dim=1) != 0, (1, 0))
    return index - torch.where(begins, index, torch.zeros_like(index)).cummax(dim=1).values


def index_in_sentence(tokens: Tensor, padding_idx: int, eos_idx: int, causal: bool) -> Tensor:
    """Number each sentence's tokens from 0 in packed blocks of sentences.

    Args:
        tokens: (B, S) token ids.
        padding_idx: id of padding.
        eos_idx: id of the sentence end.
        causal: False: a sentence starts after an eos (the eos ends its sentence).  True: it starts
            at the eos, which a causal decoder reads as the beginning of what follows.

    Returns:
        (B, S) indices.
    """
    slots = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
    starts = tokens == eos_idx
    if not causal:
        starts = starts.roll(1, dims=1) & (slots > 0)
    real = tokens != padding_idx
    starts = starts | (real & (real.long().cumsum(dim=1) == 1))
    begin = torch.where(starts, slots, torch.zeros_like(slots))
    if is_exported():  # ONNX has no running maximum
        earlier = slots[0][None, :] <= slots[0][:, None]
        begin = (begin[:, None] * earlier).amax(dim=2)
    else:
        begin = begin.cummax(dim=1).values
    return torch.where(real, slots - begin, torch.zeros_like(slots))


class RandomizedPositions:
    """Sample the positions of each batch, so that training sees the distances of longer input.

    Ruoss et al. 2023, Randomized Positional Encodings (arXiv:2305.16843), section 3: a batch of n
    tokens takes a random subset of n of the positions 0..L-1, in rising order.  The sample depends on
    torch's seed, which fairseq sets to --seed plus the number of updates, and on how many samples that
    seed has given: it is the same on all ranks and after a resume, and another for each batch of an
    update.  Evaluation, where it is randomized, has one sample for each n, so that a score does not
    depend on the batches.

    Args:
        limit: number of positions L.
        label: name of the stack whose positions they are, which seeds the samples.
    """

    def __init__(self, limit: int, label: str) -> None:
        self.limit, self.label = limit, label
        self._seed, self._count = -1, 0

    @torch._disable_dynamo  # torch.compiler.disable imports dynamo at once, which takes seconds
    def sample(self, length: int, by_batch: bool = True) -> Tensor:
        """Return (length,) rising positions, on the CPU.

        Args:
            length: number of tokens n.
            by_batch: True: a new sample at each call; False: always the one of this length.

        Raises:
            ValueError: the batch has more tokens than there are positions.
        """
        if length > self.limit:
            raise ValueError(
                f"--position-random-range {self.limit}: the batch has {length} tokens, more than "
                f"there are positions to draw: raise it, or shorten the input"
            )
        seed = 0
        if by_batch:
            if self._seed != torch.initial_seed():
                self._seed, self._count = torch.initial_seed(), 0
            self._count += 1
            seed = self._seed
        label = f"random positions/{self.label}/{self._count if by_batch else length}"
        generator = torch.Generator()
        generator.manual_seed((seed + zlib.crc32(label.encode())) % 2**63)
        return torch.randperm(self.limit, generator=generator)[:length].sort().values
