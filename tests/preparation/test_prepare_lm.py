"""Text to language modelling data: what fairseq reads back is the text that went in."""

from __future__ import annotations

import gzip
import json
import random
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import folders, processes
from helpers.commands import call
from helpers.faulty_server import serve
from helpers.folders import contents
from helpers.shell import told
from relpos_fairseq.io import lines as text_lines
from relpos_fairseq.io.downloads import RemoteFile
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.lines import Part
from relpos_fairseq.preparation import corpora, lm_encoding
from relpos_fairseq.preparation.lm import parse_fractions
from relpos_fairseq.preparation.lm_encoding import sample_lines
from relpos_fairseq.text.dictionary import SPECIAL, choose_symbols, read_dictionary, symbol_of
from relpos_fairseq.text.levels import char_symbol

SPLITS = ("train", "valid", "test")
WORDS = ["the", "cat", "sat", "on", "mat", "ähnlich", "日本", "don't", "a", "<unk>"]


def sentences(count: int, seed: int = 1) -> str:
    chosen = np.random.default_rng(seed).integers(0, len(WORDS), (count, 7))
    return "".join(" " + " ".join(WORDS[i] for i in row) + " \n" for row in chosen)


def prepare(out: Path, *arguments: object) -> dict:
    """Runs the command in this process; returns its manifest."""
    folders.prepare("lm", [*arguments, "--out", out])
    return json.loads((out / "manifest.json").read_text())


@pytest.fixture
def refuses(capsys) -> Callable[..., str]:
    """A function that runs what cannot be; its error."""
    return lambda out, *given: folders.refused(capsys, "lm", [*given, "--out", out]).removeprefix("error: ")


def ids(folder: Path, split: str) -> np.ndarray:
    """A split's tokens, read without this project's code."""
    from fairseq.data import indexed_dataset

    data = indexed_dataset.make_dataset(str(folder / split), "mmap")
    return np.concatenate([data[i].numpy() for i in range(len(data))]) if len(data) else np.zeros(0)


def symbols(folder: Path, split: str) -> list[str]:
    """A split's tokens as fairseq's dictionary reads them."""
    from fairseq.data import Dictionary

    dictionary = Dictionary.load(str(folder / "dict.txt"))
    return [dictionary[i] for i in ids(folder, split)]


def text_of(tokens: list[str]) -> str:
    """The text of character tokens."""
    joined = "".join({"</s>": "\n", "\u2581": " "}.get(token, token) for token in tokens)
    return re.sub(r"<U\+([0-9A-F]+)>", lambda number: chr(int(number[1], 16)), joined)


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(sentences(200))
    return path


@pytest.mark.parametrize(("threshold", "words"), [(0, None), (140, None), (0, 4)])
def test_words_are_fairseqs(text, tmp_path, threshold, words):
    """Against fairseq's own dictionary builder and encoder, but for a literal special token, which is a word."""
    from fairseq.data import Dictionary
    from fairseq.tokenizer import tokenize_line

    with text.open("a") as file:
        file.write("\n\ttab\u00a0and\u2003spaces \u2028 \n<pad> </s> x")
    options = ["--threshold", threshold, *(["--words", words] if words else [])]
    manifest = prepare(tmp_path / "out", "--train", text, *options)
    dictionary = Dictionary()
    lines = text.read_text().split("\n")
    counted = [symbol_of(word) for line in lines for word in tokenize_line(line) if word != "<unk>"]
    assert "\\</s>" in counted and not {*counted} & {*SPECIAL}
    for word in counted:
        dictionary.add_symbol(word)
    nwords = words + len(SPECIAL) if words else -1
    dictionary.finalize(threshold=threshold, nwords=nwords, padding_factor=1)
    dictionary.save(str(tmp_path / "dict.txt"))
    assert (tmp_path / "out" / "dict.txt").read_bytes() == (tmp_path / "dict.txt").read_bytes()
    index, eos = dictionary.index, dictionary.eos()
    expected = [n for line in lines for n in (*(index(symbol_of(word)) for word in tokenize_line(line)), eos)]
    assert ids(tmp_path / "out", "train").tolist() == expected
    counts = manifest["splits"]["train"]
    assert counts["tokens"] == len(expected) == counts["words"] + counts["lines"]
    assert counts["unknown"] == expected.count(dictionary.unk())
    assert counts["lines"] == 203 and manifest["level"] == "word"


@pytest.mark.slow
def test_words_are_those_of_the_real_command(text, tmp_path):
    where = ["--only-source", "--trainpref", str(text), "--destdir", str(tmp_path / "its")]
    call("preprocess", *where, "--padding-factor", "8")
    prepare(tmp_path / "ours", "--train", text, "--padding-factor", 8)
    for name in ("dict.txt", "train.bin", "train.idx"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "its" / name).read_bytes()


ODD = "\ufeffa b\tc\r\nd\u2581e \u00a0\u2028\x0bf\rg\n\n<s> |||\u200d日本語\n no line feed"


def test_characters_are_all_there(tmp_path):
    path = tmp_path / "odd.txt"
    path.write_bytes(ODD.encode())
    manifest = prepare(tmp_path / "out", "--train", path, "--level", "char")
    expected = ODD.removeprefix("\ufeff").replace("\r\n", "\n")
    assert text_of(symbols(tmp_path / "out", "train")) == expected
    counts = manifest["splits"]["train"]
    assert counts["tokens"] == counts["characters"] == len(expected)
    assert counts["bytes"] == len(expected.encode()) and counts["unknown"] == 0
    assert manifest["</s>"] == "line feed"
    assert not (tmp_path / "out" / "dict.txt").read_text().count("\r")


def test_bytes_are_untouched(tmp_path):
    data = bytes(range(256)) * 3 + ODD.encode()
    (tmp_path / "raw").write_bytes(data)
    manifest = prepare(tmp_path / "out", "--train", tmp_path / "raw", "--level", "byte")
    assert bytes(10 if t == "</s>" else int(t) for t in symbols(tmp_path / "out", "train")) == data
    counts = manifest["splits"]["train"]
    assert counts["tokens"] == counts["bytes"] == len(data)
    assert manifest["vocabulary"] == 255 + len(SPECIAL)
    (tmp_path / "plain").write_text("日本語 ab\nc")
    counts = prepare(tmp_path / "b", "--test", tmp_path / "plain", "--level", "byte")["splits"]
    assert counts["test"]["characters"] == 8 and counts["test"]["words"] == 3


@given(st.text(st.characters(exclude_categories=("Cs",)), min_size=1), st.integers(4, 9))
@settings(max_examples=40, deadline=None)
def test_pieces_are_the_text_wherever_they_are_cut(tmp_path_factory, text, size):
    path = tmp_path_factory.mktemp("pieces") / "a"
    path.write_bytes(text.encode())
    with mock.patch.object(text_lines, "PART", size):
        pieces = list(lm_encoding.read_text([path], "char", "fail"))
        raw = list(lm_encoding.read_text([path], "byte", "fail"))
    joined = "".join(piece.text + "\n" * piece.ends for piece in pieces)
    assert joined == text.removeprefix("\ufeff").replace("\r\n", "\n")
    assert b"".join(piece.text + b"\n" * piece.ends for piece in raw) == text.encode()
    assert [piece.begins for piece in raw] == [True, *(piece.ends for piece in raw)][:-1]
    symbols = [char_symbol(char) for char in set(text)]
    assert len(set(symbols)) == len(symbols) and not any(map(str.isspace, "".join(symbols)))


def test_sentencepiece(text, tmp_path):
    options = ["--level", "sentencepiece", "--vocab-size", 25, "--train", text, "--valid", text]
    manifest = prepare(tmp_path / "out", *options)
    pieces = symbols(tmp_path / "out", "train")
    read = "".join("\n" if piece == "</s>" else piece for piece in pieces).replace("\u2581", " ")
    assert read == "".join(f" {' '.join(line.split())}\n" for line in text.read_text().splitlines())
    counts = manifest["splits"]["train"]
    assert counts["tokens"] == len(pieces) and counts["words"] == 1400
    frequency = [int(line.split(" ")[1]) for line in (tmp_path / "out" / "dict.txt").open()]
    assert frequency == sorted(frequency, reverse=True)  # as adaptive softmax needs it
    assert counts["unknown"] == text.read_text().count("<unk>") == pieces.count("<unk>")
    assert sum(frequency) == counts["tokens"] - counts["lines"] - counts["unknown"]
    # The same model and dictionary for another text, whose unknown characters are counted.
    (tmp_path / "other").write_text("the cat Ω\n")
    made = ["--dict", tmp_path / "out" / "dict.txt"]
    made += ["--sentencepiece", tmp_path / "out" / "sentencepiece.model"]
    other = ["--level", "sentencepiece", "--test", tmp_path / "other", *made]
    assert prepare(tmp_path / "more", *other)["splits"]["test"]["unknown"] == 1


def test_sentencepiece_with_bytes_knows_every_character(text, tmp_path):
    options = ["--level", "sentencepiece", "--vocab-size", 300, "--byte-fallback", "--train", text]
    (tmp_path / "other").write_text("the cat Ω\n")
    manifest = prepare(tmp_path / "out", *options, "--model-type", "bpe", "--test", tmp_path / "other")
    assert manifest["splits"]["test"]["unknown"] == 0
    assert "<0xCE>" in symbols(tmp_path / "out", "test")


@pytest.mark.parametrize("level", ["word", "sentencepiece", "char", "byte"])
def test_any_number_of_workers_makes_the_same(text, tmp_path, level, monkeypatch):
    text.write_text("\n\n".join(sentences(5, seed) for seed in range(20)))
    options = ["--text", text, "--shares", "0.8,0.1,0.1", "--level", level, "--vocab-size", 25]
    options += ["--shards", 2, "--documents", "blank"]
    made = []
    for workers, size in ((1, 500), (3, 500), (1, 1 << 19)):
        monkeypatch.setattr(lm_encoding, "CHUNK", size)
        out = tmp_path / f"{workers}-{size}"
        prepare(out, *options, "--workers", workers)
        made.append(contents(out, ".stages"))
    assert made[0] == made[1] == made[2]
    assert {"manifest.json", "shard0/train.bin", "shard1/dict.txt"} <= set(made[0])


@pytest.mark.parametrize("level", ["char", "byte"])
def test_an_exact_split_loses_nothing(tmp_path, level):
    texts, out = [tmp_path / "a", tmp_path / "b"], tmp_path / "out"
    texts[0].write_text(sentences(30, 1) + "no end")
    texts[1].write_text("日本\n" + sentences(30, 2))
    manifest = prepare(out, "--text", *texts, "--level", level, "--shares", "0.7,0.2,0.1")
    whole = b"".join(path.read_bytes() for path in texts)
    total = len(whole) if level == "byte" else len(whole.decode())
    parts = [manifest["splits"][split]["tokens"] for split in SPLITS]
    assert parts == [total * 7 // 10, total * 9 // 10 - total * 7 // 10, total - total * 9 // 10]
    assert b"".join((out / "text" / f"{split}.txt").read_bytes() for split in SPLITS) == whole
    if level == "char":
        assert "".join(text_of(symbols(out, split)) for split in SPLITS) == whole.decode()


def test_a_split_by_lines(text, tmp_path):
    prepare(tmp_path / "out", "--text", text, "--shares", "0.9,0.1")
    files = [(tmp_path / "out" / "text" / f"{split}.txt").read_text() for split in ("train", "valid")]
    assert "".join(files) == text.read_text()
    assert [part.count("\n") for part in files] == [180, 20]
    assert not (tmp_path / "out" / "test.bin").exists()


HEADINGS = "\n = One = \n\n a b \n = not a title = \n = = Section = = \n\n c \n\n = Two 2 = \n\n d e f \n"


@pytest.mark.parametrize("level", ["word", "char"])
@pytest.mark.parametrize("documents", ["none", "blank", "heading"])
def test_documents_start_where_they_start(tmp_path, level, documents):
    for name in "ab":
        (tmp_path / name).write_text(HEADINGS)
    files = ["--train", tmp_path / "a", tmp_path / "b"]
    manifest = prepare(tmp_path / "out", *files, "--level", level, "--documents", documents)
    path = tmp_path / "out" / "train.documents.npy"
    if documents == "none":
        assert not path.exists() and "documents" not in manifest["splits"]["train"]
        return
    starts = np.load(path)
    assert starts.dtype == np.int64 and len(starts) == manifest["splits"]["train"]["documents"]
    lines, place, expected = HEADINGS.split("\n")[:-1] * 2, 0, []
    half = len(lines) // 2
    for number, line in enumerate(lines):
        after_blank = number % half == 0 or not lines[number - 1].strip()
        title = documents == "blank" or line in (" = One = ", " = Two 2 = ")
        if number % half == 0 or line.strip() and after_blank and title:
            expected.append(place)
        place += len(line.split() if level == "word" else line) + 1
    assert starts.tolist() == expected
    prepare(tmp_path / "out", *files, "--level", level)
    assert not path.exists()  # it would be taken for that of the new data


def test_shards_are_the_whole(text, tmp_path, monkeypatch):
    monkeypatch.setattr(lm_encoding, "CHUNK", 300)
    text.write_text("\n\n".join(sentences(5, seed) for seed in range(40)))
    options = ["--train", text, "--valid", text, "--documents", "blank"]
    whole = prepare(tmp_path / "one", *options)["splits"]
    manifest = prepare(tmp_path / "three", *options, "--shards", 3)
    assert manifest["splits"] == whole
    folders = [tmp_path / "three" / f"shard{i}" for i in range(3)]
    parts = [ids(folder, "train") for folder in folders]
    assert np.array_equal(np.concatenate(parts), ids(tmp_path / "one", "train"))
    assert max(map(len, parts)) < 1.2 * min(map(len, parts))
    starts = [np.load(folder / "train.documents.npy") for folder in folders]
    assert [start[0] for start in starts] == [0, 0, 0]  # no document is cut
    offsets = np.cumsum([0, *map(len, parts)])[:3]
    joined = np.concatenate([start + offset for start, offset in zip(starts, offsets, strict=True)])
    assert np.array_equal(joined, np.load(tmp_path / "one" / "train.documents.npy"))
    for number, folder in enumerate(folders):
        assert (folder / "valid.bin").exists() == (number == 0)
        own = json.loads((folder / "manifest.json").read_text())
        assert own["splits"]["train"]["tokens"] == len(parts[number]) and own["shard"] == number


def test_running_again_and_with_other_options(text, tmp_path, capsys):
    options = ["--train", text, "--valid", text]
    first = prepare(tmp_path / "out", *options, "--test", text)
    capsys.readouterr()
    assert prepare(tmp_path / "out", *options, "--test", text) == first
    assert capsys.readouterr().out.count("unchanged") == 4
    prepare(tmp_path / "out", *options, "--words", 3)
    made = set(contents(tmp_path / "out", ".stages"))
    assert "test.bin" not in made and "valid.bin" in made  # its dictionary is gone
    fresh = prepare(tmp_path / "new", *options, "--words", 3)
    assert contents(tmp_path / "out", ".stages") == contents(tmp_path / "new", ".stages")
    assert fresh["vocabulary"] == 3 + len(SPECIAL)


def test_characters_of_valid_are_in_the_dictionary(tmp_path):
    (tmp_path / "train").write_text("aab\n")
    (tmp_path / "valid").write_text("bcb\n")
    files = ["--train", tmp_path / "train", "--valid", tmp_path / "valid", "--level", "char"]
    manifest = prepare(tmp_path / "out", *files)
    assert (tmp_path / "out" / "dict.txt").read_text() == "a 2\nb 1\nc 0\n"
    assert manifest["splits"]["valid"]["unknown"] == 0


def test_a_character_outside_a_given_dictionary(tmp_path, refuses):
    (tmp_path / "dict.txt").write_text("a 2\nb 1\n")
    (tmp_path / "t").write_text("ab\n\nbaab\u00a0a\n")
    options = ["--test", tmp_path / "t", "--dict", tmp_path / "dict.txt"]
    for workers in (1, 2):
        said = refuses(tmp_path / "out", *options, "--level", "char", "--workers", workers)
        assert said.startswith(f"{tmp_path}/t, line 3, character 5: '\\xa0' (U+00A0) is not in the dic")
    assert not (tmp_path / "out" / "test.bin").exists()
    assert prepare(tmp_path / "words", *options)["splits"]["test"]["unknown"] == 2


@pytest.mark.parametrize("level", ["word", "char"])
def test_bad_lines(tmp_path, refuses, level):
    (tmp_path / "t").write_bytes(b"good\nb\xffd\ngood\n")
    options = ["--train", tmp_path / "t", "--level", level]
    assert refuses(tmp_path, *options).startswith(f"{tmp_path}/t, line 2: invalid UTF-8")
    made = prepare(tmp_path, *options, "--on-bad-line", "drop")["splits"]["train"]
    assert made["lines"] == 2 and made["dropped: invalid_utf8"] == 1


BAD = {  # of files: text, empty, dict
    "": "either --train",
    "--train text --text text": "give either --train/--valid/--test, or --text, or --corpus",
    "--text text": "--shares and --text belong together",
    "--valid text": "without --train there must be --dict",
    "--train missing": "missing does not exist: give a file that does",
    "--train text --valid empty": "the split valid is empty",
    "--train empty": "no unit at all",
    "--train empty --level sentencepiece": "sentencepiece cannot be trained",
    "--train text --level sentencepiece --vocab-size 5000": "cannot make 5000 pieces of this text...has not so many, "
    "so --vocab-size must be smaller: at most",
    "--train text --level sentencepiece --vocab-size 5": "so --vocab-size must be larger: at least",
    "--train text --shards 900": "too short for 900 shards",
    "--text text --shares 0.001,0.999": "--shares leaves train empty: the text has 200 lines",
    "--train text --workers 0": "--workers must be >= 1, got 0",
    "--train text --threshold -1": "--threshold must be >= 0, got -1",
    "--train text --threshold 100000": "lower --threshold",
    "--train text --level byte --words 3": "the dictionary is fixed",
    "--train text --dict text --words 3": "--dict is used as it is",
    "--train text --dict text": "line 1: not `SYMBOL COUNT`",
    "--test text --dict dict --level sentencepiece --sentencepiece text": "is not a sentencepiece model",
    "--train text --character-coverage 2": "--character-coverage must be above 0 and <= 1, got 2.0",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_line(text, tmp_path, refuses, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    text.rename("text")
    Path("empty").touch()
    Path("dict").write_text("a 1\n")
    assert re.search(told(BAD[line]), refuses("out", *line.split()))
    made = {path.name for path in Path("out").rglob("*.bin")}
    assert made == ({"train.bin"} if "--valid empty" in line else set())


@pytest.mark.parametrize("text", ["1", "0.5,0.6", "a,b", "0.5,0.5,0,0", "1.5,-0.5", "1/0,1", ""])
def test_bad_fractions(text):
    with pytest.raises(UserError, match="numbers with the sum 1"):
        parse_fractions(text)


def test_the_vocabularys_order_and_a_bad_dictionary(tmp_path):
    counts = {"b": 2, "a": 2, "c": 3, "d": 1, "<pad>": 9}
    assert choose_symbols(counts, 2, None) == [("c", 3), ("a", 2), ("b", 2)]
    assert choose_symbols(counts, 0, 2, factor=4)[2:] == [("madeupword0000", 0), ("madeupword0001", 0)]
    path = tmp_path / "dict.txt"
    path.write_text("a 1\nb 2 #fairseq:overwrite\n\u2581 3\n")
    assert read_dictionary(path) == ["a", "b", "\u2581"]
    path.write_text("a 1\na 2\n")
    with pytest.raises(UserError, match="line 2: 'a' is there twice"):
        read_dictionary(path)


@given(st.integers(0, 60), st.integers(1, 20), st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_a_sample_is_bounded_and_in_order(count, size, seed):
    pieces = [Part(f"{n:03}", Path("a"), n) for n in range(count)]
    chosen = sample_lines(iter(pieces), size, seed)
    assert len(chosen) == min(count, size) and chosen == sorted(set(chosen))
    assert chosen == sample_lines(iter(pieces), size, seed)


@pytest.fixture
def published(tmp_path, monkeypatch) -> Callable[..., Path]:
    """A function that puts an archive in the place of a corpus's; it returns the archive's folder."""

    def publish(name: str, members: dict[str, bytes]) -> Path:
        real, folder = corpora.CORPORA[name], tmp_path / "archives"
        folder.mkdir()
        with zipfile.ZipFile(folder / real.archive.filename, "w") as file:
            for member, data in members.items():
                file.writestr(member, data)
        source = RemoteFile(name, real.archive.urls, real.archive.filename)
        monkeypatch.setitem(corpora.CORPORA, name, replace(real, archive=source))
        return folder

    return publish


def test_wikitext_from_a_folder(tmp_path, published):
    folder = published("wikitext-2", {f"wikitext-2/wiki.{split}.tokens": HEADINGS.encode() for split in SPLITS})
    manifest = prepare(tmp_path / "out", "--corpus", "wikitext-2", "--from-dir", folder, "--documents", "heading")
    assert set(manifest["splits"]) == {*SPLITS}
    assert manifest["splits"]["test"]["documents"] == 3  # the first line's, and two titles
    assert "archive 0: wikitext-2-v1.zip" in manifest["inputs"]


def test_downloads_go_where_they_are_told(tmp_path, published, monkeypatch):
    archives = published("wikitext-2", {f"wikitext-2/wiki.{split}.tokens": b"some text\n" for split in SPLITS})
    downloads = tmp_path / "a, b"  # fairseq ends paths at commas; here none ends
    changed = corpora.CORPORA["wikitext-2"]
    name = changed.archive.filename
    with serve() as server:
        source = replace(changed.archive, urls=[server.put(name, (archives / name).read_bytes())])
        monkeypatch.setitem(corpora.CORPORA, "wikitext-2", replace(changed, archive=source))
        manifest = prepare(tmp_path / "out, too", "--corpus", "wikitext-2", "--downloads", downloads, "--yes")
    assert (downloads / name).is_file()
    assert manifest["splits"]["train"]["tokens"] == 3 and str(downloads) not in str(manifest)


def test_enwik8_is_split_as_everybody_does(tmp_path, published, refuses, monkeypatch):
    options = ["--corpus", "enwik8", "--from-dir"]
    options.append(published("enwik8", {"enwik8": ("<page>日本</page>\n" * 5000).encode()[:100_000]}))
    manifest = prepare(tmp_path / "out", *options)
    assert [found["tokens"] for found in manifest["splits"].values()] == [5000, 90_000, 5000]
    assert manifest["level"] == "byte"
    monkeypatch.undo()
    assert "enwik8.zip has" in refuses(tmp_path / "real", *options)  # not the published file


def test_published_hashes_are_hashes():
    for name, entry in corpora.CORPORA.items():
        assert re.fullmatch("[0-9a-f]{64}", entry.archive.sha256), name
        assert all(url.startswith("https://") for url in entry.archive.urls)


def test_real_text(shared_data, tmp_path, capsys):
    text = shared_data / "lm" / "tinyshakespeare.txt.gz"
    options = ["--text", text, "--shares", "0.9,0.05,0.05", "--level", "char"]
    manifest = prepare(tmp_path / "chars", *options, "--documents", "blank")
    with gzip.open(text, "rt", encoding="utf-8", newline="\n") as file:
        whole = file.read()
    assert "".join(text_of(symbols(tmp_path / "chars", split)) for split in SPLITS) == whole
    assert len(whole) == 1_115_394
    assert manifest["vocabulary"] == 64 + len(SPECIAL)  # 65 characters, one of them </s>
    assert "| train   | 1,003,854 |" in capsys.readouterr().out
    text = shared_data / "lm" / "wikitext2.valid.txt.gz"
    options = ["--text", text, "--shares", "0.9,0.1", "--documents", "heading"]
    counts = prepare(tmp_path / "words", *options)["splits"]
    assert counts["train"]["tokens"] + counts["valid"]["tokens"] == 217_646  # as published
    assert counts["train"]["documents"] + counts["valid"]["documents"] == 62


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_killed_at_any_moment_and_run_again(tmp_path, seed):
    text = tmp_path / "text"
    text.write_text("\n\n".join(sentences(50, n) for n in range(300)))
    options = ["--text", text, "--shares", "0.8,0.1,0.1", "--documents", "blank", "--shards", 2]
    prepare(tmp_path / "undisturbed", *options, "--workers", 1)
    command = [sys.executable, "-m", "relpos_fairseq.cli", "prepare", "lm", *options]
    command = [str(part) for part in [*command, "--out", tmp_path / "out", "--workers", 2]]
    chance = random.Random(seed)
    for _ in range(4):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            process.communicate(timeout=0.3 + 1.2 * chance.random())
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate(timeout=60)
    assert processes.run(command).returncode == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")
