"""A campaign of faults: kills, full disks, clocks, two processes at once, caches.

Small by default. The full numbers take hours:

    RELPOS_FAULTS=full bash scripts/test.sh tests/faults

RELPOS_FAULTS=N kills each job N times. After each fault the same job runs again undisturbed, and
what it makes must be equal to what it makes without a fault.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from helpers import commands as cli
from helpers.fault_jobs import JOBS, UPDATES, ended, finished, started
from helpers.folders import contents

pytestmark = pytest.mark.slow
SIZE = os.environ.get("RELPOS_FAULTS", "")
FULL = SIZE == "full"
KILLS = 20 if FULL else int(SIZE or 1)  # of each job
# Logs, what fairseq leaves of a killed save, and files that name the folder they lie in.
NOT_COMPARED = (".log", ".tmp", "conversion.json", "MODEL_CARD.md")


# Of these the small campaign leaves out the kills: they start programs, or take seconds.
SLOW = ("prepare wmt", "train xl on two", "evaluate length", "evaluate xtreme", "compare")
SLOW += ("export ct2", "export onnx", "export transformers")
QUICK = [name for name in JOBS if name not in SLOW]
KILLED = list(JOBS) if SIZE else QUICK
FILLING = [name for name in (*QUICK, *["export transformers"] * bool(SIZE)) if not name.startswith("train")]


def made(out: Path) -> dict[str, object]:
    """What a job made, to be compared: bytes, of checkpoints those of the tensors."""
    found: dict[str, object] = {}
    if (archive := out / "results" / "results.jsonl.gz").exists():  # of a comparison: its scores, without its times
        for run in map(json.loads, gzip.decompress(archive.read_bytes()).splitlines()):
            found[run["run"]] = run["settings"], {name: one | {"seconds": 0} for name, one in run["sets"].items()}
        return found
    for name, content in contents(out, ".stages").items():
        if name.endswith(".pt"):
            model = torch.load(out / name, map_location="cpu", weights_only=True)["model"]
            found |= {f"{name} {key}": (part.shape, part.numpy().tobytes()) for key, part in model.items()}
        elif name == "length.csv":  # its last column but one is a speed
            rows = [line.split(b",") for line in content.splitlines()]
            found[name] = [row[:-2] + row[-1:] for row in rows]
        elif not name.endswith(NOT_COMPARED):
            found[name] = content
    return found


def assert_equal(found: dict, expected: dict) -> None:
    """Compare what two runs made."""
    assert not [name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)]


@pytest.fixture(scope="module")
def undisturbed(inputs, tmp_path_factory) -> Callable[[str], tuple[dict, float]]:
    """What a job makes without a fault, and how long it takes."""

    @cache
    def run(name: str) -> tuple[dict, float]:
        out = tmp_path_factory.mktemp("undisturbed") / "out"
        out.mkdir()
        log, start = out.parent / "log", time.monotonic()
        assert finished(lambda: JOBS[name](inputs, out), log) == 0, log.read_text()[-3000:]
        return made(out), time.monotonic() - start

    return run


@pytest.mark.parametrize("name", KILLED)
def test_kills_at_random_moments(inputs, undisturbed, tmp_path, name):
    """Nothing is lost, and the same command makes the same."""
    expected, seconds = undisturbed(name)
    chance, outcomes = random.Random(name), Counter()
    for number in range(KILLS):
        out = tmp_path / str(number)
        out.mkdir()
        log = tmp_path / f"{number}.log"
        for _ in range(1 + chance.randrange(2)):
            if is_whole(name, out):
                break
            child = started(lambda out=out: JOBS[name](inputs, out), log)
            time.sleep(chance.random() * seconds)
            os.killpg(child, signal.SIGKILL) if ahead(child) else os.kill(child, signal.SIGKILL)
            outcomes["killed" if ended(child) == -signal.SIGKILL else "ended before"] += 1
        if not is_whole(name, out):
            assert finished(lambda out=out: JOBS[name](inputs, out), log) == 0, log.read_text()
            outcomes["run again"] += 1
        assert_equal(made(out), expected)
        outcomes["equal"] += 1
    print(f"\n{name}: {dict(outcomes)}")


def is_whole(name: str, out: Path) -> bool:
    """Whether a job came to its end before its kill, and would not do the same again.

    Conversions and exports never write over a result, and fairseq goes on for an update after the last one.
    """
    if name in ("convert", "export transformers", "export onnx", "export ct2"):
        return (out / "new").exists() or (out / "served").exists()
    path = out / "checkpoint_last.pt"
    if not name.startswith("train") or not path.exists():
        return False
    return cli.load(path)["optimizer_history"][-1]["num_updates"] == UPDATES


def ahead(child: int) -> bool:
    """Whether a fork leads a group of its own by now."""
    try:
        return os.getpgid(child) == child
    except ProcessLookupError:
        return False


@pytest.fixture
def small_disk(tmp_path):
    """A file system of four kilobytes, where this machine lets one be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield place
    subprocess.run(["umount", "-l", place], check=False)


@pytest.mark.parametrize("name", FILLING)
def test_a_full_disk_is_one_line_and_no_loss(inputs, undisturbed, tmp_path, small_disk, name):
    expected, _ = undisturbed(name)
    chance, disk = random.Random(name), small_disk
    sizes = [4, *(chance.randrange(8, 200) for _ in range(10 if FULL else 1))]
    log = tmp_path / "log"
    for kilobytes in sorted(sizes):
        grow(disk, kilobytes)
        if is_whole(name, disk / "out"):
            break
        log.unlink(missing_ok=True)
        status = finished(lambda: JOBS[name](inputs, disk / "out"), log)
        said = log.read_text()
        assert status in (0, 2) and "Traceback" not in said, said[-3000:]
        if status:
            errors = [line for line in said.splitlines() if line.startswith("error: ")]
            assert len(errors) == 1 and "space" in errors[0], said[-3000:]
    grow(disk, 200_000)
    if not is_whole(name, disk / "out"):
        (disk / "out").mkdir(exist_ok=True)
        assert finished(lambda: JOBS[name](inputs, disk / "out"), log) == 0, log.read_text()
    assert_equal(made(disk / "out"), expected)


def grow(disk: Path, kilobytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", str(disk)], check=True)


@pytest.mark.parametrize("name", ["prepare lm", "prepare mlm", "prepare glue", "prepare qa"])
def test_a_clock_that_jumps_back(inputs, undisturbed, tmp_path, name):
    """Halfway it is a year ago; what was made lies in the future, and stays."""
    expected, seconds = undisturbed(name)
    out, log = tmp_path / "out", tmp_path / "log"
    out.mkdir()
    child = started(lambda: JOBS[name](inputs, out), log)
    time.sleep(seconds / 2)
    os.kill(child, signal.SIGKILL)
    ended(child)
    later = time.time() + 3e7
    for path in out.rglob("*"):
        os.utime(path, (later, later))

    def back() -> None:
        real = time.time
        time.time = lambda: real() - 3e7

    assert ended(started(lambda: JOBS[name](inputs, out), log, back)) == 0, log.read_text()
    assert_equal(made(out), expected)


@pytest.mark.parametrize("name", ["prepare lm", "prepare mlm", "prepare glue", "prepare qa"])
def test_two_processes_on_one_output(inputs, undisturbed, tmp_path, name):
    """One makes it, the other waits or is refused in a line."""
    expected, _ = undisturbed(name)
    for number in range(10 if FULL else KILLS):
        out = tmp_path / str(number)
        logs = [tmp_path / f"{number}{part}.log" for part in "ab"]
        children = [started(lambda out=out: JOBS[name](inputs, out), log) for log in logs]
        statuses = [ended(child) for child in children]
        said = "".join(log.read_text() for log in logs)
        assert 0 in statuses and set(statuses) <= {0, 2} and "Traceback" not in said, said
        assert 2 not in statuses or "another process works in" in said, said
        assert_equal(made(out), expected)


def test_a_cache_that_cannot_be_written(tmp_path):
    """The kernel goes elsewhere, or a slower backend serves; nobody sees a traceback."""
    program = (
        "import torch\n"
        "from relpos_fairseq.attention import native, AttentionInputs, attend\n"
        "from relpos_fairseq.core.positions import Positions\n"
        "q = torch.randn(1, 2, 200, 8)\n"
        "inputs = AttentionInputs(q, q, q, (), Positions(200, 200), 1.0, dropout=0.1)\n"
        "print('shape', tuple(attend(inputs)[0].shape))\n"
    )
    for variable in ("RELPOS_CACHE", "XDG_CACHE_HOME"):
        said = cli.command("python", "-c", program, **{variable: "/proc/nowhere"})
        assert "shape (1, 2, 200, 8)" in said and "Traceback" not in said
