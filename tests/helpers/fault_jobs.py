"""Jobs that are disturbed by faults: trainings, preparations, conversion, exports, comparisons and evaluation.

Each runs in a fork of the tests' process, so that a kill costs no start.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from helpers import commands as cli
from helpers import segment_corpus, wmt_text
from helpers.commands import relpos
from helpers.glue_data import write_glue, write_tokenizer
from helpers.questions import make_data, make_file
from helpers.roberta import ARCH, MASKED_LM, OPTIMIZE, write_packed
from relpos_fairseq.io.command import run_command

UPDATES = 8
TRAINING = ("--save-interval-updates", "2", "--no-epoch-checkpoints", "--disable-validation")
TRAINING += ("--update-epoch-batch-itr", "True")  # fairseq shuffles otherwise after a resume


# Two schemes on one tiny task, saved and so resumed every five updates.
SPEC = """
seeds: 1
schemes: [none, t5]
train: {max-update: 12, log-interval: 5, save-interval-updates: 5, max-tokens: 400}
tasks:
  copying: {kind: copy, longest: 4, beyond: 6, examples: 200, each: 2}
"""


@dataclass(frozen=True)
class Inputs:
    """What the jobs read."""

    wmt: Path
    translation: Path
    packed: Path
    stream: Path
    glue: Path
    tokenizer: Path
    questions: Path
    xquad: Path
    text: Path
    checkpoint: Path
    translator: Path
    reader: Path
    lm: Path
    spec: Path


def write_inputs(folder: Path) -> Inputs:
    """Write what the jobs read, four models of two updates among it."""
    text = folder / "text.txt"
    segment_corpus.write_lines(text, 400, 1, words=True)
    packed = write_packed(folder / "packed")
    stream = segment_corpus.write_corpus(folder / "stream")
    questions = make_data(folder / "questions", unanswerable=True)
    (folder / "xquad").mkdir()
    for number, language in enumerate(("en", "de")):
        make_file(folder / "xquad" / f"xquad.{language}.json", 20, number)
    two = ("--max-update", "2", "--save-dir")
    lengths = ("--tokens-per-sample", "24")
    cli.call("train", packed, *ARCH, *MASKED_LM, *OPTIMIZE, *TRAINING, *lengths, *two, folder / "roberta")
    cli.call(
        "train",
        questions,
        *ARCH,
        *OPTIMIZE,
        *TRAINING,
        *two,
        folder / "answers",
        *("--task", "question_answering", "--criterion", "question_answering"),
        *("--tokens-per-sample", "40", "--doc-stride", "8", "--batch-size", "8"),
        *("--max-query-length", "12"),
    )
    segment_corpus.train(stream, folder / "lm", *two[:2])
    corpus = cli.write_corpus(folder / "translation")
    cli.call("train", *cli.train_arguments(corpus, folder / "translator", *two[:2], *TRAINING))
    spec = folder / "spec.yaml"
    spec.write_text(SPEC)
    return Inputs(
        wmt=wmt_text.write_texts(folder / "wmt"),
        translation=corpus.binary,
        packed=packed,
        stream=stream,
        glue=write_glue(folder / "glue", train=60),
        tokenizer=write_tokenizer(folder / "tokenizer"),
        questions=questions,
        xquad=folder / "xquad",
        text=text,
        checkpoint=folder / "roberta" / "checkpoint_last.pt",
        translator=folder / "translator" / "checkpoint_last.pt",
        reader=folder / "answers" / "checkpoint_last.pt",
        lm=folder / "lm" / "checkpoint_last.pt",
        spec=spec,
    )


def training(tool: Callable[[Inputs, Path], list]) -> Callable[[Inputs, Path], int]:
    """A job that trains, as fairseq-train does."""

    def job(inputs: Inputs, out: Path) -> int:
        def main(argv: object) -> None:
            cli.call("train", *tool(inputs, out))

        return run_command(main)

    return job


def on_two(tool: Callable[[Inputs, Path], list]) -> Callable[[Inputs, Path], int]:
    """A job that trains on two processes, this one and a fork of it."""

    def job(inputs: Inputs, out: Path) -> int:
        meeting = out.parent / f"{out.name}-{os.getpid()}.meeting"
        first = os.fork()

        def main(argv: object) -> None:
            cli.call(
                *("train", *tool(inputs, out), "--distributed-world-size", "2"),
                *("--distributed-rank", "1" if first else "0", "--distributed-no-spawn"),
                *("--distributed-init-method", f"file://{meeting}"),
            )

        status = run_command(main)
        if not first:
            os._exit(status)
        return max(status, abs(ended(first)))

    return job


def _translation(inputs: Inputs, out: Path) -> list:
    corpus = cli.Corpus(inputs.translation.parent / "raw", inputs.translation)
    return cli.train_arguments(corpus, out, "--max-update", str(UPDATES), *TRAINING)


def _language_model(arch: str, *more: str) -> Callable[[Inputs, Path], list]:
    def arguments(inputs: Inputs, out: Path) -> list:
        saving = ("--max-update", str(UPDATES), *TRAINING[:2])
        flags = segment_corpus.arguments(inputs.stream, out, *saving)
        flags[flags.index("--arch") + 1] = arch
        return [flag for flag in flags if flag not in more]

    return arguments


def _roberta(inputs: Inputs, out: Path) -> list:
    data = (inputs.packed, *ARCH, *MASKED_LM, *OPTIMIZE, *TRAINING)
    return [*data, "--tokens-per-sample", "24", "--max-update", str(UPDATES), "--save-dir", out]


LM = ("--mem-len", "10", "--init-std", "0.3")
JOBS: dict[str, Callable[[Inputs, Path], int]] = {
    "train translation": training(_translation),
    "train xl": training(_language_model("relpos_transformer_xl_tiny")),
    "train lm": training(_language_model("relpos_transformer_lm_tiny", *LM)),
    "train roberta": training(_roberta),
    "train translation on two": on_two(_translation),
    "train xl on two": on_two(_language_model("relpos_transformer_xl_tiny")),
    "prepare lm": lambda i, out: relpos(
        *("prepare", "lm", "--text", i.text, "--shares", "0.8,0.1,0.1", "--level", "char"),
        *("--out", out, "--workers", "1"),
    ),
    "prepare mlm": lambda i, out: relpos(
        *("prepare", "mlm", "--train", i.text, "--hold-out", "0.2", "--documents", "line"),
        *("--vocab-size", "300", "--tokens-per-sample", "24", "--out", out, "--workers", "1"),
    ),
    "prepare glue": lambda i, out: relpos(
        "prepare", "glue", i.glue, "--tokenizer-folder", i.tokenizer, "--out", out, "--workers", "1"
    ),
    "prepare qa": lambda i, out: relpos(
        *("prepare", "qa", "--train", i.questions / "train.json", "--train-articles", "30"),
        *("--train-tokenizer", "wordpiece", "--vocab-size", "200", "--out", out),
    ),
    "prepare wmt": lambda i, out: relpos(
        *("prepare", "wmt", "en-de", "--from-dir", i.wmt, "--out", out, "--vocab-size", "60"), *("--workers", "1")
    ),
    "convert": lambda i, out: relpos(
        "convert", i.checkpoint, "--data", i.packed, "--to", "learned+m4", "--out", out / "new"
    ),
    "average": lambda i, out: relpos("average", i.checkpoint, i.checkpoint, "--out", out / "mean.pt"),
    "export transformers": lambda i, out: relpos(
        "export", "transformers", i.checkpoint, "--out", out / "served", "--data", i.packed
    ),
    "export onnx": lambda i, out: relpos("export", "onnx", i.checkpoint, "--out", out / "served", "--data", i.packed),
    "export ct2": lambda i, out: relpos(
        "export", "ct2", i.translator, "--out", out / "served", "--data", i.translation, "--sentences", "8"
    ),
    "compare": lambda i, out: relpos("compare", "run", i.spec, "--work", out / "work", "--results", out / "results"),
    "corpus": lambda i, out: relpos("corpus", "--out", out, "--train", "400"),
    "evaluate qa": lambda i, out: relpos(
        *("evaluate", "qa", i.questions / "valid.json", "--checkpoint", i.reader, "--cpu"), *("--out", out / "answers")
    ),
    "evaluate xtreme": lambda i, out: relpos(
        *("evaluate", "xtreme", "--qa-model", i.reader, "--qa-data", i.questions, "--cpu"),
        *("--xquad", i.xquad, "--out", out),
    ),
    "evaluate length": lambda i, out: relpos(
        *("evaluate", "length", i.lm, "--data", i.stream, "--lengths", "8,16", "--mem-len", "0,8"),
        *("--tokens", "60", "--out", out),
    ),
    "evaluate lm": lambda i, out: relpos(
        *("evaluate", "lm", i.lm, "--data", i.stream, "--by-token", out / "tokens.jsonl")
    ),
    "score": lambda i, out: relpos(
        *("score", i.wmt / "test.de", "--reference", i.wmt / "test.de", "--target-lang", "de"),
        *("--out", out / "score.json"),
    ),
}


def started(job: Callable[[], int], log: Path, before: Callable[[], None] | None = None) -> int:
    """Run a job in a fork with its output in a log; returns the fork's process id."""
    child = os.fork()
    if child:
        return child
    status = 99
    try:
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  (pytest's are this process's)
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        tqdm.set_lock(threading.RLock())  # the one shared by forks stays locked where a kill hits its holder
        if before:
            before()
        status = job()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def ended(child: int) -> int:
    """Wait for a fork; returns its exit status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def finished(job: Callable[[], int], log: Path) -> int:
    return ended(started(job, log))
