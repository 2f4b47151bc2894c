"""Score translations: BLEU and chrF by sacrebleu, and a paired bootstrap of two systems."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import read_json, write_json
from relpos_fairseq.io.lines import read_lines
from relpos_fairseq.io.progress import table
from relpos_fairseq.text.moses import Detokeniser

HYPOTHESIS = re.compile(r"([DH])-(\d+)\t[^\t]*\t(.*)")
SHOWN = 10  # numbers of sentences that an error lists


def read_system(path: Path, sentences: int) -> list[str]:
    """Read one translation for every sentence of the test set, in its order.

    Args:
        path: Lines `D-NUMBER<tab>score<tab>text` (or `H-`) among others, as fairseq-generate prints
            them in any order, or one plain translation a line.
        sentences: How many there must be.

    Raises:
        UserError: Sentences are missing, repeated, or more than there are.
    """
    generated: dict[str, dict[int, list[str]]] = {"D": {}, "H": {}}
    plain = []
    for line in read_lines(path):
        match = HYPOTHESIS.fullmatch(line)
        if match:
            kind, number, text = match.groups()
            generated[kind].setdefault(int(number), []).append(text)
        plain.append(line)
    found = generated["D"] or generated["H"]
    if not found:
        if len(plain) != sentences:
            raise UserError(
                f"{path} has {len(plain):,} lines, the reference has {sentences:,}: "
                "every sentence needs exactly one translation"
            )
        return plain
    check_complete(path, found, sentences)
    return [found[number][0] for number in range(sentences)]


def check_complete(path: Path, found: dict[int, list[str]], sentences: int) -> None:
    """Check that every sentence is translated once.

    Raises:
        UserError: The message lists the sentences' numbers and what may be the cause.
    """
    problems = (
        ("repeated", [n for n, texts in found.items() if len(texts) > 1], "two runs in one file, or --nbest above 1?"),
        ("unknown", [n for n in found if n >= sentences], "another test set's output?"),
        (
            "missing",
            [n for n in range(sentences) if n not in found],
            "was the run cut off, or skipped it long ones (--skip-invalid-size-inputs-valid-test)?",
        ),
    )
    for problem, numbers, cause in problems:
        if numbers:
            listed = ", ".join(map(str, sorted(numbers)[:SHOWN]))
            more = ", ..." if len(numbers) > SHOWN else ""
            raise UserError(
                f"{path}: of {sentences:,} sentences {len(numbers):,} are {problem} ({listed}{more}): {cause}"
            )


@dataclass(frozen=True)
class Target:
    """The reference that translations are compared with."""

    reference: list[str]  # a sentence a line
    detokenise: Detokeniser  # turns a system's line into text of the reference's form


def read_reference(path: Path, language: str | None, tokenizer: str | None, units: str | None) -> Target:
    """Read a plain reference.

    Raises:
        UserError: its language is not said.
    """
    if not language:
        raise UserError("--reference needs --language, say de")
    return Target(list(read_lines(path)), Detokeniser(language, tokenizer or "none", units or "auto"))


def read_prepared(folder: Path, name: str, tokenizer: str | None, units: str | None) -> Target:
    """Read a test set of a folder that `relpos prepare wmt` wrote.

    Raises:
        UserError: it is another program's folder, or has no such set.
    """
    manifest = read_json(folder / "manifest.json")
    if manifest is None:
        raise UserError(f"{folder} has no manifest.json: run prepare_wmt.py to its end")
    settings = manifest.get("settings", {})
    if "sets" not in manifest or not {"languages", "tokenizer", "bpe"} <= settings.keys():
        raise UserError(f"{folder}/manifest.json is not of a whole run of relpos prepare wmt: name its --out")
    language = settings["languages"][1]
    reference = folder / "reference" / f"{name}.{language}"
    if not reference.is_file():
        known = ", ".join(manifest["sets"])
        raise UserError(f"{folder} has no set {name}: choose one of {known}")
    # fairseq-generate --post-process leaves no units behind; joining words leaves them as they are.
    tokenizer, units = tokenizer or settings["tokenizer"], units or settings["bpe"]
    return Target(list(read_lines(reference)), Detokeniser(language, tokenizer, units))


def metrics() -> dict:
    """Return sacrebleu's metrics with its defaults, but for the case, by their names in tables."""
    return {"BLEU": BLEU(), "BLEU uncased": BLEU(lowercase=True), "chrF": CHRF()}


def score(system: list[str], reference: list[str]) -> list[list]:
    """Return a row for each metric: name, score, details, signature."""
    rows = []
    for name, metric in metrics().items():
        result = metric.corpus_score(system, [reference])
        details = result.format(score_only=False).partition("= ")[2] if "BLEU" in name else ""
        rows.append([name, round(result.score, 2), details, metric.get_signature().format()])
    return rows


def compare(baseline: list[str], system: list[str], reference: list[str], samples: int, seed: int) -> list[list]:
    """Compare a system with a baseline by a paired bootstrap (Koehn 2004).

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


def evaluate(
    system: Path,
    target: Target,
    baseline: Path | None = None,
    samples: int = 1000,
    seed: int = 12345,
    json: Path | None = None,
) -> None:
    """Score a system, and compare it with a baseline; print tables and write the numbers to `json`."""
    reference = target.reference
    paths = [path for path in (baseline, system) if path]
    systems = [list(map(target.detokenise, read_system(path, len(reference)))) for path in paths]
    if not reference:
        raise UserError("the reference is empty")
    results = {}
    for path, lines in zip(paths, systems, strict=True):
        rows = score(lines, reference)
        results[str(path)] = {name: [value, signature] for name, value, _, signature in rows}
        empty = sum(not line.strip() for line in lines)
        print(f"{path}: {len(lines):,} sentences, {empty:,} of them empty\n")
        print(table(rows, ["metric", "score", "details", "signature"]), end="\n\n")
    if baseline:
        rows = compare(*systems, reference, samples, seed)
        results["bootstrap"] = {row[0]: row[1:] for row in rows}
        print(f"paired bootstrap, {samples:,} resamples, seed {seed}\n")
        shown = [[*row[:-1], f"p = {row[-1]:.4f}"] for row in rows]
        print(table(shown, ["metric", "baseline (mean ± 95 %)", "system (mean ± 95 %)", "differ"]))
    if json:
        write_json(json, results)
