"""`relpos quickstart`: a recipe, from text to a trained, scored and drawn translation model."""

import os
from collections.abc import Sequence
from pathlib import Path

from relpos_fairseq.cli.command import command
from relpos_fairseq.io.command import CONTINUE
from relpos_fairseq.io.options import InFolder, OutFolder, option

QUICKSTART = """\
your own text (--from-dir DIR): one sentence a line, UTF-8, plain or .gz, line n of one language
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


def usable_cores() -> int:
    """Return how many cores this process may use, at most 8: the model is small."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        cores = os.cpu_count() or 1
    return min(cores, 8)


@command("quickstart", "train, score and draw a small translation model in minutes", CONTINUE, epilog=QUICKSTART)
class Quickstart:
    """From text to a trained, scored and drawn translation model with a chosen position scheme.

        relpos quickstart                               # built-in corpus, default scheme
        relpos quickstart --compare none,learned,m4     # one table for several schemes
        relpos quickstart --from-dir my_text --position-scheme m4m

    It is a comparison (`relpos compare`) of one seed: every stage is a fairseq command whose log stays
    in --out; a stage that is done is not repeated, and an interrupted training continues.
    """

    position_scheme: str = option(
        "m4",
        "the scheme, or several joined by + (default: %(default)s); an unknown name lists all",
        metavar="SCHEME",
        exclusive=0,
    )
    compare: str | None = option(None, "train several and print one table", metavar="S1,S2,...", exclusive=0)
    from_dir: InFolder | None = option(None, "your parallel text (default: a built-in corpus)", metavar="DIR")
    source_lang: str | None = option(None, "language of the source (default: from file names)", metavar="SRC")
    target_lang: str | None = option(None, "language of the target (default: from file names)", metavar="TGT")
    out: OutFolder = option(Path("quickstart_out"), "default: %(default)s")
    # One scheme takes about three minutes on two idle cores.
    max_update: int = option(750, "updates of training (default: %(default)s)", metavar="N", above=0)
    minutes: float | None = option(None, "stop each training after so many minutes", metavar="M", above=0)
    seed: int = option(1, "default: %(default)s")
    threads: int = option(
        usable_cores(), "threads to compute with (default: the usable cores, here %(default)s)", above=0
    )

    def run(self, argv: Sequence[str]) -> int:
        from relpos_fairseq.lab.comparison.quickstart import quickstart

        if self.from_dir is None and (self.source_lang or self.target_lang):
            raise ValueError("--source-lang and --target-lang go with --from-dir; the built-in corpus is en-de")
        schemes = list(dict.fromkeys((self.compare or self.position_scheme).split(",")))
        if not all(schemes):
            raise ValueError(f"an empty name among the schemes: {self.compare!r}")
        return quickstart(schemes, self)
