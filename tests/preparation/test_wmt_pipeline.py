"""prepare_wmt.py as a whole: what it makes, and that nothing stops it for good."""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import io
import json
import os
import random
import re
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import sacrebleu.dataset

from helpers import wmt_text
from helpers.commands import call
from helpers.faulty_server import serve
from helpers.folders import contents, prepare_status, refused
from helpers.shell import told
from relpos_fairseq.io import files, manifests
from relpos_fairseq.io.downloads import RemoteFile, fetch
from relpos_fairseq.io.progress import LogProgress
from relpos_fairseq.preparation import corpora, parallel_text, wmt

SMALL = ["--vocab-size", "60", "--workers", "1"]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return wmt_text.write_texts(tmp_path_factory.mktemp("text") / "en-de")


@pytest.fixture
def mine(text, tmp_path) -> Path:
    """A copy of the text, to be changed."""
    return shutil.copytree(text, tmp_path / "text")


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


@pytest.fixture(autouse=True, scope="module")
def quick():
    """Small chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_text, "LINES", 20)
        yield


def command(folder: Path, out: Path, *options: str, pair: str = "en-de") -> list[object]:
    return [*pair.split(), "--from-dir", folder, "--out", out, *SMALL, *options]


def prepare(*given, **pair: str) -> None:
    assert prepare_status("wmt", command(*given, **pair)) == 0


@pytest.fixture
def refuses(capsys) -> Callable[..., str]:
    """A function that prepares what cannot be; its error."""
    return lambda *given, **pair: refused(capsys, "wmt", command(*given, **pair))


def made(out: Path) -> dict[str, bytes]:
    """All files, but for locks and stamps."""
    return contents(out, ".stages")


def final(out: Path) -> dict[str, bytes]:
    """What later programs use."""
    used = ("data-bin/", "units/", "reference/", "text/")
    return {name: data for name, data in made(out).items() if name.startswith(used)}


def manifest_of(out: Path) -> dict:
    return json.loads((out / "manifest.json").read_text())


@pytest.fixture(scope="module")
def undisturbed(text, quick, tmp_path_factory) -> dict[str, bytes]:
    """What one run makes."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    prepare(text, out)
    return made(out)


# What it makes


def test_a_run_makes_what_it_says(text, undisturbed):
    manifest = json.loads(undisturbed["manifest.json"])
    clean = manifest["stages"]["clean"]["train"]
    kept = manifest["stages"]["merge"]["kept"]
    assert clean["read"][0] == wmt_text.TRAIN
    for language in ("en", "de"):
        lines = undisturbed[f"units/train.{language}"].decode().splitlines()
        assert len(lines) == kept[0]
        plain = [line.replace("@@ ", "").replace(" .", ".") for line in lines]
        assert plain == (text / f"train.{language}").read_text().splitlines()[: len(plain)]
        reference = (text / f"test.{language}").read_bytes()
        assert undisturbed[f"reference/test.{language}"] == reference
    assert not [name for name in undisturbed if "partial" in name]
    assert manifest["settings"]["vocab_size"] == 60 and "sacremoses" in manifest["versions"]
    assert str(text) not in undisturbed["manifest.json"].decode()


@pytest.mark.parametrize("workers", ["2", "3"])
def test_workers_change_nothing(text, undisturbed, out, workers):
    prepare(text, out, "--workers", workers)
    assert made(out) == undisturbed


def test_shards_change_nothing(text, undisturbed, out, tmp_path, refuses):
    assert "run with --shard 1/3 first" in refuses(text, out, "--merge", "3")
    for shard in (3, 1, 2):
        prepare(text, out, "--shard", f"{shard}/3")
    prepare(text, out, "--merge", "3")
    assert final(out) == {k: v for k, v in undisturbed.items() if k in final(out)}
    whole, merged = json.loads(undisturbed["manifest.json"]), manifest_of(out)
    assert merged["stages"]["clean"] == whole["stages"]["clean"] and merged["outputs"] == whole["outputs"]
    assert "was made with limits" in refuses(text, out, "--merge", "3", "--max-words", "9")
    for shard in (1, 2):
        prepare(text, tmp_path / "kept", "--shard", f"{shard}/2", "--tokenizer", "none", "--normalization", "identity")
    said = refuses(text, tmp_path / "kept", "--merge", "2", "--tokenizer", "none")
    assert "was made with normalization identity" in said


def test_shards_of_other_versions_are_not_joined(text, out, refuses):
    now = manifests.versions()
    for shard in ("1/2", "2/2"):
        prepare(text, out, "--shard", shard)
    without_regex = {name: version for name, version in now.items() if name != "regex"}
    for here, said in (
        (now | {"sacremoses": "9.9"}, f"(sacremoses {now['sacremoses']}, here 9.9)"),
        (without_regex, f"(regex {now['regex']}, here absent)"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wmt, "versions", lambda here=here: here)
            error = refuses(text, out, "--merge", "2")
            assert said in error and "--shard 1/2" in error
    prepare(text, out, "--merge", "2")


def test_every_file_is_hashed_once_a_run(text, undisturbed, out, monkeypatch):
    read, original = Counter(), files.hash_file

    def hash_file(path: Path, *algorithms) -> dict[str, str]:
        read[path] += 1
        return original(path, *algorithms)

    monkeypatch.setattr(files, "hash_file", hash_file)
    prepare(text, out)
    assert made(out) == undisturbed
    assert read and set(read.values()) == {1}


def test_a_shard_that_was_begun_again_is_not_joined(mine, out, refuses):
    for shard in ("1/2", "2/2"):
        prepare(mine, out, "--shard", shard)
    with pytest.MonkeyPatch.context() as patch:  # cut between two stages; the manifest is the old
        patch.setattr(wmt.WmtPreparation, "run_tokenise", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(mine, out, "--shard", "1/2", "--sample", "40")
    assert "is not of the files beside it: run --shard 1/2 again" in refuses(mine, out, "--merge", "2")
    lines = (mine / "train.de").read_text().splitlines(True)
    (mine / "train.de").write_text("".join(reversed(lines)))
    prepare(mine, out, "--shard", "1/2")
    assert "made of other text than is there now: run --shard 2/2 again" in refuses(mine, out, "--merge", "2")
    prepare(mine, out, "--shard", "2/2")
    prepare(mine, out, "--merge", "2")


def test_shards_of_a_sample_are_the_sample(text, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for out, *option in ((whole,), (parts, "--shard", "1/2"), (parts, "--shard", "2/2"), (parts, "--merge", "2")):
        prepare(text, out, "--sample", "40", "--seed", "5", *option)
    assert final(parts) == final(whole)
    assert manifest_of(whole)["stages"]["clean"]["train"]["read"][0] == 40


def test_a_second_run_does_nothing_and_a_change_only_what_follows(text, out, capsys, refuses):
    prepare(text, out)
    before = made(out)
    said = refuses(text, out, pair="de-en")
    assert f"--out {out} holds en-de, which de-en would replace: name another" in said
    prepare(text, out)
    stages = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert len(stages) == 9 and all(line.endswith("unchanged") for line in stages)
    assert made(out) == before
    prepare(text, out, "--vocab-size", "50")
    said = capsys.readouterr().out
    names = ("clean", "tokenise", "merge", "sample", "learn", "apply", "binarise")
    assert [name for name in names if f"{name} ... unchanged" not in said] == ["learn", "apply", "binarise"]
    (out / "text" / "train.en").write_text("corrected by hand\n")
    assert "train.en is there already and was not written by this command, or was changed" in refuses(text, out)
    (out / "text" / "train.en").unlink()
    prepare(text, out)
    assert made(out) == before


def test_counts_say_why_lines_went(text, mine, out, capsys):
    odd = [
        ("A pair", "Ein Paar"),
        ("", "nichts"),
        ("Same words", "same words"),
        ("w " * 300, "w " * 300),
        ("a b c d e f g h i", "eins"),
        ("Tab\there ||| x\r", "Tab\thier ||| y\r"),
        ("какой то текст здесь", "irgend ein Text hier"),
        ("A pair", "Ein Paar"),
        ((text / "test.en").read_text().split("\n")[0], "Etwas"),
    ]
    for language, lines in zip(("en", "de"), zip(*odd, strict=True), strict=True):
        path = mine / f"train.{language}"
        content = "\ufeff" + "".join(f"{line}\n" for line in lines) + path.read_text()
        (mine / f"train.{language}.gz").write_bytes(gzip.compress(content.encode()))
        path.unlink()
    prepare(mine, out)
    stages = manifest_of(out)["stages"]
    counts = {reason: number for reason, (number, *_) in stages["clean"]["train"].items()}
    reasons = ("empty", "identical sides", "too long", "length ratio", "wrong script", "in a test set")
    read = wmt_text.TRAIN + 9
    assert counts == dict.fromkeys(reasons, 1) | {"read": read, "kept": read - 6}
    assert stages["merge"]["duplicate"][0] == 1
    first = (out / "text" / "train.en").read_text().split("\n")[:2]
    assert first == ["A pair", "Tab here &#124; &#124; &#124; x"]
    said = capsys.readouterr().out
    assert "| duplicate" in said and "-1" in said


def test_czeng_by_a_folder(tmp_path):
    folder = tmp_path / "czeng"
    folder.mkdir()
    rows = [
        "a-b1-00train\t0.9\tdobrý den vám\tgood day to you",
        "only\ttwo",
        "a-b2-00train\t0.5\tvyňatý blok zde\tan excluded block",
    ]
    (folder / "00train.gz").write_bytes(gzip.compress("".join(f"{row}\n" for row in rows).encode()))
    (folder / "convert_czeng16_to_17.pl").write_text("my @bad = qw{2\n 7};\n")
    (only,) = parallel_text.czeng(folder, "en", "cs")
    assert only.skipped == {2, 7} and only.count() == 3
    assert list(only.rows()) == [(b"good day to you", "dobrý den vám".encode()), None, (b"", b"")]
    counts = Counter()
    (chunk,) = parallel_text.read_chunks(only, iter([True] * 3), counts, "drop")
    assert chunk.numbers == [1] and counts == {parallel_text.MALFORMED: 1, "empty": 1}


# What stops it


TEXT = {  # what is written to files of the text, "+": to its end, None: which are not there -> the error
    "unequal training": ({"train.de": "+eins mehr\n"}, "train.en has 150...train.de has 151"),
    "unequal validation": ({"valid.de": "+eins mehr\n"}, "valid.en has 7...valid.de has 8"),
    "unequal test": ({"test.de": "+eins mehr\n"}, "test.en has 9...test.de has 10"),
    "one side": ({"valid.de": None}, "has no valid.de"),
    "one side of a second test": ({"test_2.en": "x\n"}, "put it there, or take test_2.en away"),
    "empty test": ({"test.en": "", "test.de": ""}, "fill .../text/test.en and .../text/test.de"),
    "empty training": ({"train.en": "", "train.de": ""}, "train has no sentence: fill .../text/train.en"),
}


@pytest.mark.parametrize("name", TEXT)
def test_wrong_text_is_named_and_mended_text_is_prepared(text, mine, out, refuses, name):
    edits, said = TEXT[name]
    for file, content in edits.items():
        path = mine / file
        if content is None:
            path.unlink()
        else:
            path.write_text(path.read_text() + content[1:] if content.startswith("+") else content)
    assert re.search(told(said), refuses(mine, out))
    for file in edits:
        shutil.copy(text / file, mine) if (text / file).exists() else (mine / file).unlink()
    prepare(mine, out)


def test_invalid_utf8(mine, out, refuses):
    lines = (mine / "train.de").read_bytes().split(b"\n")
    lines[41] += b"\xe9"
    (mine / "train.de").write_bytes(b"\n".join(lines))
    assert re.search(told("train.de, line 42: invalid UTF-8...--on-bad-line drop"), refuses(mine, out))
    prepare(mine, out, "--on-bad-line", "drop")
    counts = manifest_of(out)["stages"]["clean"]["train"]
    assert counts["invalid UTF-8"][0] == 1 and counts["kept"][0] == wmt_text.TRAIN - 1


def test_own_text_of_any_shape(mine, out, capsys, refuses):
    """No test set is a warning; a name may hold a full stop; nothing left says why."""
    for path in mine.glob("test*"):
        path.unlink()
    valid = mine / "valid.en"
    valid.write_text(valid.read_text().replace("e", "\u03a9"))  # which training has not
    prepare(mine, out)
    said = capsys.readouterr().err
    assert "has no test set (test.en and test.de)" in said
    assert "are unknown (<unk>)" in said and "pieces of valid.en" in said
    for language in ("en", "de"):
        shutil.copy(mine / f"valid.{language}", mine / f"test.b.{language}")
    prepare(mine, out)
    assert manifest_of(out)["sets"]["test"] == "test.b" and "--from-dir DIR --out DIR" in manifest_of(out)["command"]
    said = refuses(mine, out, "--max-words", "1", "--max-dropped", "1")
    assert f"is left after filtering (read {wmt_text.TRAIN:,}, " in said


def test_words_are_cut_where_they_come_back(tmp_path, capsys):
    """Moses cuts Thai inside words: not by default; where it is asked for, the table names what changes less."""
    for split, first in (("train", 100), ("valid", 900)):
        numbers = [" ".join(str(number)) for number in range(first, first + 99)]
        (tmp_path / f"{split}.en").write_text("".join(f"a, {digits}\n" for digits in numbers))
        (tmp_path / f"{split}.th").write_text("".join(f"ที่นี่มีน้ำ {digits}\n" for digits in numbers))
    for options, tokenizer, share in (([], "none", "0.0%"), (["--tokenizer", "moses"], "moses", "100.0%, less with")):
        out = tmp_path / tokenizer
        prepare(tmp_path, out, *options, pair="en-th")
        assert manifest_of(out)["settings"]["tokenizer"] == tokenizer
        row = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| valid.th")][-1]
        assert share in row and ("--tokenizer none" in row) == bool(options)


REFUSED = {
    "en-en": "give [YEAR] PAIR",
    "wmt15 en-fr": "choose one of wmt14 en-de, wmt14 de-en, wmt14 en-fr, wmt14 fr-en",
    "en-ru": "no training set is known",
    "wmt15 en-de --test newstest1999": "sacrebleu has no test set newstest1999",
    "wmt15 en-de --without czeng": "the corpora are europarl-v7",
    "en-de --shard 1/2 --merge 2": "give one of them",
    "wmt15 en-de --czeng .": "--czeng: the corpora are europarl-v7",
    "wmt15 en-de --without europarl-v7 commoncrawl news-commentary-v10": "news-commentary-v10 leaves no training text",
    "en-de --model-type bpe": "--model-type bpe goes with --bpe sentencepiece",
    "en-de --max-ratio 0.5": "--max-ratio must be >= 1, got 0.5",
    "en-de --out a:b": "has a colon, at which fairseq parts the paths",
    "en-de --max-dropped 0": "--max-dropped must be above 0 and <= 1, got 0.0",
    "en-de --from-dir none": "--from-dir none does not exist: give a folder",
    "en-de --from-dir .": "has no train.en",
    "wmt15 en-de --from-dir TEXT --dry-run": "wmt15 names published sets",
    "en-de --from-dir TEXT --czeng .": "--czeng goes with published sets",
    "en-de --from-dir TEXT --without czeng": "--without goes with published sets",
    "en-de --from-dir TEXT --valid newstest2014": "--valid goes with published sets",
    "en-de --from-dir TEXT --test newstest2014": "--test goes with published sets",
}


@pytest.mark.parametrize("line", REFUSED)
def test_wrong_lines(text, out, tmp_path, capsys, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    given = ["--out", out, *(text if word == "TEXT" else word for word in line.split())]
    assert REFUSED[line] in refused(capsys, "wmt", given)


# Vaswani et al. 2017, section 5.1, and Shaw et al. 2018: newstest2014, of Europarl to Giga.
VASWANIS = ("europarl-v7", "commoncrawl", "news-commentary-v9", "sacrebleu wmt14 ")
SOURCES = {  # what a dry run names, and what it does not
    "wmt18 en-cs": (("europarl-v7", "657.6 MB", "paracrawl", "sacrebleu wmt15", "about 7,363.2 MB", "--czeng"), ()),
    "wmt14 en-de": (VASWANIS, ("giga-fren", "un ", "wmt15")),
    "wmt14 en-fr": ((*VASWANIS, "giga-fren", "un "), ("wmt15",)),
    "wmt15 en-de --valid newstest2014 newstest2014/full": (("sacrebleu wmt14 ", "sacrebleu wmt14/full"), ()),
}


@pytest.mark.parametrize("line", SOURCES)
def test_dry_run_names_sources_and_needs(out, capsys, line):
    assert prepare_status("wmt", [*line.split(), "--dry-run", "--out", out]) == 0
    said = capsys.readouterr().out
    named, others = SOURCES[line]
    assert {word for word in (*named, *others) if word in said} == {*named}
    assert not out.exists()


@pytest.mark.parametrize(("pair", "count"), [("en-de", 3), ("en-fr", 5)])
def test_no_two_corpora_of_wmt14_have_a_file_of_one_name(pair, count):
    found = corpora.training_set("wmt14", *pair.split("-"))
    members = [member for corpus in found for member in corpus.members.values()]
    assert len(found) == count and len(set(members)) == 2 * count


# Killed


def counted(patch: pytest.MonkeyPatch, event) -> None:
    """Calls `event` at every step: a chunk written, a file synced, a file renamed."""
    for owner, name in ((os, "replace"), (os, "fsync"), (LogProgress, "update")):
        original = getattr(owner, name)

        def step(*args, original=original, **kwargs):
            event()
            return original(*args, **kwargs)

        patch.setattr(owner, name, step)


def killed(text: Path, out: Path, at: int) -> None:
    """Runs in a child that kills itself at a step; returns when it is dead."""
    child = os.fork()
    if child == 0:
        steps = iter(range(1, at))
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        with pytest.MonkeyPatch.context() as patch:
            counted(patch, lambda: next(steps, None) or os.kill(os.getpid(), signal.SIGKILL))
            prepare_status("wmt", command(text, out))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_kill_at_any_moment(text, undisturbed, tmp_path):
    steps = []
    with pytest.MonkeyPatch.context() as patch:
        counted(patch, lambda: steps.append(1))
        prepare(text, tmp_path / "counted")
    for number, at in enumerate(random.Random(7).sample(range(1, len(steps) + 1), 6)):
        out = tmp_path / str(number)
        killed(text, out, at)
        for name, content in made(out).items():
            if not any(part.startswith(".partial-") for part in Path(name).parts):
                assert content == undisturbed[name], (at, name)  # nothing is half there
        killed(text, out, random.Random(at).randrange(1, 4))
        prepare(text, out)
        assert made(out) == undisturbed, at


@pytest.mark.parametrize(
    ("error", "at", "status", "said"),
    [
        (KeyboardInterrupt(), 9, 130, "run the same command again to continue"),
        (OSError(28, "No space left on device"), 0, 2, "error: no space left"),
    ],
    ids=["Ctrl-C", "a full disk"],
)
def test_a_run_that_was_ended_is_continued(text, undisturbed, out, capsys, error, at, status, said):
    steps = iter(range(at))

    def end() -> None:
        if next(steps, None) is None:
            raise error

    with pytest.MonkeyPatch.context() as patch:
        counted(patch, end)
        assert prepare_status("wmt", command(text, out)) == status
    told = capsys.readouterr().err
    assert said in told and "Traceback" not in told
    assert not list(out.rglob(".partial-*"))
    prepare(text, out)
    assert made(out) == undisturbed


# Downloads


@pytest.fixture
def server(text, monkeypatch):
    """A small WMT of two training archives and two test sets on a server of this machine."""
    packed = wmt_text.archives(text)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serve())
        server.stop = stack.close
        wmt_text.serve_archives(server, packed)

        def corpus(name: str) -> corpora.ParallelCorpus:
            urls = tuple(f"{server.url}/{mirror}/{name}.tgz" for mirror in ("one", "two"))
            content = packed[f"{name}.tgz"]
            source = RemoteFile(name, urls, f"{name}.tgz", len(content), hashlib.sha256(content).hexdigest())
            return corpora.ParallelCorpus(name, source, {one: f"{name}.de-en.{one}" for one in ("de", "en")}, 1000)

        monkeypatch.setitem(corpora.TRAINING, ("wmt15", "de"), (corpus("first"), corpus("second")))
        for name, archive, members in (
            ("wmt13", "dev.tgz", "test/newstest2013-src.{}.sgm"),
            ("wmt15", "test.tgz", "test/newstest2015-{}.sgm"),
        ):
            pairs = {"en-de": [members.format(one) for one in ("en", "de")]}
            given = {"data": [f"{server.url}/{archive}"], "md5": [wmt_text.md5(packed[archive])], "langpairs": pairs}
            monkeypatch.setitem(sacrebleu.dataset.DATASETS, name, SimpleNamespace(name=name, **given))
        quick = functools.partial(fetch, attempts=2, backoff=0.01, timeout=20)
        monkeypatch.setattr(parallel_text, "fetch", quick)
        yield server


def downloading(out: Path, *options: str) -> list[object]:
    return ["wmt15", "en-de", "--out", out, *SMALL, "--yes", *options]


def download(*given) -> int:
    return prepare_status("wmt", downloading(*given))


DOWNLOADED: dict[str, bytes] = {}


@pytest.fixture
def whole(server, tmp_path) -> dict[str, bytes]:
    """What an undisturbed download makes, once."""
    if not DOWNLOADED:
        assert download(tmp_path / "undisturbed") == 0
        DOWNLOADED.update(final(tmp_path / "undisturbed"))
        server.requests.clear()
    return DOWNLOADED


def test_from_nothing_to_binary(whole, undisturbed):
    first, second = (sorted(files["text/train.de"].split()) for files in (whole, undisturbed))
    assert first == second  # the archives hold the same pairs in another order
    assert whole["reference/test.de"] == undisturbed["reference/test.de"]


@pytest.mark.parametrize("fault", wmt_text.FAULTS)
def test_a_mirrors_fault_is_survived(server, whole, out, capsys, fault):
    """What was cut is continued; what is wrong comes from the other mirror."""
    wmt_text.spoil(server, "one/first.tgz", fault)
    assert download(out) == 0, capsys.readouterr().err
    assert final(out) == whole
    if fault == "cut":
        assert server.ranges("one/first.tgz")[1].startswith("bytes=")
    else:
        assert any(path.startswith("/two/") for path, *_ in server.requests)


@pytest.mark.parametrize("fault", ["404", "html", "corrupt"])
def test_a_fault_everywhere_is_one_error_and_a_new_run_continues(server, whole, text, out, capsys, fault):
    for name in ("one/first.tgz", "two/first.tgz", "test.tgz"):
        wmt_text.spoil(server, name, fault)
    capsys.readouterr()
    assert download(out) == 2
    said = capsys.readouterr().err  # what to put where has lines of its own
    assert said.count("error: ") == 1 and "Traceback" not in said and not (out / "data-bin").exists()
    wmt_text.serve_archives(server, wmt_text.archives(text))
    assert download(out) == 0
    assert final(out) == whole


def test_what_was_downloaded_stays(server, out):
    assert download(out) == 0
    shutil.copytree(out / "downloads", out / "mine")
    archives = sorted(made(out / "mine"))
    content = (out / "downloads" / "second.tgz").read_bytes()
    got = manifest_of(out)["stages"]["download"]["second"]
    assert got == {"file": "second.tgz", "sha256": hashlib.sha256(content).hexdigest()}
    assert download(out, "--without", "second") == 0
    assert "second.tgz" in archives and sorted(made(out / "downloads")) == archives
    for more in ([], ["--without", "second"]):
        assert download(out, "--from-dir", str(out / "mine"), *more) == 0
    assert sorted(made(out / "mine")) == archives


def test_a_continued_run_needs_room_for_what_is_missing_alone(server, out, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(wmt, "require_space", lambda _, size: asked.append(size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wmt.WmtPreparation, "run_clean", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            download(out)
    there = sum(len(data) for data in made(out).values())
    assert download(out) == 0
    assert len(asked) == 2 and asked[1] <= max(0, asked[0] - there)
    (tmp_path / "gone").symlink_to("vanished")  # as a file does that another shard renames
    assert files.bytes_below(tmp_path) > there


def test_a_download_that_nobody_agreed_to_is_refused_before_anything_is_made(server, out, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))  # no terminal
    said = refused(capsys, "wmt", ["wmt15", "en-de", "--out", out])
    assert "would download first.tgz, second.tgz, wmt13.dev.tgz, wmt15.test.tgz (" in said and "--yes" in said, said
    assert not server.requests and not out.exists()


def test_no_network_says_where_to_put_what(server, whole, text, out, tmp_path, capsys):
    server.stop()
    assert download(out) == 2
    said = capsys.readouterr().err
    for name in ("first.tgz", "second.tgz", "wmt15.test.tgz", "wmt13.dev.tgz", "--from-dir"):
        assert name in said, said
    folder, packed = tmp_path / "archives", wmt_text.archives(text)
    folder.mkdir()
    names = {"dev.tgz": "wmt13.dev.tgz", "test.tgz": "wmt15.test.tgz"}
    for name, content in packed.items():
        (folder / names.get(name, name)).write_bytes(content)
    assert download(out, "--from-dir", str(folder)) == 0
    assert final(out) == whole
    (folder / "wmt15.test.tgz").write_bytes(packed["test.tgz"][:-40])
    assert "expected: replace it" in refused(capsys, "wmt", downloading(out, "--from-dir", str(folder)))


def test_an_archive_that_leads_out_of_its_folder(server, out, tmp_path, capsys, monkeypatch):
    (corpus, _) = corpora.TRAINING["wmt15", "de"]
    evil = wmt_text.pack({"../../first.de-en.de": "x\n", "first.de-en.en": "y\n"})
    wmt_text.serve_archives(server, {"first.tgz": evil})
    source = RemoteFile("first", corpus.archive.urls, "first.tgz")
    only = corpora.ParallelCorpus("first", source, corpus.members, 10)
    monkeypatch.setitem(corpora.TRAINING, ("wmt15", "de"), (only,))
    assert "../" in refused(capsys, "wmt", downloading(out))
    assert not (tmp_path / "first.de-en.de").exists()


# Real text


@pytest.mark.slow
@pytest.mark.parametrize(("pair", "bpe"), [("en-de", "subword-nmt"), ("en-cs", "sentencepiece")])
def test_multi30k(shared_data, out, tmp_path, monkeypatch, pair, bpe):
    from fairseq.data import Dictionary, data_utils

    monkeypatch.setattr(parallel_text, "LINES", 2000)
    target, splits = pair[3:], ("train", "valid", "test")
    options = ["--sample", "800", "--bpe", bpe, "--vocab-size", "400", "--workers", "2"]
    prepare(shared_data / "multi30k", out, *options, pair=pair)
    for split in splits:
        for language in ("en", target):
            lines = (out / "units" / f"{split}.{language}").read_text().splitlines()
            dictionary = Dictionary.load(str(out / "data-bin" / f"dict.{language}.txt"))
            prefix = out / "data-bin" / f"{split}.{pair}.{language}"
            dataset = data_utils.load_indexed_dataset(str(prefix), dictionary)
            assert len(dataset) == len(lines)
            for number in (0, len(lines) // 2, len(lines) - 1) if split == "train" else ():
                assert dictionary.unk() not in dataset[number]
                assert dictionary.string(dataset[number]) == lines[number]
    reference = gzip.open(shared_data / "multi30k" / f"test_2016_flickr.{target}.gz").read()
    assert (out / "reference" / f"test.{target}").read_bytes() == reference
    sets = [f"--{split}pref={out / 'units' / split}" for split in splits]
    given = ["--joined-dictionary", "--srcdict", str(out / "units" / "dict.txt")]  # with all characters
    sides = ["--source-lang", "en", "--target-lang", target, *given]
    call("preprocess", *sides, *sets, "--destdir", str(tmp_path / "its"))
    for path in (tmp_path / "its").iterdir():
        assert path.name == "preprocess.log" or path.read_bytes() == (out / "data-bin" / path.name).read_bytes()
