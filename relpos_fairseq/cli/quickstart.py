"""From text to a trained, scored and drawn translation model with a chosen position scheme.

    python scripts/quickstart.py                               # built-in corpus, default scheme
    python scripts/quickstart.py --compare none,learned,m4     # one table for several schemes
    python scripts/quickstart.py --data my_text --position-scheme m4m

Every stage is a fairseq command whose log stays in --out; a stage that is done is not repeated, and
an interrupted training continues where it stopped.
"""

import argparse
import csv
import io
import os
import signal
import sys
from pathlib import Path

from relpos_fairseq.comparison.quickstart import corpus as data
from relpos_fairseq.comparison.quickstart.recipe import DEFAULT_SCHEME, MAX_UPDATE, SEED
from relpos_fairseq.comparison.quickstart.run import Run, Settings
from relpos_fairseq.engine.files import write_json, write_text
from relpos_fairseq.engine.tools import ToolError

EPILOG = """\
your own text (--data DIR): one sentence a line, UTF-8, plain or .gz, line n of one language
translates line n of the other:
  train.SRC train.TGT  valid.SRC valid.TGT  test.SRC test.TGT     (SRC and TGT such as en and de)
It is cut into joint sentencepiece units; BLEU is on detokenised text (13a). Raise --max-update for
more text than some ten thousand sentences. DIR is only read.

what is left in --out:
  data/      prepared text and fairseq's binary form of it
  runs/      per scheme and settings: checkpoints, logs, translations (test.TGT), pictures
  results.json, results.csv     the table of the last call
Finished stages are reused when inputs and settings are the same; delete --out to start over. After
an interruption run the same command again.

exit status: 0 all done, 1 a stage failed, 2 wrong options or data, 130 interrupted
"""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Trains a small translation model with a position scheme, translates, scores "
        "and draws what the scheme learned.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--position-scheme", metavar="S", default=DEFAULT_SCHEME,
        help="the scheme, e.g. none, learned, shaw, t5, m4, m4m, rope, or a sum as in learned+m4m "
        "(default: %(default)s); an unknown name lists all",
    )  # fmt: skip
    which.add_argument("--compare", metavar="S1,S2,...", help="train several and print one table")
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="your parallel text (default: a built-in corpus)")
    add("--source-lang", metavar="SRC", help="language of the source (default: from file names)")
    add("--target-lang", metavar="TGT", help="language of the target (default: from file names)")
    add("--out", type=Path, default=Path("quickstart_out"), help="default: %(default)s")
    add("--max-update", type=int, default=MAX_UPDATE, metavar="N",
        help="updates of training (default: %(default)s)")  # fmt: skip
    add("--minutes", type=float, metavar="M", help="stop each training after so many minutes")
    add("--seed", type=int, default=SEED, help="default: %(default)s")
    add("--threads", type=int, default=usable_cores(),
        help="threads to compute with (default: the usable cores, here %(default)s)")  # fmt: skip
    options = parser.parse_args(arguments)
    for name in ("max_update", "minutes", "threads"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0, got {value}")
    if options.data is None and (options.source_lang or options.target_lang):
        parser.error("--source-lang and --target-lang go with --data; the built-in corpus is en-de")
    options.schemes = list(dict.fromkeys((options.compare or options.position_scheme).split(",")))
    if not all(options.schemes):
        parser.error(f"an empty name among the schemes: {options.compare!r}")
    return options


def usable_cores() -> int:
    """Returns how many cores this process may use, at most 8: the model is small."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        cores = os.cpu_count() or 1
    return min(cores, 8)


def table(rows: list[dict]) -> list[list[str]]:
    """Lays the results out: a header and one line of texts per scheme."""
    long = any("test_long" in row for row in rows)
    header = ["scheme", "BLEU test", *(["BLEU long"] if long else []), "valid ppl", "parameters"]
    lines = [[*header, "train tok/s", "generate tok/s", "seconds"]]
    for row in rows:
        lines.append([
            row["scheme"],
            f"{row['test']['bleu']:.2f}",
            *([f"{row['test_long']['bleu']:.2f}"] if long else []),
            f"{row['valid_ppl']:.2f}",
            str(row["parameters"]),
            f"{row['train_tokens_per_second']:.0f}",
            f"{row['test']['tokens_per_second']:.0f}",
            f"{row['seconds']:.0f}",
        ])  # fmt: skip
    return lines


def print_table(lines: list[list[str]]) -> None:
    """Prints aligned columns, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *others in lines:
        cells = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *cells]))


def print_samples(row: dict) -> None:
    """Prints a few sentences with their references and translations."""
    for source, reference, translation in row["test"]["samples"]:
        print(f"  source       {source}\n  reference    {reference}")
        print(f"  translation  {translation}\n")


def write_results(out: Path, rows: list[dict]) -> None:
    """Writes the table as results.json and results.csv."""
    write_json(out / "results.json", rows)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table(rows))
    write_text(out / "results.csv", text.getvalue())


def run_all(options: argparse.Namespace) -> int:
    """Prepares the data and finishes every scheme; returns the exit status."""
    if options.data is None:
        corpus = data.built_in(options.out, options.threads)
    else:
        languages = (options.source_lang, options.target_lang)
        corpus = data.user_data(options.data, options.out, *languages, options.threads)
    chosen = ("out", "max_update", "minutes", "seed", "threads")
    settings = Settings(**{name: getattr(options, name) for name in chosen})
    rows, failed = [], []
    for scheme in options.schemes:
        try:
            rows.append(Run(scheme, corpus, settings).finish())
        except ToolError as error:
            print(error, file=sys.stderr, flush=True)
            failed.append(scheme)
            continue
        write_results(options.out, rows)
        print_samples(rows[-1])
    if rows:
        print_table(table(rows))
        print(f"\nBLEU: {rows[0]['test']['signature']}")
        print(f"written: {options.out / 'results.json'}, {options.out / 'results.csv'}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def main() -> int:
    """Runs the quickstart; a SIGTERM ends its commands as Ctrl-C does."""
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    options = parse_arguments()
    try:
        return run_all(options)
    except data.DataError as error:
        print(f"quickstart: error: {error}", file=sys.stderr)
        return 2
    except ToolError as error:
        print(f"quickstart: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; run the same command again to continue", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
