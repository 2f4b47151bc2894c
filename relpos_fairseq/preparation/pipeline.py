"""The pipeline of every preparation: settings -> stages from files to files -> manifest and tables."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from relpos_fairseq.io.files import Hashes
from relpos_fairseq.io.stages import Stage, run_stages, write_manifest
from relpos_fairseq.preparation.binarise import warn_of_unknown


@dataclass
class Report:
    """What a preparation says of its result: a manifest, and lines to print."""

    inputs: Mapping[str, Path] | Iterable[Path]  # files read, by label or by their own names
    outputs: Iterable[Path]
    lines: list[str]  # tables and remarks, printed
    stages: Mapping[str, Mapping] = field(default_factory=dict)  # counts by stage, for the manifest
    extra: Mapping[str, object] = field(default_factory=dict)  # more entries of the manifest
    unknown: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # unknown tokens and all, by data set
    folder: Path | None = None  # where manifest.json goes, if not into the preparation's folder


class Preparation(ABC):
    """One preparation, into the folder `out`; a subclass takes its settings."""

    prunes = False  # whether outputs of stages that these settings lack are removed
    waits = False  # whether to wait for another process that works in the same folder

    def __init__(self, out: Path) -> None:
        self.out = out
        self.hashes = Hashes()  # of all files that a run reads, each computed once

    @abstractmethod
    def stages(self) -> list[Stage]:
        """Return the steps from the input to the result, in order."""

    @abstractmethod
    def report(self, counts: dict[str, Mapping]) -> list[Report]:
        """Describe the result, from every stage's counts; a second report is of a part, such as a shard."""

    def run(self, command: Sequence[str], force: bool = False) -> None:
        """Run the stages that are not done, or all of them; write the manifests and print the tables."""
        counts = run_stages(
            self.stages(), self.out, force=force, prune=self.prunes, wait=self.waits, hashes=self.hashes
        )
        for report in self.report(dict(counts)):
            write_manifest(
                (report.folder or self.out) / "manifest.json",
                command=command,
                inputs=report.inputs,
                outputs=report.outputs,
                stages=report.stages,
                extra=report.extra,
                hashes=self.hashes,
            )
            for line in report.lines:
                print(line, flush=True)
            warn_of_unknown(report.unknown)
