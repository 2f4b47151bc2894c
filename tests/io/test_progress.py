"""Long work is never silent: a line a minute in a log, a bar on a terminal, nothing about what is quick."""

from __future__ import annotations

import fcntl
import io
import itertools
import os
import pty
import select
import struct
import termios
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relpos_fairseq.cli import command, main
from relpos_fairseq.io import processes, progress, stages
from relpos_fairseq.io.files import Hashes
from relpos_fairseq.io.lines import lines_of

# Commands that end in seconds whatever they are given; every other one is held to a line a minute.
QUICK = {
    "schemes": "prints a table of the code",
    "recipes": "lists and copies small files",
    "path": "prints a folder",
    "theorems": "multiplies a few matrices",
}


@pytest.fixture
def clock(monkeypatch):
    """A clock that work sets forward by `clock.work(seconds)`, while the thread looks as often as it would."""
    clock = SimpleNamespace(now=1000.0)

    def work(seconds: float) -> None:
        for _ in range(int(seconds)):
            clock.now += 1
            progress.tick()

    clock.work = work
    monkeypatch.setattr(progress, "_watch", lambda: None)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock.now))
    yield clock
    assert not progress._under_way
    progress._thread = None


def test_a_line_a_minute_with_what_remains(clock, capsys):
    for _ in progress.progress(range(10), description="read", unit="files"):
        clock.work(30)
    out, lines = capsys.readouterr()
    begins = [f"read: {n} of 10 files ({10 * n}%)" for n in range(0, 10, 2)]
    assert not out and [line.split(", ")[0] for line in lines.splitlines()] == begins
    assert lines.splitlines()[1] == "read: 2 of 10 files (20%), 70 s, 5 min left"


@given(st.lists(st.integers(0, 200), max_size=20))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_log_is_neither_silent_nor_full(clock, seconds):
    """Whatever steps last, between two lines lies a minute, and before the first ten seconds."""
    said, begin = [], clock.now
    with mock.patch.object(progress, "say", lambda line, file: said.append(clock.now)):
        for step in progress.progress(seconds, description="steps", unit="steps"):
            clock.work(step)
    times = [begin, *said, clock.now]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert all(gap <= progress.EVERY + 2 for gap in gaps) and all(gap >= progress.EVERY for gap in gaps[1:-1])
    assert said or clock.now - begin <= progress.FIRST + 2


def test_nothing_about_quick_work(clock, capsys):
    with progress.doing("relpos convert"):
        for _ in progress.progress(range(9), description="read"):
            clock.work(1)
    assert capsys.readouterr() == ("", "")


def test_steps_inside_each_other_are_named(clock, capsys, tmp_path):
    stage = stages.Stage("learn", lambda: clock.work(80), [], [])
    with progress.doing("relpos prepare wmt"):
        stages.run_stage(stage, tmp_path, "[2/7]", False, Hashes())
    assert capsys.readouterr().err.splitlines() == [
        *("relpos prepare wmt: [2/7] learn: 10 s", "relpos prepare wmt: [2/7] learn: 70 s")
    ]


def test_an_exception_ends_what_it_leaves(clock, capsys):
    """Iterators that nobody closes are forgotten, too."""
    kept = []
    with pytest.raises(KeyboardInterrupt), progress.doing("relpos average"):
        kept.append(iter(progress.progress(range(3))))
        next(kept[0])
        raise KeyboardInterrupt
    assert not progress._under_way
    clock.work(200)
    kept[0].close()
    assert capsys.readouterr() == ("", "")


def test_the_thread_ends_with_the_work(monkeypatch, capsys):
    for name, seconds in (("TICK", 0.001), ("FIRST", 0.0), ("EVERY", 0.01)):
        monkeypatch.setattr(progress, name, seconds)
    said = threading.Event()
    monkeypatch.setattr(progress, "say", lambda line, file: said.set())
    with progress.doing("one step"):
        thread = progress._thread
        assert thread.daemon and said.wait(5)
    thread.join(5)
    assert not thread.is_alive() and progress._thread is None


def test_a_child_begins_with_nothing_under_way(tmp_path):
    """Its log has lines of its own alone, and the parent says the last of them."""
    log = tmp_path / "log"

    def child() -> None:
        print(len(progress._under_way), progress._thread, flush=True)
        with progress.doing("own"):  # the lock is free
            print("at work")

    with progress.doing("parent"):
        processes.in_fork(child, log, "child")
    assert log.read_text() == "0 None\nat work\n" and processes.last_line(log) == "at work"


def test_nothing_while_a_person_types(clock, capsys, monkeypatch):
    typed = SimpleNamespace(isatty=lambda: True, buffer=io.BytesIO(b"one\n"))
    monkeypatch.setattr("sys.stdin", typed)
    with progress.doing("relpos translate"):
        for _ in lines_of(None):
            clock.work(200)
    assert capsys.readouterr() == ("", "")


def test_a_note_that_cannot_be_read_costs_nothing(clock, tmp_path, capsys):
    with progress.doing("child", lambda: processes.last_line(tmp_path / "absent")):
        clock.work(20)
    assert capsys.readouterr() == ("", "child: 10 s\n")


def test_a_bar_on_a_terminal(monkeypatch, capfd):
    """A bar with what is noted; lines of results stand above it, and steps without number are lines."""
    monkeypatch.setattr(progress, "FIRST", 0.0)
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        with progress.progress(range(3), description="runs", unit="runs", note=lambda: "update 7") as bar:
            bar.update()
            progress.tick()
            with progress.doing("export"):
                progress._next = 0.0
                progress.tick()
        assert isinstance(bar, progress.Bar) and not progress._under_way
        shown = ""
        while select.select([leader], [], [], 0.2)[0]:  # what was written comes in parts
            shown += os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert "runs:  33%" in shown and "1/3" in shown and "update 7" in shown and "runs: export: 0 s" in shown
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("name", [name for name in main.COMMANDS if name not in QUICK])
def test_no_long_command_is_silent(name, clock, capsys, monkeypatch):
    """What a command does in one step, however long, has its line: it is inside `doing`."""
    declared = main.load(name)
    monkeypatch.setattr(command, "parse", lambda *_: SimpleNamespace(run=lambda argv: clock.work(200)))
    monkeypatch.setattr(command, "homes_of", lambda given: [])
    monkeypatch.setattr(command, "check", lambda given: None)
    assert declared is not None and main.main(name.split()) == 0
    said = capsys.readouterr()
    assert said.err.splitlines() == [f"relpos {name}: {at}" for at in ("10 s", "70 s", "2 min", "3 min")]
    assert not said.out


def test_quick_commands_are_commands():
    assert main.COMMANDS and set(QUICK) <= set(main.COMMANDS)
