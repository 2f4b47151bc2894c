"""Several schemes on one corpus, and their table."""

import csv
import io
import sys
from pathlib import Path

from relpos_fairseq.comparison.quickstart import corpus as data
from relpos_fairseq.comparison.quickstart.run import Choices, SchemeRun
from relpos_fairseq.engine.errors import ToolError
from relpos_fairseq.engine.files import write_json, write_text
from relpos_fairseq.engine.tables import table


def compare(
    schemes: list[str], choices: Choices, text: Path | None, source: str | None, target: str | None
) -> int:
    """Prepare the data and finish every scheme; print and write the table.

    Args:
        schemes: names of position schemes.
        choices: of all runs.
        text: folder of the user's parallel text; None: the built-in corpus.
        source: its source language; None: from the files' names.
        target: its target language; None: from the files' names.

    Returns:
        The exit status: 1 where a scheme failed.
    """
    out = choices.out
    if text is None:
        corpus = data.built_in(out, choices.threads)
    else:
        corpus = data.user_data(text, out, source, target, choices.threads)
    rows, failed = [], []
    for scheme in schemes:
        try:
            rows.append(SchemeRun(scheme, corpus, choices).finish())
        except ToolError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            failed.append(scheme)
            continue
        write_results(out, rows)
        print_samples(rows[-1])
    if rows:
        header, *lines = cells(rows)
        print(table(lines, header))
        print(f"\nBLEU: {rows[0]['test']['signature']}")
        print(f"written: {out / 'results.json'}, {out / 'results.csv'}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def cells(rows: list[dict]) -> list[list]:
    """Return the table: a header, and a line a scheme."""
    long = any("test_long" in row for row in rows)
    header = ["scheme", "BLEU test", *(["BLEU long"] if long else []), "valid ppl", "parameters"]
    lines: list[list] = [[*header, "train tok/s", "generate tok/s", "seconds"]]
    for row in rows:
        bleu = [row[name]["bleu"] for name in ("test", *(["test_long"] if long else []))]
        speeds = [row["train_tokens_per_second"], row["test"]["tokens_per_second"], row["seconds"]]
        lines.append(
            [
                row["scheme"],
                *bleu,
                round(row["valid_ppl"], 2),
                row["parameters"],
                *map(round, speeds),
            ]
        )
    return lines


def print_samples(row: dict) -> None:
    """Print a few sentences with their references and translations."""
    for source, reference, translation in row["test"]["samples"]:
        print(f"  source       {source}\n  reference    {reference}")
        print(f"  translation  {translation}\n")


def write_results(out: Path, rows: list[dict]) -> None:
    """Write the table as results.json and results.csv."""
    write_json(out / "results.json", rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for line in cells(rows):
        writer.writerow([f"{one:.2f}" if isinstance(one, float) else one for one in line])
    write_text(out / "results.csv", text.getvalue())
