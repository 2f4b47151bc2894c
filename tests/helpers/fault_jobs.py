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
    roberta = (*ARCH, *OPTIMIZE, *TRAINING)
    answers = "--task question_answering --criterion question_answering --tokens-per-sample 40 --doc-stride 8"
    answers = [*answers.split(), "--batch-size", "8", "--max-query-length", "12"]
    cli.call("train", packed, *roberta, *MASKED_LM, "--tokens-per-sample", "24", *two, folder / "roberta")
    cli.call("train", questions, *roberta, *answers, *two, folder / "answers")
    segment_corpus.train(stream, folder / "lm", *two[:2])
    corpus = cli.write_corpus(folder / "translation")
    cli.call("train", *cli.train_arguments(corpus, folder / "translator", *two[:2], *TRAINING))
    spec = folder / "spec.yaml"
    spec.write_text(SPEC)
    glue, tokenizer = write_glue(folder / "glue", train=60), write_tokenizer(folder / "tokenizer")
    models = [folder / name / "checkpoint_last.pt" for name in ("roberta", "translator", "answers", "lm")]
    sources = (wmt_text.write_texts(folder / "wmt"), corpus.binary, packed, stream, glue, tokenizer, questions)
    return Inputs(*sources, folder / "xquad", text, *models, spec)


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


def line(words: str) -> Callable[[Inputs, Path], int]:
    """A job that is a line of `relpos`; `{0.text}` in it is what it reads, `{1}` where it writes."""
    return lambda inputs, out: relpos(*words.format(inputs, out).split())


LM = ("--mem-len", "10", "--init-std", "0.3")
JOBS: dict[str, Callable[[Inputs, Path], int]] = {
    "train translation": training(_translation),
    "train xl": training(_language_model("relpos_transformer_xl_tiny")),
    "train lm": training(_language_model("relpos_transformer_lm_tiny", *LM)),
    "train roberta": training(_roberta),
    "train translation on two": on_two(_translation),
    "train xl on two": on_two(_language_model("relpos_transformer_xl_tiny")),
    "prepare lm": line("prepare lm --text {0.text} --shares 0.8,0.1,0.1 --level char --out {1} --workers 1"),
    "prepare mlm": line(
        "prepare mlm --train {0.text} --hold-out 0.2 --documents line --vocab-size 300 --tokens-per-sample 24"
        " --out {1} --workers 1"
    ),
    "prepare glue": line("prepare glue {0.glue} --tokenizer-folder {0.tokenizer} --out {1} --workers 1"),
    "prepare qa": line(
        "prepare qa --train {0.questions}/train.json --train-articles 30 --train-tokenizer wordpiece --vocab-size 200"
        " --out {1}"
    ),
    "prepare wmt": line("prepare wmt en-de --from-dir {0.wmt} --out {1} --vocab-size 60 --workers 1"),
    "convert": line("convert {0.checkpoint} --data {0.packed} --to learned+m4 --out {1}/new"),
    "average": line("average {0.checkpoint} {0.checkpoint} --out {1}/mean.pt"),
    "export transformers": line("export transformers {0.checkpoint} --out {1}/served --data {0.packed}"),
    "export onnx": line("export onnx {0.checkpoint} --out {1}/served --data {0.packed}"),
    "export ct2": line("export ct2 {0.translator} --out {1}/served --data {0.translation} --sentences 8"),
    "compare": line("compare run {0.spec} --work {1}/work --results {1}/results"),
    "corpus": line("corpus --out {1} --train 400"),
    "evaluate qa": line("evaluate qa {0.questions}/valid.json --checkpoint {0.reader} --cpu --out {1}/answers"),
    "evaluate xtreme": line(
        "evaluate xtreme --qa-model {0.reader} --qa-data {0.questions} --cpu --xquad {0.xquad} --out {1}"
    ),
    "evaluate length": line(
        "evaluate length {0.lm} --data {0.stream} --lengths 8,16 --mem-len 0,8 --tokens 60 --out {1}"
    ),
    "evaluate lm": line("evaluate lm {0.lm} --data {0.stream} --by-token {1}/tokens.jsonl"),
    "score": line("score {0.wmt}/test.de --reference {0.wmt}/test.de --target-lang de --out {1}/score.json"),
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
