"""`relpos evaluate ...` and `relpos finetune ...`: numbers of trained models on published tasks."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from relpos_fairseq.cli.command import command, numbers, parse
from relpos_fairseq.io.command import CONTINUE
from relpos_fairseq.io.options import InFile, InFolder, OutFile, OutFolder, argument, flag, option, required

TRAINED = "as in training (default: the checkpoint's)"
BOUNDARIES = ("sidecar", "eos")
DOCUMENTS = "where documents start, of a model that was trained to see none before its own (default: the checkpoint's)"
TRIALS = "; several are trials, whose median is reported"
FLAGS = "'--FLAG ...'"


@dataclass(kw_only=True)
class Questions:
    """Files of questions in other languages, and how they are answered."""

    xquad: InFolder | None = option(None, "XQuAD's files", metavar="FOLDER")
    mlqa: InFolder | None = option(None, "MLQA's files", metavar="FOLDER")
    tydiqa: InFolder | None = option(None, "TyDiQA's files", metavar="FOLDER")
    qa_flags: str = option("", "more of `relpos evaluate qa`: --qa-flags='--on-long-question truncate'", metavar=FLAGS)

    def answering(self) -> object:
        """Return the options of `relpos evaluate qa` that --qa-flags holds."""
        return parse(EvaluateQa, "--qa-flags", ["every file", *shlex.split(self.qa_flags)])


@dataclass(kw_only=True)
class Training:
    """What every fine-tuning by a protocol takes."""

    models: list[str] = argument("pre-trained models", metavar="[NAME=]CHECKPOINT")
    lr: list[float] | None = option(None, "other learning rates than the protocol's", above=0)
    epochs: list[int] | None = option(None, "other numbers of epochs", above=0)
    seeds: list[int] | None = option(None, "other seeds", above=0)
    max_update: int = option(0, "end runs after so many updates", least=0)
    model_flags: str = option("", "the model's, beside its own: --model-flags='--segment-encoding head'", metavar=FLAGS)
    train_flags: str = option("", "further ones of fairseq-train: --train-flags=--fp16", metavar=FLAGS)
    threads: int = option(1, "threads of a run (default: %(default)s)", least=1)


@command("evaluate lm", "perplexity of language models at a chosen memory or context")
class EvaluateLm:
    """Perplexity and bits a token of language models, on the same predictions.

        relpos evaluate lm CHECKPOINT... --data DATA_BIN [--split test] [--mem-len 640 | --context 256]

    A model with memory reads segments of its trained length with --mem-len of memory (default: its
    own); any other, or every model with --context, reads windows of that many tokens (default: as
    trained) that move on by --stride (default: half a window), so that each prediction sees at least
    the rest of a window.  fairseq-eval-lm and fairseq-validate score a checkpoint as it was trained.
    A model that was trained with --reset-memory-at-document sees nothing before a document's start.

    --by-token OUT.jsonl writes every prediction ("index" in the stream, "token", "nats", its "place" in
    the segment or window, the "memory" before it), and OUT.png draws loss by place, and by memory where
    several lengths are given; several checkpoints are in one picture.  --dynamic RATE lets a model with
    memory learn from each segment once it is scored (Krause et al. 2018): parameters move by RATE times
    the gradient of the segment's mean loss, and by --decay of their way back to the trained ones.
    --rms N is their variant whose steps are divided by the root mean square of the gradients over the
    first N tokens of the split `train` (say --dynamic 0.0001 --rms 100000), plus --epsilon.
    """

    checkpoints: list[InFile] = argument(metavar="CHECKPOINT")
    data: InFolder = required("folder of binarised text")
    split: str = option("valid", "default: %(default)s")
    mem_len: list[int] | None = option(None, "tokens of memory", metavar="N", exclusive=3)
    context: int | None = option(None, "tokens a window", metavar="N", exclusive=3, least=1)
    stride: int | None = option(None, "tokens between windows (default: half of one)", metavar="N", least=1)
    tokens: int | None = option(None, "predictions scored: the last (default: all)", metavar="N", least=1)
    by_token: OutFile | None = option(None, "JSON lines, and a picture beside them", metavar="FILE")
    dynamic: float | None = option(None, "parameters follow the text (say 0.01)", metavar="RATE", above=0)
    decay: float | None = option(None, "with --dynamic: the way back (default: 0.001)", metavar="D", least=0)
    rms: int | None = option(None, "with --dynamic: scale by gradients of N tokens", metavar="N", least=1)
    epsilon: float | None = option(None, "with --rms: added to it (default: 0.001)", metavar="E", above=0)
    batch_size: int = option(4, "rows or windows evaluated together (%(default)s)", least=1)
    document_boundaries: str | None = option(None, DOCUMENTS, choices=BOUNDARIES)

    def run(self, argv: Sequence[str]) -> None:
        from relpos_fairseq.evaluation.language_model import Dynamic
        from relpos_fairseq.evaluation.perplexity import Reading, compare

        for name, needs in (("decay", "dynamic RATE"), ("rms", "dynamic RATE"), ("epsilon", "rms N")):
            if getattr(self, name) is not None and getattr(self, needs.split()[0]) is None:
                raise ValueError(f"--{name} needs --{needs}")
        dynamic = None
        if self.dynamic is not None:
            given = {"decay": self.decay, "tokens": self.rms, "epsilon": self.epsilon}
            given = {name: value for name, value in given.items() if value is not None}
            training = None if self.rms is None else self.data / "train"
            dynamic = Dynamic(self.dynamic, training=training, **given)
        readings = [
            Reading(mem_len, self.context, self.stride, self.batch_size, dynamic) for mem_len in self.mem_len or [None]
        ]
        boundaries = self.document_boundaries
        print(compare(self.checkpoints, self.data, self.split, self.tokens, readings, self.by_token, boundaries))


@command("evaluate length", "perplexity of a language model by length of context and memory", interrupted=CONTINUE)
class EvaluateLength:
    """Perplexity of a language model by the length of its context and of its memory.

        relpos evaluate length CHECKPOINT --data DATA_BIN --out DIR
            [--lengths 64,128,256] [--mem-len 0,128,512] [--split valid] [--tokens 20000]
            [--override position_rope_scaling=yarn]

    For every length, windows of that many tokens, moved on by half a window (--stride), score the same
    predictions: the last --tokens of the split.  For a model with memory, every memory length is
    scored too, with segments of the trained length.  By default both go from half to 16 times what was
    trained.  Writes length.csv and length.png; finished points are kept, so an interrupted run goes on.
    A scheme that cannot read a length is reported so, and so is one that reads it badly, compared with
    the trained length, which is always scored.  --override evaluates under other flags of the model
    than it was trained with, as fairseq's --model-overrides does; what must not change is refused.
    """

    checkpoint: InFile = argument()
    data: InFolder = required("folder of binarised text")
    lengths: list[int] | None = option(None, "tokens of context, joined by commas", type=numbers)
    mem_len: list[int] | None = option(None, "memory lengths, joined by commas", type=numbers)
    split: str = option("valid")
    tokens: int = option(20000, "predictions scored: the last", least=1)
    stride: int | None = option(None, "tokens between windows; default: half of each", least=1)
    override: list[str] = option([], "a flag of the model", action="append", metavar="FIELD=VALUE")
    batch_size: int = option(4, "rows or windows evaluated together", least=1)
    document_boundaries: str | None = option(None, DOCUMENTS, choices=BOUNDARIES)
    out: OutFolder = required()

    def run(self, argv: Sequence[str]) -> None:
        from relpos_fairseq.evaluation.length import evaluate

        evaluate(self)


@command("evaluate qa", "answer questions of SQuAD's format, and score answers", interrupted=CONTINUE)
class EvaluateQa:
    """Answer the questions of files of SQuAD's format by a checkpoint, or score predictions.

        relpos evaluate qa FILE... --checkpoint checkpoint_best.pt --data DATA --out DIR
        relpos evaluate qa FILE --predictions predictions.json [--null-odds null_odds.json]

    With a checkpoint, predictions.json (id to answer, empty for none), nbest.json and, where there are
    unanswerable questions, null_odds.json go to DIR for one file, to DIR/NAME for several. Exact match
    and F1 are those of the official scripts: SQuAD v1.1's (XQuAD and TyDiQA-GoldP use them, too),
    v2.0's where there are unanswerable questions (HasAns, NoAns and the thresholds that would be best),
    MLQA's with --metric mlqa. Several files or languages become one table with its mean, and
    results.json has the same numbers. After an interruption the same command continues. With
    predictions the numbers are those that the official script prints for these files, missing answers
    and --na-prob-thresh included.
    """

    files: list[InFile] = argument("questions, .json or .json.gz")
    checkpoint: InFile | None = option(None, "to answer with")
    data: InFolder | None = option(
        None, "its data folder (default: the one it was trained on, or where it was converted to)"
    )
    out: OutFolder | None = option(None, "folder of the files written")
    predictions: InFile | None = option(None, "score this file instead of answering")
    null_odds: InFile | None = option(None, "with --predictions: odds of 'no answer'")
    na_prob_thresh: float | None = option(None, "with --null-odds: above it there is no answer (default 1.0)")
    metric: str | None = option(None, "normalisation (the checkpoint's, or squad)", choices=("squad", "mlqa"))
    language: str | None = option(None, "language for --metric mlqa (default: from the file's name)")
    max_tokens: int | None = option(None, "tokens of a batch (default 8192)", least=1)
    null_threshold: float | None = option(None, TRAINED)
    n_best: int | None = option(None, TRAINED)
    max_answer_length: int | None = option(None, TRAINED)
    tokens_per_sample: int | None = option(None, TRAINED)
    doc_stride: int | None = option(None, TRAINED)
    max_query_length: int | None = option(None, TRAINED)
    on_long_question: str | None = option(None, TRAINED, choices=("fail", "truncate", "drop"))
    unanswerable: str | None = option(None, TRAINED, choices=("auto", "yes", "no"))
    cpu: bool = flag("no GPU")

    def run(self, argv: Sequence[str]) -> None:
        from relpos_fairseq.evaluation.questions import evaluate

        evaluate(self)


@command("evaluate xtreme", "accuracy and F1 in every language of XTREME", interrupted=CONTINUE)
class EvaluateXtreme(Questions):
    r"""Evaluate models that were fine-tuned on English in every language that is there (XTREME).

        relpos evaluate xtreme --out runs/xtreme \
            --xnli-model runs/xnli/.../model.pt --xnli data-bin/glue/XNLI \
            --qa-model checkpoints/squad/checkpoint_best.pt --qa-data data-bin/squad \
            --xquad xquad --mlqa MLQA_V1/test --tydiqa tydiqa-goldp-v1.1-dev

    Accuracy on XNLI, F1 and exact match on XQuAD, MLQA and TyDiQA-GoldP, a row a language. Several
    checkpoints of a kind are trials, of which the median is reported (Chen2021, section 4.2). Models and
    data sets that are not given are left out; what is done is kept, and the same command goes on.
    """

    out: OutFolder = required("folder of predictions and the table")
    xnli_model: list[InFile] = option((), f"fine-tuned on XNLI's English{TRIALS}")
    xnli: InFolder | None = option(None, "XNLI, as `relpos prepare glue` wrote it")
    qa_model: list[InFile] = option((), f"fine-tuned on English questions{TRIALS}")
    qa_data: InFolder | None = option(None, "its data folder (default: the one it was trained on)")
    cpu: bool = flag("no GPU")
    force: bool = flag("repeat what is done")

    def run(self, argv: Sequence[str]) -> None:
        from relpos_fairseq.evaluation.xtreme import Options, evaluate

        evaluate(Options(**vars(self), answering=self.answering()))


@command("finetune glue", "fine-tune pre-trained models on GLUE by a published protocol", interrupted=CONTINUE)
class FinetuneGlue(Training):
    r"""Fine-tune pre-trained models on GLUE by a published protocol and print one table.

        relpos finetune glue --data data-bin/glue m4=checkpoints/m4.pt m4m=checkpoints/m4m.pt \
            --protocol huang --tasks RTE,MRPC,CoLA,STS-B --out runs/glue

    Runs that have ended are kept: the same command again goes on where it was interrupted, and with
    more models, tasks or learning rates it does what is missing. Several commands may share the work if
    each has tasks or models of its own.
    """

    data: InFolder = required("folder that `relpos prepare glue` wrote")
    out: OutFolder = required("folder of the runs and the table")
    protocol: str = option(
        "huang",
        (
            "huang: 3 epochs, 3e-5; multiplicative: 3 epochs, best of 2e-5, 3e-5, 4e-5; chen: 5 or 10 epochs, "
            "1e-5 to 4e-5, median of five runs' best checkpoints; xtreme: its XNLI, 3 epochs (default: "
            "%(default)s)"
        ),
        choices=("huang", "multiplicative", "chen", "xtreme"),
    )
    tasks: str | None = option(None, "separated by commas (default: those in DATA)")
    predictions: bool = flag(
        "let the models that the table reports predict all sets: OUT/predictions, and for GLUE's server "
        "OUT/submission; keeps the models"
    )
    keep_models: bool = flag("keep each run's model")

    def run(self, argv: Sequence[str]) -> int:
        from relpos_fairseq.lab.comparison.finetuning import finetune_glue

        return finetune_glue(self)


@command(
    "finetune xtreme", "fine-tune on English, evaluate in XTREME's languages: Chen2021's table", interrupted=CONTINUE
)
class FinetuneXtreme(Questions, Training):
    r"""Fine-tune pre-trained models on English and evaluate them in every language (XTREME).

        relpos finetune xtreme chen=checkpoints/multilingual/checkpoint_best.pt --out runs/xtreme \
            --xnli data-bin/xtreme/XNLI --squad data-bin/squad \
            --xquad xquad --mlqa MLQA_V1/test --tydiqa tydiqa-goldp-v1.1-dev

    As Chen et al. 2021, section 4.2 and Table 7: XNLI's and SQuAD's English training data, 3 epochs,
    batches of 32, learning rates 1e-5 to 4e-5, five trials. Of each model and data set the learning
    rate with the best median on English is evaluated in all languages; a row a model, each number the
    median of its trials. Runs that have ended and evaluations are kept: the same command goes on.
    """

    out: OutFolder = required("folder of the runs, predictions and the table")
    xnli: InFolder | None = option(None, "XNLI, as `relpos prepare glue` wrote it")
    squad: InFolder | None = option(None, "English questions, as `relpos prepare qa` wrote them")
    squad_flags: str = option(
        "", "of fairseq-train for questions alone: --squad-flags='--tokens-per-sample 384'", metavar=FLAGS
    )

    def run(self, argv: Sequence[str]) -> int:
        from relpos_fairseq.lab.comparison.finetuning import finetune_xtreme

        return finetune_xtreme(self, self.answering())
