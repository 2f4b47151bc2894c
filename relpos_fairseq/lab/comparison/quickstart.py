"""Make the quickstart: a comparison on one corpus with one seed, its table, samples and plots.

A function that takes `given` takes the options of `relpos quickstart`.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from relpos_fairseq.io.child import command_of
from relpos_fairseq.io.errors import ToolError
from relpos_fairseq.io.files import write_json, write_text
from relpos_fairseq.io.lines import read_lines
from relpos_fairseq.io.processes import run_tool
from relpos_fairseq.io.progress import table
from relpos_fairseq.io.stages import Stage, run_stages
from relpos_fairseq.lab.comparison.run import Run
from relpos_fairseq.lab.comparison.scheduling import Comparison
from relpos_fairseq.lab.comparison.spec import make_spec

SAMPLES = 3


def quickstart(schemes: list[str], given: Any) -> int:
    """Make the runs of all schemes; print and write the table, samples and plots.

    Returns:
        The exit status: 1 where a scheme failed.
    """
    comparison, out = comparison_of(schemes, given), given.out
    status = comparison.run()
    rows = []
    for run in comparison.runs:
        if result := comparison.result(run):
            rows.append(result)
            print(f"\n{run.scheme}: {comparison.folder(run)}")
            print_samples(run, comparison)
            draw(run, comparison)
    if rows:
        lines = list(map(table_row, rows))
        print(table([line.values() for line in lines], list(lines[0])))
        write_results(out, lines)
        print(f"written: {out / 'results.json'}, {out / 'results.csv'}")
    return status


def comparison_of(schemes: list[str], given: Any) -> Comparison:
    """Return the runs as a comparison."""
    task = {"kind": "built_in"}
    if given.from_dir is not None:
        task = {
            "kind": "parallel",
            "data": str(given.from_dir),
            "source": given.source_lang,
            "target": given.target_lang,
        }
    train = {"max-update": given.max_update}
    if given.minutes is not None:
        train["stop-time-hours"] = given.minutes / 60
    content = {"schemes": schemes, "seeds": [given.seed], "train": train, "tasks": {"corpus": task}}
    spec = make_spec("quickstart", content)
    return Comparison(spec, given.out, given.out / "results", threads=given.threads, keep_models=True)


def table_row(result: dict) -> dict[str, object]:
    """Return the table's row of a scheme's result, by column."""
    sets = result["sets"]
    return {
        "scheme": result["scheme"],
        **{f"BLEU {name.replace('test_', '')}": one["values"]["BLEU"] for name, one in sets.items()},
        "valid ppl": min((v["valid_loss"], v["valid_ppl"]) for v in result["validations"])[1],
        "parameters": result["parameters"],
        "train tok/s": result["tokens_per_second"],
        "generate tok/s": round(sets["test"]["tokens_per_second"]),
        "seconds": round(result["seconds"] + sum(one["seconds"] for one in sets.values())),
    }


def print_samples(run: Run, comparison: Comparison) -> None:
    """Print a few sentences with their references and translations."""
    raw = run.task.data_folder(comparison.work) / "raw"
    paths = [raw / f"test.{language}" for language in run.task.languages]
    paths.append(comparison.folder(run) / "test.txt")
    lines = list(zip(*map(read_lines, paths), strict=True))[:SAMPLES]
    for source, reference, translation in lines:
        print(f"  source       {source}\n  reference    {reference}")
        print(f"  translation  {translation}\n")


def draw(run: Run, comparison: Comparison) -> None:
    """Draw what a scheme has learned, by `relpos plot`; a failure is printed and costs nothing else."""
    folder = comparison.folder(run)
    plots, checkpoint = folder / "pictures", folder / "checkpoints" / "checkpoint_best.pt"
    data = run.task.data_folder(comparison.work) / "bin"
    command = [*command_of("relpos_fairseq.cli"), "plot", str(checkpoint)]
    command += ["--data", str(data), "--out", str(plots)]
    log = folder / "pictures.log"
    # `relpos plot` itself checks what it replaces.
    drawing = Stage("pictures", lambda: run_tool(command, log, comparison.threads), [checkpoint], [plots], keeps=True)
    try:
        run_stages([drawing], folder)
    except ToolError as error:
        print(f"  no pictures: {error}", flush=True)


def write_results(out: Path, rows: list[dict[str, object]]) -> None:
    """Write the table as results.json and results.csv."""
    write_json(out / "results.json", rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: f"{one:.2f}" if isinstance(one, float) else one for name, one in row.items()})
    write_text(out / "results.csv", text.getvalue())
