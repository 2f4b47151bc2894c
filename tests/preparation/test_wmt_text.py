"""Parallel text, line by line: normalising, tokenising, filtering, units, duplicates."""

from __future__ import annotations

import contextlib
import functools
import io
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from sacremoses import MosesPunctNormalizer, MosesTokenizer
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.lab.comparison.tasks import parallel_text as quickstart_corpus
from relpos_fairseq.preparation import cleaning
from relpos_fairseq.preparation.binarise import count_dictionary
from relpos_fairseq.preparation.cleaning import Cleaner, Filter, Limits, sampled
from relpos_fairseq.preparation.parallel_text import LONGEST_SIDE, Chunk, Text, map_lines
from relpos_fairseq.text import training
from relpos_fairseq.text.assets import ParallelText
from relpos_fairseq.text.dictionary import read_dictionary
from relpos_fairseq.text.moses import Detokeniser, FastMoses, Normaliser, join_subwords
from relpos_fairseq.text.subwords import SubwordNmt, load_subwords
from relpos_fairseq.text.tokenizer import usable_pieces
from relpos_fairseq.text.training import learn_sentencepiece

LANGUAGES = ("en", "de", "cs", "fr")
FEW = settings(max_examples=40, deadline=None)

# Text that tokenizers treat specially, glued together at random.
BITS = [
    *("a", "B", "zwei", "Mr.", "z.B.", "No.", "5", "1,000", "'", '"', ",", ".", "..", "...", " "),
    *("  ", "-", "&", "|||", "<s>", "«", "\u00a0", "%", "(", ")", "’", "'s", "„", "é", "ß", "中"),
    *("DOTMULTI", "\t", "€", ":", ";", "`", "´", "\u200b", "\x07", "e\u0301", "@-@", "@@", "x@@ "),
]
odd_text = st.lists(st.sampled_from(BITS), max_size=16).map("".join) | st.text(max_size=30)


@functools.cache
def normaliser(language: str) -> Normaliser:
    return Normaliser(language)


@functools.cache
def tokeniser(language: str) -> FastMoses:
    return FastMoses(language)


@functools.cache
def mosess_own(language: str) -> Callable[[str], str]:
    library = MosesTokenizer(language)
    return lambda line: " ".join(library.tokenize(line, aggressive_dash_splits=True))


@FEW
@given(line=odd_text, language=st.sampled_from(LANGUAGES))
def test_a_normalised_line_is_one_clean_line_with_the_librarys_punctuation(line, language):
    expected = MosesPunctNormalizer(lang=language).normalize(line)
    assert normaliser(language).punctuation(line).strip() == expected
    normal = normaliser(language)(line)
    assert normal == " ".join(normal.split())
    assert not any(ord(c) < 32 or c in "\u2028\u200b\ufeff\x85" for c in normal)
    assert len(normal.splitlines()) <= 1


def test_normalising_by_hand():
    assert normaliser("en")("\ufeff“It’s”\t5\u00a0000 e\u0301\u0007…") == '"It\'s" 5.000 é...'
    assert normaliser("en")("e\u200b\u0301\u2066 a\u2069") == "é a"
    assert normaliser("de")("„So“ kostet 5\u00a0000 – ja") == '"So" kostet 5,000 - ja'


@settings(max_examples=120, deadline=None)
@given(line=odd_text, language=st.sampled_from(LANGUAGES), raw=st.booleans())
def test_tokens_are_the_librarys(line, language, raw):
    line = line if raw else normaliser(language)(line)
    for _ in range(2):  # the second time from memory
        assert tokeniser(language)(line) == mosess_own(language)(line)


@pytest.mark.parametrize(
    "tokens", ["at No. 5", "at No . Five", "it is etc. and", "he said so. and", "he said so . And", "he said so ."]
)
def test_runs_depend_on_what_follows_them(tokens):
    assert tokeniser("en")(tokens.replace(" .", ".")) == tokens


def test_forgetting_changes_nothing(monkeypatch):
    monkeypatch.setattr("relpos_fairseq.text.moses.REMEMBERED", 2)
    small = FastMoses("en")
    for line in ("a, b. c; d! e?", "No. 5, a-b", "(f) 'g' \"h\"", "a, b. c; d! e?"):
        assert small(line) == mosess_own("en")(line)
        assert small.known.cache_info().currsize <= 2


@pytest.fixture(scope="module")
def codes(tmp_path_factory):
    path = tmp_path_factory.mktemp("codes") / "bpe.codes"
    words = "low lower lowest new newer newest wide wider widest é 中文 &apos; x@@"
    with path.open("w", encoding="utf-8") as file:
        learn_bpe(io.StringIO(f"{words}\n" * 3), file, 30)
    return path


@FEW
@given(line=odd_text | st.just("lowest newer wid unheard"))
def test_units_are_subword_nmts_and_join_again(codes, line):
    line = normaliser("en")(line)
    units = " ".join(SubwordNmt(codes)(line))
    if "@@" not in line:
        with codes.open(encoding="utf-8") as file:
            assert units == BPE(file).process_line(line)
    assert join_subwords(units, "subword-nmt") == line == join_subwords(units, "auto")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    text = folder / "text"
    characters = "abcdefghijklmnopqrstuvwxyzäé中.,'\"()-&|<>%;:`@0123456789"
    text.write_text("\n".join([" ".join(characters), "the lowest newer wide house"] * 20))
    learn_sentencepiece(text, 120, "unigram", folder / "sentencepiece.model")
    assert sorted(path.name for path in folder.iterdir()) == ["sentencepiece.model", "text"]
    return folder / "sentencepiece.model"


def test_sentencepieces_model_does_not_depend_on_where_it_is_made(model, tmp_path):
    text = tmp_path / "a,b"
    text.write_bytes(model.with_name("text").read_bytes())
    learn_sentencepiece(text, 120, "unigram", tmp_path / "made")
    assert (tmp_path / "made").read_bytes() == model.read_bytes()


@pytest.mark.parametrize(
    ("lines", "size", "limit", "said"),
    [
        (["abcdefgh"] * 9, 10, False, r"make 10 pieces .* larger: at least 12$"),
        (["ab"] * 9, 99, True, r"make 99 pieces .* --size must be smaller: at most \d$"),
        (["ab"] * 9, 99, False, None),
        ([], 99, False, "it is empty"),
        (["", " "], 99, False, "it is empty"),
    ],
)
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepieces_error_says_which_way_the_size_must_go(kind, lines, size, limit, said):
    options = {"model_type": kind, "num_threads": 1, "hard_vocab_limit": limit}
    with pytest.raises(UserError, match=said) if said else contextlib.nullcontext():
        assert training.train_sentencepiece_model(lines, size, "--size", **options)


def test_sentencepieces_error_comes_from_its_own_process(model, tmp_path):
    with pytest.raises(UserError, match="--vocab-size must be larger: at least"):
        learn_sentencepiece(model.with_name("text"), 9, "bpe", tmp_path / "made")
    assert not list(tmp_path.iterdir())


def test_the_quickstart_learns_what_units_there_are(tmp_path):
    path = tmp_path / "text"
    path.write_text("two words\n")
    made = sentencepiece.SentencePieceProcessor(model_proto=quickstart_corpus.train_subwords([path]))
    assert made.decode(made.encode("two words")) == "two words"
    for text in ("", "\n\n"):
        path.write_text(text)
        with pytest.raises(UserError, match="it is empty"):
            quickstart_corpus.train_subwords([path])


@FEW
@given(words=st.lists(st.text("abcäé.,'(-|&%@059", min_size=1, max_size=6), max_size=6))
def test_sentencepiece_joins_again(model, words):
    line = " ".join(words)
    units = " ".join(load_subwords("sentencepiece", model)(line))
    library = sentencepiece.SentencePieceProcessor(model_file=str(model))
    assert join_subwords(units, "sentencepiece") == library.decode(library.encode(line)) == line


@FEW
@given(numbers=st.lists(st.integers(0, 99), max_size=5))
def test_any_pieces_join_as_the_library_joins_them(model, numbers):
    """A hypothesis may begin within a word, or have no mark at all."""
    library = sentencepiece.SentencePieceProcessor(model_file=str(model))
    usable = usable_pieces(library)
    pieces = [usable[number % len(usable)] for number in numbers]
    assert ParallelText("de", "none", "sentencepiece", model).decode(pieces) == library.decode_pieces(pieces).strip()


def test_all_lines_tell_whether_they_are_in_pieces():
    """One without a mark is joined among others with marks; of text that is joined already none is."""
    of_pieces, by_marks = Detokeniser("de", "none", "sentencepiece"), Detokeniser("de", "none")
    for detokenise in (of_pieces, by_marks):
        assert detokenise.lines(["z .", "▁a b ▁c"]) == ["z." if detokenise is of_pieces else "z .", "ab c"]
        assert detokenise.lines(["z .", "▁a b ▁c", "▁d"]) == ["z.", "ab c", "d"]
        assert detokenise.lines(["a b .", "c"]) == ["a b .", "c"]
        assert detokenise.lines(["a b .", "a b ▁▂ .", "c"])[::2] == ["a b .", "c"]
    assert of_pieces.lines(["z ."], cut=True) == ["z."]
    assert by_marks.lines(["lo@@ west ."]) == ["lowest ."]


def test_a_missing_piece_is_split_into_the_best_that_are_there(model):
    """As by a model whose piece has the lowest of scores, and not into characters."""
    library = sentencepiece.SentencePieceProcessor(model_file=str(model))
    known = usable_pieces(library)
    whole = max((piece for piece in load_subwords("sentencepiece", model)("lowest house") if len(piece) > 2), key=len)
    proto = ModelProto.FromString(library.serialized_model_proto())
    next(one for one in proto.pieces if one.piece == whole).score = -1e6
    oracle = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    found = load_subwords("sentencepiece", model, {*known} - {whole})("lowest house")
    assert found == oracle.encode("lowest house", out_type=str) and whole not in found
    assert any(len(piece) > 1 for piece in {*found} - {*load_subwords("sentencepiece", model)("lowest house")})


@FEW
@given(lines=st.lists(st.text("abcdeé 中", max_size=12), max_size=5), held_out=st.text("abcdeé 中x", max_size=12))
@pytest.mark.parametrize("kind", ["subword-nmt", "sentencepiece"])
def test_no_character_of_the_training_text_is_unknown(codes, model, tmp_path_factory, kind, lines, held_out):
    """Whatever the dictionary lacks is split into what it has; what remains unknown are other characters, alone."""
    path, lines = codes if kind == "subword-nmt" else model, [" ".join(line.split()) for line in [*lines, "ab c"]]
    unlimited, folder = load_subwords(kind, path), tmp_path_factory.mktemp("dictionary")
    (folder / "train").write_text("".join(f"{' '.join(unlimited(line))}\n" for line in lines))
    known = count_dictionary((folder / "train", folder / "train"), kind, folder / "dict.txt", 1)
    assert known == read_dictionary(folder / "dict.txt")
    cut = load_subwords(kind, path, known)
    assert all(cut(line) == unlimited(line) for line in lines)
    units = cut(line := " ".join(held_out.split()))
    assert join_subwords(" ".join(units), kind) == line
    for unit in {*units} - {*known}:
        character = unit.removesuffix("@@") if kind == "subword-nmt" else unit
        assert len(character) == 1 and character not in "".join(lines)


@FEW
@given(
    words=st.lists(st.text("abcXYZäé", min_size=1, max_size=6), min_size=1, max_size=6),
    stop=st.sampled_from([".", "?", "!", ""]),
    comma=st.booleans(),
)
def test_detokenising_undoes_tokenising(words, stop, comma):
    line = f"{words[0]}{',' if comma else ''} {' '.join(words)}{stop}"
    for language in ("en", "de"):
        assert Detokeniser(language, "moses")(tokeniser(language)(line)) == line


def test_detokenising_by_hand(codes):
    line = "He said: \"It's a well-known (new) house & more\", didn't he?"
    tokens = tokeniser("en")(line)
    assert "&apos;s" in tokens and "well @-@ known" in tokens and "&amp;" in tokens
    assert Detokeniser("en", "moses", "subword-nmt")(" ".join(SubwordNmt(codes)(tokens))) == line
    assert Detokeniser("de", "none", "none")("a@@ b ▁c") == "a@@ b ▁c"


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ("a b", "c d", None),
        ("", "c", "empty"),
        ("w " * 251, "w " * 251, "too long"),
        ("x" * 3001, "y", "too long"),
        ("a b c d e f g h", "i j", "length ratio"),
        ("a b c d", "i", None),
        ("Same Words", "same words", "identical sides"),
        ("12 34", "12 35", None),
        ("какой то текст", "some text here", "wrong script"),
        ("some text here", "text mit ein пример", None),
        ("in the test", "etwas", "in a test set"),
        ("etwas", "Der Test", "in a test set"),
    ],
)
def test_filter(source, target, reason):
    filter = Filter("en", "de", Limits(), {"in the test", "der test"})
    assert filter(source.strip(), target.strip()) == reason


def test_filter_knows_scripts():
    assert Filter("en", "ru", Limits())("some words", "какой то") is None
    assert Filter("en", "ru", Limits())("some words", "latin words") == "wrong script"
    chinese = Filter("en", "zh", Limits(no_filter=["length-ratio"]))
    assert chinese("What is the NASUWT?", "NASUWT\u662f\u4ec0\u4e48\uff1f") is None  # a name, and three letters
    assert chinese("What is the NASUWT?", "what is NASUWT \u662f\uff1f") == "wrong script"
    assert Filter("en", "ja", Limits())("some words", "何か") is None


def clean(source: bytes, target: bytes, on_bad_line: str = "fail", numbers: tuple[int, ...] = (7, 8, 9)):
    """Clean lines of t.en and t.de."""
    cleaner = Cleaner((Normaliser("en"), Normaliser("de")), Filter("en", "de", Limits()), on_bad_line)
    return cleaner(Chunk(Text("t", (Path("t.en"), Path("t.de"))), numbers, source, target))


def test_invalid_utf8_is_named_or_dropped_and_counted():
    with pytest.raises(UserError, match=r"t\.de, line 8: invalid UTF-8 at byte 3 \(ff\)"):
        clean(b"a\nb\nc", b"x\nyy\xff\nz")
    result = clean(b"a\nb\nc", b"x\nyy\xff\nz", "drop")
    assert result.files[:2] == (b"a\nc\n", b"x\nz\n")
    assert result.counts == {"read": [3, 2, 2], "kept": [2, 2, 2], "invalid UTF-8": [1, 0, 0]}


def test_a_line_cut_inside_a_character_is_too_long_not_invalid():
    result = clean("é".encode() * (LONGEST_SIDE // 2 + 9), b"x", numbers=(1,))
    assert result.counts["too long"][0] == 1
    cut = ("a" + "é" * LONGEST_SIDE).encode()[: LONGEST_SIDE + 1]
    assert cleaning.decode_cut(cut).startswith("aé")


@FEW
@given(total=st.integers(0, 60), size=st.integers(1, 70), seed=st.integers(0, 5))
def test_sample_has_its_size(total, size, seed):
    chosen = list(sampled(total, size, seed))
    assert len(chosen) == total and sum(chosen) == min(size, total)
    assert chosen == list(sampled(total, size, seed))


def test_every_pair_is_as_likely_in_the_sample():
    times = Counter(n for seed in range(600) for n, yes in enumerate(sampled(6, 2, seed)) if yes)
    assert all(150 < times[number] < 250 for number in range(6))  # 200 expected, deviation 11.5


@FEW
@given(hashes=st.lists(st.integers(0, 9) | st.integers(2**64 - 9, 2**64 - 1), max_size=40), cuts=st.integers(1, 3))
def test_first_occurrences_stay(tmp_path_factory, hashes, cuts):
    """Of pairs with these hashes, written as so many shards."""
    folder, parts, paths = tmp_path_factory.mktemp("records"), [], []
    records = np.array([(value, (1, 2)) for value in hashes], cleaning.RECORD)
    for number, part in enumerate(np.array_split(np.arange(len(hashes)), cuts)):
        parts.append((folder / f"{number}.a", folder / f"{number}.b"))
        for path in parts[-1]:
            path.write_text("".join(f"{path.suffix}{line}\n" for line in part))
        paths.append(folder / f"{number}.records")
        paths[-1].write_bytes(records[part].tobytes())
    outputs = folder / "out.a", folder / "out.b"
    counts = cleaning.drop_duplicates(parts, paths, outputs, Limits(max_dropped=1))
    stay = [number for number, value in enumerate(hashes) if value not in hashes[:number]]
    for path in outputs:
        assert path.read_text().splitlines() == [f"{path.suffix}{number}" for number in stay]
    kept, dropped = len(stay), len(hashes) - len(stay)
    assert counts == {"kept": [kept, kept, 2 * kept], "duplicate": [dropped, dropped, 2 * dropped]}


def test_first_occurrences_of_many_pairs():
    hashes = np.random.default_rng(1).integers(0, 3000, 4000).astype("<u8")
    kept = np.flatnonzero(cleaning.first_occurrences(hashes))
    assert kept.tolist() == sorted(np.unique(hashes, return_index=True)[1].tolist())


def test_blocks_of_lines_keep_empty_lines():
    assert map_lines(str.upper, b"a\n\nb\n") == b"A\n\nB\n"
    assert map_lines(str.upper, b"\n") == b"\n"


def test_sample_for_units_takes_the_same_lines_of_both_sides(tmp_path):
    paths = (tmp_path / "a", tmp_path / "b")
    for path in paths:
        path.write_text("".join(f"{path.name}{number}\n" for number in range(50)))
    size = cleaning.write_sample(paths, 50, 9, 3, tmp_path / "sample")
    lines = (tmp_path / "sample").read_text().split()
    numbers = [number for number, chosen in enumerate(sampled(50, 9, 3)) if chosen]
    assert size == 9 and lines == [f"{side}{number}" for side in "ab" for number in numbers]
