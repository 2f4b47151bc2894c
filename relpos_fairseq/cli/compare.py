"""`relpos compare|plot|theorems|schemes|doctor`: comparisons, plots, and this installation."""

import logging
from collections.abc import Sequence

from relpos_fairseq.cli.command import command, whole_number
from relpos_fairseq.io.command import CONTINUE
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.options import (
    InFile,
    InFolder,
    OutFolder,
    WorkFile,
    WorkFolder,
    argument,
    flag,
    option,
    required,
)

COMPARE = """\
The file's keys, the tasks and the statistics: relpos_fairseq/lab/comparison/README.md.

exit status: 0 all done, 1 a run failed (status: is missing), 2 wrong options or file, 130 or 143
interrupted
"""


@command("compare", "schemes x seeds x tasks from one file: runs, statistics, a report", CONTINUE, epilog=COMPARE)
class Compare:
    """Compare schemes on tasks, each with several seeds, by fairseq's own commands.

        relpos compare run examples/comparison/quick.yaml --workers 2
        relpos compare status examples/comparison/quick.yaml
        relpos compare report examples/comparison/quick.yaml

    A run is a scheme on a task with a seed. `run` makes the runs that are missing: after an interruption,
    or on another machine that has the folder of results, the same command again continues. A comparison
    that is whole keeps its results in one file, NAME/results.jsonl.gz.
    """

    action: str = argument("what to do", choices=("run", "status", "report"))
    spec: InFile = argument("the comparison, a YAML file", metavar="SPEC")
    work: WorkFolder | None = option(None, "data, checkpoints and logs (default: compare_out/NAME)")
    results: WorkFolder | None = option(None, "results, small files to keep (default: NAME beside SPEC)")
    workers: int = option(1, "runs at a time (default: %(default)s)", least=1)
    threads: int = option(1, "threads of a run (default: %(default)s)", least=1)
    executor: str = option(
        "local",
        "slurm: a job a run, by submitit and the file's `slurm:` (default: %(default)s)",
        choices=("local", "slurm"),
    )
    keep_models: bool = flag("keep each run's checkpoint")
    any_code: bool = flag("count results of other versions of the code")
    seeds: str = option("", "seeds in place of the file's, say 101,102: are they where the file's put a further one?")

    def run(self, argv: Sequence[str]) -> int:
        given = vars(self).copy()
        action, executor = given.pop("action"), given.pop("executor")
        from relpos_fairseq.lab.comparison.scheduling import Comparison, run_jobs, status

        if action == "report" and self.seeds:
            raise UserError("--seeds belongs to run and status: a report is of the file's seeds")
        comparison = Comparison.of(**given)
        if action == "status":
            return status(comparison)
        if action == "report":
            from relpos_fairseq.lab.comparison.reporting import write_report

            return write_report(comparison)
        return run_jobs(comparison, executor) if executor == "slurm" else comparison.run()


@command("plot", "pictures of what a checkpoint's positions have learned")
class Plot:
    """Draw what a checkpoint's positions have learned, and how it attends.

        relpos plot CHECKPOINT --data DATA_BIN --out DIR
        relpos plot --curves LOG... --out DIR
        relpos plot --scores runs/glue/chen.json runs/xtreme/medians.json --out DIR

    Writes a PNG and a CSV of the same numbers for every stack (encoder, decoder) and
    - every table over distance: scalars by head; vectors by head and channel (Huang2020, Fig. 4), and norm;
    - attention probabilities on a sentence, averaged over heads, to 50 tokens (Huang2020, Fig. 5);
    - position logits without content (Chen2021, Fig. 4), with segments, and their softmax (Chen2021, Fig. 6);
    - ranks of content and position logits on the sentence, or on a batch (Chen2021, Fig. 2);
    - cosine similarity of absolute positions, and its distribution (Chen2021, Fig. 5).
    What the checkpoint's scheme does not have is left out, and a line says so.

    With --curves, learning curves of what fairseq-train printed (--log-format json or simple): the
    training and validation loss by update, a line a log. With --scores, bars of the models' scores on
    natural language inference (Chen2021, Fig. 1: MNLI and XNLI; or others, by --on), out of what `relpos
    finetune glue` and `relpos finetune xtreme` write.

    Huang2020: Improve Transformer Models with Better Relative Position Embeddings.
    Chen2021: Demystifying the Better Performance of Position Encoding Variants.
    """

    checkpoint: InFile | None = argument("a .pt file of fairseq-train", nargs="?", default=None)
    curves: list[InFile] | None = option(None, "draw these logs' curves instead", metavar="LOG")
    scores: list[InFile] | None = option(None, "draw these tables' bars instead", metavar="JSON")
    on: str = option("MNLI,XNLI", "with --scores: data sets, by commas (%(default)s)")
    measure: str = option("loss", "with --curves: loss, nll_loss, ppl, ... (%(default)s)")
    out: OutFolder = required("folder for PNG and CSV files")
    data: InFolder | None = option(
        None, "folder of fairseq-preprocess: its first test sentence is read, in its dictionary"
    )
    sentence: str | None = option(
        None,
        (
            "words to read instead, tokenised as the training data are (or by the tokenizer that lies in --data, "
            "which then takes plain text); a decoder reads its own greedy translation"
        ),
    )
    length: int = option(32, "tokens of position logits (%(default)s)", type=whole_number(2))
    segments: int = option(2, "segments of equal length in segment logits (%(default)s)", type=whole_number(2))
    sentences: int = option(1, "of --data, in ranks (%(default)s)", type=whole_number(1))
    tokens: int = option(50, "first queries drawn (%(default)s)", type=whole_number(1))
    distance: int = option(50, "largest distance (%(default)s)", type=whole_number(1))

    def run(self, argv: Sequence[str]) -> None:
        logging.basicConfig(level=logging.WARNING)  # before fairseq is imported, which reports more
        if self.curves or self.scores:
            from relpos_fairseq.plots.results import draw_curves, draw_score_bars

            if self.curves:
                return draw_curves(self.curves, self.measure, self.out)
            return draw_score_bars(self.scores, self.on.split(","), self.out)
        from relpos_fairseq.plots.checkpoint import draw_checkpoint

        draw_checkpoint(self)


@command("theorems", "Chen2021's theorems: the ranks of attention with positions on the input and in each head")
class Theorems:
    """Theorems 1 and 2 of Chen et al. 2021 (section 2.3) with numbers: why positions leave the input.

        relpos theorems --width 768 --head-dim 64 --rank 128 --length 256

    Theorem 1: a loss has the same gradient at token and at position embeddings that are added.
    Theorem 2: attention logits of such a sum have at most the rank of a head; positions that are added
    to the logits add theirs.
    """

    width: int = option(768, "d of the model (default: %(default)s)")
    head_dim: int = option(64, "d_h of a head (default: %(default)s)")
    rank: int = option(128, "d_p of positions (default: %(default)s)")
    length: int = option(256, "n tokens (default: %(default)s)")
    seed: int = option(1, "of the random matrices (default: %(default)s)")

    def run(self, argv: Sequence[str]) -> None:
        from relpos_fairseq.plots.theorems import Sizes, report

        print(report(Sizes(self.width, self.head_dim, self.rank, self.length), self.seed))


@command("schemes", "all position schemes, or what is known of one")
class Schemes:
    """List all position schemes, or say what is known of one: equation, options, costs, backends.

        relpos schemes
        relpos schemes m4
        relpos schemes --write README.md

    --write FILE renews the tables between the markers in FILE, as in relpos_fairseq/schemes/README.md.
    """

    name: str | None = argument("one scheme", nargs="?", metavar="SCHEME", default=None)
    write: WorkFile | None = option(None, "renew the tables in FILE", metavar="FILE")

    def run(self, argv: Sequence[str]) -> None:
        from relpos_fairseq.scheme_table import description, listing, renew

        if self.write is not None:
            renew(self.write)
        else:
            print(listing() if self.name is None else description(self.name))


@command("doctor", "what is installed here, and whether it works")
class Doctor:
    """Say on one screen what this installation consists of, and whether it works.

    It names versions, compiler and instruction set, which backend serves what here and why another
    does not, holds the kernel for CPUs against fp64, and lists the verdicts on GPUs.  Status 1 where
    something is wrong.  Paste what it prints into an issue.
    """

    quick: bool = flag("without the self-check (seconds)")
    verify: list[InFolder] = option(
        [], "instead: read these folders' files, and compare their hashes", metavar="FOLDER"
    )

    def run(self, argv: Sequence[str]) -> int:
        if self.verify:
            from relpos_fairseq.io.manifests import check_folder

            for folder in self.verify:
                print(f"{folder}: {check_folder(folder)} files are as their manifests say", flush=True)
            return 0
        from relpos_fairseq.doctor import examine

        return examine(self.quick)
