"""Score translations: BLEU, chrF and TER by sacrebleu, and a paired bootstrap of two systems."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.significance import PairedTest

from relpos_fairseq.evaluation.comet import PROGRAM as COMET
from relpos_fairseq.evaluation.comet import bootstrap, comet, find_program
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import write_json
from relpos_fairseq.io.lines import read_lines
from relpos_fairseq.io.manifests import Manifest
from relpos_fairseq.io.progress import table
from relpos_fairseq.io.reading import read_json
from relpos_fairseq.metrics.bleu import bleu_of
from relpos_fairseq.text.dictionary import WORD_START
from relpos_fairseq.text.moses import Detokeniser

HYPOTHESIS = re.compile(r"([DH])-(\d+)\t[^\t]*\t(.*)")
TARGET = re.compile(r"T-(\d+)\t(.*)")
GENERATED = re.compile(r"Generate (\S+) with beam=.*")
SHOWN = 10  # numbers of sentences that an error lists


@dataclass(frozen=True)
class Target:
    """The references that translations are compared with."""

    references: list[list[str]]  # one or several, each of a sentence a line
    detokenise: Detokeniser  # turns a system's lines into text of the references' form
    language: str  # the target's
    subset: str | None = None  # the set's name in fairseq-generate, where it is known
    source: list[str] | None = None  # the sentences that were translated, where they are known


def read_system(path: Path, sentences: int, target: Target | None = None) -> list[str]:
    """Read one translation for every sentence of the test set, in its order; of a `target` as its plain text.

    Args:
        path: Lines `D-NUMBER<tab>score<tab>text` (or `H-`) among others, as fairseq-generate prints
            them in any order, or one plain translation a line.
        sentences: How many there must be.
        target: what they are compared with; None: not to be compared with what `path` says of its test set.

    Raises:
        UserError: Sentences are missing, repeated, or more than there are, or those of another set.
    """
    generated: dict[str, dict[int, list[str]]] = {"D": {}, "H": {}}
    targets: dict[int, str] = {}
    plain, subset = [], None
    for line in read_lines(path):
        if match := HYPOTHESIS.fullmatch(line):
            kind, number, text = match.groups()
            generated[kind].setdefault(int(number), []).append(text)
        elif match := TARGET.fullmatch(line):
            targets[int(match[1])] = match[2]
        elif match := GENERATED.fullmatch(line):
            subset = match[1]
        plain.append(line)
    found = generated["D"] or generated["H"]
    if found and target is not None:
        check_set(path, target, subset, targets)
    if not found:
        if len(plain) != sentences:
            raise UserError(
                f"{path} has {len(plain):,} lines, the reference has {sentences:,}: "
                "every sentence needs exactly one translation"
            )
        return target.detokenise.lines(plain) if target else plain
    check_complete(path, found, sentences)
    lines = [found[number][0] for number in range(sentences)]
    if target is None:
        return lines
    # fairseq joins subwords of H- and T- lines alike (--post-process), and those of D- lines by --bpe.
    cut = generated["D"] in ({}, generated["H"]) and any(WORD_START in text for text in targets.values())
    return target.detokenise.lines(lines, cut)


def check_set(path: Path, target: Target, subset: str | None, targets: dict[int, str]) -> None:
    """Check that fairseq-generate's output is of the set that it is compared with.

    Args:
        path: the output.
        target: the references.
        subset: the set that the output names, or None.
        targets: the targets that the output holds (`T-` lines), by number.

    Raises:
        UserError: it is of another set.
    """
    if subset and target.subset and subset != target.subset:
        raise UserError(
            f"{path} is fairseq-generate's output of --gen-subset {subset}, and is to be compared with the set "
            f"{target.subset}: give --split {subset}"
        )
    known = {n: text for n, text in targets.items() if n < len(target.references[0])}
    letters = [
        (_letters(target.detokenise(text)), {_letters(reference[n]) for reference in target.references})
        for n, text in known.items()
    ]
    other = sum(text not in right for text, right in letters)
    if 2 * other > len(letters):
        raise UserError(
            f"{path}: {other:,} of its {len(letters):,} targets (T- lines) are not the reference's sentences: it is "
            f"the output of another test set (--split, --reference), or its words were cut otherwise (--tokenizer, "
            f"--units)"
        )


def _letters(text: str) -> str:
    """Return a sentence's letters and digits, which normalisation of punctuation and case does not change."""
    return "".join(part for part in text.casefold() if part.isalnum())


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


def read_reference(
    paths: list[Path], language: str | None, tokenizer: str | None, units: str | None, source: Path | None = None
) -> Target:
    """Read plain references, one or several of each sentence, and perhaps the sentences.

    Raises:
        UserError: their language is not said, or they have different numbers of lines.
    """
    if not language:
        raise UserError("--reference needs --target-lang, say de")
    references = [list(read_lines(path)) for path in paths]
    sentences = None if source is None else list(read_lines(source))
    read = list(zip(paths, references, strict=True)) + ([] if sentences is None else [(source, sentences)])
    for path, lines in read:
        if len(lines) != len(references[0]):
            raise UserError(
                f"{path} has {len(lines):,} lines and {paths[0]} {len(references[0]):,}: every reference has a line "
                f"for each sentence"
            )
    detokenise = Detokeniser(language, tokenizer or "none", units or "auto")
    return Target(references, detokenise, language, source=sentences)


def read_prepared(folder: Path, name: str, tokenizer: str | None, units: str | None) -> Target:
    """Read a test set of a folder that `relpos prepare wmt` wrote.

    Args:
        folder: its --out.
        name: the set as fairseq-generate names it (`test`, `test1`), or as it is named where it comes from.
        tokenizer: what the system's words were cut by; None: what the folder says.
        units: the system's units; None: what the folder says.

    Raises:
        UserError: it is another program's folder, or has no such set.
    """
    manifest = read_json(folder / "manifest.json", Manifest, None)
    if manifest is None:
        raise UserError(f"{folder} has no manifest.json: run prepare_wmt.py to its end")
    settings = manifest.get("settings", {})
    if "sets" not in manifest or not {"languages", "tokenizer", "bpe"} <= settings.keys():
        raise UserError(f"{folder}/manifest.json is not of a whole run of relpos prepare wmt: name its --out")
    (source, language), sets = settings["languages"], manifest["sets"]
    split = name if name in sets else next((split for split, own in sets.items() if own == name), name)
    reference = folder / "reference" / f"{split}.{language}"
    if not reference.is_file():
        known = ", ".join(split if split == own else f"{split} ({own})" for split, own in sets.items())
        raise UserError(f"{folder} has no set {name}: choose one of {known}")
    detokenise = Detokeniser(language, tokenizer or settings["tokenizer"], units or settings["bpe"])
    sentences = reference.with_name(f"{split}.{source}")
    source = list(read_lines(sentences)) if sentences.is_file() else None
    return Target([list(read_lines(reference))], detokenise, language, split, source)


def metrics(language: str, tokenize: str | None = None, ter: bool = False) -> dict:
    """Return sacrebleu's metrics with its defaults for a language, but for the case, by their names in tables.

    Args:
        language: of the target; Chinese, Japanese and Korean have tokenizers of their own, as in sacrebleu.
        tokenize: sacrebleu's name of BLEU's tokenizer; None: by the language.
        ter: whether TER is among them.

    Raises:
        UserError: there is no such tokenizer, or its package is not installed.
    """
    if tokenize is not None and tokenize not in BLEU.TOKENIZERS:
        raise UserError(f"--tokenize must be one of {', '.join(BLEU.TOKENIZERS)}, got {tokenize}")
    cased, uncased = (bleu_of(language, tokenize, "--tokenize char", lowercase=lower) for lower in (False, True))
    found = {"BLEU": cased, "BLEU uncased": uncased, "chrF": CHRF()}
    return found | ({"TER": TER()} if ter else {})


def score(system: list[str], references: list[list[str]], chosen: dict) -> list[list]:
    """Return a row for each metric of `metrics`: name, score, details, signature."""
    rows = []
    for name, metric in chosen.items():
        result = metric.corpus_score(system, references)
        details = result.format(score_only=False).partition("= ")[2] if "BLEU" in name else ""
        rows.append([name, round(result.score, 2), details, metric.get_signature().format()])
    return rows


def compare(
    baseline: list[str], system: list[str], references: list[list[str]], chosen: dict, samples: int, seed: int
) -> list[list]:
    """Compare a system with a baseline by a paired bootstrap (Koehn 2004).

    Returns:
        A row for each metric: name, both scores with the bootstrap's mean and 95 % interval, p.
    """
    os.environ["SACREBLEU_SEED"] = str(seed)
    named = [("baseline", baseline), ("system", system)]
    rows = []
    for name, metric in chosen.items():
        # One test a metric: sacrebleu calls both BLEUs by one name.
        _, scores = PairedTest(named, {name: metric}, references, "bs", samples)()
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
    tokenize: str | None = None,
    ter: bool = False,
    model: str | None = None,
) -> None:
    """Score a system, and compare it with a baseline; print tables and write the numbers to `json`.

    Args:
        system: its translations.
        target: what they are compared with.
        baseline: another system's.
        samples: resamples of the bootstrap.
        seed: of it.
        json: file of the numbers.
        tokenize: BLEU's tokenizer, by sacrebleu's name.
        ter: whether TER is computed.
        model: COMET's, where it is computed.
    """
    program = find_program() if model else ""
    if model and (target.source is None or len(target.references) > 1):
        lacking = "the sentences that were translated: give --source" if target.source is None else "one --reference"
        raise UserError(f"--comet needs {lacking}")
    sentences, chosen = len(target.references[0]), metrics(target.language, tokenize, ter)
    paths = [path for path in (baseline, system) if path]
    systems = [read_system(path, sentences, target) for path in paths]
    if not sentences:
        raise UserError("the reference is empty")
    learned = comet(program, model, target.source, systems, target.references[0]) if model and target.source else None
    results = {}
    for number, (path, lines) in enumerate(zip(paths, systems, strict=True)):
        rows = score(lines, target.references, chosen)
        if learned is not None:
            rows.append(["COMET x 100", round(100 * learned[number].mean(), 2), "", f"model:{model}|{COMET}"])
        results[str(path)] = {name: [value, signature] for name, value, _, signature in rows}
        empty = sum(not line.strip() for line in lines)
        print(f"{path}: {len(lines):,} sentences, {empty:,} of them empty\n")
        print(table(rows, ["metric", "score", "details", "signature"]), end="\n\n")
    if baseline:
        rows = compare(systems[0], systems[1], target.references, chosen, samples, seed)
        if learned is not None:
            drawn, p = bootstrap(100 * learned, samples, seed)
            own = zip(100 * learned.mean(axis=1), drawn, strict=True)
            rows.append(["COMET x 100", *(f"{value:.2f} ({mean:.2f} ± {half:.2f})" for value, (mean, half) in own), p])
        results["bootstrap"] = {row[0]: row[1:] for row in rows}
        print(f"paired bootstrap, {samples:,} resamples, seed {seed}\n")
        shown = [[*row[:-1], f"p = {row[-1]:.4f}"] for row in rows]
        print(table(shown, ["metric", "baseline (mean ± 95 %)", "system (mean ± 95 %)", "differ"]))
    if json:
        write_json(json, results)
