"""Stages and worker processes: what is skipped, what is made again, and kills at any moment."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TypedDict

import numpy as np
import pytest

from helpers import ROOT
from helpers.folders import contents
from relpos_fairseq.io import manifests, stages
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import atomic_folder, write_text
from relpos_fairseq.io.processes import ordered_map
from relpos_fairseq.io.reading import Number, read_json
from relpos_fairseq.io.stages import Stage, run_stages
from relpos_fairseq.preparation import binarise
from relpos_fairseq.preparation.binarise import write_indexed

# A pipeline of four stages with workers, a folder as an output, and files written in pieces.
PIPELINE = """
import signal, sys, time
from pathlib import Path

signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent may have had Ctrl-C ignored
from relpos_fairseq.preparation.binarise import write_indexed
from relpos_fairseq.io.command import run_command
from relpos_fairseq.io.files import atomic_folder, open_text_out
from relpos_fairseq.io.lines import read_lines
from relpos_fairseq.io.manifests import write_manifest
from relpos_fairseq.io.processes import ordered_map
from relpos_fairseq.io.stages import Stage, run_stages


def main(argv):
    f, workers, pause = Path(argv[0]), int(argv[1]), float(argv[2])

    def square(n):
        time.sleep(pause)
        return str(n * n)

    def numbers():
        with open_text_out(f / "numbers.txt") as file:
            for line in ordered_map(square, range(60), workers):
                file.write(line + "\\n")
                file.flush()
        return {"lines": 60}

    def odd():
        with open_text_out(f / "odd.gz") as file:
            for line in read_lines(f / "numbers.txt"):
                time.sleep(pause)
                file.write(line + "\\n" if int(line) % 2 else "")

    def parts():
        with atomic_folder(f / "parts") as temporary:
            for i, line in enumerate(read_lines(f / "odd.gz")):
                time.sleep(pause)
                (temporary / str(i)).write_text(line)

    def ids():
        lines = read_lines(f / "numbers.txt")
        return write_indexed(f / "ids", ([int(c) for c in line] for line in lines), 10)

    stages = [
        Stage("numbers", numbers, [], [f / "numbers.txt"], {"n": 60}),
        Stage("odd", odd, [f / "numbers.txt"], [f / "odd.gz"]),
        Stage("parts", parts, [f / "odd.gz"], [f / "parts"]),
        Stage("ids", ids, [f / "numbers.txt"], [f / "ids.bin", f / "ids.idx"]),
    ]
    counts = run_stages(stages, f)
    made = [path for stage in stages for path in stage.outputs]
    write_manifest(f / "manifest.json", command="x", inputs=[], outputs=made, stages=counts)
    print("done")


sys.exit(run_command(main, sys.argv[1:]))
"""


def start(folder: Path, workers: int, pause: float) -> subprocess.Popen:
    command = [sys.executable, "-c", PIPELINE, str(folder), str(workers), str(pause)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **pipes, cwd=ROOT, start_new_session=True)


def finish(process: subprocess.Popen, status: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == status, err
    return out, err


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("undisturbed")
    out, _ = finish(start(folder, 1, 0))
    assert re.match(r"\[1/4\] numbers \.\.\.\n\[1/4\] numbers \.\.\. \d+ s\n", out)
    return contents(folder)


def test_any_number_of_workers_makes_the_same(undisturbed, tmp_path):
    for workers, unchanged in ((3, 0), (2, 4)):
        out, _ = finish(start(tmp_path, workers, 0))
        assert contents(tmp_path) == undisturbed
        assert out.endswith("done\n") and out.count("unchanged") == unchanged


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_any_moment_and_run_again(undisturbed, tmp_path, seed):
    chance = random.Random(seed)
    for kill in (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM):
        process = start(tmp_path, 2, 0.01)
        try:
            process.communicate(timeout=0.15 + chance.random())
        except subprocess.TimeoutExpired:
            process.send_signal(kill)  # to the parent alone: workers have to find out
            process.communicate(timeout=60)
    finish(start(tmp_path, 2, 0))
    assert contents(tmp_path) == undisturbed


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_ends_it_and_its_workers(undisturbed, tmp_path, workers):
    process = start(tmp_path, workers, 0.2)
    assert process.stdout.readline() == "[1/4] numbers ...\n"
    for _ in range(1200):
        if any(tmp_path.glob(".partial-*-numbers.txt")):
            break
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, err = finish(process, 130)
    assert err == "interrupted; run the same command again to continue\n"
    assert set(contents(tmp_path)) == {".stages/lock"}
    with pytest.raises(ProcessLookupError):
        for _ in range(200):  # until the last worker is reaped
            os.killpg(process.pid, 0)
            time.sleep(0.05)
    finish(start(tmp_path, workers, 0))
    assert contents(tmp_path) == undisturbed


def test_two_processes_in_one_folder(tmp_path):
    first = start(tmp_path, 1, 0.2)
    assert first.stdout.readline() == "[1/4] numbers ...\n"
    _, err = finish(start(tmp_path, 1, 0), 2)
    assert err.startswith(f"error: another process works in {tmp_path}") and err.count("\n") == 1
    first.kill()
    first.communicate(timeout=60)
    finish(start(tmp_path, 1, 0))


# ------------------------------------------------------------------------------------- in process


class Small:
    """Two stages that note when they run: b.txt is a.txt twice."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ran, self.parameters = folder, [], {"n": 1}
        write_text(folder / "source", "x")

    def one(self):
        self.ran.append("one")
        write_text(self.folder / "a.txt", (self.folder / "source").read_text()[:1])
        return {"n": 1}

    def two(self):
        self.ran.append("two")
        write_text(self.folder / "b.txt", (self.folder / "a.txt").read_text() * 2)

    def run(self, **options) -> list[str]:
        self.ran.clear()
        f = self.folder
        stages = [
            Stage("one", self.one, [f / "source"], [f / "a.txt"], self.parameters),
            Stage("two", self.two, [f / "a.txt"], [f / "b.txt"], {"tuple": (1, 2)}),
        ]
        assert run_stages(stages, f, **options) == {"one": {"n": 1}, "two": {}}
        assert (f / "b.txt").read_text() == (f / "source").read_text()[:1] * 2
        return list(self.ran)


@pytest.fixture
def small(tmp_path) -> Small:
    return Small(tmp_path)


def test_only_what_changed_runs_again(small):
    assert small.run() == ["one", "two"]
    assert small.run() == []
    assert small.run(force=True) == ["one", "two"]
    small.parameters = {"n": 2}
    assert small.run() == ["one"]  # its output is what it was
    write_text(small.folder / "source", "xy")
    assert small.run() == ["one"]
    write_text(small.folder / "source", "z")
    assert small.run() == ["one", "two"]
    write_text(small.folder / "b.txt", "??")  # the same size
    assert small.run() == ["two"]
    (small.folder / "b.txt").unlink()
    assert small.run() == ["two"]
    (small.folder / ".stages" / "two.json").write_text("{half")
    assert small.run() == ["two"]


def test_other_versions_make_it_anew(small, monkeypatch):
    now = manifests.versions()
    assert "regex" in now and {"fairseq", "fairseq-fixed"} & set(now)
    assert small.run() == ["one", "two"]
    monkeypatch.setattr(stages, "versions", lambda: now | {"sacremoses": "9.9"})
    assert small.run() == ["one", "two"]
    assert small.run() == []


def test_a_failing_stage_has_no_stamp(small, monkeypatch):
    small.run()
    write_text(small.folder / "source", "q")
    with monkeypatch.context() as patch:
        patch.setattr(small, "two", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            small.run()
    assert not (small.folder / ".stages" / "two.json").exists()
    assert small.run() == ["two"]


def test_a_missing_input_is_named(small):
    (small.folder / "source").unlink()
    with pytest.raises(UserError, match="stage one needs what is not there: .*source"):
        small.run()
    with pytest.raises(UserError, match="stages must have different names, got a, a"):
        run_stages([Stage("a", dict, [], []), Stage("a", dict, [], [])], small.folder)


def test_outputs_of_another_pipeline_can_be_removed(small):
    small.run()
    outside = small.folder.parent / f"{small.folder.name}-outside.txt"
    last = Stage("last", lambda: write_text(outside, "x"), [], [outside])
    run_stages([last], small.folder)
    assert (small.folder / "b.txt").exists()
    one = Stage("one", small.one, [small.folder / "source"], [small.folder / "a.txt"], {"n": 1})
    run_stages([one], small.folder, prune=True)
    assert set(contents(small.folder, ".stages")) == {"source", "a.txt"}
    assert outside.exists()  # not ours to remove
    assert {path.name for path in (small.folder / ".stages").glob("*.json")} == {"one.json"}


@pytest.mark.parametrize("name", ["../keep", "x/../../keep", "linked/keep", ".", ".."])
@pytest.mark.parametrize("within", [False, True])
def test_a_stamp_of_a_strangers_removes_nothing_outside(tmp_path, name, within):
    """A data folder from somebody else may hold any stamp; what it names must lie in the folder."""
    folder, keep = tmp_path / "data", tmp_path / "keep"
    write_text(keep / "thesis.tex", "years")
    (folder / ".stages").mkdir(parents=True)
    (folder / "linked").symlink_to(tmp_path)
    described = {"bytes": 5, "sha256": "0"}
    outputs = {"made": {"files": {f"../{name}": described}}} if within else {name: {"files": {"thesis.tex": described}}}
    for stamp in ("step", "old"):
        (folder / ".stages" / f"{stamp}.json").write_text(json.dumps({"outputs": outputs, "counts": {}}))
    step = Stage("step", lambda: write_text(folder / "a.txt", "a"), [], [folder / "a.txt"])
    for prune in (False, True):
        with pytest.raises(UserError, match=r"step\.json names|old\.json names"):
            run_stages([step], folder, prune=prune)
    assert (keep / "thesis.tex").read_text() == "years"


@pytest.mark.parametrize(
    "stamp", ["[]", "3", '{"outputs": 3}', '{"outputs": {"a.txt": 3}}', '{"outputs": {"a.txt": {}}}', "{"]
)
def test_a_damaged_stamp_is_none(tmp_path, stamp):
    write_text(tmp_path / ".stages" / "step.json", stamp)
    run_stages([Stage("step", lambda: write_text(tmp_path / "a.txt", "a"), [], [tmp_path / "a.txt"])], tmp_path)
    assert (tmp_path / "a.txt").read_text() == "a"


@pytest.mark.parametrize(
    "wrong",
    [{"n": -1}, {"n": {"of": [3, -1]}}, {"share": float("nan")}, {"bytes": -1}, {"bytes": True}, {"files": {"x": 3}}],
)
def test_a_stamp_with_counts_that_cannot_be_is_made_anew(small, wrong):
    small.run()
    path = small.folder / ".stages" / "one.json"
    stamp = read_json(path)
    of_output = wrong.keys() & {"bytes", "files"}
    (stamp["outputs"]["a.txt"] if of_output else stamp["counts"]).update(wrong)
    path.write_text(json.dumps(stamp))
    assert "one" in small.run() and small.run() == []


def test_a_stage_declares_the_type_of_its_counts(tmp_path):
    class Made(TypedDict):
        score: Number

    ran = []
    step = Stage("step", lambda: ran.append(1) or {"score": float("nan")}, [], [], counted=Made)
    path = tmp_path / ".stages" / "step.json"
    for content, runs in ((None, 1), (None, 1), ('{"score": "1"}', 2), ("{}", 3)):
        if content is not None:
            path.write_text(json.dumps(read_json(path) | {"counts": json.loads(content)}))
        run_stages([step], tmp_path)
        assert len(ran) == runs


def test_stamps_hold_in_a_folder_that_was_moved(small):
    small.run()
    moved = small.folder.rename(small.folder.with_name(small.folder.name + "-moved"))
    stage = Stage("two", dict, [moved / "a.txt"], [moved / "b.txt"], {"tuple": (1, 2)})
    run_stages([stage], moved)
    assert read_json(moved / ".stages" / "two.json")["outputs"]["b.txt"]["bytes"] == 2


def test_files_of_others_in_a_folder_are_never_removed(tmp_path):
    ran = []

    def run(number: int, name: str = "make", **options) -> int:
        def make():
            ran.append(number)
            with atomic_folder(tmp_path / "made") as folder:
                write_text(folder / "sub" / "a", str(number))

        run_stages([Stage(name, make, [], [tmp_path / "made"], {"n": number})], tmp_path, **options)
        return len(ran)

    assert run(1) == run(1) == 1
    mine = tmp_path / "made" / "sub" / "mine"
    mine.write_text("mine")
    assert run(1) == 1  # what the stage made is as it was
    for number, options in ((1, {"force": True}), (2, {}), (2, {"name": "x", "prune": True})):
        with pytest.raises(
            UserError, match="sub/mine in it was not written by this command, or was changed since: move it"
        ):
            run(number, **options)
        assert mine.read_text() == "mine"
    mine.rename(tmp_path / "mine")
    assert run(2) == run(2) == 2
    (tmp_path / "made" / "sub" / "a").write_text("3")
    with pytest.raises(UserError, match="sub/a in it was not written by this command, or was changed since"):
        run(2)
    (tmp_path / "made" / "sub" / "a").unlink()
    assert run(2) == 3


# ---------------------------------------------------------------------------------------- workers


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_results_come_in_order_and_memory_is_bounded(workers):
    read = []

    def chunks():
        for n in range(40):
            read.append(n)
            yield n

    def slow_for_some(n):
        time.sleep(0.02 if n % 7 == 0 else 0)
        return n * n, os.getpid()

    results = ordered_map(slow_for_some, chunks(), workers)
    assert next(results)[0] == 0
    assert len(read) <= 2 * workers
    rest = list(results)
    assert [value for value, _ in rest] == [n * n for n in range(1, 40)]
    here = {pid == os.getpid() for _, pid in rest}
    assert here == {workers == 1}
    assert list(ordered_map(slow_for_some, [], workers)) == []


@pytest.mark.parametrize(
    ("error", "workers", "numbers", "said"),
    [
        ("raise", 1, 10, "^bad 3$"),
        ("raise", 2, 10, "^bad 3$"),
        ("die", 2, 10, "killed, perhaps for want of memory"),
        ("raise", 0, 0, "workers must be >= 1, got 0"),
    ],
)
def test_an_error_in_a_worker_is_the_callers(error, workers, numbers, said):
    def fails(n):
        if error == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if n == 3:
            raise UserError(f"bad {n}")
        return n

    with pytest.raises(UserError, match=said):
        list(ordered_map(fails, range(numbers), workers))


def test_a_caller_that_stops_early_ends_the_workers():
    def identity(n):
        return os.getpid()

    results = ordered_map(identity, iter(int, 1), 2)
    workers = {next(results) for _ in range(20)}
    results.close()
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# ------------------------------------------------------------------------------------ binarising


@pytest.mark.parametrize("vocabulary", [10, 65499, 65500, 4294967295])
def test_ids_are_written_as_fairseq_writes_them(tmp_path, vocabulary):
    import torch
    from fairseq.data import indexed_dataset

    items = [torch.tensor(item) for item in ([1, 2, 3], [], [4], [vocabulary - 1])]
    counts = write_indexed(tmp_path / "ours", iter(items), vocabulary)
    assert counts == {"sequences": 4, "tokens": 5}
    builder = indexed_dataset.make_builder(str(tmp_path / "its.bin"), "mmap", vocabulary)
    for item in items:
        builder.add_item(item)
    builder.finalize(str(tmp_path / "its.idx"))
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"its.{suffix}").read_bytes(), suffix
    read = indexed_dataset.make_dataset(str(tmp_path / "ours"), "mmap")
    assert all(torch.equal(read[i], items[i].long()) for i in (0, 2, 3)) and len(read) == 4


def test_no_index_without_its_ids(tmp_path):
    write_indexed(tmp_path / "a", [[1]], 10)

    def breaks():
        yield np.array([1])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_indexed(tmp_path / "a", breaks(), 10)
    assert set(contents(tmp_path)) == {"a.bin"}
    with pytest.raises(ValueError, match="sizes sum up to 2, there are 1 ids"):
        binarise.write_blocks(tmp_path / "a", [(np.array([1]), np.array([2]))], 10)


def test_a_record_gives_back_what_was_kept_or_is_refused(tmp_path):
    """Whatever byte of it changes and wherever it is cut; lines that are lost, twice or in another order."""
    path, results = tmp_path / "r.jsonl", [[1, {"text": "a", "odds": 0.5}], [2], [2], [3, float("inf")]]
    with stages.ResumeLog(path, {"a": 1}).opened() as keep:
        for one in results:
            keep(one)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    changed = [whole[:at] + bytes([byte ^ 1]) + whole[at + 1 :] for at, byte in enumerate(whole)]
    changed += [whole[:at] for at in range(len(whole))]
    changed += [b"".join([*lines[:1], *order]) for order in (lines[2:], lines[1:2] * 2, lines[:0:-1])]
    for content in changed:
        path.write_bytes(content)
        try:
            kept = stages.ResumeLog(path, {"a": 1}).kept
        except UserError as error:
            assert f"{path} is not a record" in str(error) and str(error).endswith("delete it")
        else:
            assert kept == results[: len(kept)]


def test_nothing_here_imports_torch():
    code = """if True:
        import sys
        from relpos_fairseq.io import command, downloads, lines, processes, stages
        from relpos_fairseq.preparation import binarise
        print({"torch", "fairseq"} & set(sys.modules))
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_helpers_see_every_file(tmp_path):
    write_text(tmp_path / "a" / "b", "1")
    assert contents(tmp_path) == {"a/b": b"1"} and contents(tmp_path, "a") == {}
