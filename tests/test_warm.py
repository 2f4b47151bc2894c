"""A command that begins as a fork of a warm process does what it does when it is begun anew."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers import FULL, warm

SAYS = """
import atexit, os, signal, sys, tempfile
class Kept: pass
def kept(x: Kept) -> None: pass
atexit.register(lambda: print("end", sys.modules["__main__"].Kept.__name__))
print(sys.argv[1:], os.getcwd(), os.environ["GIVEN"], tempfile.gettempdir(), __name__, kept.__annotations__)
print(ascii(sys.stdin.read()), "ü\\r")
print("wrong", file=sys.stderr)
"""
ENDS = {
    "well": ("", 0),
    "status": ("sys.exit(3)", 3),
    "words": ("sys.exit('no')", 1),
    "error": ("1 / 0", 1),
    "names": ("def other(x: absent): pass", 1),
    "signal": ("sys.stdout.flush(); os.kill(os.getpid(), signal.SIGTERM)", -15),
    "at once": ("sys.stdout.flush(); os._exit(4)", 4),
    "nothing said": ("sys.exit('')", 1),
    "C": ("import ctypes; sys.stdout.flush(); ctypes.CDLL(None).printf(b'of C')", 0),
    "a pipe without a reader": ("r, w = os.pipe(); kept = os.fdopen(w, 'w'); kept.write('x'); os.close(r)", 0),
    "no status": ("sys.exit()", 0),
    "a large one": ("sys.exit(258)", 2),
    "a thread": (
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('done'))).start()",
        0,
    ),
    "a thread that stays": (
        "import threading, time; threading.Thread(target=time.sleep, args=[9], daemon=True).start()",
        0,
    ),
    "a file left open": ("kept = open('left', 'w'); kept.write('whole')", 0),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_program_is_the_same(end: str, tmp_path: Path) -> None:
    """Arguments, folder, environment, both ends of the pipe, what it does at its end, and its status."""
    more, status = ENDS[end]
    (tmp_path / "said.py").write_text(SAYS + more)
    env = os.environ | {"GIVEN": "1", "PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path)}
    how = {"cwd": tmp_path, "env": env, "input": "read\r\nü"}
    for words in (["-c", SAYS + more], ["-m", "said"], ["said.py"])[: 3 if end == "well" else 1]:
        here, there = (warm.run([sys.executable, *words, "a", "-b"], **how, anew=anew) for anew in (False, True))
        assert (here.returncode, here.stdout) == (there.returncode, there.stdout)
        assert here.returncode == status and here.stdout.count("end") == (end not in ("signal", "at once"))
        assert here.stderr == there.stderr
    assert (tmp_path / "left").read_text() == "whole" if end == "a file left open" else not (tmp_path / "left").exists()


def test_errors_may_be_part_of_the_output() -> None:
    done = warm.run([sys.executable, "-c", "import sys; print('wrong', file=sys.stderr)"], joined=True)
    assert (done.stdout, done.stderr) == ("wrong\n", None)


ANEW = {
    "options": ([sys.executable, "-O", "-c", ""], {}),
    "warnings": ([sys.executable, "-W", "error", "-c", ""], {}),
    "another Python": (["/usr/bin/python3", "-c", ""], {}),
    "nothing": ([sys.executable], {}),
    "no script": ([sys.executable, "absent.py"], {}),
    "no program": ([str(Path(sys.executable).parent / "absent"), "a"], {}),
    "hashes": ([sys.executable, "-c", ""], {"PYTHONHASHSEED": "3"}),
    "locale": ([sys.executable, "-c", ""], {"LC_ALL": "C.ASCII"}),
    "instructions": ([sys.executable, "-c", ""], {"ATEN_CPU_CAPABILITY": "default"}),
}


@pytest.mark.parametrize("name", ANEW)
def test_what_python_reads_at_its_start_is_begun_anew(name: str) -> None:
    words, more = ANEW[name]
    assert not warm._can_be_a_fork(words, os.environ | more, Path())
    assert warm._can_be_a_fork([sys.executable, "-u", "-W", "ignore", "-c", ""], dict(os.environ), Path())


def test_draws_and_threads_are_a_process_of_its_own() -> None:
    words = [
        sys.executable,
        "-c",
        "import numpy, random, torch; print(numpy.random.rand(), random.random(), torch.rand(1))",
    ]
    assert warm.run(words).stdout != warm.run(words).stdout
    threads = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    assert [warm.run(threads, env=os.environ | {"OMP_NUM_THREADS": n}).stdout for n in "12"] == ["1\n", "2\n"]


def test_what_takes_too_long_is_killed_and_answers_are_each_commands_own() -> None:
    """Also of a wait that something else ends, and of threads."""
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run(sleeps, timeout=0.2)

    def interrupt(number: int, frame: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(InterruptedError):
            warm.run(sleeps)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda n: warm.run([sys.executable, "-c", f"print({n}); exit({n})"]), range(6))
        assert [(done.returncode, done.stdout) for done in found] == [(n, f"{n}\n") for n in range(6)]


def test_a_server_that_died_is_said_and_another_begun() -> None:
    """Whether what waits for the command died, or what is forked."""
    kills = "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"
    with pytest.raises(RuntimeError, match="has died"):
        warm.run([sys.executable, "-c", kills])
    assert warm.run([sys.executable, "-c", "print(1)"]).stdout == "1\n"
    warm._server("").process.kill()
    warm._server("").process.wait()
    with pytest.raises(RuntimeError, match="has died"):
        warm.run([sys.executable, "-c", "print(1)"])
    assert warm.run([sys.executable, "-c", "print(1)"]).stdout == "1\n"


LISTENS = """
import os, sys, time
try:  # before it says that it has begun: the interrupt may come at once
    os.write(int(sys.argv[1]), b"passed")
    print("begun")
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", sys.stdin.read())
"""


def test_a_command_is_talked_to_while_it_runs() -> None:
    """Several at once, each by its pipes, and the descriptors that it is given."""
    reading, writing = os.pipe()
    ends = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE) | {"text": True, "pass_fds": [writing]}
    words, environment = [sys.executable, "-c", LISTENS, str(writing)], os.environ | {"PYTHONUNBUFFERED": "1"}
    unbuffered = [words[0], "-u", *words[1:]]
    with warm.Popen(words, env=environment, **ends) as one, warm.Popen(unbuffered, **ends) as other:
        os.close(writing)
        assert (one._answers is None) == FULL and one.pid != other.pid
        assert [process.stdout.readline() for process in (one, other)] == ["begun\n"] * 2
        with open(reading) as passed:
            assert passed.read(12) == "passed" * 2
        assert one.poll() is None
        one.send_signal(signal.SIGINT)
        other.kill()
        assert one.communicate("heard") == ("interrupted heard\n", None)
        assert (one.wait(), other.wait(), one.poll()) == (0, -signal.SIGKILL, 0)


def test_a_shell_runs_programs_that_begin_warm(tmp_path: Path) -> None:
    """Their pipes, arguments, folder, variables and statuses, several at once."""
    says = "import os, sys; print(sys.argv[1:], os.getcwd(), os.environ['GIVEN'], sys.stdin.read()); sys.exit(3)"
    dies = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    given = {"says": [sys.executable, "-c", says], "dies": [sys.executable, "-c", dies]}
    with warm.programs(tmp_path, given):
        words = "echo heard | GIVEN=1 says 'a b' | GIVEN=2 says; echo $?; dies; echo $?"
        env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run(["bash", "-c", words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    inner = f"['a b'] {tmp_path} 1 heard\n"
    assert (done.stdout, done.stderr) == (f"[] {tmp_path} 2 {inner}\n\n3\n137\n", "")


def test_a_fork_leaves_commands_to_the_process_that_began_them() -> None:
    """`subprocess` asks all that nobody waited for, whenever one begins."""
    process = warm.Popen([sys.executable, "-c", "exit(3)"])
    time.sleep(0.5)
    child = os.fork()
    if not child:
        os._exit(process.poll())
    assert os.waitpid(child, 0)[1] == 0 and process.wait() == 3
    process = warm.Popen([sys.executable, "-c", "import time; time.sleep(0.5); exit(3)"])
    child = os.fork()
    if not child:
        os._exit(process.wait(60))
    assert os.waitpid(child, 0)[1] == 0 and process.wait() == 3


def test_several_threads_ask_for_one_end() -> None:
    for _ in range(5):
        process = warm.Popen([sys.executable, "-c", "exit(3)"])
        with ThreadPoolExecutor() as threads:
            ends = [threads.submit(process.wait, 60) for _ in range(2)]
            while process.poll() is None:
                pass
            assert [process.poll(), *(end.result() for end in ends)] == [3, 3, 3]


def test_what_is_too_large_for_the_server_is_begun_anew() -> None:
    given = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
    try:
        assert warm.Popen([sys.executable, "-c", ""], pass_fds=given).wait(60) == 0
    finally:
        for number in given:
            os.close(number)
    assert (
        warm.run([sys.executable, "-c", ""], env=os.environ | {f"V{n}": "ü" * 50_000 for n in range(16)}).returncode
        == 0
    )


def test_fairseqs_programs_find_it_loaded() -> None:
    asks = [sys.executable, "-c", "import sys; print('fairseq' in sys.modules, 'relpos_fairseq' in sys.modules)"]
    assert warm.run(asks).stdout == "False False\n"
    assert warm.run(asks, fairseq=True).stdout == f"{not FULL} False\n"
