"""At every level text becomes symbols and text again: what normalization leaves comes back, no symbol is special."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.text import train_tokenizer
from relpos_fairseq.text.assets import read_text
from relpos_fairseq.text.dictionary import SPECIAL, choose_symbols, write_dictionary
from relpos_fairseq.text.round_trip import LINES as LOOKED_AT
from relpos_fairseq.text.round_trip import round_trip
from relpos_fairseq.text.training import learn_sentencepiece, learn_subword_nmt, train_sentencepiece_model

TEXT = """\
the lowest newer wide house
two@@ words @@ fine a@@ b
</s> in a sentence <s> <pad> <unk>
AT&T <unk piece> <0x41> <U+0041> \\<s> \\\\</s>
na\u00efve \u4e2d\u6587 \u0e44\u0e17\u0e22 \ufb01 \u00bd
x</s>y <s>
@-@ &lt; | ||| ##ing [UNK]
"""
LINES = TEXT.splitlines() * 3
ODD = ["</s>", "<s>", "<pad>", "<unk>", "@@", "two@@", "@", "\u2581", "\\<s>", "<0x41>", "<U+0041>", "<mask>", "##a"]
ODD += ["</w>", "@@@"]
FAMILY = "\U0001f469\u200d\U0001f469\u200d\U0001f467"  # three people, joined
SOME = [*ODD, FAMILY, "a", "\u00e9", "\u4e2d\u6587", "\ufb01", "\u200d", "\u00ad"]
WORDS = st.one_of(st.sampled_from(SOME), st.text(max_size=5))
TEXTS = st.lists(WORDS, max_size=6).map(" ".join) | st.lists(st.sampled_from(ODD), max_size=4).map("".join)


def one_line(text: str) -> str:
    """White space as one space, without that at the ends; a line has no line feed."""
    return " ".join(text.split())


def without_marks(text: str) -> str:
    """The same of sentencepiece, whose mark of a space is a space."""
    return one_line(text.replace("\u2581", " "))


def parallel(folder: Path, bpe: str) -> None:
    """Make a folder as `relpos prepare wmt --normalization identity --tokenizer none` does."""
    folder.mkdir()
    (folder / "sample").write_text("".join(f"{one_line(line)}\n" for line in LINES))
    if bpe == "subword-nmt":
        learn_subword_nmt(folder / "sample", 60, folder / "bpe.codes")
    elif bpe != "none":
        learn_sentencepiece(folder / "sample", 200, bpe, folder / "sentencepiece.model", "identity")
        bpe = "sentencepiece"
    chosen = {"languages": ["en", "de"], "tokenizer": "none", "normalization": "identity", "bpe": bpe}
    (folder / "manifest.json").write_text(json.dumps({"settings": chosen}))
    write_dictionary(folder / "dict.de.txt", [("a", 1), ("two@@", 1)])


def level(folder: Path, name: str) -> None:
    """Make a folder as `relpos prepare lm` does."""
    folder.mkdir()
    if name == "sentencepiece":
        given = {"normalization_rule_name": "identity", "hard_vocab_limit": False}
        model = train_sentencepiece_model(map(one_line, LINES), 200, "--vocab-size", **given)
        (folder / "sentencepiece.model").write_bytes(model)
    (folder / "manifest.json").write_text(json.dumps({"level": name}))
    write_dictionary(folder / "dict.txt", [("a", 1)])


def as_it_is(text: str) -> str:
    return text


# For each level how its folder is made, and what normalization leaves of a text.
LEVELS: dict[str, tuple[Callable[[Path], object], Callable[[str], str]]] = {
    "words of parallel text": (functools.partial(parallel, bpe="none"), one_line),
    "subword-nmt": (functools.partial(parallel, bpe="subword-nmt"), one_line),
    "unigram": (functools.partial(parallel, bpe="unigram"), without_marks),
    "bpe": (functools.partial(parallel, bpe="bpe"), without_marks),
    "words": (functools.partial(level, name="word"), one_line),
    "sentencepiece": (functools.partial(level, name="sentencepiece"), without_marks),
    "characters": (functools.partial(level, name="char"), as_it_is),
    "bytes": (functools.partial(level, name="byte"), as_it_is),
    "bytes' BPE": (lambda at: train_tokenizer("bpe", at, vocab_size=300, texts=LINES), lambda text: text.strip(" ")),
    "wordpiece": (lambda at: train_tokenizer("wordpiece", at, vocab_size=200, texts=LINES), as_it_is),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """The text of each level, made once."""
    home = tmp_path_factory.mktemp("levels")

    @functools.cache
    def of(name: str):
        LEVELS[name][0](home / name)
        return read_text(home / name, "de")

    return of


@pytest.mark.parametrize("name", LEVELS)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
@example(text="</s> in a sentence")
@example(text="two@@ words")
@example(text="ok @@ fine a@@ b")
@example(text="<s> start")
@example(text="\U0001f600<unk piece>")
def test_text_comes_back(texts, name: str, text: str) -> None:
    """decode(encode(x)) is what normalization leaves of x, and no symbol of a line but the unknown word is special."""
    codec = texts(name)
    symbols = codec.encode(text)
    ends = {"</s>"} if name in ("words", "sentencepiece", "characters", "bytes") and "\n" in text else set()
    assert {*symbols} & {*SPECIAL[:3]} == ends
    if ends or (name in ("sentencepiece", "wordpiece") and "<unk>" in symbols):  # a character that its model lacks
        return
    if name == "wordpiece":  # which keeps no spaces: what comes back has the same symbols
        assert codec.encode(codec.decode(symbols)) == symbols
        return
    assert codec.decode(symbols) == LEVELS[name][1](text)


def test_characters_stay_as_they_are(texts) -> None:
    """With identity neither composed letters nor joiners nor ligatures are changed."""
    for text in ("e\u0301", "\ufb01", "a\u200db", "\u00bd", "\ufeffa", "\ufdfa", FAMILY, "AT&T", "https://a.b/?c=d&e"):
        for name in ("subword-nmt", "bpe", "unigram"):
            assert texts(name).decode(texts(name).encode(text)) == text


class Replaced:
    """Text that comes back as another."""

    def __init__(self, back: str) -> None:
        self.back = back

    def encode(self, text: str) -> list[str]:
        return [text]

    def decode(self, symbols: list[str]) -> str:
        return self.back if symbols != ["<unk>"] else "<unk>"


@pytest.mark.parametrize(
    ("line", "back", "why"),
    [
        ("a  b", "a b", "white space"),
        ("a\u00a0b", "a b", "white space"),
        ("a\u2581 b", "a b", "\u2581 is sentencepiece's own space"),
        ("\ufb01sh", "fish", "Unicode's other forms of characters"),
        ("a\u200db", "ab", "characters that are not seen"),
        ("l ' eau", "l'eau", "spaces that came or went"),
        ("\u2581x", "\u2581 x", "spaces that came or went"),
        ("Ab", "ab", "upper and lower case"),
        ("caf\u00e9", "cafe", "accents"),
        ("\u201ea\u201c", '"a"', "punctuation"),
        ("abc", "abd", "other characters"),
        ("\u201eCaf\u00e9\u201c  x", '"cafe" x', "punctuation"),
    ],
)
def test_why_a_line_does_not_come_back(line: str, back: str, why: str) -> None:
    """The reason is the last thing without which both are equal."""
    found = round_trip(Replaced(back), [line, "", back, line, line, line])
    assert (found.lines, found.changed) == (5, 4) and len(found.examples) == 3
    assert found.examples[0][2] == why
    assert round_trip(Replaced(back), [line], {"other"}).examples[0][1:] == ("<unk>", "unknown symbols")


def test_a_text_is_looked_at_from_its_beginning() -> None:
    """Only the first lines are read, and what differs far in a line is shown."""
    lines = iter([f"{'a' * 500}b\n"] * LOOKED_AT * 2)
    found = round_trip(Replaced("a" * 500), lines)
    assert found.lines == found.changed == LOOKED_AT and next(lines)
    assert found.examples[0][:2] == (f"{'a' * 12}b\\n", "a" * 12)


def test_a_model_of_one_side_of_parallel_text_reads_text_as_its_data_were_made(texts, tmp_path) -> None:
    """Without a language, as a language model has none, the units are those of the folder."""
    texts("subword-nmt"), texts("unigram")
    for name in ("subword-nmt", "unigram"):
        folder = tmp_path / name
        parallel(folder, name)
        assert read_text(folder).encode("a </s> two@@ b") == read_text(folder, "de").encode("a </s> two@@ b")
        assert not {*read_text(folder).encode("</s> <s>")} & {*SPECIAL}


def test_fillers_of_a_dictionary_are_none_of_its_words() -> None:
    kept = choose_symbols({"a": 3, "madeupword0000": 2, "madeupword0002": 1}, 0, None, 8)
    names = [name for name, _ in kept]
    assert names == ["a", "madeupword0000", "madeupword0002", "madeupword0001"]


def test_sentencepiece_says_which_lines_it_leaves_out() -> None:
    with pytest.raises(UserError, match=r"U\+2585"):
        train_sentencepiece_model(["a \u2585 b"] * 9, 20, "--vocab-size")
