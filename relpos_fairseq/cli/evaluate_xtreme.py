#!/usr/bin/env python3
"""Evaluates models that were fine-tuned on English in every language that is there (XTREME).

    python scripts/evaluate_xtreme.py --out runs/xtreme \
        --xnli-model runs/xnli/.../model.pt --xnli data-bin/glue/XNLI \
        --qa-model checkpoints/squad/checkpoint_best.pt --qa-data data-bin/squad \
        --xquad xquad --mlqa MLQA_V1/test --tydiqa tydiqa-goldp-v1.1-dev

Accuracy on XNLI, F1 and exact match on XQuAD, MLQA and TyDiQA-GoldP, a row a language. Models and
data sets that are not given are left out; what is done is kept, and the same command goes on.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from relpos_fairseq.engine.command import run_command
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import atomic_folder, read_json, write_json, write_text
from relpos_fairseq.engine.tables import table
from relpos_fairseq.engine.stages import Stage, run_stages
from relpos_fairseq.evaluation.xtreme import xnli
from relpos_fairseq.evaluation.xtreme.files import METRICS, NAMES, question_files

ENGLISH = "en"
FLAGS = {"XQuAD": "xquad", "MLQA": "mlqa", "TyDiQA-GoldP": "tydiqa"}
ABSENT, UNLABELLED = "-", "no labels"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read and check the command line.

    Raises:
        PreparationError: a model without data, or data without a model.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of predictions and the table")
    add("--xnli-model", type=Path, help="checkpoint fine-tuned on XNLI's English training data")
    add("--xnli", type=Path, help="XNLI of prepare_glue.py")
    add("--qa-model", type=Path, help="checkpoint fine-tuned on English questions")
    add("--qa-data", type=Path, help="its data folder (default: the one it was trained on)")
    add("--qa-flags", default="", metavar="'--FLAG ...'",
        help="more of evaluate_qa.py's: --qa-flags='--on-long-question truncate'")  # fmt: skip
    for name, flag in FLAGS.items():
        add(f"--{flag}", type=Path, metavar="FOLDER", help=f"{name}'s files")
    add("--cpu", action="store_true", help="no GPU")
    add("--force", action="store_true", help="repeat what is done")
    args = parser.parse_args(argv)
    if bool(args.xnli_model) != bool(args.xnli):
        raise PreparationError("--xnli-model and --xnli belong together: give both or neither")
    given = [flag for flag in FLAGS.values() if getattr(args, flag)]
    if bool(args.qa_model) != bool(given):
        raise PreparationError(
            "--qa-model belongs together with one of --xquad, --mlqa, --tydiqa at least"
        )
    if not args.xnli and not given:
        raise PreparationError("there is nothing to evaluate: give --xnli-model or --qa-model")
    for path in filter(None, (getattr(args, name) for name in ("xnli", *given))):
        if not path.is_dir():
            raise PreparationError(f"there is no folder {path}")
    for path in filter(None, (args.xnli_model, args.qa_model)):
        if not path.is_file():
            raise PreparationError(f"there is no checkpoint {path}")
    return args


def stages(args: argparse.Namespace) -> list[Stage]:
    """One a data set."""
    found = []
    if args.xnli:
        xnli.languages(args.xnli)
        found.append(
            Stage(
                xnli.NAME,
                lambda: evaluate_xnli(args),
                [args.xnli_model, args.xnli],
                [args.out / xnli.NAME],
            )  # fmt: skip
        )
    for name, flag in FLAGS.items():
        folder = getattr(args, flag)
        if folder:
            files = question_files(name, folder)
            found.append(
                Stage(
                    name,
                    lambda name=name, files=files: evaluate_questions(args, name, files),
                    [args.qa_model, *files.values()],
                    [args.out / name],
                    {"metric": METRICS[name], "flags": args.qa_flags, "data": str(args.qa_data)},
                )
            )
    return found


def evaluate_xnli(args: argparse.Namespace) -> dict[str, float | None]:
    """Accuracy by language, None without labels; predictions are written, a label a line.

    That is how XTREME takes them: test sets without labels are predicted for it.
    """
    model = xnli.Classifier(args.xnli_model, args.xnli, args.cpu)
    results = {}
    with atomic_folder(args.out / xnli.NAME) as folder:
        for language, splits in xnli.languages(args.xnli).items():
            results[language] = None
            for split in filter(None, (splits.scored, splits.unlabelled)):
                predicted, right = model.predict(split)
                stem = "test" if split.startswith("test") else "dev"
                labels = "".join(f"{label}\n" for label in predicted)
                write_text(folder / f"{stem}-{language}.tsv", labels)
                if split == splits.scored:
                    hits = sum(a == b for a, b in zip(predicted, right, strict=True))
                    results[language] = 100 * hits / len(right)
    return results


def evaluate_questions(
    args: argparse.Namespace, name: str, files: dict[str, Path]
) -> dict[str, list[float]]:
    """F1 and exact match by language, by evaluate_qa.py."""
    from relpos_fairseq.cli import evaluate_qa
    from relpos_fairseq.data.question_answering.reading import split_name

    with atomic_folder(args.out / name) as folder:
        command = [*files.values(), "--path", args.qa_model, "--out", folder]
        command += ["--metric", METRICS[name]]
        command += ["--data", args.qa_data] if args.qa_data else []
        command += shlex.split(args.qa_flags)
        evaluate_qa.main([*map(str, command), *(["--cpu"] if args.cpu else [])])
        numbers = read_json(folder / "results.json")
    results = {}
    for language, path in files.items():
        found = numbers[split_name(path)]
        results[language] = [found["f1"], found["exact"]]
    return results


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate.

    Raises:
        ValueError: what is wrong with the command line, a model or a file.
    """
    args = parse(argv)
    results = run_stages(stages(args), args.out, force=args.force)
    text = by_language(results)
    print(f"\n{text}")
    write_text(args.out / "xtreme.md", f"{text}\n")
    write_json(args.out / "xtreme.json", results)


def by_language(results: dict[str, dict]) -> str:
    """One row a language, English first; the last rows are means.

    Args:
        results: data set to language to accuracy (None: no labels), or to F1 and exact match.
    """
    names = [name for name in (xnli.NAME, *NAMES) if name in results]
    spoken = {language for name in names for language in results[name]}
    order = sorted(spoken, key=lambda language: (language != ENGLISH, language))
    columns = [results[name] for name in names]
    rows = [[language, *(cell(found.get(language), language in found) for found in columns)]
            for language in order]  # fmt: skip
    for title, left_out in (("mean", ()), ("mean without English", (ENGLISH,))):
        rows.append([title, *(cell(mean(found, left_out)) for found in columns)])
    heads = [f"{name} ({'accuracy' if name == xnli.NAME else 'F1 / EM'})" for name in names]
    return table(rows, ["language", *heads])


def mean(found: dict, left_out: Sequence[str]) -> float | list[float] | None:
    """The mean over languages; None where none is left."""
    kept = [value for language, value in found.items()
            if language not in left_out and value is not None]  # fmt: skip
    if not kept:
        return None
    if isinstance(kept[0], list):
        return [statistics.fmean(column) for column in zip(*kept, strict=True)]
    return statistics.fmean(kept)


def cell(value: float | Sequence[float] | None, there: bool = False) -> str:
    """A number, or F1 / EM; without one it says whether the language is `there`."""
    if value is None:
        return UNLABELLED if there else ABSENT
    values = value if isinstance(value, (list, tuple)) else [value]
    return " / ".join(f"{number:.2f}" for number in values)


if __name__ == "__main__":
    sys.exit(run_command(main))
