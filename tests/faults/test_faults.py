"""A campaign of faults: kills, full disks, clocks, two processes at once, caches, bad input.

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
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import ROOT, transformer_xl_original
from helpers import commands as cli
from helpers.commands import relpos
from helpers.fault_jobs import JOBS, UPDATES, ended, finished, started
from helpers.folders import contents
from helpers.questions import make_file
from relpos_fairseq.io.command import run_command

pytestmark = pytest.mark.slow
SIZE = os.environ.get("RELPOS_FAULTS", "")
FULL = SIZE == "full"
KILLS = 20 if FULL else int(SIZE or 1)  # of each job
MALFORMED = 1250 if FULL else 60 * KILLS if SIZE else 12  # of each kind of input
# Logs, what fairseq leaves of a killed save, and files that name the folder they lie in.
NOT_COMPARED = (".log", ".tmp", "conversion.json", "MODEL_CARD.md")


# Of these the small campaign leaves out the kills: they start programs, or take seconds.
SLOW = ("prepare wmt", "train xl on two", "evaluate length", "evaluate xtreme", "compare")
SLOW += ("export ct2", "export onnx", "export transformers")
QUICK = [name for name in JOBS if name not in SLOW]
KILLED = list(JOBS) if SIZE else QUICK
FILLING = [name for name in (*QUICK, *["export transformers"] * bool(SIZE)) if not name.startswith("train")]


def made(out: Path) -> dict[str, object]:
    """What a job made: bytes, and of checkpoints the tensors."""
    found: dict[str, object] = {}
    if (archive := out / "results" / "results.jsonl.gz").exists():  # of a comparison: its scores, without its times
        runs = map(json.loads, gzip.decompress(archive.read_bytes()).splitlines())
        scores = {run["run"]: [run["settings"], _without_times(run["sets"])] for run in runs}
        return {"results": json.dumps(scores, sort_keys=True).encode()}
    for name, content in contents(out, ".stages").items():
        if name.endswith(".pt"):
            found[name] = torch.load(out / name, map_location="cpu", weights_only=True)["model"]
        elif name == "length.csv":  # its last column but one is a speed
            rows = [line.split(b",") for line in content.splitlines()]
            found[name] = b"\n".join(b",".join(row[:-2] + row[-1:]) for row in rows)
        elif not name.endswith(NOT_COMPARED):
            found[name] = content
    return found


def _without_times(sets: dict[str, dict]) -> dict[str, dict]:
    return {name: {key: value for key, value in one.items() if key != "seconds"} for name, one in sets.items()}


def assert_equal(found: dict, expected: dict) -> None:
    """Compare what two runs made."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, bytes):
            assert found[name] == value, name
            continue
        assert found[name].keys() == value.keys(), name
        for key, tensor in value.items():
            assert torch.equal(found[name][key], tensor), (name, key)


@pytest.fixture(scope="module")
def undisturbed(inputs, tmp_path_factory) -> Callable[[str], tuple[dict, float]]:
    """What a job makes without a fault, and how long it takes."""
    known: dict[str, tuple[dict, float]] = {}

    def run(name: str) -> tuple[dict, float]:
        if name not in known:
            out = tmp_path_factory.mktemp("undisturbed") / "out"
            out.mkdir()
            log, start = out.parent / "log", time.monotonic()
            assert finished(lambda: JOBS[name](inputs, out), log) == 0, log.read_text()[-3000:]
            known[name] = made(out), time.monotonic() - start
        return known[name]

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
    """A file system of few kilobytes, where this machine lets one be mounted."""
    place, mounted = tmp_path / "disk", []

    def mount(kilobytes: int) -> Path:
        place.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(place)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("a tmpfs cannot be mounted here")
        mounted.append(place)
        return place

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=False)


@pytest.mark.parametrize("name", FILLING)
def test_a_full_disk_is_one_line_and_no_loss(inputs, undisturbed, tmp_path, small_disk, name):
    expected, _ = undisturbed(name)
    chance, disk = random.Random(name), small_disk(4)
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


# Malformed inputs.


@st.composite
def damaged(draw, content: bytes) -> bytes:
    """A valid file with some of its bytes cut, changed, repeated or replaced."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(content) - 1, 0)))
        upto = min(len(content), at + draw(st.integers(1, 40)))
        how = draw(st.sampled_from(("cut", "leave out", "put in", "replace", "repeat")))
        new = draw(st.binary(max_size=12) | st.sampled_from(TOKENS))
        if how == "cut":
            content = content[:at]
        elif how == "repeat":
            content = content[:upto] + content[at:upto] + content[upto:]
        else:
            middle = {"leave out": b"", "put in": new + content[at:upto], "replace": new}[how]
            content = content[:at] + middle + content[upto:]
    return content


TOKENS = [
    b"null",
    b"[]",
    b"{}",
    b'"',
    b"\t",
    b"\n",
    b"\r",
    b"-1",
    b"1e999",
    b"\0",
    b"\xff\xfe",
    "\ufeff \u2028 é 日".encode(),
    b"true",
    b"<unk>",
    b"</s>",
    b",",
    b":",
]


def assert_one_line(capsys, status: object, *names: str) -> None:
    """A command succeeded, or ended in one line that names its input."""
    said = capsys.readouterr()
    assert status in (0, 2), said.err
    if status:
        lines = [line for line in said.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and "Traceback" not in said.err, said.err
        assert any(name in lines[0] for name in names), lines


def _limited(test):
    health = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(
        max_examples=MALFORMED, deadline=None, suppress_health_check=health, derandomize=not FULL, database=None
    )(test)


def _fuzzed(content: bytes):
    return lambda test: _limited(given(damaged(content))(test))


def test_malformed_json(inputs, tmp_path, capsys):
    questions = make_file(tmp_path / "q.json", 3, 1)
    answers = tmp_path / "a.json"
    good = b'{"0-0": "red", "0-1": "", "1-0": "the cat"}'

    @_fuzzed(questions.read_bytes())
    def read(content: bytes) -> None:
        path = tmp_path / "bad.json"
        path.write_bytes(content)
        answers.write_bytes(good)
        status = relpos("evaluate", "qa", path, "--predictions", answers)
        assert_one_line(capsys, status, "bad.json", "a.json")

    @_fuzzed(good)
    def read_answers(content: bytes) -> None:
        answers.write_bytes(content)
        status = relpos("evaluate", "qa", questions, "--predictions", answers)
        assert_one_line(capsys, status, "a.json")

    read()
    read_answers()


def test_malformed_tables_and_dictionaries(inputs, tmp_path, capsys):
    from relpos_fairseq.preparation.glue_tasks import GLUE, TableFile, read_examples
    from relpos_fairseq.text.assets import Vocabulary

    def one_line(job: Callable[[], object], name: str) -> None:
        assert_one_line(capsys, run_command(lambda argv: job() and None), name)

    def fuzz_table(task: str) -> None:
        path = tmp_path / "train.tsv"
        source = TableFile(path, GLUE[task].columns)

        @_fuzzed((inputs.glue / task / "train.tsv").read_bytes()[:600])
        def read(content: bytes) -> None:
            path.write_bytes(content)
            one_line(lambda: list(read_examples(source, GLUE[task])), "train.tsv")

        read()

    def fuzz_tokenizer(name: str) -> None:
        folder = tmp_path / "tokenizer"

        @_fuzzed((inputs.tokenizer / name).read_bytes()[:4000])
        def load(content: bytes) -> None:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(inputs.tokenizer, folder)
            (folder / name).write_bytes(content)
            one_line(lambda: Vocabulary(folder), "tokenizer")

        load()

    for task in ("RTE", "STS-B", "CoLA"):
        fuzz_table(task)
    for name in ("dict.txt", "tokenizer.json"):
        fuzz_tokenizer(name)


def test_malformed_checkpoints(inputs, tmp_path, capsys):
    path = tmp_path / "bad.pt"
    small = {"model": {"a": torch.zeros(3)}, "cfg": {"model": {"_name": "x"}}, "extra_state": {}}
    torch.save(small, path)

    @_fuzzed(path.read_bytes())
    def read(content: bytes) -> None:
        path.write_bytes(content)
        status = relpos("average", path, path, "--out", tmp_path / "mean.pt")
        assert_one_line(capsys, status, "bad.pt")
        status = relpos("convert", path, "--to", "m4", "--out", tmp_path / "out")
        assert_one_line(capsys, status, "bad.pt")

    read()


def test_malformed_released_models(tmp_path, capsys):
    """Transformer-XL's model.pt, in both of torch's formats, and the vocabulary in its cache.pt."""
    symbols = ["<eos>", "<unk>", *map(str, range(8))]
    whole = transformer_xl_original.model(len(symbols))
    convert = ("convert", tmp_path / "model.pt", "--to", "same", "--out", tmp_path / "out.pt")

    def fuzz(name: str, content: bytes) -> None:
        @_fuzzed(content)
        def read(damaged: bytes) -> None:
            (tmp_path / name).write_bytes(damaged)
            assert_one_line(capsys, relpos(*convert), "model.pt", "cache.pt")
            (tmp_path / "out.pt").unlink(missing_ok=True)

        read()

    cache = transformer_xl_original.save(transformer_xl_original.corpus(symbols), tmp_path / "cache.pt").read_bytes()
    for zipped in (True, False):
        options = {"_use_new_zipfile_serialization": zipped}
        model = transformer_xl_original.save(whole, tmp_path / "model.pt", **options).read_bytes()
        fuzz("model.pt", model)
    (tmp_path / "model.pt").write_bytes(model)
    fuzz("cache.pt", cache)


def test_malformed_specifications(tmp_path, capsys):
    """YAML that is none, and YAML that says something else than a comparison."""
    from relpos_fairseq.lab.comparison.spec import read_spec

    path = tmp_path / "bad.yaml"

    def fuzz(content: bytes) -> None:
        @_fuzzed(content)
        def read(damaged: bytes) -> None:
            path.write_bytes(damaged)
            status = run_command(lambda argv: read_spec(path) and None)
            assert_one_line(capsys, status, "bad.yaml")

        read()

    for name in ("scalars.yaml", "ablations.yaml"):
        fuzz((ROOT / "examples" / "comparison" / name).read_bytes())


def test_malformed_options(capsys):
    """Values of position options that a recipe or a command line may have."""
    from relpos_fairseq.core.config import PositionConfig, resolve
    from relpos_fairseq.core.scheme import AttentionShape

    shape = AttentionShape(embed_dim=16, num_heads=2, max_positions=64, seed_name="test")
    known = [part.name for part in fields(PositionConfig)]
    values = st.sampled_from(VALUES) | st.text(max_size=8)

    @_limited
    @given(st.sampled_from(SCHEMES) | values, st.dictionaries(st.sampled_from(known), values))
    def read(scheme: str, options: dict[str, str]) -> None:
        config = PositionConfig(**{"position_scheme": scheme} | options)
        status = run_command(lambda argv: resolve(config, shape, "translation") and None)
        given = (value for value in (scheme, *options.values()))
        fields_of = [name.removeprefix("position_") for name in options]
        names = ["position scheme", *fields_of, *(name.replace("_", "-") for name in fields_of), *given]
        assert_one_line(capsys, status, *names)

    read()


VALUES = [
    "0",
    "-1",
    "1",
    "3",
    "2.5",
    "1e999",
    "nan",
    "-inf",
    "None",
    "[]",
    "auto",
    "none",
    "heads",
    "layers",
    "both",
    "on",
    "off",
    "paper",
    "10**9",
    "é 日",
    "\0",
    " 3 ",
    "1_0",
]
SCHEMES = ["t5", "m4", "m4m", "rope", "tupe", "deberta+t5", "rope/none", "fire", "kerple", "fox"]
