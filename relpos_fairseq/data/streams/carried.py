"""The memory of one reading of a stream: what a model remembers, and which block comes next."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch

from relpos_fairseq.modules.memory import Memory, MemoryCarrier


class StreamMemory:
    """Carries memory from block to block, and refuses a block out of turn.

    Block 0 starts with none: an epoch, a validation and a shard each begin so.
    """

    def __init__(self) -> None:
        self.next_step = 0
        self.memory: Memory | None = None
        self._attempt: Hashable = None
        self._before: dict[int, Memory | None] = {}

    @contextmanager
    def block(self, step: int, attempt: Hashable, device: torch.device) -> Iterator[MemoryCarrier]:
        """Lend the memory for one forward pass, and keep what comes back.

        A pass that is repeated within one attempt (an update after an overflow, a batch after
        running out of memory) starts from the memory of its first time.

        Args:
            step: the block's number, which must follow the last one.
            attempt: what the pass belongs to: the number of the update, or the block itself.
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
        """Position and memory as plain values, on the CPU."""
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
