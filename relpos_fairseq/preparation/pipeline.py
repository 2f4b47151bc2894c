"""The pipeline of every preparation: settings -> stages from files to files -> manifest and tables."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import Hashes
from relpos_fairseq.io.manifests import write_manifest
from relpos_fairseq.io.progress import table
from relpos_fairseq.io.stages import Stage, run_stages
from relpos_fairseq.preparation.binarise import warn_of_unknown
from relpos_fairseq.text.assets import Text
from relpos_fairseq.text.round_trip import LACKS, RoundTrip, round_trip

CAUSES = 2  # of a text's changes that its row names
MANY = 0.1  # share of a text's lines above which a remedy is named, if they change by other than unknown symbols


@dataclass(frozen=True)
class TextLines:
    """Lines as the user has them, and how they become symbols.

    Attributes:
        text: to symbols and back.
        lines: as many as there are; only the first are read.
        known: symbols of the dictionary, or None where the text itself says which are unknown.
        remedy: options by which more of the text comes back, or "".
    """

    text: Text
    lines: Iterable[str]
    known: Collection[str] | None = None
    remedy: str = ""


@dataclass
class Report:
    """What a preparation says of its result: a manifest, and lines to print."""

    inputs: Mapping[str, Path] | Iterable[Path]  # files read, by label or by their own names
    outputs: Iterable[Path]
    lines: list[str]  # tables and remarks, printed
    stages: Mapping[str, Mapping] = field(default_factory=dict)  # counts by stage, for the manifest
    extra: Mapping[str, object] = field(default_factory=dict)  # more entries of the manifest
    unknown: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # unknown tokens and all, by data set
    texts: Mapping[str, TextLines] = field(default_factory=dict)  # to tell what does not come back, by data set
    folder: Path | None = None  # where manifest.json goes, if not into the preparation's folder


class Preparation(ABC):
    """One preparation, into the folder `out`; a subclass takes its settings."""

    prunes = False  # whether outputs of stages that these settings lack are removed
    waits = False  # whether to wait for another process that works in the same folder

    def __init__(self, out: Path) -> None:
        if ":" in str(out):
            raise UserError(f"--out {out} has a colon, at which fairseq parts the paths of data: name another folder")
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
            trips = {name: round_trip(one.text, one.lines, one.known) for name, one in report.texts.items()}
            kept = {name: {"lines": trip.lines, "changed": trip.changed} for name, trip in trips.items()}
            write_manifest(
                (report.folder or self.out) / "manifest.json",
                command=command,
                inputs=report.inputs,
                outputs=report.outputs,
                stages=report.stages,
                extra={**report.extra, **({"round_trip": kept} if kept else {})},
                hashes=self.hashes,
            )
            for line in report.lines:
                print(line, flush=True)
            if trips:
                remedies = {name: one.remedy for name, one in report.texts.items()}
                print(f"\n{describe_trips(trips, remedies)}", flush=True)
            warn_of_unknown(report.unknown)


def describe_trips(trips: Mapping[str, RoundTrip], remedies: Mapping[str, str]) -> str:
    """Return a table of the lines that do not come back, by data set, with a remedy if they are many; and examples."""
    rows = []
    for name, trip in trips.items():
        helps = remedies[name] and trip.changed - trip.reasons[LACKS] > MANY * trip.lines
        less = f", less with {remedies[name]}" if helps else ""
        why = ", ".join(f"{count:,} {reason}" for reason, count in trip.reasons.most_common(CAUSES))
        rows.append((name, trip.lines, trip.changed, f"{trip.changed / max(trip.lines, 1):.1%}{less}", why))
    parts = [table(rows, ("text to symbols and back", "lines", "changed", "share", "by"))]
    for name, trip in trips.items():
        parts += [f"{name}: `{line}` comes back as `{back}` ({why})" for line, back, why in trip.examples]
    return "\n".join(parts)
