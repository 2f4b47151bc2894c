"""A training that is interrupted saves where it is, and the same command goes on as if it had not been."""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import relpos_fairseq  # noqa: F401
from helpers import FULL, ROOT
from helpers import commands as cli
from helpers.commands import Corpus
from relpos_fairseq.patches import interruption


def begin(*command: str | Path, **place: str) -> subprocess.Popen[str]:
    """Begin a training, whose output is read while it runs; `place` is what it finds in its environment."""
    program, *rest = map(str, command)
    run = [str(Path(sys.executable).parent / program), *rest]
    environment = cli.child_environment() | {"PYTHONPATH": str(ROOT)} | place
    how = {"env": environment, "cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # A shell's job in the background ignores Ctrl-C, and its children with it.
    listens = {"preexec_fn": functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)}
    return subprocess.Popen(run, **how, **listens)


def until_an_update(process: subprocess.Popen[str]) -> str:
    """What a training prints up to its first update."""
    said = ""
    for line in process.stdout:
        said += line
        if "train_inner" in line:
            break
    return said


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM] if FULL else [signal.SIGINT])
def test_the_same_command_goes_on(corpus: Corpus, tmp_path: Path, signum: signal.Signals) -> None:
    def arguments(folder: str, updates: int) -> list[str]:
        return cli.train_arguments(corpus, tmp_path / folder, "--max-update", str(updates), "--log-interval", "2")

    with begin("fairseq-train", *arguments("one", 2000)) as process:
        said = until_an_update(process)
        process.send_signal(signum)
        said += process.stdout.read()
    found = re.fullmatch(
        r"interrupted after (\d+) updates; (\S+) is saved; run the same command again to continue",
        said.strip().splitlines()[-1],
    )
    assert found and process.returncode == 128 + signum and "Traceback" not in said, said[-2000:]
    assert found[2] == str(tmp_path / "one" / "checkpoint_last.pt")
    more = int(found[1]) + 3
    cli.call("train", *arguments("one", more))
    cli.call("train", *arguments("two", more))
    one, two = (cli.load(tmp_path / name / "checkpoint_last.pt")["model"] for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in two)


@pytest.mark.slow
def test_two_processes_save_once(corpus: Corpus, tmp_path: Path) -> None:
    """Where one of them is interrupted, both end after the same update."""
    given = cli.train_arguments(corpus, tmp_path, "--max-update", "2000", "--log-interval", "2")
    if FULL:
        ranks = [begin(*cli.TORCHRUN, "fairseq-train", *given)]
    else:
        ranks = [begin("fairseq-train", *given, **place) for place in cli.places_of(2)]
    said = until_an_update(ranks[0])
    children = Path(f"/proc/{ranks[0].pid}/task/{ranks[0].pid}/children").read_text().split()  # torchrun's
    os.kill(int(children[-1]) if FULL else ranks[-1].pid, signal.SIGTERM)
    said += "".join(process.communicate()[0] for process in ranks)
    assert all(process.returncode for process in ranks)
    assert said.count("interrupted after") == said.count("is saved; run the same command") == 1
    assert (tmp_path / "checkpoint_last.pt").is_file()


@pytest.fixture
def listens():
    """Ctrl-C interrupts this process, as it does not where a shell began it in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_only_the_first_signal_is_kept(listens) -> None:
    """What was ignored stays ignored, and afterwards all is as before."""
    trainer = SimpleNamespace(data_parallel_world_size=1)
    before = [signal.getsignal(signum) for signum in interruption.SIGNALS]
    ended = []

    def epoch() -> None:
        signal.raise_signal(signal.SIGINT)
        ended.append(interruption._interrupted(trainer))
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interruption.train(epoch)
    assert ended == [signal.SIGINT]
    assert [signal.getsignal(signum) for signum in interruption.SIGNALS] == before
    interruption.train(lambda: ended.append(interruption._interrupted(trainer)))
    assert ended == [signal.SIGINT, 0]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interruption.train(lambda: ended.append(signal.getsignal(signal.SIGINT)))
    assert ended[-1] is signal.SIG_IGN


def test_a_training_that_saves_nothing_says_so(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(interruption, "_interrupted", lambda trainer: signal.SIGTERM)
    monkeypatch.setattr(interruption.checkpoint_utils, "save_checkpoint", lambda *given: None)
    trainer = SimpleNamespace(is_data_parallel_master=True, get_num_updates=lambda: 7)
    with pytest.raises(SystemExit, match="143"):
        interruption.validate_and_save(None, SimpleNamespace(checkpoint=None), trainer, None, None, [], False)
    assert capsys.readouterr().err == "interrupted after 7 updates; nothing is saved (--no-save)\n"


def test_a_worker_that_a_training_has_begun_ends_by_its_signal():
    """Python waits for it at its end; torch sets a worker's own handlers a while after its fork."""
    here, there = multiprocessing.Pipe()

    def work() -> None:
        there.send("begun")
        time.sleep(60)

    with interruption._kept():
        worker = multiprocessing.get_context("fork").Process(target=work, daemon=True)
        worker.start()
        here.recv()
        worker.terminate()
        worker.join(30)
        assert worker.exitcode == -signal.SIGTERM and not interruption._received
