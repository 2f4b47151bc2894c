"""The quickstart: a comparison on one corpus with one seed, its table, samples and pictures."""

from __future__ import annotations

import csv
import io
import sys
from dataclasses import dataclass
from pathlib import Path

from relpos_fairseq.comparison.run import ComparisonRun
from relpos_fairseq.comparison.scheduling import Comparison
from relpos_fairseq.comparison.spec import make_spec
from relpos_fairseq.io.errors import ToolError
from relpos_fairseq.io.files import write_json, write_text
from relpos_fairseq.io.lines import read_lines
from relpos_fairseq.io.processes import run_tool
from relpos_fairseq.io.progress import table
from relpos_fairseq.io.stages import Stage, run_stages

SAMPLES = 3


@dataclass(frozen=True)
class Choices:
    """What the user chose for all schemes.

    Raises:
        ValueError: A number is not above 0.
    """

    out: Path  # the output folder
    max_update: int  # updates of training
    minutes: float | None  # an upper limit for the training of one scheme; None sets none
    seed: int  # the random seed
    threads: int  # threads to compute with
    text: Path | None = None  # folder of the user's parallel text; None: the built-in corpus
    source: str | None = None  # its source language; None: from the files' names
    target: str | None = None  # its target language; None: from the files' names

    def __post_init__(self) -> None:
        for name in ("max_update", "minutes", "threads"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {value}")

    def comparison(self, schemes: list[str]) -> Comparison:
        """Return the runs as a comparison."""
        task: dict = {"kind": "built_in"}
        if self.text is not None:
            task = {"kind": "parallel", "data": self.text, "source": self.source}
            task["target"] = self.target
        train = {"max-update": self.max_update}
        if self.minutes is not None:
            train["stop-time-hours"] = self.minutes / 60
        content = {"schemes": schemes, "seeds": [self.seed], "train": train}
        spec = make_spec("quickstart", content | {"tasks": {"corpus": task}})
        return Comparison(spec, self.out, self.out / "results", threads=self.threads, keep=True)


def quickstart(schemes: list[str], choices: Choices) -> int:
    """Finish every scheme; print and write the table, samples and pictures.

    Returns:
        The exit status: 1 where a scheme failed.
    """
    comparison, out = choices.comparison(schemes), choices.out
    status = comparison.run()
    rows = []
    for cell in comparison.cells:
        if result := comparison.result(cell):
            rows.append(result)
            print(f"\n{cell.scheme}: {cell.folder(out, comparison.code)}")
            print_samples(cell, comparison)
            draw(cell, comparison)
    if rows:
        header, *lines = cells(rows)
        print(table(lines, header))
        write_results(out, rows)
        print(f"written: {out / 'results.json'}, {out / 'results.csv'}")
    return status


def cells(rows: list[dict]) -> list[list]:
    """Return the table: a header, and a line a scheme."""
    tests = list(rows[0]["sets"])
    header = ["scheme", *(f"BLEU {name.replace('test_', '')}" for name in tests), "valid ppl"]
    lines: list[list] = [[*header, "parameters", "train tok/s", "generate tok/s", "seconds"]]
    for row in rows:
        sets = row["sets"].values()
        lines.append(
            [
                row["scheme"],
                *(one["values"]["BLEU"] for one in sets),
                min((v["valid_loss"], v["valid_ppl"]) for v in row["validations"])[1],
                row["parameters"],
                row["tokens_per_second"],
                round(row["sets"]["test"]["tokens_per_second"]),
                round(row["seconds"] + sum(one["seconds"] for one in sets)),
            ]
        )
    return lines


def print_samples(cell: ComparisonRun, comparison: Comparison) -> None:
    """Print a few sentences with their references and translations."""
    raw = cell.task.data_folder(comparison.work) / "raw"
    paths = [raw / f"test.{language}" for language in cell.task.languages]
    paths.append(cell.folder(comparison.work, comparison.code) / "test.txt")
    lines = list(zip(*map(read_lines, paths), strict=True))[:SAMPLES]
    for source, reference, translation in lines:
        print(f"  source       {source}\n  reference    {reference}")
        print(f"  translation  {translation}\n")


def draw(cell: ComparisonRun, comparison: Comparison) -> None:
    """Draw what a scheme learned; a failure is shown and costs nothing else."""
    folder = cell.folder(comparison.work, comparison.code)
    pictures, checkpoint = folder / "pictures", folder / "checkpoints" / "checkpoint_best.pt"
    data = cell.task.data_folder(comparison.work) / "bin"
    command = [sys.executable, "-m", "relpos_fairseq.cli", "plot", str(checkpoint)]
    command += ["--data", str(data), "--out", str(pictures)]
    log = folder / "pictures.log"
    drawing = Stage("pictures", lambda: run_tool(command, log, comparison.threads), [checkpoint], [pictures])
    try:
        run_stages([drawing], folder)
    except ToolError as error:
        print(f"  no pictures: {error}", flush=True)


def write_results(out: Path, rows: list[dict]) -> None:
    """Write the table as results.json and results.csv."""
    header, *lines = cells(rows)
    write_json(out / "results.json", [dict(zip(header, line, strict=True)) for line in lines])
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for line in (header, *lines):
        writer.writerow([f"{one:.2f}" if isinstance(one, float) else one for one in line])
    write_text(out / "results.csv", text.getvalue())
