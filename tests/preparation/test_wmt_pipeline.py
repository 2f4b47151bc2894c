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
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import sacrebleu.dataset

from helpers import wmt_text
from helpers.commands import call
from helpers.faulty_server import serve
from helpers.folders import prepare_status
from relpos_fairseq.io import files, manifests
from relpos_fairseq.io.downloads import RemoteFile, fetch
from relpos_fairseq.io.progress import LogProgress
from relpos_fairseq.preparation import corpora as sources
from relpos_fairseq.preparation import parallel_text
from relpos_fairseq.preparation import wmt as shards
from relpos_fairseq.preparation import wmt as stages

UNSEEN = (".stages",)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return wmt_text.write_texts(tmp_path_factory.mktemp("text") / "en-de")


@pytest.fixture(autouse=True, scope="module")
def quick():
    """Small chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_text, "LINES", 20)
        yield


def prepare(folder: Path, out: Path, *options: str, pair: str = "en-de") -> int:
    base = [*pair.split(), "--from-dir", str(folder), "--out", str(out)]
    small = ["--vocab-size", "60", "--workers", "1"]
    return prepare_status("wmt", [*base, *small, *options])


def made(out: Path) -> dict[str, bytes]:
    """All files, but for locks and stamps."""
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file() and not set(UNSEEN) & set(path.relative_to(out).parts)
    }


def final(out: Path) -> dict[str, bytes]:
    """What later programs use."""
    return {
        name: data
        for name, data in made(out).items()
        if name.split("/")[0] in ("data-bin", "units", "reference", "text")
    }


@pytest.fixture(scope="module")
def undisturbed(text, quick, tmp_path_factory) -> dict[str, bytes]:
    """What one run makes."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    assert prepare(text, out) == 0
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


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_change_nothing(text, undisturbed, tmp_path, workers):
    assert prepare(text, tmp_path / "out", "--workers", str(workers)) == 0
    assert made(tmp_path / "out") == undisturbed


def test_shards_change_nothing(text, undisturbed, tmp_path, capsys):
    out = tmp_path / "out"
    assert prepare(text, out, "--merge", "3") == 2
    assert "run with --shard 1/3 first" in capsys.readouterr().err
    for shard in (3, 1, 2):
        assert prepare(text, out, "--shard", f"{shard}/3") == 0
    assert prepare(text, out, "--merge", "3") == 0
    assert final(out) == {k: v for k, v in undisturbed.items() if k in final(out)}
    whole, merged = (json.loads(x) for x in (undisturbed["manifest.json"], (out / "manifest.json").read_bytes()))
    assert merged["stages"]["clean"] == whole["stages"]["clean"]
    assert merged["outputs"] == whole["outputs"]
    capsys.readouterr()
    assert prepare(text, out, "--merge", "3", "--max-words", "9") == 2
    assert "was made with limits" in capsys.readouterr().err
    kept = tmp_path / "kept"
    for shard in (1, 2):
        chosen = "--tokenizer", "none", "--normalization", "identity"
        assert prepare(text, kept, "--shard", f"{shard}/2", *chosen) == 0
    assert prepare(text, kept, "--merge", "2", "--tokenizer", "none") == 2
    assert "was made with normalization identity" in capsys.readouterr().err


def test_shards_of_other_versions_are_not_joined(text, tmp_path, capsys):
    out = tmp_path / "out"
    now = manifests.versions()
    for shard in ("1/2", "2/2"):
        assert prepare(text, out, "--shard", shard) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "versions", lambda: now | {"sacremoses": "9.9"})
        assert prepare(text, out, "--merge", "2") == 2
        said = error(capsys)
        assert f"(sacremoses {now['sacremoses']}, here 9.9)" in said and "--shard 1/2" in said
        patch.setattr(shards, "versions", lambda: {k: now[k] for k in now if k != "regex"})
        assert prepare(text, out, "--merge", "2") == 2
        assert f"(regex {now['regex']}, here absent)" in error(capsys)
    assert prepare(text, out, "--merge", "2") == 0


def test_every_file_is_hashed_once_a_run(text, undisturbed, tmp_path, monkeypatch):
    read, original = Counter(), files.hash_file

    def hash_file(path: Path, *algorithms) -> dict[str, str]:
        read[path] += 1
        return original(path, *algorithms)

    monkeypatch.setattr(files, "hash_file", hash_file)
    assert prepare(text, tmp_path / "out") == 0
    assert made(tmp_path / "out") == undisturbed
    assert read and set(read.values()) == {1}


def test_a_shard_that_was_begun_again_is_not_joined(text, tmp_path, capsys):
    folder, out = shutil.copytree(text, tmp_path / "text"), tmp_path / "out"
    for shard in ("1/2", "2/2"):
        assert prepare(folder, out, "--shard", shard) == 0
    with pytest.MonkeyPatch.context() as patch:  # cut between two stages; the manifest is the old
        patch.setattr(stages.WmtPreparation, "run_tokenise", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(folder, out, "--shard", "1/2", "--sample", "40")
    capsys.readouterr()
    assert prepare(folder, out, "--merge", "2") == 2
    assert "is not of the files beside it: run --shard 1/2 again" in error(capsys)
    lines = (folder / "train.de").read_text().splitlines(True)
    (folder / "train.de").write_text("".join(reversed(lines)))
    assert prepare(folder, out, "--shard", "1/2") == 0
    capsys.readouterr()
    assert prepare(folder, out, "--merge", "2") == 2
    assert "made of other text than is there now: run --shard 2/2 again" in error(capsys)
    assert prepare(folder, out, "--shard", "2/2") == 0
    assert prepare(folder, out, "--merge", "2") == 0


def test_shards_of_a_sample_are_the_sample(text, tmp_path):
    options = ("--sample", "40", "--seed", "5")
    assert prepare(text, tmp_path / "whole", *options) == 0
    for shard in ("1/2", "2/2"):
        assert prepare(text, tmp_path / "parts", *options, "--shard", shard) == 0
    assert prepare(text, tmp_path / "parts", *options, "--merge", "2") == 0
    assert final(tmp_path / "parts") == final(tmp_path / "whole")
    read = json.loads((tmp_path / "whole" / "manifest.json").read_text())["stages"]["clean"]
    assert read["train"]["read"][0] == 40


def test_another_pair_does_not_replace_a_pair(text, tmp_path, capsys):
    assert prepare(text, tmp_path / "out") == 0
    before = made(tmp_path / "out")
    assert prepare(text, tmp_path / "out", pair="de-en") == 2
    assert f"--out {tmp_path / 'out'} holds en-de, which de-en would replace: name another" in capsys.readouterr().err
    assert made(tmp_path / "out") == before


def test_a_second_run_does_nothing_and_a_change_only_what_follows(text, tmp_path, capsys):
    out = tmp_path / "out"
    assert prepare(text, out) == 0
    before = made(out)
    capsys.readouterr()
    assert prepare(text, out) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert len(said) == 9 and all(line.endswith("unchanged") for line in said)
    assert made(out) == before
    assert prepare(text, out, "--vocab-size", "50") == 0
    said = capsys.readouterr().out
    changed = [
        s
        for s in ("clean", "tokenise", "merge", "sample", "learn", "apply", "binarise")
        if f"{s} ... unchanged" not in said
    ]
    assert changed == ["learn", "apply", "binarise"]
    (out / "text" / "train.en").write_text("corrected by hand\n")
    assert prepare(text, out) == 2
    assert "train.en is there already and was not written by this command, or was changed" in capsys.readouterr().err
    (out / "text" / "train.en").unlink()
    assert prepare(text, out) == 0
    assert made(out) == before


def test_counts_say_why_lines_went(text, tmp_path, capsys):
    folder = shutil.copytree(text, tmp_path / "text")
    odd = {
        "en": [
            "A pair",
            "",
            "Same words",
            "w " * 300,
            "a b c d e f g h i",
            "Tab\there ||| x\r",
            "какой то текст здесь",
            "A pair",
            (text / "test.en").read_text().split("\n")[0],
        ],
        "de": [
            "Ein Paar",
            "nichts",
            "same words",
            "w " * 300,
            "eins",
            "Tab\thier ||| y\r",
            "irgend ein Text hier",
            "Ein Paar",
            "Etwas",
        ],
    }
    for language, lines in odd.items():
        path = folder / f"train.{language}"
        content = "\ufeff" + "".join(f"{line}\n" for line in lines) + path.read_text()
        with gzip.open(f"{path}.gz", "wt", encoding="utf-8", newline="") as file:
            file.write(content)
        path.unlink()
    out = tmp_path / "out"
    assert prepare(folder, out) == 0
    made_by = json.loads((out / "manifest.json").read_text())["stages"]
    counts = {key: value[0] for key, value in made_by["clean"]["train"].items()}
    reasons = ("empty", "identical sides", "too long", "length ratio", "wrong script", "in a test set")
    assert [counts[reason] for reason in reasons] == [1] * 6
    assert counts["read"] == wmt_text.TRAIN + 9 and counts["kept"] == counts["read"] - 6
    assert made_by["merge"]["duplicate"][0] == 1
    first = (out / "text" / "train.en").read_text().split("\n")[:2]
    assert first == ["A pair", "Tab here &#124; &#124; &#124; x"]
    said = capsys.readouterr().out
    assert "| duplicate" in said and "-1" in said


def test_czeng_by_a_folder(tmp_path, monkeypatch):
    folder = tmp_path / "czeng"
    folder.mkdir()
    rows = [
        "a-b1-00train\t0.9\tdobrý den vám\tgood day to you",
        "only\ttwo",
        "a-b2-00train\t0.5\tvyňatý blok zde\tan excluded block",
    ]
    with gzip.open(folder / "00train.gz", "wt", encoding="utf-8") as file:
        file.write("".join(f"{row}\n" for row in rows))
    (folder / "convert_czeng16_to_17.pl").write_text("my @bad = qw{2\n 7};\n")
    (only,) = parallel_text.czeng(folder, "en", "cs")
    assert only.skipped == {2, 7} and only.count() == 3
    assert list(only.rows()) == [(b"good day to you", "dobrý den vám".encode()), None, (b"", b"")]
    counts = Counter()
    (chunk,) = parallel_text.read_chunks(only, iter([True] * 3), counts, "drop")
    assert chunk.numbers == [1] and counts == {parallel_text.MALFORMED: 1, "empty": 1}


# What stops it


def error(capsys) -> str:
    """The one line of an error."""
    lines = capsys.readouterr().err.strip().splitlines()
    said = [line for line in lines if line.startswith("error: ")]
    assert len(said) == 1 and "Traceback" not in "".join(lines), lines
    return said[0]


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_unequal_lengths_name_both_files_and_counts(text, tmp_path, capsys, split):
    folder = shutil.copytree(text, tmp_path / "text")
    with (folder / f"{split}.de").open("a") as file:
        file.write("eins mehr\n")
    assert prepare(folder, tmp_path / "out") == 2
    said = error(capsys)
    count = {"train": wmt_text.TRAIN, "valid": wmt_text.VALID, "test": wmt_text.TEST}[split]
    assert f"{split}.en has {count:,}" in said and f"{split}.de has {count + 1:,}" in said
    shutil.copy(text / f"{split}.de", folder)
    assert prepare(folder, tmp_path / "out") == 0


def test_invalid_utf8(text, undisturbed, tmp_path, capsys):
    folder = shutil.copytree(text, tmp_path / "text")
    lines = (folder / "train.de").read_bytes().split(b"\n")
    lines[41] += b"\xe9"
    (folder / "train.de").write_bytes(b"\n".join(lines))
    assert prepare(folder, tmp_path / "out") == 2
    said = error(capsys)
    assert "train.de, line 42: invalid UTF-8" in said and "--on-bad-line drop" in said
    assert prepare(folder, tmp_path / "out", "--on-bad-line", "drop") == 0
    counts = json.loads((tmp_path / "out" / "manifest.json").read_text())["stages"]["clean"]
    assert counts["train"]["invalid UTF-8"][0] == 1
    assert counts["train"]["kept"][0] == wmt_text.TRAIN - 1


def test_what_is_missing_is_named(text, tmp_path, capsys):
    folder = shutil.copytree(text, tmp_path / "text")
    (folder / "valid.de").unlink()
    assert prepare(folder, tmp_path / "out") == 2
    assert "has no valid.de" in error(capsys)
    shutil.copy(text / "valid.de", folder)
    (folder / "test_2.en").write_text("only in English\n")
    assert prepare(folder, tmp_path / "out") == 2
    assert "put it there, or take test_2.en away" in error(capsys)
    for path in folder.glob("test_2.*"):
        path.unlink()
    for language in ("en", "de"):
        (folder / f"test.{language}").write_text("")
    assert prepare(folder, tmp_path / "out") == 2
    assert f"fill {folder}/test.en and {folder}/test.de" in error(capsys)
    assert prepare(tmp_path / "none", tmp_path / "out") == 2
    assert f"--from-dir {tmp_path / 'none'} does not exist: give a folder" in error(capsys)
    assert prepare(tmp_path, tmp_path / "out") == 2
    assert "has no train.en" in error(capsys)


def test_own_text_of_any_shape(text, undisturbed, tmp_path, capsys):
    """No test set is a warning; a name may hold a full stop; nothing left says why."""
    folder, out = shutil.copytree(text, tmp_path / "text"), tmp_path / "out"
    for path in folder.glob("test*"):
        path.unlink()
    valid = folder / "valid.en"
    valid.write_text(valid.read_text().replace("e", "\u03a9"))  # which training has not
    assert prepare(folder, out) == 0
    said = capsys.readouterr()
    assert "has no test set (test.en and test.de)" in said.err
    assert "are unknown (<unk>)" in said.err and "pieces of valid.en" in said.err
    for language in ("en", "de"):
        shutil.copy(folder / f"valid.{language}", folder / f"test.b.{language}")
    assert prepare(folder, out) == 0
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["sets"]["test"] == "test.b"
    assert "--from-dir DIR --out DIR" in manifest["command"]
    capsys.readouterr()
    assert prepare(folder, out, "--max-words", "1", "--max-dropped", "1") == 2
    assert f"is left after filtering (read {wmt_text.TRAIN:,}, " in error(capsys)
    for language in ("en", "de"):
        (folder / f"train.{language}").write_text("")
    assert prepare(folder, out) == 2
    assert f"train has no sentence: fill {folder}/train.en" in error(capsys)
    assert prepare(folder, tmp_path / "no", "--dry-run", pair="wmt15 en-de") == 2
    assert "wmt15 names published sets" in error(capsys)


def test_words_are_cut_where_they_come_back(tmp_path, capsys):
    """Moses cuts Thai inside words: not by default; where it is asked for, the table names what changes less."""
    for split, first in (("train", 100), ("valid", 900)):
        lines = [(f"a, {digits}", f"ที่นี่มีน้ำ {digits}") for digits in map(" ".join, map(str, range(first, first + 99)))]
        for language, side in zip(("en", "th"), zip(*lines, strict=True), strict=True):
            (tmp_path / f"{split}.{language}").write_text("".join(f"{line}\n" for line in side))
    for options, tokenizer, share in (([], "none", "0.0%"), (["--tokenizer", "moses"], "moses", "100.0%, less with")):
        out = tmp_path / tokenizer
        assert prepare(tmp_path, out, *options, pair="en-th") == 0
        assert json.loads((out / "manifest.json").read_text())["settings"]["tokenizer"] == tokenizer
        row = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| valid.th")][-1]
        assert share in row and ("--tokenizer none" in row) == bool(options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["en-en"], "give [YEAR] PAIR"),
        (["wmt15", "en-fr"], "choose one of wmt14 en-de, wmt14 de-en, wmt14 en-fr, wmt14 fr-en"),
        (["en-ru"], "no training set is known"),
        (["wmt15", "en-de", "--test", "newstest1999"], "sacrebleu has no test set newstest1999"),
        (["wmt15", "en-de", "--without", "czeng"], "the corpora are europarl-v7"),
        (["en-de", "--shard", "1/2", "--merge", "2"], "give one of them"),
        (["wmt15", "en-de", "--czeng", "."], "--czeng: the corpora are europarl-v7"),
        (
            ["wmt15", "en-de", "--without", "europarl-v7", "commoncrawl", "news-commentary-v10"],
            "news-commentary-v10 leaves no training text",
        ),
        (["en-de", "--model-type", "bpe"], "--model-type bpe goes with --bpe sentencepiece"),
        (["en-de", "--max-ratio", "0.5"], "--max-ratio must be >= 1, got 0.5"),
        (["en-de", "--out", "a:b"], "has a colon, at which fairseq parts the paths"),
        (["en-de", "--max-dropped", "0"], "--max-dropped must be above 0 and <= 1, got 0.0"),
    ],
)
def test_bad_options(tmp_path, capsys, options, said):
    assert prepare_status("wmt", ["--out", str(tmp_path / "out"), *options]) == 2
    assert said in error(capsys)


@pytest.mark.parametrize("options", ["--czeng .", "--without czeng", "--valid newstest2014", "--test newstest2014"])
def test_ones_own_text_leaves_nothing_to_choose(text, tmp_path, capsys, options):
    assert prepare(text, tmp_path / "out", *options.split()) == 2
    assert f"{options.split()[0]} goes with published sets" in error(capsys)


def test_dry_run_names_sources_and_needs(tmp_path, capsys):
    out = tmp_path / "out"
    assert prepare_status("wmt", ["wmt18", "en-cs", "--dry-run", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    for words in ("europarl-v7", "657.6 MB", "paracrawl", "sacrebleu wmt15", "disk needed", "--czeng"):
        assert words in said
    assert not out.exists()


@pytest.mark.parametrize("pair", ["en-de", "en-fr"])
def test_wmt14_is_vaswanis(tmp_path, capsys, pair):
    """Vaswani et al. 2017, section 5.1, and Shaw et al. 2018: newstest2014, of Europarl to Giga."""
    options = ["wmt14", pair, "--dry-run", "--out", str(tmp_path / "out")]
    assert prepare_status("wmt", options) == 0
    said = capsys.readouterr().out
    for words in ("europarl-v7", "commoncrawl", "news-commentary-v9", "sacrebleu wmt14 "):
        assert words in said
    assert ("giga-fren" in said) == ("un " in said) == (pair == "en-fr")
    assert "wmt15" not in said
    corpora = sources.training_set("wmt14", *pair.split("-"))
    members = [member for corpus in corpora for member in corpus.members.values()]
    assert len(set(members)) == 2 * len(corpora) == (10 if pair == "en-fr" else 6)


def test_newstest2014_in_full_too(tmp_path, capsys):
    options = ["wmt15", "en-de", "--valid", "newstest2014", "newstest2014/full", "--dry-run"]
    assert prepare_status("wmt", [*options, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "sacrebleu wmt14 " in said and "sacrebleu wmt14/full" in said


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
            prepare(text, out)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_kill_at_any_moment(text, undisturbed, tmp_path):
    steps = []
    with pytest.MonkeyPatch.context() as patch:
        counted(patch, lambda: steps.append(1))
        assert prepare(text, tmp_path / "counted") == 0
    for number, at in enumerate(random.Random(7).sample(range(1, len(steps) + 1), 6)):
        out = tmp_path / str(number)
        killed(text, out, at)
        for name, content in made(out).items():
            if not any(part.startswith(".partial-") for part in Path(name).parts):
                assert content == undisturbed[name], (at, name)  # nothing is half there
        killed_again = random.Random(at).randrange(1, 4)
        killed(text, out, killed_again)
        assert prepare(text, out) == 0
        assert made(out) == undisturbed, at


def test_interrupted(text, undisturbed, tmp_path, capsys):
    with pytest.MonkeyPatch.context() as patch:
        steps = iter(range(9))

        def interrupt():
            if next(steps, None) is None:
                raise KeyboardInterrupt

        counted(patch, interrupt)
        assert prepare(text, tmp_path / "out") == 130
    assert "run the same command again to continue" in capsys.readouterr().err
    assert not list((tmp_path / "out").rglob(".partial-*"))
    assert prepare(text, tmp_path / "out") == 0
    assert made(tmp_path / "out") == undisturbed


def test_disk_full(text, undisturbed, tmp_path, capsys):
    def full(self, *args):
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LogProgress, "update", full)
        assert prepare(text, tmp_path / "out") == 2
    assert "no space left" in error(capsys)
    assert prepare(text, tmp_path / "out") == 0
    assert made(tmp_path / "out") == undisturbed


# Downloads


@pytest.fixture
def wmt(text, monkeypatch):
    """A small WMT of two training archives and two test sets on a server of this machine."""
    files = wmt_text.archives(text)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serve())
        server.stop = stack.close
        wmt_text.serve_archives(server, files)
        address = server.url

        def corpus(name):
            urls = (f"{address}/one/{name}.tgz", f"{address}/two/{name}.tgz")
            content = files[f"{name}.tgz"]
            digest = hashlib.sha256(content).hexdigest()
            source = RemoteFile(name, urls, f"{name}.tgz", len(content), digest)
            members = {language: f"{name}.de-en.{language}" for language in ("de", "en")}
            return sources.ParallelCorpus(name, source, members, 1000)

        def dataset(name, archive, members):
            return SimpleNamespace(
                name=name,
                data=[f"{address}/{archive}"],
                md5=[wmt_text.md5(files[archive])],
                langpairs={"en-de": [members.format(k) for k in ("en", "de")]},
            )

        monkeypatch.setitem(sources.TRAINING, ("wmt15", "de"), (corpus("first"), corpus("second")))
        tests = (
            ("wmt13", "dev.tgz", "test/newstest2013-src.{}.sgm"),
            ("wmt15", "test.tgz", "test/newstest2015-{}.sgm"),
        )
        for test in tests:
            monkeypatch.setitem(sacrebleu.dataset.DATASETS, test[0], dataset(*test))
        quick = functools.partial(fetch, attempts=2, backoff=0.01, timeout=20)
        monkeypatch.setattr(parallel_text, "fetch", quick)
        yield server


def download(out: Path, *options: str) -> int:
    small = ["--vocab-size", "60", "--workers", "1", "--yes"]
    return prepare_status("wmt", ["wmt15", "en-de", "--out", str(out), *small, *options])


@pytest.fixture(scope="module")
def downloaded() -> dict:
    """What an undisturbed download made; filled by the first test that makes one."""
    return {}


def expected(downloaded: dict, wmt, folder: Path) -> dict[str, bytes]:
    """Returns what an undisturbed download makes."""
    if not downloaded:
        assert download(folder / "undisturbed") == 0
        downloaded.update(final(folder / "undisturbed"))
        wmt.requests.clear()
    return downloaded


def test_from_nothing_to_binary(wmt, downloaded, undisturbed, tmp_path):
    whole = expected(downloaded, wmt, tmp_path)
    lines = [sorted(files["text/train.de"].split()) for files in (whole, undisturbed)]
    assert lines[0] == lines[1]  # the archives hold the same pairs in another order
    assert whole["reference/test.de"] == undisturbed["reference/test.de"]


@pytest.mark.parametrize("fault", wmt_text.FAULTS)
def test_a_mirrors_fault_is_survived(wmt, downloaded, tmp_path, capsys, fault):
    whole = expected(downloaded, wmt, tmp_path)
    wmt_text.spoil(wmt, "one/first.tgz", fault)
    assert download(tmp_path / "out") == 0, capsys.readouterr().err
    assert final(tmp_path / "out") == whole
    assert any(path.startswith("/two/") for path, *_ in wmt.requests) or fault == "cut"


def test_a_cut_download_is_resumed(wmt, downloaded, tmp_path):
    whole = expected(downloaded, wmt, tmp_path)
    wmt_text.spoil(wmt, "one/first.tgz", "cut")
    assert download(tmp_path / "out") == 0
    assert wmt.ranges("one/first.tgz")[1].startswith("bytes=")
    assert final(tmp_path / "out") == whole


@pytest.mark.parametrize("fault", ["404", "html", "corrupt"])
def test_a_fault_everywhere_is_one_error_and_a_new_run_continues(wmt, downloaded, text, tmp_path, capsys, fault):
    whole = expected(downloaded, wmt, tmp_path)
    names = ("one/first.tgz", "two/first.tgz", "test.tgz")
    for name in names:
        wmt_text.spoil(wmt, name, fault)
    capsys.readouterr()
    assert download(tmp_path / "out") == 2
    error(capsys)
    assert not (tmp_path / "out" / "data-bin").exists()
    wmt_text.serve_archives(wmt, wmt_text.archives(text))
    assert download(tmp_path / "out") == 0
    assert final(tmp_path / "out") == whole


def test_what_was_downloaded_stays(wmt, tmp_path):
    out = tmp_path / "out"
    assert download(out) == 0
    shutil.copytree(out / "downloads", out / "mine")
    archives = sorted(made(out / "mine"))
    got = json.loads((out / "manifest.json").read_text())["stages"]["download"]["second"]
    content = (out / "downloads" / "second.tgz").read_bytes()
    assert got == {"file": "second.tgz", "sha256": hashlib.sha256(content).hexdigest()}
    assert download(out, "--without", "second") == 0
    assert "second.tgz" in archives and sorted(made(out / "downloads")) == archives
    assert download(out, "--from-dir", str(out / "mine")) == 0
    assert download(out, "--from-dir", str(out / "mine"), "--without", "second") == 0
    assert sorted(made(out / "mine")) == archives


def test_a_continued_run_needs_room_for_what_is_missing_alone(wmt, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(stages, "require_space", lambda _, size: asked.append(size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages.WmtPreparation, "run_clean", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            download(tmp_path / "out")
    there = sum(len(data) for data in made(tmp_path / "out").values())
    assert download(tmp_path / "out") == 0
    assert len(asked) == 2 and asked[1] <= max(0, asked[0] - there)
    (tmp_path / "gone").symlink_to("vanished")  # as a file does that another shard renames
    assert files.bytes_below(tmp_path) > there


def test_a_download_that_nobody_agreed_to_is_refused_before_anything_is_made(wmt, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))  # no terminal
    assert prepare_status("wmt", ["wmt15", "en-de", "--out", str(tmp_path / "out")]) == 2
    said = error(capsys)
    assert "would download first.tgz, second.tgz, wmt13.dev.tgz, wmt15.test.tgz (" in said and "--yes" in said, said
    assert not wmt.requests and not (tmp_path / "out").exists()


def test_no_network_says_where_to_put_what(wmt, downloaded, text, tmp_path, capsys, monkeypatch):
    whole = expected(downloaded, wmt, tmp_path)
    wmt.stop()
    assert download(tmp_path / "out") == 2
    said = capsys.readouterr().err
    for name in ("first.tgz", "second.tgz", "wmt15.test.tgz", "wmt13.dev.tgz", "--from-dir"):
        assert name in said, said
    folder = tmp_path / "archives"
    folder.mkdir()
    files = wmt_text.archives(text)
    for name, content in files.items():
        names = {"dev.tgz": "wmt13.dev.tgz", "test.tgz": "wmt15.test.tgz"}
        (folder / names.get(name, name)).write_bytes(content)
    assert download(tmp_path / "out", "--from-dir", str(folder)) == 0
    assert final(tmp_path / "out") == whole
    (folder / "wmt15.test.tgz").write_bytes(files["test.tgz"][:-40])
    assert download(tmp_path / "out", "--from-dir", str(folder)) == 2
    assert "expected: replace it" in capsys.readouterr().err


def test_an_archive_that_leads_out_of_its_folder(wmt, tmp_path, capsys, monkeypatch):
    (corpus, _) = sources.TRAINING["wmt15", "de"]
    evil = wmt_text.pack({"../../first.de-en.de": "x\n", "first.de-en.en": "y\n"})
    wmt_text.serve_archives(wmt, {"first.tgz": evil})
    source = RemoteFile("first", corpus.archive.urls, "first.tgz")
    only = sources.ParallelCorpus("first", source, corpus.members, 10)
    monkeypatch.setitem(sources.TRAINING, ("wmt15", "de"), (only,))
    assert download(tmp_path / "out") == 2
    assert "../" in error(capsys)
    assert not (tmp_path / "first.de-en.de").exists()


# Real text


@pytest.mark.slow
@pytest.mark.parametrize(("pair", "bpe"), [("en-de", "subword-nmt"), ("en-cs", "sentencepiece")])
def test_multi30k(shared_data, tmp_path, monkeypatch, capsys, pair, bpe):
    from fairseq.data import Dictionary, data_utils

    monkeypatch.setattr(parallel_text, "LINES", 2000)
    out, target = tmp_path / "out", pair[3:]
    options = ["--sample", "800", "--bpe", bpe, "--vocab-size", "400", "--workers", "2"]
    assert prepare(shared_data / "multi30k", out, *options, pair=pair) == 0, capsys.readouterr().err
    for split in ("train", "valid", "test"):
        for language in ("en", target):
            lines = (out / "units" / f"{split}.{language}").read_text().splitlines()
            dictionary = Dictionary.load(str(out / "data-bin" / f"dict.{language}.txt"))
            prefix = out / "data-bin" / f"{split}.{pair}.{language}"
            dataset = data_utils.load_indexed_dataset(str(prefix), dictionary)
            assert len(dataset) == len(lines)
            for number in (0, len(lines) // 2, len(lines) - 1):
                ids = dataset[number]
                if split == "train":
                    assert dictionary.unk() not in ids
                    assert dictionary.string(ids) == lines[number]
    reference = gzip.open(shared_data / "multi30k" / f"test_2016_flickr.{target}.gz").read()
    assert (out / "reference" / f"test.{target}").read_bytes() == reference
    sets = [f"--{split}pref={out / 'units' / split}" for split in ("train", "valid", "test")]
    given = ["--joined-dictionary", "--srcdict", str(out / "units" / "dict.txt")]  # with all characters
    sides = ["--source-lang", "en", "--target-lang", target, *given]
    call("preprocess", *sides, *sets, "--destdir", str(tmp_path / "its"))
    for path in (tmp_path / "its").iterdir():
        assert path.name == "preprocess.log" or path.read_bytes() == (out / "data-bin" / path.name).read_bytes()
