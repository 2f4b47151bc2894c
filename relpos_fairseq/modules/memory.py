"""Transformer-XL's memory: the hidden states of earlier segments (Dai2019, section 3.2).

    h~ = [SG(h_tau) ; h_tau+1]        SG(h_tau) -> `Memory.states`, one tensor a layer

Memory is a value: a forward pass takes one and returns another, and no module keeps any.  A row of the
batch may have fewer valid slots than others (a new stream, a boundary between documents, a shorter
prompt): its valid slots always stand at the right end, next to the tokens that follow, so that
distances between slots are distances between tokens.  The released code keeps one more tensor, the
last layer's output, which nothing reads (arXiv:1901.02860).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from relpos_fairseq.core.positions import is_exported


@dataclass(frozen=True)
class Memory:
    """Hidden states of the tokens before a segment.

    Args:
        states: one (M, B, C) tensor a layer: that layer's inputs for the last M tokens.
        valid: (B, M) True at slots that may be attended to; in each row a suffix.

    Raises:
        ValueError: shapes that disagree, or states that gradients could flow through.
    """

    states: tuple[Tensor, ...]
    valid: Tensor

    def __post_init__(self) -> None:
        if not self.states:
            raise ValueError("a memory needs the states of at least one layer, got none")
        shapes = [tuple(state.shape) for state in self.states]
        first = self.states[0]
        if any(shape != shapes[0] for shape in shapes) or first.dim() != 3:
            raise ValueError(f"a memory's states must all be (M, B, C), got {sorted(set(shapes))}")
        if tuple(self.valid.shape) != (first.size(1), first.size(0)):
            raise ValueError(
                f"a memory's valid must be (B, M) = ({first.size(1)}, {first.size(0)}), got {tuple(self.valid.shape)}"
            )
        if any(state.requires_grad for state in self.states):
            raise ValueError("a memory's states must be detached: no gradient crosses a segment")

    @classmethod
    def empty(cls, num_layers: int, batch: int, width: int, like: Tensor) -> Memory:
        """Return a memory without slots, of the type and on the device of `like`."""
        state = like.new_zeros(0, batch, width)
        valid = torch.zeros(batch, 0, dtype=torch.bool, device=like.device)
        return cls((state,) * num_layers, valid)

    def __len__(self) -> int:
        return self.states[0].size(0)

    @property
    def num_layers(self) -> int:
        return len(self.states)

    @property
    def batch(self) -> int:
        return self.states[0].size(1)

    @property
    def width(self) -> int:
        return self.states[0].size(2)

    def check(self, num_layers: int, batch: int, width: int) -> None:
        """Raise an error if the memory is of another model or of another batch.

        Raises:
            ValueError: names what differs, both values and the way out.
        """
        if self.num_layers != num_layers or self.width != width:
            raise ValueError(
                f"memory is of {self.num_layers} layers of width {self.width} and the model has "
                f"{num_layers} of width {width}: it belongs to another model, start without memory"
            )
        if self.batch != batch:
            raise ValueError(
                f"memory has {self.batch} rows and the input {batch}: a row of memory continues "
                f"the same row of the batch; select rows by reorder, or start without memory"
            )

    def to(self, like: Tensor) -> Memory:
        """Return the memory in the type and on the device of `like`."""
        states = tuple(state.to(like) for state in self.states)
        return Memory(states, self.valid.to(like.device))

    def on(self, device: torch.device) -> Memory:
        """Return the memory on a device, in its own type."""
        return Memory(tuple(state.to(device) for state in self.states), self.valid.to(device))

    def last(self, mem_len: int) -> Memory:
        """Return the memory's newest `mem_len` slots."""
        if len(self) <= mem_len:
            return self
        start = len(self) - mem_len
        return Memory(tuple(state[start:] for state in self.states), self.valid[:, start:])

    def reorder(self, new_order: Tensor) -> Memory:
        """Select rows of the batch, as beam search does."""
        states = tuple(state.index_select(1, new_order) for state in self.states)
        return Memory(states, self.valid.index_select(0, new_order))

    def reset_rows(self, rows: Tensor) -> Memory:
        """Hide all slots of the rows (B,) that are True, which start a new stream or document."""
        return replace(self, valid=self.valid & ~rows.to(self.valid.device)[:, None])

    def extend(
        self, states: Sequence[Tensor], mem_len: int, *, padding: Tensor | None = None, documents: Tensor | None = None
    ) -> Memory:
        """Return the memory after a segment: the last `mem_len` tokens of each row.

        Args:
            states: one (T, B, C) tensor a layer, which give the memory its type; gradients end here.
            mem_len: most slots to keep.
            padding: (B, T) True at padding, which becomes no slot; None: there is none.
            documents: (B, T) number of each token's document, never falling, 0 where it continues the
                memory's document; only the last document of a row is remembered.
        """
        tokens = self.valid.new_ones(self.batch, states[0].size(0))
        if padding is not None:
            tokens = ~padding
        kept = torch.cat([self.valid, tokens], dim=1)  # (B, M + T)
        if documents is not None:
            number = torch.cat([torch.zeros_like(self.valid, dtype=documents.dtype), documents], 1)
            last = number.masked_fill(~kept, 0).amax(dim=1, keepdim=True)
            kept = kept & (number == last)
        start = kept.size(1) - mem_len
        if not is_exported():  # a graph is given mem_len slots of memory, so there are more
            start = max(start, 0)
        pairs = zip(self.states, states, strict=True)
        if padding is None:  # real slots end the row already
            return Memory(tuple(_joined(*pair, start) for pair in pairs), kept[:, start:].clone())
        order = kept.long().argsort(dim=1, stable=True)[:, start:]  # (B, M'), real slots last
        rows = torch.arange(order.size(0), device=order.device)
        selected = (_joined(*pair)[order.t(), rows] for pair in pairs)
        return Memory(tuple(selected), kept.gather(1, order))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the memory as plain tensors: `states` (L, M, B, C) and `valid` (B, M)."""
        return {"states": torch.stack(self.states), "valid": self.valid.clone()}

    @classmethod
    def from_state_dict(cls, state: dict[str, Tensor]) -> Memory:
        """Return the memory from the tensors that `state_dict` returned.

        Raises:
            ValueError: `state` holds other tensors.
        """
        if set(state) != {"states", "valid"} or state["states"].dim() != 4:
            raise ValueError(f"a saved memory has states (L, M, B, C) and valid (B, M), got {sorted(state)}")
        return cls(tuple(state["states"].unbind(0)), state["valid"].bool())


def _joined(old: Tensor, new: Tensor, start: int = 0) -> Tensor:
    """Concatenate [old ; SG(new)] from slot `start` on, in a new tensor: a view would keep all slots alive."""
    if is_exported():
        return torch.cat([old.to(new), new.detach()])[start:]
    new = new[max(start - len(old), 0) :]
    return torch.cat([old[start:].to(new), new.detach()])


class MemoryCarrier:
    """A mutable container of a memory: a task passes it to the model with a batch, and the model replaces the memory.

    fairseq's criterions drop what a model returns beside its logits; a carrier that the task puts
    into `net_input` survives them.  One carrier belongs to one stream of batches and one model.
    """

    def __init__(self, memory: Memory | None = None) -> None:
        self.memory = memory
        self._filled_by: object = None

    def fill(self, memory: Memory, model: object) -> None:
        """Store the memory that a model returned after a segment.

        Raises:
            ValueError: another model, say of an ensemble, has stored its memory here, so that this model has read
                that memory.
        """
        if self._filled_by not in (None, model):
            raise ValueError(
                "models of an ensemble cannot share one memory: evaluate a text with memory by one "
                "checkpoint at a time (or by their average, relpos average)"
            )
        self.memory, self._filled_by = memory, model


def carried(memory: Memory | MemoryCarrier | None) -> Memory | None:
    """Return the memory in a carrier; return a memory or None unchanged.

    Raises:
        ValueError: it is neither a carrier, a memory nor None.
    """
    if isinstance(memory, MemoryCarrier):
        memory = memory.memory
    if memory is not None and not isinstance(memory, Memory):
        raise ValueError(f"memory must be a Memory, a carrier of one or None, got {type(memory)}")
    return memory


def number_documents(starts: Tensor | None, padding: Tensor | None) -> Tensor | None:
    """Number the documents of a segment's tokens (B, T); number 0 continues the memory's document.

    Documents begin where `starts` (B, T) is True, and never at padding (B, T).
    """
    if starts is None:
        return None
    if padding is not None:
        starts = starts & ~padding
    return starts.long().cumsum(dim=1)


class StreamMemory:
    """Carry memory from block to block; raise an error for a block that does not follow the last one.

    Blocks are those of data/streams/dataset.py; block 0 starts without memory.  Each epoch, validation and shard begins
    with block 0.
    """

    def __init__(self) -> None:
        self.next_step = 0
        self.memory: Memory | None = None
        self._attempt: Hashable = None
        self._before: dict[int, Memory | None] = {}

    @contextmanager
    def block(self, step: int, attempt: Hashable, device: torch.device) -> Iterator[MemoryCarrier]:
        """Give the forward pass in the `with` block the memory before a block, and store the memory that it returns.

        A pass that is repeated within one attempt (an update after an overflow, a batch after running out of GPU
        memory) starts from the memory of the first pass.

        Args:
            step: the block's number, which must follow that of the last block.
            attempt: a key of the attempt: the number of the update, or the block itself.
            device: of the model.
        """
        if attempt != self._attempt or step == 0:  # overflows may last longer than an epoch
            self._attempt, self._before = attempt, {}
        if step == 0:
            memory = None
        elif step in self._before:
            memory = self._before[step]
        elif step == self.next_step:
            memory = self.memory
        else:
            raise ValueError(
                f"block {step} of the stream came where block {self.next_step} follows: memory "
                f"needs blocks in their order (a checkpoint of another data position?)"
            )
        memory = None if memory is None else memory.on(device)
        self._before[step] = memory
        carrier = MemoryCarrier(memory)
        yield carrier
        self.memory, self.next_step = carrier.memory, step + 1

    def state_dict(self) -> dict:
        """Return the number of the next block, and the memory as plain tensors on the CPU."""
        memory = None
        if self.memory is not None:
            memory = {name: part.cpu() for name, part in self.memory.state_dict().items()}
        return {"next_step": self.next_step, "memory": memory}

    @classmethod
    def from_state_dict(cls, state: dict) -> StreamMemory:
        restored = cls()
        restored.next_step = state["next_step"]
        if state["memory"] is not None:
            restored.memory = Memory.from_state_dict(state["memory"])
        return restored
