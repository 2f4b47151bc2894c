"""Running fairseq's commands in tests: in this process, or as real commands."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import random
import re
import socket
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from unittest import mock

from helpers import FULL, ROOT, USER_DIR, processes

CONFIGS = ROOT / "examples" / "translation" / "config"
TEST_SENTENCES, VALID_SENTENCES = 37, 29  # no multiples of 8, fairseq's batch size multiple

# A model and a training so small that an update takes milliseconds.
SMALL = """--arch relpos_transformer_tiny --encoder-embed-dim 32 --decoder-embed-dim 32 --encoder-ffn-embed-dim 48
    --decoder-ffn-embed-dim 48 --encoder-attention-heads 2 --decoder-attention-heads 2 --share-all-embeddings""".split()
QUIET = ["--cpu", "--num-workers", "0", "--no-progress-bar"]
TRAIN = """--task translation --optimizer relpos_adam --adam-betas (0.9,0.98) --lr 5e-3 --lr-scheduler inverse_sqrt
    --warmup-updates 10 --criterion relpos_label_smoothed_cross_entropy --label-smoothing 0.1 --max-tokens 400
    --cpu --num-workers 0 --no-progress-bar --log-interval 1 --distributed-world-size 1
    --no-epoch-checkpoints""".split()
LENGTHS = ["--max-len-b", "14"]  # a model that knows little never ends


# What a process says that dies without a traceback, or above one of another rank.
DEATH = re.compile(r"terminate called|what\(\)|Fatal Python error|corrupt|free\(\)|Error: ")


class CommandError(AssertionError):
    """A command did not end as the test asked."""


@dataclass(frozen=True)
class Corpus:
    """A binarised toy corpus: the target is the source reversed.

    Attributes:
        raw: folder of the text files.
        binary: folder that fairseq reads.
    """

    raw: Path
    binary: Path

    def lines(self, split: str, language: str) -> list[str]:
        """Sentences of one side of a split."""
        return (self.raw / f"{split}.{language}").read_text().splitlines()


def write_corpus(folder: Path) -> Corpus:
    """Write and binarise 400 training, 29 validation and 37 test sentences."""
    raw, binary = folder / "raw", folder / "bin"
    raw.mkdir(parents=True)
    generator = random.Random(1)
    words = [f"w{number}" for number in range(24)]
    for split, count in (("train", 400), ("valid", VALID_SENTENCES), ("test", TEST_SENTENCES)):
        sides = {"src": [], "tgt": []}
        for _ in range(count):
            sentence = generator.choices(words, k=generator.randint(1, 12))
            sides["src"].append(" ".join(sentence))
            sides["tgt"].append(" ".join(reversed(sentence)))
        for language, lines in sides.items():
            (raw / f"{split}.{language}").write_text("\n".join(lines) + "\n")
    binarise(raw, binary, "--testpref", str(raw / "test"))
    return Corpus(raw, binary)


def binarise(raw: Path, binary: Path, *more: str, languages: tuple[str, str] = ("src", "tgt")):
    """Run fairseq-preprocess with one dictionary for both languages."""
    sides = ("--source-lang", languages[0], "--target-lang", languages[1], "--joined-dictionary")
    files = ("--trainpref", raw / "train", "--validpref", raw / "valid", "--destdir", binary)
    return call("preprocess", *sides, *files, *more)


def call(tool: str, *arguments: str | Path) -> str:
    """Run a fairseq command's own entry point in this process.

    Args:
        tool: `train`, `generate`, ...
        arguments: its command line, without the name.

    Returns:
        Everything that it printed and logged.
    """
    module = importlib.import_module(f"fairseq_cli.{tool}")
    with captured() as stream, mock.patch.object(sys, "argv", [f"fairseq-{tool}", *map(str, arguments)]):
        module.cli_main()
    return stream.getvalue()


@contextlib.contextmanager
def captured():
    """Collect prints and logs, and keep one run's records from the next."""
    from fairseq.logging import metrics

    metrics.reset()
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s | %(name)s | %(message)s"))
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            yield stream
    finally:
        root.handlers[:] = handlers  # fairseq-validate adds its own
        root.setLevel(level)


def child_environment() -> dict[str, str]:
    """Environment of a real command: this Python's programs on PATH, one thread, no GPU."""
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return os.environ | threads | {"PATH": search, "CUDA_VISIBLE_DEVICES": "", "PYTHONFAULTHANDLER": "1"}


def command(*arguments: str | Path, fails: bool = False, cwd: Path = ROOT, stdin: str = "", **environment: str) -> str:
    """Run a command of this Python's environment in a process of its own, and return its output.

    Args:
        arguments: program (`fairseq-train`, `python`, `torchrun`) and arguments, run by `processes.run`.
        fails: whether it must end with a status other than 0.
        cwd: working directory.
        stdin: what it reads.
        environment: variables to set.

    Raises:
        CommandError: it failed though it must not, or the other way round.
    """
    program, *rest = map(str, arguments)
    path = sys.executable if program == "python" else str(Path(sys.executable).parent / program)
    how = {"cwd": cwd, "env": child_environment() | environment, "input": stdin}
    done = processes.run([path, *rest], **how, joined=True)
    if (done.returncode != 0) != fails:
        died = "\n".join(line for line in done.stdout.splitlines() if DEATH.search(line))
        said = f"{done.stdout[-4000:]}\n{died}"
        raise CommandError(f"{program} ended with {done.returncode}:\n{said}")
    return done.stdout


TORCHRUN = ("torchrun", "--standalone", "--nproc_per_node", "2", "--no-python")


def torchrun(*arguments: str | Path) -> str:
    """Run a command as two processes, and return what both print; with RELPOS_ONNX=full torchrun begins them."""
    if FULL:
        return command(*TORCHRUN, *arguments)
    with ThreadPoolExecutor() as pool:
        return "".join(pool.map(lambda place: command(*arguments, **place), places_of(2)))


def places_of(processes: int, a_node: int | None = None) -> list[dict[str, str]]:
    """What torchrun tells each of some processes; `a_node` is how many of them a node has, None: one has all."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(processes)}
    ranks = range(processes)
    return [meet | {"RANK": str(rank), "LOCAL_RANK": str(rank % (a_node or processes))} for rank in ranks]


def by_two(tool: str, *arguments: str | Path, log: Path) -> str:
    """Run a fairseq command as two processes, and return what both print.

    They are forks of this process, as `forked` makes them; with RELPOS_ONNX=full torchrun's.
    """
    if FULL:
        return torchrun(f"fairseq-{tool.replace('_', '-')}", *arguments)
    return "".join(forked(tool, [*map(str, arguments)], 2, log))


def on_two_nodes(tool: str, *arguments: str | Path, log: Path) -> list[str]:
    """Run a fairseq command on two nodes with a process each, as `by_two`; what each of them prints."""
    if not FULL:
        return forked(tool, [*map(str, arguments)], 2, log, a_node=1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = ("--nnodes", "2", "--nproc_per_node", "1", "--master_addr", "127.0.0.1", "--master_port", str(port))
    with ThreadPoolExecutor() as nodes:
        given = ("--no-python", f"fairseq-{tool}", *arguments)
        return list(nodes.map(lambda rank: command("torchrun", *where, "--node_rank", str(rank), *given), range(2)))


def train(corpus: Corpus, save_dir: Path, *more: str | Path) -> str:
    """Train the small model in this process."""
    return call("train", *train_arguments(corpus, save_dir, *more))


def train_arguments(corpus: Corpus, save_dir: Path, *more: str | Path) -> list[str]:
    """Command line of a training of the small model."""
    paths = [str(corpus.binary), "--user-dir", str(USER_DIR), "--save-dir", str(save_dir)]
    return [*paths, *SMALL, *TRAIN, *map(str, more)]


def forked_training(arguments: list[str], processes: int, log: Path) -> str:
    """Train as `forked`; what the first one said."""
    return forked("train", arguments, processes, log)[0]


def forked(tool: str, arguments: list[str], processes: int, log: Path, a_node: int | None = None) -> list[str]:
    """Run a fairseq command in forks of this process, as torchrun would have started them.

    Args:
        tool: `train`, `validate`, ...
        arguments: its command line, without the name.
        processes: how many.
        log: where files of what each says begin.
        a_node: how many of them a node has; None: one node has all.

    Returns:
        What each of them said.

    Raises:
        CommandError: one of them failed.
    """
    children, logs = [], [log.with_name(f"{log.name}.{rank}") for rank in range(processes)]
    for place, path in zip(places_of(processes, a_node), logs, strict=True):
        child = os.fork()
        if not child:
            _run_as(place, tool, arguments, path)
        children.append(child)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    said = [path.read_text() if path.exists() else "" for path in logs]
    if any(statuses):
        raise CommandError("\n".join([f"processes ended with {statuses}", *said]))
    return said


def _run_as(place: dict[str, str], tool: str, arguments: list[str], log: Path) -> NoReturn:
    """Run a command in this fork, and end it."""
    status = 1
    try:
        os.environ |= place
        log.write_text(call(tool, *arguments))
        status = 0
    except BaseException:
        log.write_text(traceback.format_exc())
    finally:
        os._exit(status)


def generate(corpus: Corpus, checkpoint: Path, *more: str | Path) -> str:
    """Translate the test set in this process."""
    return call("generate", *generate_arguments(corpus, checkpoint, *more))


def generate_arguments(corpus: Corpus, checkpoint: Path, *more: str | Path) -> list[str]:
    """Command line of a translation of the test set."""
    paths = [str(corpus.binary), "--user-dir", str(USER_DIR), "--path", str(checkpoint)]
    return [*paths, *QUIET, "--max-tokens", "400", "--beam", "2", *LENGTHS, *map(str, more)]


def evaluate(tool: str, data: Path, checkpoint: Path, *more: str | Path) -> str:
    """Run a fairseq command that evaluates a checkpoint on data in this process."""
    return call(tool, data, "--user-dir", USER_DIR, "--path", checkpoint, *QUIET, *more)


def hypotheses(output: str) -> dict[int, str]:
    """Number to translation of every `D-` line of fairseq-generate or -interactive."""
    found = re.findall(r"^D-(\d+)\t\S+\t(.*)$", output, re.MULTILINE)
    assert len(found) == len({number for number, _ in found}), "a sentence was translated twice"
    return {int(number): text for number, text in found}


def in_order(output: str) -> list[str]:
    """Translations in the order of the test set; fails where a number is missing."""
    found = hypotheses(output)
    assert sorted(found) == list(range(len(found))), sorted(found)
    return [found[number] for number in range(len(found))]


def scores(output: str) -> list[float]:
    """Score of every translation in the order of the test set."""
    found = {int(n): float(s) for n, s in re.findall(r"^D-(\d+)\t(\S+)\t", output, re.MULTILINE)}
    return [found[number] for number in sorted(found)]


def losses(output: str, kind: str = "train_inner") -> list[float]:
    """Every loss of one kind of log line (`train_inner`, `train`, `valid`)."""
    lines = re.findall(rf"\|? ?{kind} \|.*$", output, re.MULTILINE)
    found = [re.search(r"\bloss[= ]+([\d.]+)", line) for line in lines]
    return [float(match.group(1)) for match in found if match]


def value(output: str, name: str) -> float:
    """The last value logged as `name 1.23`."""
    return float(re.findall(rf"\b{name}[= ]+([\d.]+)", output)[-1])


class Malicious:
    """Makes a folder where it is unpickled."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("ran",)


def load(path: Path) -> dict:
    """A checkpoint, safely."""
    import torch

    return torch.load(path, map_location="cpu", weights_only=True)


def assert_same_state(first: Path, second: Path) -> None:
    """Model and optimizer of two checkpoints are equal to the bit."""
    import torch

    one, two = load(first), load(second)
    assert one["model"].keys() == two["model"].keys()
    for name, tensor in one["model"].items():
        assert torch.equal(tensor, two["model"][name]), name
    states = [checkpoint["last_optimizer_state"]["state"] for checkpoint in (one, two)]
    assert states[0].keys() == states[1].keys() and states[0]
    for key, state in states[0].items():
        for name, part in state.items():
            assert torch.equal(torch.as_tensor(part), torch.as_tensor(states[1][key][name])), name


def relpos(*arguments: object) -> int:
    """Run `relpos` in this process; returns its exit status."""
    from relpos_fairseq.cli.main import main

    return main([str(part) for part in arguments])


def relpos_job(*arguments: object) -> int | None:
    """Run a subcommand in this process, and let its errors through."""
    from relpos_fairseq.cli.command import parse
    from relpos_fairseq.cli.main import find, load

    name, rest = find([str(part) for part in arguments])
    return parse(load(name), f"relpos {name}", rest).run(rest)
