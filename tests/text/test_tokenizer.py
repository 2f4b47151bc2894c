"""Tokenizers: exact character offsets, training, loading, dictionaries."""

from __future__ import annotations

import gzip
import itertools
import json
import pickle
import re
import unicodedata
from pathlib import Path

import pytest
import sentencepiece
from fairseq.data import Dictionary
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.folders import contents
from relpos_fairseq.text import load_tokenizer, train_tokenizer
from relpos_fairseq.text.assets import word_starts
from relpos_fairseq.text.sentencepiece_model import add_tokens
from relpos_fairseq.text.tokenizer import UNKNOWN, exact_offsets

TEXTS = [
    "The Panthers defense gave up just 308 points, ranking sixth in the league.",
    "Die Verteidigung der Panthers gab nur 308 Punkte ab; café, Straße, naïve.",
    "黑豹队的防守只丢了 308分，在联赛中排名第六，同时也以 24 次拦截领先。",
    "لم يتخلى فريق بانثرز سوى عن 308 نقطة، ليحتل المركز السادس في الدوري",
    "Emoji 😀 👩‍👩‍👧 and ½ of the ﬁrst İstanbul, e\u0301te\u0301, 한국어 かな",
]
KINDS = {
    "bpe": {"vocab_size": 420},
    "bpe-bytes": {"vocab_size": 256},
    "wordpiece": {"vocab_size": 300},
    "wordpiece-uncased": {"vocab_size": 300, "lowercase": True},
    "sentencepiece": {"vocab_size": 250, "character_coverage": 1.0},
    "sentencepiece-bytes": {"vocab_size": 420, "byte_fallback": True},
}
QUICK = settings(max_examples=30, deadline=None)
CHARACTERS = st.characters(exclude_categories=("Cs",))
PHRASES = st.sampled_from([word for text in TEXTS for word in text.split()] + ["\u0301", "\u200d"])
ANY_TEXT = st.lists(
    st.one_of(PHRASES, st.text(CHARACTERS, max_size=4), st.sampled_from([" ", "  ", "\u3000", "\n"])), max_size=12
).map("".join)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name, options in KINDS.items():
        made[name] = tmp_path_factory.mktemp(name)
        train_tokenizer(name.split("-")[0], made[name], texts=TEXTS * 4, **options)
    return made


@pytest.fixture(scope="module")
def tokenizers(folders):
    return {name: load_tokenizer(folder) for name, folder in folders.items()}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC"])
@QUICK
@given(text=ANY_TEXT)
def test_offsets_are_exact(tokenizers, name, form, text):
    """Ranges stay inside, never go back, hold no outer space and, joined, miss no character."""
    text = unicodedata.normalize(form, text)
    encoding = tokenizers[name].encode(text)
    assert len(encoding.pieces) == len(encoding.offsets) == len(encoding.word_begins)
    assert {*encoding.pieces} <= {*tokenizers[name].symbols, "<unk>"}
    covered, last = set(), 0
    for start, end in encoding.offsets:
        assert last <= start <= end <= len(text)
        last = start
        part = text[start:end]
        assert part == part.strip() or not part.strip(), part
        covered.update(range(start, end))
    lost = [c for n, c in enumerate(text) if n not in covered and not c.isspace()]
    if name.startswith("bpe"):  # loses nothing
        assert tokenizers[name].decode(encoding.pieces) == text.strip(" ") and not lost
    dropped = {"Cc", "Cf", "Mn", "Cn", "Co", "Me", "Mc", "Lo", "Zs"}
    assert all(unicodedata.category(c) in dropped for c in lost), lost


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_words_round_trip(tokenizers, name, text):
    """The pieces from a word's first to its last character give that word again."""
    for form in ("NFC", "NFD"):
        said = unicodedata.normalize(form, text)
        offsets = tokenizers[name].encode(said).offsets
        for match in re.finditer(r"\S+", said):
            inside = [(s, e) for s, e in offsets if s < match.end() and e > match.start()]
            assert said[inside[0][0] : inside[-1][1]] == match.group()


@pytest.mark.parametrize(("name", "count"), [("bpe-bytes", 4), ("sentencepiece-bytes", 4)])
def test_parts_of_a_character_cover_it(tokenizers, name, count):
    assert tokenizers[name].encode("a 𐍈 b").offsets.count((2, 3)) >= count


def test_dropped_characters_before_a_text_shift_nothing(tokenizers):
    """The library's offsets were shifted by control characters that its normalization removes."""
    for text in ("\x1fThe", "\x01\x02 The", "\x00The \x1fThe"):
        assert tokenizers["sentencepiece"].encode(text).offsets[-1][1] == len(text)


def test_dropped_marks_belong_to_their_letter(tokenizers):
    text = "the cafe\u0301 here"
    encoding = tokenizers["wordpiece-uncased"].encode(text)
    assert max(end for start, end in encoding.offsets if start < 9) == 9
    assert exact_offsets("e\u0301 x", ["e", "x"], [(0, 1), (3, 4)]) == [(0, 2), (3, 4)]
    assert exact_offsets("e\u0301x", ["e", "ux"], [(0, 1), (1, 3)]) == [(0, 1), (1, 3)]


def test_expanded_characters(tokenizers):
    """One character that becomes several pieces is covered by each of them."""
    text = "x ½ y"
    encoding = tokenizers["sentencepiece-bytes"].encode(text)
    assert encoding.offsets.count((2, 3)) >= 3
    assert text[encoding.offsets[-1][0] : encoding.offsets[-1][1]] == "y"


@pytest.mark.parametrize("name", KINDS)
def test_word_begins(tokenizers, name):
    tokenizer = tokenizers[name]
    text = "The Panthers ranking"
    encoding = tokenizer.encode(text)
    marked = zip(encoding.offsets, encoding.word_begins, strict=True)
    begun = {start + text[start].isspace() for (start, _), first in marked if first}
    assert begun == {0, 4, 13}
    assert all(
        tokenizer.begins_word(piece) == first
        for piece, first in zip(encoding.pieces[1:], encoding.word_begins[1:], strict=True)
    )
    assert tokenizer.begins_word("<s>") and tokenizer.begins_word("<mask>")


def test_ideographs_are_words(tokenizers):
    encoding = tokenizers["wordpiece"].encode("黑豹队")
    assert encoding.word_begins == [True] * 3
    assert tokenizers["sentencepiece"].begins_word("的")


@pytest.mark.parametrize("name", KINDS)
def test_text_is_never_special_and_nothing_has_no_pieces(tokenizers, name):
    pieces = tokenizers[name].encode("a [SEP] b </s> <mask> [CLS]").pieces
    assert not {"</s>", "<mask>", "<s>"} & set(pieces)
    assert tokenizers[name].encode("").pieces == []


@pytest.mark.parametrize("name", KINDS)
def test_saved_and_read_and_pickled(folders, tokenizers, name, tmp_path):
    tokenizer = tokenizers[name]
    tokenizer.save(tmp_path / "again")
    again = load_tokenizer(tmp_path / "again")
    for text in TEXTS:
        assert again.encode(text) == tokenizer.encode(text)
        assert pickle.loads(pickle.dumps(tokenizer)).encode(text) == tokenizer.encode(text)
    assert (tmp_path / "again" / "dict.txt").read_bytes() == (folders[name] / "dict.txt").read_bytes()


@pytest.mark.parametrize("name", KINDS)
def test_dictionary_is_fairseqs(folders, tokenizers, name):
    dictionary = Dictionary.load(str(folders[name] / "dict.txt"))
    assert dictionary.symbols[4:] == tokenizers[name].symbols
    tokenizers[name].check_dictionary(dictionary, "dict.txt")
    with pytest.raises(ValueError, match=r"dict.txt lacks [\d,]+ of the"):
        tokenizers[name].check_dictionary(set(dictionary.symbols[:50]), "dict.txt")


def test_a_literal_unknown_sign_is_text(tmp_path):
    """WikiText's <unk>: sentencepiece took it out of its training, and < and > were unknown."""
    texts = ["the <unk> of the house", "a <unk> > b", "an old house"] * 20
    tokenizer = train_tokenizer("sentencepiece", tmp_path, texts=texts, vocab_size=60)
    encoding = tokenizer.encode("the <unk> house")
    assert UNKNOWN not in encoding.pieces and "".join(encoding.pieces) == "▁the▁<unk>▁house"
    inside = tokenizer.encode("hou☃se")
    assert inside.pieces[-3:].count(UNKNOWN) == 1 or UNKNOWN in inside.pieces
    assert sum(inside.word_begins) == 1, "an unknown piece goes on with its word"
    dictionary = Dictionary.load(str(tmp_path / "dict.txt"))
    assert word_starts(tmp_path, dictionary)[dictionary.unk()] == 0


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "sentencepiece"])
def test_training_repeats(tmp_path, kind):
    source = tmp_path / "text.gz"
    source.write_bytes(gzip.compress("\r\n".join(TEXTS * 3).encode()))
    for name, read in (("a", {"files": [source]}), ("b", {"files": [source]}), ("c", {"texts": iter(TEXTS * 3)})):
        train_tokenizer(kind, tmp_path / name, vocab_size=300, **read)
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "c")


def test_limited_alphabet(tmp_path):
    texts = ["aab aab abc", "xyz"]
    limited = train_tokenizer("wordpiece", tmp_path, texts=texts, vocab_size=40, limit_alphabet=2)
    assert {"a", "b", "##a", "##b"} <= set(limited.symbols)
    assert not set("xyzc") & set("".join(limited.symbols))
    assert limited.encode("abc").pieces == ["<unk>"]


def test_hugging_face_and_fairseq_folders(tmp_path, folders, tokenizers):
    whole = json.loads((folders["bpe"] / "tokenizer.json").read_text())["model"]
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in whole["merges"]]
    for vocabulary, rules in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        (tmp_path / vocabulary).mkdir()
        (tmp_path / vocabulary / vocabulary).write_text(json.dumps(whole["vocab"]))
        (tmp_path / vocabulary / rules).write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    text = " " + TEXTS[1]
    expected = tokenizers["bpe"].encode(text)
    assert load_tokenizer(tmp_path / "vocab.json").encode(text) == expected
    by_number = load_tokenizer(tmp_path / "encoder.json")
    found = by_number.encode(text)
    assert found.pieces == [str(whole["vocab"][piece]) for piece in expected.pieces]
    assert found.offsets == expected.offsets and found.word_begins == expected.word_begins
    assert by_number.decode(found.pieces) == TEXTS[1]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer in"),
        ({"tokenizer.json": "{}"}, "tokenizer.json is not .*model is missing"),
        ({"sentencepiece.model": "no model"}, "is not a sentencepiece model"),
        ({"vocab.txt": "the\nthe\n"}, "names 1 pieces twice"),
        ({"vocab.txt": "the\n"}, r"lacks \[UNK\]"),
        ({"vocab.json": "[]", "merges.txt": ""}, "vocab.json is not .*must be an object"),
        ({"vocab.json": "{", "merges.txt": ""}, "vocab.json is not the JSON"),
        ({"vocab.json": '{"a": 0}', "merges.txt": "a b c\n"}, "merges.txt: .* is no merge of two pieces"),
        ({"vocab.json": '{"a": 0}', "merges.txt": "a b\n"}, "merges.txt: .* is no merge of two pieces"),
    ],
)
def test_broken_folders(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("words", {}, "tokenizer must be one of"),
        ("bpe", {"vocab_size": 100}, "vocab_size of 256"),
        ("bpe", {"texts": []}, "no text"),
        ("wordpiece", {"vocab_size": 20}, "needs a vocab_size of"),
        ("sentencepiece", {"texts": []}, "no text"),
        ("sentencepiece", {"vocab_size": 5}, "vocab_size must be larger: at least"),
        ("bpe", {"lowercase": True}, "wordpiece's"),
        ("bpe", {"byte_fallback": True}, "takes no byte_fallback"),
        ("bpe", {"files": ["x"]}, "either files or texts"),
        ("bpe", {"texts": None, "files": ["bad.txt"]}, "bad.txt, line 2: invalid UTF-8"),
        ("bpe", {"texts": None, "files": ["absent.txt"]}, "is not a file"),
    ],
)
def test_wrong_training(tmp_path, monkeypatch, kind, given, message):
    monkeypatch.chdir(tmp_path)
    Path("bad.txt").write_bytes(b"good\n\xff\xfe\n")
    with pytest.raises(ValueError, match=message):
        train_tokenizer(kind, tmp_path, **{"vocab_size": 300, "texts": TEXTS} | given)


@pytest.mark.parametrize("name", KINDS)
def test_half_of_a_character_is_refused(tokenizers, name):
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        tokenizers[name].encode("a \ud83d b")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"user_defined_symbols": ["<2de>", "th", "the"]},
        {"user_defined_symbols": ["<2de>"], "model_type": "bpe", "split_by_whitespace": False},
        {"add_dummy_prefix": False},
        {"remove_extra_whitespaces": False},
        {"add_dummy_prefix": False, "remove_extra_whitespaces": False},
    ],
)
def test_ids_are_sentencepieces_own(options, tmp_path) -> None:
    """Of any spaces, and around symbols that a model finds whole."""
    prefix, given = str(tmp_path / "sentencepiece"), {"vocab_size": 120, "minloglevel": 2, "hard_vocab_limit": False}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXTS * 9), model_prefix=prefix, **given | options)
    library = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    ours = load_tokenizer(tmp_path)
    parts = ["<2de>", "Two", "th", "the", "Panthers", " ", "  ", "\t", "\u2581", ".", "\u00bd", "\0</s>", "\u6771"]
    for text in map("".join, itertools.product(["", *parts], repeat=3)):
        expected = library.id_to_piece(library.encode(text))
        found = [ours.pieces.get(one, one) for one in ours.encode(text).pieces]
        assert found == expected, text


def test_added_tokens_are_numbered_in_their_order():
    """One that the vocabulary has keeps its number, the others follow it."""
    state = {"model": {"vocab": [["a", 0.0], ["b", 0.0], ["<s>", 0.0]]}, "added_tokens": []}
    add_tokens(state, [{"content": name} for name in ("<x>", "<s>", "<y>")], [{"content": "<z>"}, {"content": "<x>"}])
    assert [(token["content"], token["id"]) for token in state["added_tokens"]] == [
        *(("<s>", 2), ("<x>", 3), ("<y>", 4), ("<z>", 5))
    ]
