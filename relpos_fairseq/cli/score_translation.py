#!/usr/bin/env python
"""Scores translations: detokenised BLEU, cased and uncased, and chrF, with sacrebleu's signatures.

    python scripts/score_translation.py generated.txt --prepared data/wmt15.en-de
    python scripts/score_translation.py generated.txt --baseline other.txt --prepared DIR
    python scripts/score_translation.py system.de --reference test.de --language de

A system's file is fairseq-generate's output or plain lines; a sentence that is missing or repeated
is an error. --prepared is prepare_wmt.py's folder: it knows the reference, the tokenizer and the
units. --baseline compares two systems by a paired bootstrap. The papers report uncased BLEU on
newstest2015.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest

from relpos_fairseq.engine.command import run_command
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import read_json, write_json
from relpos_fairseq.engine.lines import read_lines
from relpos_fairseq.engine.tables import table
from relpos_fairseq.evaluation.hypotheses import Detokeniser, read_system


def parser() -> argparse.ArgumentParser:
    """Returns the command line's parser."""
    whole = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = whole.add_argument
    add("system", type=Path, help="fairseq-generate's output, or one translation a line")
    add("--baseline", type=Path, help="a second system, to compare with")
    add("--prepared", type=Path, metavar="DIR", help="prepare_wmt.py's folder")
    add("--set", default="test", help="its test set: test, test1, valid (default: test)")
    add("--reference", type=Path, help="plain reference, where there is no --prepared")
    add("--language", help="the target's language, where there is no --prepared")
    add("--tokenizer", choices=("moses", "none"), help="what the system's words were cut by")
    add("--units", choices=("auto", "subword-nmt", "sentencepiece", "none"))
    add("--samples", type=int, default=1000, help="resamples of the bootstrap (default: 1000)")
    add("--seed", type=int, default=12345, help="of the bootstrap (default: sacrebleu's, 12345)")
    add("--json", type=Path, help="write the numbers here as well")
    return whole


def read_target(args: argparse.Namespace) -> tuple[list[str], Detokeniser]:
    """Returns the reference and what turns a system's lines into text like it.

    Raises:
        PreparationError: Neither --prepared nor --reference says what to score on, or --prepared
            is another program's folder.
    """
    if bool(args.prepared) == bool(args.reference):
        raise PreparationError("give either --prepared DIR or --reference FILE")
    if args.reference:
        if not args.language:
            raise PreparationError("--reference needs --language, say de")
        detokenise = Detokeniser(args.language, args.tokenizer or "none", args.units or "auto")
        return list(read_lines(args.reference)), detokenise
    manifest = read_json(args.prepared / "manifest.json")
    if manifest is None:
        raise PreparationError(
            f"{args.prepared} has no manifest.json: run prepare_wmt.py to its end"
        )
    settings = manifest.get("settings", {})
    if "sets" not in manifest or not {"languages", "tokenizer", "bpe"} <= settings.keys():
        raise PreparationError(
            f"{args.prepared}/manifest.json is not of a whole run of prepare_wmt.py: name its --out"
        )
    language = settings["languages"][1]
    reference = args.prepared / "reference" / f"{args.set}.{language}"
    if not reference.is_file():
        known = ", ".join(manifest["sets"])
        raise PreparationError(f"{args.prepared} has no set {args.set}: choose one of {known}")
    tokenizer, units = args.tokenizer or settings["tokenizer"], args.units or settings["bpe"]
    # fairseq-generate --post-process leaves no units behind; joining words leaves them as they are.
    return list(read_lines(reference)), Detokeniser(language, tokenizer, units)


def metrics() -> dict:
    """Returns the metrics, by the names of the table; sacrebleu's defaults but for the case."""
    return {"BLEU": BLEU(), "BLEU uncased": BLEU(lowercase=True), "chrF": CHRF()}


def score(system: list[str], reference: list[str]) -> list[list]:
    """Returns a row for each metric: name, score, details, signature."""
    rows = []
    for name, metric in metrics().items():
        result = metric.corpus_score(system, [reference])
        details = result.format(score_only=False).partition("= ")[2] if "BLEU" in name else ""
        rows.append([name, round(result.score, 2), details, metric.get_signature().format()])
    return rows


def compare(
    baseline: list[str], system: list[str], reference: list[str], samples: int, seed: int
) -> list[list]:
    """Compares a system with a baseline by a paired bootstrap (Koehn 2004).

    Returns:
        A row for each metric: name, both scores with the bootstrap's mean and 95 % interval, p.
    """
    os.environ["SACREBLEU_SEED"] = str(seed)
    named = [("baseline", baseline), ("system", system)]
    rows = []
    for name, metric in metrics().items():
        # One test a metric: sacrebleu calls both BLEUs by one name.
        _, scores = PairedTest(named, {name: metric}, [reference], "bs", samples)()
        first, second = next(results for key, results in scores.items() if key != "System")
        interval = [f"{r.score:.2f} ({r.mean:.2f} ± {r.ci:.2f})" for r in (first, second)]
        # Of two systems without any difference sacrebleu gives the least p there is.
        p = 1.0 if first.score == second.score else second.p_value
        rows.append([name, *interval, round(p, 4)])
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    args = parser().parse_args(argv)
    if args.samples < 1:
        raise PreparationError(f"--samples must be >= 1, got {args.samples}")
    reference, detokenise = read_target(args)
    paths = [path for path in (args.baseline, args.system) if path]
    systems = [list(map(detokenise, read_system(path, len(reference)))) for path in paths]
    if not reference:
        raise PreparationError("the reference is empty")
    results = {}
    for path, lines in zip(paths, systems, strict=True):
        rows = score(lines, reference)
        results[str(path)] = {name: [value, signature] for name, value, _, signature in rows}
        empty = sum(not line.strip() for line in lines)
        print(f"{path}: {len(lines):,} sentences, {empty:,} of them empty\n")
        print(table(rows, ["metric", "score", "details", "signature"]), end="\n\n")
    if args.baseline:
        rows = compare(*systems, reference, args.samples, args.seed)
        results["bootstrap"] = {row[0]: row[1:] for row in rows}
        print(f"paired bootstrap, {args.samples:,} resamples, seed {args.seed}\n")
        shown = [[*row[:-1], f"p = {row[-1]:.4f}"] for row in rows]
        print(table(shown, ["metric", "baseline (mean ± 95 %)", "system (mean ± 95 %)", "differ"]))
    if args.json:
        write_json(args.json, results)


if __name__ == "__main__":
    sys.exit(run_command(main))
