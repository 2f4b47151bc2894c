"""Positions that training draws at random, so that it sees the distances of longer input."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor


class RandomPositions:
    """Ruoss et al. 2023, Randomized Positional Encodings (arXiv:2305.16843), section 3.

    A batch of n tokens takes a random subset of n of the positions 0..L-1, in rising order, so that
    training sees the distances of longer input.  The subset depends on torch's seed, which fairseq
    sets to --seed plus the number of updates, and on how many were drawn since that changed: it is
    the same on all ranks and after a resume, and another for each batch of an update.  Evaluation,
    where it draws, takes one subset for each n, so that a score does not hang on the batches.

    Args:
        limit: L.
        label: whose positions they are.
    """

    def __init__(self, limit: int, label: str) -> None:
        self.limit, self.label = limit, label
        self._seed, self._count = -1, 0

    @torch._disable_dynamo  # torch.compiler.disable imports dynamo at once, which takes seconds
    def draw(self, length: int, anew: bool = True) -> Tensor:
        """Return (length,) rising positions, on the CPU.

        Args:
            length: n.
            anew: others for each batch; else those of the length.

        Raises:
            ValueError: there are fewer positions than tokens.
        """
        if length > self.limit:
            raise ValueError(
                f"--position-random-range {self.limit}: the batch has {length} tokens, more than "
                f"there are positions to draw: raise it, or shorten the input"
            )
        seed = 0
        if anew:
            if self._seed != torch.initial_seed():
                self._seed, self._count = torch.initial_seed(), 0
            self._count += 1
            seed = self._seed
        label = f"random positions/{self.label}/{self._count if anew else length}"
        generator = torch.Generator()
        generator.manual_seed((seed + zlib.crc32(label.encode())) % 2**63)
        return torch.randperm(self.limit, generator=generator)[:length].sort().values
