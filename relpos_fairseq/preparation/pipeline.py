"""The shape of every preparation: settings -> stages -> report."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from relpos_fairseq.io.files import Hashes
from relpos_fairseq.io.stages import Stage, run_stages


class Preparation(ABC):
    """One preparation, into the folder `out`; a subclass takes its settings."""

    prunes = False  # whether what earlier settings made is removed
    waits = False  # whether to wait for another process that works in the same folder

    def __init__(self, out: Path) -> None:
        self.out = out
        self.hashes = Hashes()  # of all files that a run reads, each computed once

    @abstractmethod
    def stages(self) -> list[Stage]:
        """Return the steps from the input to the result, in order."""

    @abstractmethod
    def report(self, counts: Mapping[str, Mapping], command: Sequence[str]) -> None:
        """Write the manifest and print what was made, from every stage's counts."""

    def run(self, command: Sequence[str], force: bool = False) -> None:
        """Run the stages that are not done, or all of them, and report."""
        counts = run_stages(
            self.stages(), self.out, force=force, prune=self.prunes, wait=self.waits, hashes=self.hashes
        )
        self.report(counts, command)
