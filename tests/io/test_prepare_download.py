"""Downloads: every fault of a server, resuming, mirrors, hashes."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import random
import socket
import sys
import tarfile
from types import SimpleNamespace

import pytest

from helpers.faulty_server import serve
from relpos_fairseq.io import downloads, progress
from relpos_fairseq.io.downloads import RemoteFile, agree, fetch
from relpos_fairseq.io.errors import UserError

DATA = random.Random(1).randbytes(300_000)
SHA = hashlib.sha256(DATA).hexdigest()
QUICK = {"backoff": 0.001, "timeout": 5.0}


@pytest.fixture
def server():
    with serve() as running:
        yield running


def source(*urls: str, name: str = "a.bin", sha256: str | None = SHA, **more) -> RemoteFile:
    return RemoteFile(name, urls, name, sha256=sha256, **more)


def get(folder, *sources, **more) -> bytes:
    paths = fetch(sources, folder, **{**QUICK, **more})
    return paths[sources[0].name].read_bytes()


def left(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_file_comes_once(server, tmp_path):
    url = server.put("a.bin", DATA)
    for _ in range(2):
        assert get(tmp_path, source(url, size=len(DATA))) == DATA
    assert server.ranges("a.bin") == [None]
    assert left(tmp_path) == {"a.bin"}


def test_a_file_without_a_hash_is_pinned(server, tmp_path):
    url = server.put("a.bin", DATA)
    for _ in range(2):
        assert get(tmp_path, source(url, sha256=None)) == DATA
    assert len(server.requests) == 1
    assert (tmp_path / "a.bin.sha256").read_text() == f"{SHA}  a.bin\n"
    (tmp_path / "a.bin").unlink()
    server.put("a.bin", DATA[::-1])
    with pytest.raises(UserError, match="first download had another hash: delete .*a.bin.sha"):
        get(tmp_path, source(url, sha256=None))
    (tmp_path / "a.bin.sha256").unlink()
    assert get(tmp_path, source(url, sha256=None)) == DATA[::-1]


CUT = [("stop", 100_000)]
STOPS = {"faults": [*CUT, ("stop", 1)]}
CONTINUED = [None, "bytes=100000-", "bytes=100001-"]
SURVIVED = {  # what a server does, what is known of the file, and which parts of it are asked for
    "stops mid-file": (STOPS, {}, CONTINUED),
    "stops, without an ETag": (STOPS | {"etag": None}, {}, CONTINUED),
    "stops, without a hash": (STOPS, {"sha256": None}, CONTINUED),
    # nobody knows whether the rest belongs to the beginning
    "stops, with neither": (STOPS | {"etag": None}, {"sha256": None}, [None] * 3),
    "stalls": ({"faults": [("stall", 131_072)]}, {}, [None, "bytes=131072-"]),
    "is slow": ({"piece": 1000}, {}, [None]),
    "knows no ranges": ({"faults": CUT, "ranges": False}, {}, [None, "bytes=100000-"]),
    "sends a wrong range": ({"faults": [*CUT, ("wrong range",)]}, {}, [None, "bytes=100000-", None]),
    "is mute and busy": ({"faults": [("mute",), ("status", 503), ("status", 429)]}, {}, [None] * 4),
    "tells no length": ({"length": False}, {"size": len(DATA)}, [None]),
}


@pytest.mark.parametrize("name", SURVIVED)
def test_a_server_that(server, tmp_path, name):
    does, known, ranges = SURVIVED[name]
    url = server.put("a.bin", DATA, **does | {"faults": [*does.get("faults", [])]})  # which are used up
    assert get(tmp_path, source(url, **known), timeout=1.0) == DATA
    assert server.ranges("a.bin") == ranges


def test_a_body_of_unknown_length_that_ends_early(server, tmp_path):
    url = server.put("a.bin", DATA, length=False, faults=[("stop", 10)] * 9)
    with pytest.raises(UserError, match="got 10 bytes, 300,000 expected"):
        get(tmp_path, source(url, sha256=None, size=len(DATA)))


def test_a_later_run_continues(server, tmp_path):
    url = server.put("a.bin", DATA, faults=[("stop", 123_456)] + [("stop", 0)] * 9)
    with pytest.raises(UserError, match="breaks after 123,456 bytes, 2 times without"):
        get(tmp_path, source(url), attempts=2)
    assert left(tmp_path) == {"a.bin.partial", "a.bin.partial.json"}
    server.put("a.bin", DATA)
    server.requests.clear()
    assert get(tmp_path, source(url)) == DATA
    assert server.ranges("a.bin") == ["bytes=123456-"]
    assert left(tmp_path) == {"a.bin"}


def test_a_file_that_changed_between_two_runs(server, tmp_path):
    url = server.put("a.bin", DATA[::-1], faults=[("stop", 100_000)] + [("stop", 0)] * 3)
    with pytest.raises(UserError):
        get(tmp_path, source(url, sha256=None), attempts=2)
    server.put("a.bin", DATA, etag='"2"')  # If-Range tells
    assert get(tmp_path, source(url, sha256=None)) == DATA


def test_a_part_that_another_program_wrote_is_not_continued(server, tmp_path):
    url = server.put("a.bin", DATA, faults=[("stop", 1000)] + [("stop", 0)] * 9)
    with pytest.raises(UserError):
        get(tmp_path, source(url, sha256=None), attempts=2)
    (tmp_path / "theirs").write_bytes(b"x" * 1000)
    (tmp_path / "theirs").rename(tmp_path / "a.bin.partial")
    server.put("a.bin", DATA)
    assert get(tmp_path, source(url, sha256=None)) == DATA


@pytest.mark.parametrize(
    ("part", "etag", "ranges"),
    [
        (b"x" * 1000, None, ["bytes=1000-", None]),  # of another file: the hash tells
        (DATA, '"1"', ["bytes=300000-"]),
        (DATA + b"extra", '"1"', ["bytes=300005-", None]),
    ],
    ids=["another file's", "complete", "too long"],
)
def test_a_part_that_is_no_beginning(server, tmp_path, part, etag, ranges):
    (tmp_path / "a.bin.partial").write_bytes(part)
    url = server.put("a.bin", DATA, etag=etag)
    assert get(tmp_path, source(url)) == DATA
    assert server.ranges("a.bin") == ranges


FAULTS = {
    "404": (("status", 404), DATA, "status 404"),
    "403": (("status", 403), DATA, "status 403"),
    "html": (("html",), DATA, "a web page, not"),
    "checksum": (("ok",), DATA[::-1], "got sha256"),
    "size": (("ok",), DATA[:-1], "the server has 299,999 bytes, 300,000 expected"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_mirror(server, tmp_path, name):
    fault, data, message = FAULTS[name]
    bad = server.put("bad", data, faults=[fault] * 2)
    good = server.put("good", DATA)
    size = len(DATA) if name == "size" else None
    with pytest.raises(UserError, match=message) as caught:
        get(tmp_path, source(bad, size=size))
    assert "--from-dir" in str(caught.value) and "a.bin" in str(caught.value)
    assert not (tmp_path / "a.bin").exists()
    assert get(tmp_path, source(bad, good, size=size)) == DATA
    assert left(tmp_path) == {"a.bin"}


def test_no_network_says_what_to_put_where(tmp_path):
    with socket.socket() as free:  # bound, but nobody listens
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/a.bin"
        with pytest.raises(UserError) as caught:
            get(tmp_path, source(url, size=len(DATA)))
    text = str(caught.value)
    assert "cannot be reached" in text and "--from-dir" in text
    assert f"a.bin (0.3 MB, sha256 {SHA}) from {url}" in text


def test_local_files(tmp_path):
    folder = tmp_path / "mine" / "deep"
    folder.mkdir(parents=True)
    (folder / "a.bin").write_bytes(DATA)
    out = tmp_path / "out"
    paths = fetch([source("http://nowhere.invalid/a")], out, from_dir=tmp_path / "mine", **QUICK)
    assert paths == {"a.bin": folder / "a.bin"} and not out.exists()
    (folder / "a.bin").write_bytes(DATA[::-1])
    with pytest.raises(UserError, match="a.bin has sha256 .* expected: replace it"):
        fetch([source()], out, from_dir=tmp_path, **QUICK)
    with pytest.raises(UserError, match="lacks files; put there:\n  b.bin"):
        fetch([source(name="b.bin")], out, from_dir=tmp_path, **QUICK)


def test_several_at_a_time_and_a_failure_spoils_no_other(server, tmp_path):
    wanted = [source(server.put(f"{i}.bin", DATA), name=f"{i}.bin") for i in range(5)]
    lost = source(f"{server.url}/lost", name="lost.bin")
    with pytest.raises(UserError, match="could not download lost.bin\n"):
        fetch([lost, *wanted], tmp_path, workers=3, **QUICK)
    assert left(tmp_path) == {f"{i}.bin" for i in range(5)}


def test_a_full_disk_is_no_network_error(server, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(downloads, "next_block", full)
    with pytest.raises(OSError) as caught:
        get(tmp_path, source(server.put("a.bin", DATA)))
    assert caught.value.filename == str(tmp_path / "a.bin.partial")


def test_a_file_name_may_not_lead_elsewhere():
    with pytest.raises(UserError, match="not a plain file name"):
        RemoteFile("a", ["http://x"], "../a")


def test_what_happens_is_said(server, tmp_path, capsys):
    url = server.put("a.bin", DATA, faults=[("stop", 100_000)])
    get(tmp_path, source(f"{server.url}/lost", url, size=len(DATA)))
    said = capsys.readouterr().out
    assert "downloading a.bin (0.3 MB)" in said
    assert f"{server.url}/lost: status 404 Not Found; asking the next address" in said
    assert "200000 more expected); continuing after 100,000 bytes" in said


@pytest.mark.parametrize("size", [len(DATA), None])
def test_on_a_terminal_there_is_a_bar(server, tmp_path, monkeypatch, size):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "FIRST", 0.0)
    url = server.put("a.bin", DATA, faults=[("stop", 100_000)])
    assert get(tmp_path, source(url, size=size)) == DATA
    assert "download: " in terminal.getvalue() and "300k" in terminal.getvalue()


TAR = io.BytesIO()
with tarfile.open(fileobj=TAR, mode="w:gz") as made:
    made.addfile(tarfile.TarInfo("text"), io.BytesIO())


@pytest.mark.parametrize(
    ("name", "data"), [("a.tgz", TAR.getvalue()), ("a.txt.gz", gzip.compress(DATA))], ids=["tgz", "gz"]
)
def test_without_a_hash_an_archive_says_whether_it_is_whole(server, tmp_path, name, data):
    url = server.put(name, data, length=False, etag=None, faults=[("stop", len(data) - 4)])
    with pytest.raises(UserError, match=f"{name}: got an archive that is truncated or damaged"):
        get(tmp_path, source(url, name=name, sha256=None))
    assert left(tmp_path) == set()
    assert get(tmp_path, source(url, name=name, sha256=None)) == data
    assert left(tmp_path) == {name, f"{name}.sha256"}


def test_a_plain_file_whose_end_nobody_tells_is_not_taken(server, tmp_path):
    url = server.put("a.bin", DATA, length=False, faults=[("stop", 10)])
    for _ in range(2):
        with pytest.raises(UserError, match="a length that the server does not tell"):
            get(tmp_path, source(url, sha256=None))
    assert left(tmp_path) == set()


def typed(answer: str | None):
    """Return a standard input: a terminal at which `answer` is typed, or none."""
    return SimpleNamespace(isatty=lambda: answer is not None, readline=lambda: answer)


@pytest.mark.parametrize("answer", [None, "", "\n", "n\n", "yes please\n"])
def test_nothing_is_downloaded_unless_it_was_agreed_to(tmp_path, monkeypatch, capsys, answer):
    monkeypatch.setattr(sys, "stdin", typed(answer))
    sources = [source(name="a.bin", size=3_000_000), source(name="b.bin")]
    with pytest.raises(UserError) as error:
        agree(sources, tmp_path / "there", False)
    what = f"download a.bin, b.bin (3.0 MB and 1 of unknown size) to {tmp_path / 'there'}"
    if answer is None:
        assert str(error.value).startswith(f"would {what}: add --yes")
    else:
        assert str(error.value) == "nothing was downloaded" and capsys.readouterr().err == f"{what}? [y/N] "
    assert left(tmp_path) == set()


@pytest.mark.parametrize(
    ("answer", "yes", "there", "agreed"),
    [
        ("Y\n", False, {}, True),
        (None, False, {}, False),
        (None, True, {}, True),
        (None, False, {"a.bin.partial": DATA[:10]}, True),  # the part that an interrupted download left
        (None, False, {"a.bin": DATA[:10]}, False),
        (None, False, {"a.bin": DATA}, True),
    ],
)
def test_what_was_agreed_to_is_not_asked_again(tmp_path, monkeypatch, answer, yes, there, agreed):
    monkeypatch.setattr(sys, "stdin", typed(answer))
    for name, content in there.items():
        (tmp_path / name).write_bytes(content)
    with contextlib.nullcontext() if agreed else pytest.raises(UserError, match="would download a.bin"):
        agree([source(size=len(DATA))], tmp_path, yes)
