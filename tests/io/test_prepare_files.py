"""Whole files, lines of any origin, archives, manifests, and how a command ends."""

from __future__ import annotations

import bz2
import errno
import functools
import gzip
import json
import lzma
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.folders import contents
from relpos_fairseq.io import command, files, lines, manifests
from relpos_fairseq.io.command import run_command
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.progress import table

# ----------------------------------------------------------------------------------- whole files


def test_a_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "new" / "a.txt"
    with pytest.raises(RuntimeError), files.atomic_path(path) as temporary:
        temporary.write_text("half")
        assert not path.exists() and temporary.suffix == ".txt"
        raise RuntimeError
    assert list(path.parent.iterdir()) == []
    files.write_text(path, "whole")
    with pytest.raises(RuntimeError), files.open_text_out(path) as file:
        file.write("half")
        raise RuntimeError
    assert path.read_text() == "whole" and list(path.parent.iterdir()) == [path]


def test_what_a_kill_left_is_replaced(tmp_path):
    with pytest.raises(KeyboardInterrupt), files.atomic_folder(tmp_path / "d") as temporary:
        (temporary / "a").write_text("1")
        raise KeyboardInterrupt
    (tmp_path / ".partial-a.txt").write_text("a user's")
    with files.atomic_folder(tmp_path / "d") as temporary:
        (temporary / "a.bin").write_text("2")
    with files.atomic_folder(tmp_path / "d") as temporary:
        (temporary / "b").write_text("3")
    files.write_text(tmp_path / "a.txt", "new")
    assert contents(tmp_path) == {"d/b": b"3", "a.txt": b"new", ".partial-a.txt": b"a user's"}


def in_fork(run: Callable[[], object]) -> int:
    """Begin a function in a fork, which ends with it; the fork's number."""
    child = os.fork()
    if not child:
        status = 1
        try:
            status = int(not run())
        finally:
            os._exit(status)
    return child


def leave(path: Path) -> Path:
    """A temporary file for `path`, as a kill leaves it."""
    temporary = files.temporary_path(path)
    temporary.write_text("half")
    return temporary


def leave_in_child(path: Path) -> Path:
    """The same of a process that has ended."""
    child = in_fork(lambda: leave(path))
    os.waitpid(child, 0)
    (temporary,) = (one for one in path.parent.glob(".partial-*") if f".{child}." in one.name)
    return temporary


@pytest.mark.parametrize("name", ["m4", "x-m4", "[x]", "a" * 240 + ".txt"])
def test_leftovers_of_ended_processes_alone_are_removed(tmp_path, name):
    """Neither a live job's, nor another file's whose name ends alike, nor another machine's; no name is a pattern."""
    path = tmp_path / name
    dead = leave_in_child(path)
    kept = [leave(path), leave_in_child(tmp_path / f"y-{name}"[-240:])]
    elsewhere = dead.with_name(".partial-" + "0" * 8 + dead.name.removeprefix(".partial-")[8:])
    elsewhere.write_text("half")
    files.write_text(path, "whole")
    assert not dead.exists() and elsewhere.exists() and path.read_text() == "whole"
    assert kept[0].exists() and (len(name) > 200 or kept[1].exists())


def test_two_writers_of_one_path(tmp_path):
    """Both succeed, and what the later one wrote stays."""
    with files.atomic_path(tmp_path / "a.txt") as first:
        with files.atomic_path(tmp_path / "a.txt") as second:
            first.write_text("first")
            second.write_text("second")
        assert (tmp_path / "a.txt").read_text() == "second"
    assert contents(tmp_path) == {"a.txt": b"first"}
    with files.atomic_folder(tmp_path / "d") as first:
        (first / "a.bin").write_text("first")
        with files.atomic_folder(tmp_path / "d") as second:
            (second / "b.bin").write_text("second")
    assert contents(tmp_path) == {"a.txt": b"first", "d/a.bin": b"first"}


def test_many_writers_of_one_folder(tmp_path):
    """Eight forks at once: all succeed, one whole result is there, and nothing else.

    Each has a beginning of its own, else its temporary files would look like those of an ended process.
    """
    files.write_text(tmp_path / "a.txt", "of the process that they are forks of")

    def write(number: int) -> bool:
        for _ in range(20):
            with files.atomic_folder(tmp_path / "d") as temporary:
                for name in ("one.bin", "two.bin"):
                    (temporary / name).write_text(str(number))
            files.write_text(tmp_path / "a.txt", str(number))
        return True

    children = [in_fork(functools.partial(write, number)) for number in range(8)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
    made = contents(tmp_path)
    assert set(made) == {"d/one.bin", "d/two.bin", "a.txt"}
    assert made["d/one.bin"] == made["d/two.bin"]


def test_a_lock_follows_no_link_and_cuts_nothing_off(tmp_path):
    (tmp_path / "precious").write_text("years")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="lock is a link"), files.file_lock(tmp_path / "lock"):
        pass
    with files.file_lock(tmp_path / "precious"):
        pass
    assert (tmp_path / "precious").read_text() == "years"


def test_a_lock_ends_with_its_process(tmp_path):
    """Killed, it leaves the lock free, though a worker that it has forked lives on."""
    reader, writer = os.pipe()
    holder = os.fork()
    if not holder:
        try:
            with files.file_lock(tmp_path / "lock"):
                worker = os.fork() or signal.pause()
                os.write(writer, str(worker).encode())
                signal.pause()
        finally:
            os._exit(1)
    worker = int(os.read(reader, 100))
    try:
        with pytest.raises(BlockingIOError), files.file_lock(tmp_path / "lock", wait=False):
            pass
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        with files.file_lock(tmp_path / "lock", wait=False):
            os.kill(worker, 0)
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_folder_with_a_users_file_is_not_replaced(tmp_path):
    """What a command wrote it replaces, whatever it was; a file of anybody else's, of any name, is not lost."""
    folder = tmp_path / "d"
    with files.atomic_folder(folder) as temporary:
        for name in ("train.bin", "anything", "input0/dict.txt"):
            files.write_text(temporary / name, "old")
        (temporary / "link").symlink_to("anything")
    with files.atomic_folder(folder) as temporary:
        (temporary / "own").write_text("new")
    assert contents(tmp_path) == {"d/own": b"new"}
    (folder / "chapters").mkdir()
    (folder / "chapters" / "thesis.tex").write_text("years")
    with pytest.raises(UserError, match=r"d would be replaced, and chapters/thesis\.tex in it was not"):
        with files.atomic_folder(folder) as temporary:
            (temporary / "own").write_text("newer")
    with pytest.raises(UserError, match="d is a folder, and a file would take its place"):
        files.write_text(folder, "text")
    assert contents(tmp_path) == {"d/own": b"new", "d/chapters/thesis.tex": b"years"}


def test_a_full_disk_leaves_nothing_and_is_named(tmp_path, monkeypatch, capsys):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "a.txt"
    files.write_text(path, "old")
    monkeypatch.setattr(files, "sync", full)
    assert run_command(lambda _: files.write_text(path, "new")) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: no space left") and str(path) in said and said.count("\n") == 1
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_room_is_checked_before(tmp_path):
    files.require_space(tmp_path / "not" / "there", 1)
    with pytest.raises(UserError, match="needs 1,000,000,000,000.0 MB"):
        files.require_space(tmp_path, 10**18)


def test_json_and_compressed_text_depend_on_the_value_alone(tmp_path):
    for name, value in (("a", {"b": "ä", "a": [1]}), ("b", {"a": [1], "b": "ä"})):
        files.write_json(tmp_path / f"{name}.json", value)
        files.write_text(tmp_path / f"{name}.gz", "text\n")
    made = contents(tmp_path)
    assert made["a.json"] == made["b.json"] and json.loads(made["a.json"]) == {"a": [1], "b": "ä"}
    assert made["a.gz"] == made["b.gz"] and gzip.decompress(made["a.gz"]) == b"text\n"


def test_a_folders_hash_sees_names_and_bytes(tmp_path):
    def of(**named):
        folder = tmp_path / "-".join([*named, *named.values()])
        for name, text in named.items():
            files.write_text(folder / name, text)
        return files.sha256_of(folder)

    assert len({of(a="1", b="2"), of(a="2", b="1"), of(a="12"), of(b="1", c="2")}) == 4
    assert files.size_of(tmp_path / "a-b-1-2") == 2


# ----------------------------------------------------------------------------------------- lines

OPEN = {"": open, ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def test_a_hash_is_computed_once_while_the_file_stays_the_same(tmp_path, monkeypatch):
    path, hashes, read = tmp_path / "folder" / "a", files.Hashes(), []
    path.parent.mkdir()
    original = files.hash_file
    monkeypatch.setattr(files, "hash_file", lambda path, *more: read.append(path) or original(path, *more))
    for number in range(20):  # faster than a file system's clock, each time of the same size
        path.write_text(f"{number:02}")
        assert hashes.of(path) == original(path)["sha256"]
    read.clear()
    assert hashes.of(path.parent) == files.sha256_of(path.parent)
    assert read == [path]  # by sha256_of, which remembers nothing
    status = path.stat()
    path.write_text("XX")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # its time set back
    assert hashes.of(path.parent) == files.sha256_of(path.parent)


def put(path: Path, data: bytes) -> Path:
    with OPEN[path.suffix if path.suffix in OPEN else ""](path, "wb") as file:
        file.write(data)
    return path


@pytest.mark.parametrize("suffix", OPEN)
def test_odd_text_is_read_as_it_is(tmp_path, suffix):
    data = "\ufeffa\tb ||| c\r\n\n  d\rd \u2028e\x0c\x1c\n\ufefff".encode()
    path = put(tmp_path / f"text{suffix}", data)
    expected = ["a\tb ||| c", "", "  d\rd \u2028e\x0c\x1c", "\ufefff"]
    assert list(lines.read_lines(path)) == expected
    assert lines.count_lines(path) == 4


LINE = st.text(st.characters(exclude_characters="\n", exclude_categories=("Cs",)))


@given(st.lists(LINE), st.booleans(), st.sampled_from(["\n", "\r\n"]))
@settings(max_examples=40, deadline=None)
def test_lines_survive_a_round_trip(tmp_path_factory, texts, mark, end):
    texts = [text.rstrip("\r") for text in texts]
    if texts:
        texts[0] = texts[0].lstrip("\ufeff")
    path = tmp_path_factory.mktemp("lines") / "a"
    path.write_bytes(b"\xef\xbb\xbf" * mark + "".join(text + end for text in texts).encode())
    assert list(lines.read_lines(path)) == texts
    assert lines.count_lines(path) == len(texts)


def test_invalid_utf8_is_named_or_dropped_and_counted(tmp_path):
    path = put(tmp_path / "a.gz", b"good\nb\xffd\ngood too\n\xc3")
    counts = {}
    assert list(lines.read_lines(path, "drop", counts)) == ["good", "good too"]
    assert counts == {"lines": 4, "invalid_utf8": 2}
    utf16 = put(tmp_path / "b", "text".encode("utf-16"))
    for asked, said in (
        ((path,), r"a\.gz, line 2: invalid UTF-8 at byte 2 \(ff"),
        ((path, "skip"), "on_bad_line must be fail or drop, got 'skip'"),
        ((utf16,), "looks like UTF-16"),
    ):
        with pytest.raises(UserError, match=said):
            list(lines.read_lines(*asked))


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_a_line_of_any_length_takes_bounded_memory(tmp_path, end):
    path = put(tmp_path / "a", b"x" * 10 + b"\r\n" + b"y" * 11 + b"\n" + b"z" * 5_000_000 + end)
    counts = {}
    assert list(lines.read_lines(path, "drop", counts, longest=10)) == ["x" * 10]
    assert counts == {"lines": 3, "too_long": 2}
    with pytest.raises(UserError, match="line 2: longer than 10 bytes"):
        list(lines.read_lines(path, longest=10))


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
def test_a_damaged_compressed_file_is_one_error(tmp_path, suffix):
    path = put(tmp_path / f"a{suffix}", b"text\n" * 100_000)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError, match=rf"a{suffix} is truncated or damaged"):
        list(lines.read_lines(path))
    path.write_bytes(b"<html>not at all</html>")
    with pytest.raises(UserError, match=rf"a{suffix} is .*damaged"):
        lines.count_lines(path)
    with pytest.raises(UserError, match="missing is not a file"):
        list(lines.read_lines(tmp_path / "missing"))


# --------------------------------------------------------------------------- commands, manifests


def raising(error: BaseException):
    def main(_):
        raise error

    return main


NO_SIGN = r"error: standard output is ascii, which has no \xdf: write to a file"


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (UserError("x must be 1, got 2"), 2, "error: x must be 1, got 2\n"),
        (ValueError("bad"), 2, "error: bad\n"),
        (FileNotFoundError(2, "No such file", "a.txt"), 2, "error: a.txt: No such file\n"),
        (KeyboardInterrupt(), 130, command.CONTINUE + "\n"),
        (UnicodeEncodeError("ascii", "aß", 1, 2, "ordinal not in range"), 2, NO_SIGN),
    ],
)
def test_a_command_ends_with_one_line(capsys, error, status, said):
    assert run_command(raising(error)) == status
    told = capsys.readouterr().err
    assert told.startswith(said) and told.count("\n") == 1


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_goes_away_is_no_error(lines: int) -> None:
    """While a command writes, or when it has ended and what it wrote is still on its way."""
    program = f"""
import sys, time
from relpos_fairseq.io.command import run_command
def main(argv):
    time.sleep(0.5)
    for _ in range({lines}):
        print("line")
sys.exit(run_command(main))
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 128 + signal.SIGPIPE


def test_a_bug_keeps_its_traceback():
    with pytest.raises(KeyError):
        run_command(raising(KeyError("bug")))
    assert run_command(lambda argv: None, []) == 0


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["at work", "ValueError: bad", "  at the end", ""], "ValueError: bad"),
        (["KeyError: 1", "a.b.MyError: two\n", "done"], "a.b.MyError: two"),
        (["said in an Error: no exception", "the end\n", "  "], "the end"),
        ([], ""),
    ],
)
def test_a_programs_last_words(lines, reason):
    assert command.error_line(iter(lines)) == reason


def test_sigterm_ends_a_command_as_ctrl_c_does(capsys):
    before = signal.getsignal(signal.SIGTERM)
    assert run_command(lambda _: signal.raise_signal(signal.SIGTERM)) == 143
    assert capsys.readouterr().err == command.CONTINUE + "\n"
    assert signal.getsignal(signal.SIGTERM) is before
    statuses = []
    thread = threading.Thread(target=lambda: statuses.append(run_command(lambda _: None)))
    thread.start()
    thread.join()
    assert statuses == [0]  # only the main thread may touch signals


def test_a_manifest_names_every_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = [Path(name) for name in ("a/t", "b/t", "c/b/t")]
    for path in paths:
        files.write_text(path, str(path))
    given = [paths[0], paths[2].absolute(), paths[1], paths[1].absolute()]
    assert list(manifests.labelled(given, None)) == ["t", "b/t", f"{tmp_path.name}/b/t"]
    assert len(manifests.describe_files(manifests.labelled(given, tmp_path))) == 3


def test_a_manifest_depends_on_the_input_alone(tmp_path):
    for name, workers in (("one", "1"), ("two", "8")):
        folder = tmp_path / name
        files.write_text(folder / "in.txt", "in")
        files.write_text(folder / "bin" / "out.txt", "out")
        manifests.write_manifest(
            folder / "manifest.json",
            command=[f"scripts/{name}/../x.py", "--workers", workers, f"--out={name}", "--seed", "1"],
            inputs=[folder / "in.txt"],
            outputs=[folder / "bin"],
            stages={"s": {"lines": 1}},
            extra={"level": "word"},
        )
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    read = json.loads((tmp_path / "one" / "manifest.json").read_bytes())
    assert read["command"] == "x.py --out DIR --seed 1" and read["stages"] == {"s": {"lines": 1}}
    assert set(read["inputs"]) == {"in.txt"} and read["outputs"]["bin"]["bytes"] == 3
    assert {"python", "numpy"} <= set(read["versions"])


def test_a_table():
    text = table([["train", 1234567], ["valid", 8]], ["split", "lines"])
    assert "| train   | 1,234,567 |" in text


@pytest.mark.parametrize("free", [0, 1 << 30])
def test_a_disk_that_torch_finds_full_is_one_line(tmp_path, monkeypatch, free):
    """torch.save ends in a RuntimeError without a file's name."""
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(OSError, match="No space left" if free == 0 else "Input/output") as caught:
        with files.atomic_path(tmp_path / "model.pt"):
            raise RuntimeError("basic_ios::clear: iostream error")
    assert caught.value.filename == str(tmp_path / "model.pt")
    with pytest.raises(RuntimeError, match="a bug"), files.atomic_path(tmp_path / "model.pt"):
        raise RuntimeError("a bug")
    assert not list(tmp_path.iterdir())


def test_links_in_a_circle_lead_nowhere(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.symlink_to(other)
    other.symlink_to(one)
    (tmp_path / "text").write_text("a")
    files.check_outputs({"--out": one}, {"text": tmp_path / "text", "other": other})
    with pytest.raises(UserError, match="one is also an input"):
        files.check_outputs({"--out": one}, {"text": one})
    with pytest.raises(UserError, match="one is there already"):
        files.write_text(one, "a")
