"""From text to a trained, scored and drawn translation model with a chosen position scheme.

    relpos quickstart                               # built-in corpus, default scheme
    relpos quickstart --compare none,learned,m4     # one table for several schemes
    relpos quickstart --data my_text --position-scheme m4m

It is a comparison (`relpos compare`) of one seed: every stage is a fairseq command whose log stays
in --out; a stage that is done is not repeated, and an interrupted training continues.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

DEFAULT_SCHEME = "m4"
MAX_UPDATE = 750  # one scheme: about three minutes on two idle cores
SEED = 1
HELP = "train, score and draw a small translation model in minutes"
EPILOG = """\
your own text (--data DIR): one sentence a line, UTF-8, plain or .gz, line n of one language
translates line n of the other:
  train.SRC train.TGT  valid.SRC valid.TGT  test.SRC test.TGT     (SRC and TGT such as en and de)
It is cut into joint sentencepiece units; BLEU is on detokenised text (13a). Raise --max-update for
more text than some ten thousand sentences. DIR is only read.

what is left in --out:
  data/      prepared text and fairseq's binary form of it
  runs/      per scheme and settings: checkpoints, logs, translations (test.txt), pictures
  results.json, results.csv     the table of the last call
Finished stages are reused when inputs and settings are the same; delete --out to start over. After
an interruption run the same command again.

exit status: 0 all done, 1 a stage failed, 2 wrong options or data, 130 or 143 interrupted
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--position-scheme",
        metavar="S",
        default=DEFAULT_SCHEME,
        help="the scheme, or several joined by + (default: %(default)s); an unknown name lists all",
    )
    which.add_argument("--compare", metavar="S1,S2,...", help="train several and print one table")
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="your parallel text (default: a built-in corpus)")
    add("--source-lang", metavar="SRC", help="language of the source (default: from file names)")
    add("--target-lang", metavar="TGT", help="language of the target (default: from file names)")
    add("--out", type=Path, default=Path("quickstart_out"), help="default: %(default)s")
    add("--max-update", type=int, default=MAX_UPDATE, metavar="N", help="updates of training (default: %(default)s)")
    add("--minutes", type=float, metavar="M", help="stop each training after so many minutes")
    add("--seed", type=int, default=SEED, help="default: %(default)s")
    add(
        "--threads",
        type=int,
        default=usable_cores(),
        help="threads to compute with (default: the usable cores, here %(default)s)",
    )


def usable_cores() -> int:
    """Return how many cores this process may use, at most 8: the model is small."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        cores = os.cpu_count() or 1
    return min(cores, 8)


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    from relpos_fairseq.comparison.quickstart import Choices, quickstart

    if args.data is None and (args.source_lang or args.target_lang):
        raise ValueError("--source-lang and --target-lang go with --data; the built-in corpus is en-de")
    schemes = list(dict.fromkeys((args.compare or args.position_scheme).split(",")))
    if not all(schemes):
        raise ValueError(f"an empty name among the schemes: {args.compare!r}")
    choices = Choices(
        args.out, args.max_update, args.minutes, args.seed, args.threads, args.data, args.source_lang, args.target_lang
    )
    return quickstart(schemes, choices)
