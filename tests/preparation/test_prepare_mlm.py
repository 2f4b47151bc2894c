"""prepare_mlm.py: documents, sampling, packing, whole words, workers, interruptions, bad input."""

from __future__ import annotations

import functools
import gzip
import itertools
import json
import random
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from fairseq.data import Dictionary, TokenBlockDataset, data_utils
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.commands import call
from helpers.folders import contents, parsed, prepare, prepare_status, refused
from helpers.roberta import ARCH, MASKED_LM, OPTIMIZE
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.preparation import documents, mlm
from relpos_fairseq.preparation.documents import document_spans, pack
from relpos_fairseq.preparation.settings import Reading, check_mlm
from relpos_fairseq.text import assets
from relpos_fairseq.text.dictionary import EOS

SYLLABLES = ["ka", "lo", "mi", "ne", "tu", "ra", "si", "po", "ge", "du"]
DOCUMENTS = {"aa": 40, "bb": 10}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> dict[str, Path]:
    """Two languages; a document's sentences all begin with its own name."""
    folder, generator, paths = tmp_path_factory.mktemp("text"), random.Random(5), {}
    for language, count in DOCUMENTS.items():
        lines = []
        for number in range(count):
            for _ in range(generator.randint(1, 6)):
                words = ["".join(generator.choices(SYLLABLES, k=2)) for _ in range(5)]
                lines.append(f"{language}{number} {' '.join(words)} .")
            lines.append("")
        paths[language] = folder / f"{language}.txt"
        paths[language].write_text("\n".join(lines) + "\n")
    return paths


def arguments(out: Path, paths: dict[str, Path], *more: str) -> list[str]:
    named = [f"{language}={path}" for language, path in paths.items()]
    size = () if "--tokenizer-folder" in more else ("--vocab-size", "300")
    sizes = ("--hold-out", "0.2", "--tokens-per-sample", "40", "--alpha", "0.5")
    return ["--out", str(out), "--train", *named, "--workers", "1", *sizes, *size, *more]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, text) -> Path:
    out = tmp_path_factory.mktemp("prepared") / "out"
    prepare("mlm", arguments(out, text))
    return out


def items(folder: Path, split: str) -> list[list[str]]:
    """Symbols of every item, read by fairseq."""
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    dataset = data_utils.load_indexed_dataset(str(folder / split), dictionary)
    return [[dictionary[int(number)] for number in item] for item in dataset]


def sentences(folder: Path, split: str) -> list[list[str]]:
    """Text of the sentences of every item."""
    tokenizer = assets.Vocabulary(folder).tokenizer
    groups = [itertools.groupby(item, key=lambda symbol: symbol == "</s>") for item in items(folder, split)]
    return [[tokenizer.decode(list(group)).strip() for end, group in one if not end] for one in groups]


def test_blocks_are_full_sentences_of_one_document(prepared, text):
    lines = {line for path in text.values() for line in path.read_text().splitlines() if line}
    names = {}
    for split in ("train", "valid"):
        blocks = sentences(prepared / "data-bin", split)
        assert all(len(item) < 40 and item[-1] == "</s>" for item in items(prepared / "data-bin", split))
        assert {sentence for block in blocks for sentence in block} <= lines
        assert all(len({sentence.split()[0] for sentence in block}) == 1 for block in blocks)
        names[split] = {block[0].split()[0] for block in blocks}
    assert not names["train"] & names["valid"]
    every = {f"{language}{n}" for language, count in DOCUMENTS.items() for n in range(count)}
    assert names["train"] | names["valid"] == every


def test_rare_language_is_repeated_as_its_exponent_says(prepared, text):
    count = {name: sum(map(bool, path.read_text().splitlines())) for name, path in text.items()}
    total = sum(count.values())
    wanted = {name: (number / total) ** 0.5 for name, number in count.items()}
    factor = (wanted["bb"] / count["bb"]) / (wanted["aa"] / count["aa"])
    assert documents.repetitions(count, 0.5) == pytest.approx({"aa": 1.0, "bb": factor})
    found = Counter(s for block in sentences(prepared / "data-bin", "train") for s in block)
    assert {n for s, n in found.items() if s.startswith("aa")} == {1}
    repeated = {n for s, n in found.items() if s.startswith("bb")}
    assert repeated <= {int(factor), int(factor) + 1}


def test_alpha_one_and_zero():
    counts = {"a": 900, "b": 100}
    assert documents.repetitions(counts, 1) == pytest.approx({"a": 1, "b": 1})
    assert documents.shares(counts, 0) == pytest.approx({"a": 0.5, "b": 0.5})
    assert documents.shares(counts, 0.7)["b"] == pytest.approx(0.1**0.7 / (0.1**0.7 + 0.9**0.7))


@given(st.floats(0, 4), st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_copies_average_the_factor_and_depend_on_the_document_alone(factor, seed):
    numbers = np.arange(4000)
    chance = documents.uniform(seed, "x", numbers)
    assert chance.min() >= 0 and chance.max() < 1
    assert documents.copies(factor, chance).mean() == pytest.approx(factor, abs=0.06)
    assert np.array_equal(documents.uniform(seed, "x", numbers[7:9]), chance[7:9])
    assert not np.array_equal(documents.uniform(seed, "y", numbers), chance)


def test_word_starts_mark_the_words_of_the_text(prepared):
    folder = prepared / "data-bin"
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    flags = assets.word_starts(folder, dictionary).tolist()
    assert len((folder / "word_starts.txt").read_text().splitlines()) == len(dictionary)
    tokenizer = assets.Vocabulary(folder).tokenizer
    for item, block in zip(items(folder, "valid"), sentences(folder, "valid"), strict=True):
        words = []
        for symbol in item:
            if flags[dictionary.index(symbol)]:
                words.append([])
            words[-1].append(symbol)
        spoken = [tokenizer.decode(word).strip() for word in words if word != ["</s>"]]
        assert spoken == [word for sentence in block for word in sentence.split()]


def test_shards_share_the_documents(tmp_path, text, prepared):
    prepare("mlm", arguments(tmp_path, text, "--shards", "3"))
    shards = [tmp_path / "data-bin" / f"shard{n}" for n in range(3)]
    found = Counter(s for shard in shards for block in sentences(shard, "train") for s in block)
    assert found == Counter(s for block in sentences(prepared / "data-bin", "train") for s in block)
    for name in ("dict.txt", "word_starts.txt", "tokenizer.json"):
        assert len({(shard / name).read_bytes() for shard in shards}) == 1
    assert (shards[0] / "valid.idx").exists()


def test_copies_of_a_document_lie_in_different_shards(tmp_path):
    (tmp_path / "text").write_text("a\n")
    line = ["--out", str(tmp_path), "--train", str(tmp_path / "text"), "--shards", "2"]
    given = check_mlm(parsed("prepare mlm", line))
    choose = partial(mlm.MlmPreparation(given).choose, given.sources[0], 50)
    chosen = [choose("train", shard, {"text": 2.0}) for shard in range(2)]
    held_out = choose("valid", 0, {"text": 2.0})
    assert [sorted(set(some)) for some in chosen] == [[n for n in range(50) if n not in held_out]] * 2
    assert all(len(set(some)) == len(some) for some in chosen)


def test_unpacked_is_what_fairseq_packs_alike(tmp_path, text, prepared):
    prepare("mlm", arguments(tmp_path, text, "--pack", "none"))
    dictionary = Dictionary.load(str(tmp_path / "data-bin" / "dict.txt"))
    dataset = data_utils.load_indexed_dataset(str(tmp_path / "data-bin" / "train"), dictionary)
    blocks = TokenBlockDataset(dataset, dataset.sizes, 39, pad=1, eos=2, break_mode="complete_doc")
    ours = items(prepared / "data-bin", "train")
    assert [[dictionary[int(i)] for i in block] for block in blocks] == ours


def naive_pack(document: list[list[int]], room: int) -> list[list[int]]:
    blocks: list[list[int]] = [[]]
    for sentence in document:
        if blocks[-1] and len(blocks[-1]) + len(sentence) > room:
            blocks.append([])
        for start in range(0, len(sentence), room):
            blocks[-1] = blocks[-1] + sentence[start : start + room]
            if start + room < len(sentence):
                blocks.append([])
    return [block for block in blocks if block]


TEXTS = st.lists(st.lists(st.lists(st.integers(4, 9), min_size=1, max_size=20), min_size=1, max_size=5), max_size=5)


@given(TEXTS, st.integers(8, 30))
@settings(max_examples=40, deadline=None)
def test_packing_equals_a_loop(texts, tokens):
    texts = [[[*sentence, EOS] for sentence in document] for document in texts]
    arrays = [[np.array(sentence) for sentence in document] for document in texts]
    found = [block.tolist() for block in pack(arrays, "document", tokens, EOS)]
    assert found == [block for document in texts for block in naive_pack(document, tokens - 1)]
    full = [block.tolist() for block in pack(arrays, "full", tokens, EOS)]
    stream = [[*doc[:-1], [*doc[-1], EOS]] for doc in texts]
    assert full == naive_pack(list(itertools.chain(*stream)), tokens - 1)
    plain = [item.tolist() for item in pack(arrays, "none", tokens, EOS)]
    assert plain == [item for doc in texts for item in (*doc, [EOS])]
    spans = document_spans(np.array([len(item) for item in plain]))
    assert [plain[a:b] for a, b in spans] == texts


def test_workers_change_nothing(tmp_path, text, monkeypatch):
    for workers in ("1", "3"):
        chunks = functools.partial(documents.in_chunks, characters=200 + int(workers))
        monkeypatch.setattr(documents, "in_chunks", chunks)
        more = ["--workers", workers, "--train-tokenizer", "wordpiece", "--lowercase"]
        prepare("mlm", arguments(tmp_path / workers, text, *more))
    assert contents(tmp_path / "1", ".stages") == contents(tmp_path / "3", ".stages")


@pytest.mark.parametrize("stage", ["count", "sample", "train_tokenizer", "encode", "assemble"])
def test_interrupted_run_goes_on_to_the_same_files(tmp_path, text, prepared, monkeypatch, stage):
    original = getattr(mlm.MlmPreparation, stage)

    def interrupted(self, *given):
        original(self, *given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(mlm.MlmPreparation, stage, interrupted)
        assert prepare_status("mlm", arguments(tmp_path, text)) == 130
    assert not (tmp_path / "manifest.json").exists()
    prepare("mlm", arguments(tmp_path, text))
    assert contents(tmp_path, ".stages") == contents(prepared, ".stages")


def test_second_run_does_nothing_and_another_length_only_what_it_must(tmp_path, text, capsys):
    for more, unchanged in (((), 0), ((), 6), (("--tokens-per-sample", "60"), 5)):
        prepare("mlm", arguments(tmp_path, text, *more))
        assert capsys.readouterr().out.count("unchanged") == unchanged


@pytest.mark.parametrize(
    ("boundary", "read"),
    [
        ("blank", ["a b. C d.", None, "e", "f", None]),
        ("line", ["a b. C d.", None, "e", None, "f", None]),
        ("file", ["a b. C d.", "e", "f", None]),
        ("^e", ["a b. C d.", None, "e", "f", None]),
    ],
)
def test_what_ends_a_document(tmp_path, boundary, read):
    path = tmp_path / "text"
    path.write_bytes("\ufeffa b. C d.\r\n\r\n\n  \ne\nf".encode())
    assert list(documents.read_stream(path, Reading(boundary))) == read


def test_json_lines_of_c4(tmp_path):
    """M4M, section 3.2: C4's files, {"text", "timestamp", "url"} a line."""
    path = tmp_path / "c4-train.00000-of-01024.json.gz"
    texts = ["First line. Two.\n\n Second line\u2028x", " \n", "Another"]
    objects = [{"text": text, "timestamp": "2019", "url": "https://a"} for text in texts]
    path.write_bytes(gzip.compress(("".join(f"{json.dumps(one)}\n" for one in objects) + "\n").encode()))
    counts = Counter()
    stream = list(documents.read_stream(path, Reading("json"), counts))
    assert stream == ["First line. Two.", "Second line\u2028x", None, "Another", None]
    assert (counts["documents"], counts["sentences"]) == (2, 3)
    assert next(documents.read_stream(path, Reading("json", "split"))) == "First line."


@pytest.mark.parametrize("line", ["plain", "[1]", '{"body": "x"}', '{"text": 3}', "[" * 99999])
def test_a_line_that_is_no_document_is_named(tmp_path, line):
    path = tmp_path / "c4.json"
    path.write_text(f'{{"text": "x"}}\n{line}\n')
    with pytest.raises(UserError, match=f"{path}, line 2 is no JSON object with a text"):
        list(documents.read_stream(path, Reading("json")))


def test_sentences_are_split_and_nothing_is_lost(tmp_path):
    line = 'He said "Go." Then he left. It cost 3.5 e.g. in Rome. OK? 你好。我很好！“是。”他说。'
    path = tmp_path / "text"
    path.write_text(line)
    counts = Counter()
    stream = list(documents.read_stream(path, Reading(sentences="split"), counts))
    english = ['He said "Go."', "Then he left.", "It cost 3.5 e.g. in Rome.", "OK?"]
    assert stream == [*english, "你好。", "我很好！", "“是。”", "他说。", None]
    assert counts == {"lines": 1, "sentences": 8, "documents": 1, "characters": len(line) - 4}


def test_text_without_pieces_is_no_end_of_a_document(tmp_path, prepared):
    path = tmp_path / "text"
    path.write_text("kalo\n\u200b\nmine\n\n")
    words = assets.Vocabulary(prepared / "tokenizer")
    words.encode = lambda texts: [np.array([9] * ("\u200b" not in text)) for text in texts]
    counts = documents.encode_file(path, tmp_path / "out", words, Reading(), 1)
    assert counts == {"items": 3, "tokens": 5, "unknown": 0}
    assert documents.Encoded(tmp_path / "out").spans.tolist() == [[0, 2]]


def test_dictionary_is_fairseqs(prepared):
    path = prepared / "data-bin" / "dict.txt"
    assert assets.Vocabulary(path.parent).ids == Dictionary.load(str(path)).indices


def test_sentencepiece_of_several_languages(tmp_path, text):
    def made(name: str, paths: dict[str, Path], *more: str) -> Path:
        prepare("mlm", arguments(tmp_path / name, paths, *more))
        return tmp_path / name / "data-bin"

    sizes = ["--vocab-size", "80", "--character-coverage", "1.0"]
    folder = made("out", text, "--train-tokenizer", "sentencepiece", *sizes)
    assert (folder / "sentencepiece.model").exists()
    lines = {line for path in text.values() for line in path.read_text().splitlines()}
    assert all(s in lines for block in sentences(folder, "valid") for s in block)
    assert items(made("again", text, "--tokenizer-folder", str(folder)), "train") == items(folder, "train")
    # The tokenizer of another data-bin brings nothing else of it along.
    fewer = made("fewer", {"aa": text["aa"]}, "--tokenizer-folder", str(folder))
    assert all(s.startswith("aa") for block in sentences(fewer, "train") for s in block)


BAD = {
    "--train nowhere.txt": "there is no file",
    "--train LATIN": "line 1: invalid UTF-8",
    "--train EMPTY": "has no text",
    "--alpha 2": "--alpha must be >= 0 and <= 1, got 2.0",
    "--hold-out 1": "--hold-out must be between 0 and 1",
    "--hold-out 0.000001": "left no document for validation",
    "--tokens-per-sample 4": "--tokens-per-sample must be >= 8",
    "--shards 999": "fewer training documents than --shards 999",
    "--lowercase": "--lowercase belongs to --train-tokenizer wordpiece",
    "--character-coverage 1": "--character-coverage belongs",
    "--documents (": "documents must be blank, line, file",
    "--tokenizer-folder . --vocab-size 90": "--vocab-size belongs to a tokenizer that is trained",
    "--tokenizer-folder . --train-tokenizer bpe": "--train-tokenizer belongs to a tokenizer that is trained",
    "--valid EMPTY": "--hold-out and --valid",
    "--tokenizer-folder .": "no tokenizer in",
    "--vocab-size 40": "byte-level BPE needs a vocab_size of",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_line(tmp_path, text, capsys, line, monkeypatch):
    (tmp_path / "LATIN").write_bytes(b"caf\xe9\n")
    (tmp_path / "EMPTY").write_bytes(b"\n\n")
    monkeypatch.chdir(tmp_path)
    assert BAD[line] in refused(capsys, "mlm", arguments(Path("out"), text, *line.split()))


def test_bad_lines_can_be_dropped(tmp_path, text):
    (tmp_path / "bad").write_bytes(text["aa"].read_bytes() + b"caf\xe9\n\n")
    prepare("mlm", arguments(tmp_path / "out", text | {"aa": tmp_path / "bad"}, "--on-bad-line", "drop"))
    assert (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.slow
def test_fairseq_trains_on_it(tmp_path, prepared):
    output = call(
        *("train", str(prepared / "data-bin"), *ARCH, *MASKED_LM, *OPTIMIZE, "--max-update", "2"),
        *("--sample-break-mode", "eos", "--tokens-per-sample", "40", "--mask-whole-words"),
        *("--save-dir", str(tmp_path)),
    )
    assert "done training" in output
