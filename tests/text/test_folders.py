"""One tokenizer a folder: its ids are AutoTokenizer's, whatever files and settings it has, and survive every way."""

from __future__ import annotations

import gzip
import json
import unicodedata
from pathlib import Path

import pytest
import sentencepiece
import transformers
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from helpers.tokenizers import ALBERT, MAKERS, ODD, SENTENCES, SETTINGS, TRAINED, lines, train, write_folders
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.text import load_tokenizer, train_tokenizer
from relpos_fairseq.text.tokenizer import load_sentencepiece
from relpos_fairseq.text.transformers_files import transformers_files

MULTI30K = ODD.parent / "data" / "multi30k"
needs_odd = pytest.mark.skipif(not ODD.is_dir(), reason="no ../shared/odd: texts and folders as people have them")
QUICK = settings(max_examples=60, deadline=None)


def plain(text: str) -> str:
    """Return a text as normalizers may make it, in which a name of a special symbol would be found."""
    stripped = unicodedata.normalize("NFKD", text).casefold()
    return "".join(one for one in stripped if unicodedata.category(one)[0] not in "MC")


ANY_TEXT = st.lists(
    st.one_of(
        st.sampled_from([*" ".join(SENTENCES).split(), "covid19", "[E1]", "Covid19", "e\u0301", "\ufb01\u0301"]),
        st.text(st.characters(exclude_categories=("Cs",)), max_size=5),
        st.sampled_from([" ", "  ", "\u3000", "\n", "\x85", "\u200b"]),
    ),
    max_size=12,
)
NAMES = ("@", "<s>", "<pad>", "</s>", "<unk>", "<mask>", "[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")  # text to us
ANY_TEXT = ANY_TEXT.map("".join).filter(lambda text: not any(name.casefold() in plain(text) for name in NAMES))


class Made(dict):
    """What a fixture made, by name; its repr is short."""

    __repr__ = object.__repr__


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return write_folders(tmp_path_factory.mktemp("folders"))


@pytest.fixture(scope="module")
def pairs(folders) -> dict[str, tuple]:
    """Our tokenizer and transformers' of each folder."""
    read = transformers.AutoTokenizer.from_pretrained
    return Made({name: (load_tokenizer(folder), read(folder)) for name, folder in folders.items()})


def own_ids(tokenizer, text: str) -> list[int]:
    return [tokenizer.numbers[piece] for piece in tokenizer.encode(text).pieces]


def ids(theirs, text: str) -> list[int]:
    """What transformers' tokenizer makes of a text."""
    return theirs(text, add_special_tokens=False)["input_ids"]


def numbers_of(tokenizer) -> dict[str, int]:
    """The numbers that fairseq gives the symbols."""
    return {s: n for n, s in enumerate(["<s>", "<pad>", "</s>", "<unk>", *tokenizer.symbols, "<mask>"])}


def exported(tokenizer, numbers: dict[str, int], folder: Path, *how):
    """Write a tokenizer for transformers; what AutoTokenizer makes of it."""
    for file, text in transformers_files(tokenizer, numbers, *how).items():
        (folder / file).write_text(text, encoding="utf-8")
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", SETTINGS)
@QUICK
@given(text=ANY_TEXT)
@example(text="\x07 .")
def test_ids_are_those_of_autotokenizer(pairs, name, text):
    ours, theirs = pairs[name]
    assert theirs.is_fast
    assert own_ids(ours, text) == ids(theirs, text)


@needs_odd
@pytest.mark.parametrize("name", SETTINGS)
def test_ids_of_odd_lines(pairs, name):
    ours, theirs = pairs[name]
    for line in lines():
        assert own_ids(ours, line) == ids(theirs, line), line


@needs_odd
def test_ids_of_folders_as_people_have_them():
    with gzip.open(ODD / "folders" / "ids.json.gz") as file:
        right = json.load(file)
    release = transformers.__version__
    for name, expected in right.get(release, right["4.46.3"]).items():
        tokenizer = load_tokenizer(ODD / "folders" / name)
        for text, wanted in zip(right["texts"], expected, strict=True):
            assert own_ids(tokenizer, text) == wanted, (name, text)


@pytest.mark.parametrize("name", SETTINGS)
def test_special_symbols_are_named(pairs, name):
    """Symbols of fairseq have the numbers of transformers' special tokens; in text their names are text."""
    ours, theirs = pairs[name]
    roles = {"<s>": "cls", "<pad>": "pad", "</s>": "sep", "<unk>": "unk", "<mask>": "mask"}
    for symbol, role in roles.items():
        assert ours.numbers[symbol] == getattr(theirs, f"{role}_token_id"), symbol
        assert not {"<s>", "<pad>", "</s>", "<mask>"} & {*ours.encode(f"a {getattr(theirs, f'{role}_token')} b").pieces}
    assert not set(roles) & set(ours.symbols)


def test_a_comma_leaves_its_digit_and_quotes_are_one_sign_for_albert(tmp_path):
    texts = [f"``So '' {one}9,0 {one}9,{two}9, as" for one in range(1, 9) for two in range(1, 9)]
    given = {"split_by_number": False, "split_by_unicode_script": False, "minloglevel": 2, "hard_vocab_limit": False}
    given |= ALBERT | {"vocab_size": 40}
    with (tmp_path / "spiece.model").open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts * 2), model_writer=model, **given)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "AlbertTokenizer"}')
    ours, theirs = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert "\u258129," in ours.pieces.values()
    for text in [*texts[:9], "9,", "29, 39,", "``a", "''", " `` a''"]:
        assert own_ids(ours, text) == ids(theirs, text), text


# The way out


@pytest.mark.parametrize("name", SETTINGS)
def test_written_for_transformers_and_read_again(pairs, name, tmp_path):
    """In another order of numbers too: added tokens keep their flags, special ones their names."""
    ours, _ = pairs[name]
    turned = dict(zip(ours.numbers, reversed(range(len(ours.numbers))), strict=True))
    for numbers in (ours.numbers, turned):
        read = exported(ours, numbers, tmp_path, 1, False, 99)
        again = load_tokenizer(tmp_path)
        assert again.numbers == numbers and again.names == ours.names and read.model_max_length == 99
        for text in [*SENTENCES, "covid19[E1] Covid19 [E1]covid19", "xcovid19 x", *lines()]:
            wanted = [numbers[piece] for piece in ours.encode(text).pieces]
            assert ids(read, text) == own_ids(again, text) == wanted, text


# Masks


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, tuple]:
    """A tokenizer of each kind, and what AutoTokenizer makes of it."""
    made = Made()
    for name in TRAINED:
        folder = tmp_path_factory.mktemp("trained")
        ours = train(name, folder)
        made[name] = ours, exported(ours, numbers_of(ours), folder, 1, False), numbers_of(ours)
    return made


WORDS = st.lists(
    st.tuples(
        st.sampled_from(["", "", "", "(", '"', "„"]),
        st.sampled_from(["man", "bike", "Zoë", "東京", "İstanbul", "woman", "city"]),
        st.sampled_from(["", "", "", ",", ".", "!", ")", ");"]),
        st.booleans(),
    ),
    min_size=1,
    max_size=7,
)


@pytest.mark.parametrize("name", TRAINED)
@QUICK
@given(words=WORDS)
def test_a_masked_text_is_fed_as_training_saw_it(trained, name, words):
    """Its symbols are those of the text with a word, and `<mask>` for that word's; the exported file's ids as well."""
    ours, theirs, numbers = trained[name]
    full = " ".join(before + word + after for before, word, after, _ in words)
    masked = " ".join(before + ("<mask>" if hidden else word) + after for before, word, after, hidden in words)
    encoding, ranges, place = ours.encode(full), [], 0
    for before, word, after, hidden in words:
        if hidden:
            ranges.append((place + len(before), place + len(before) + len(word)))
        place += len(before + word + after) + 1
    expected, whole = [], True
    for piece, (start, end) in zip(encoding.pieces, encoding.offsets, strict=True):
        inside = [one for one in ranges if start < one[1] and end > one[0]]
        if not inside:
            expected.append((piece, None))
        else:
            whole &= len(inside) == 1 and inside[0][0] <= start and end <= inside[0][1]
            if not expected or expected[-1][1] != inside[0]:
                if expected and expected[-1] == ("▁", None) and full[inside[0][0] - 1 : inside[0][0]] in ("", " "):
                    expected.pop()  # the mark of the word's own space
                expected.append(("<mask>", inside[0]))
    assume(whole)  # no piece of a word reaches beyond it
    symbols = [piece for piece, _ in expected]
    assert ours.encode_masked(masked) == symbols
    assert ids(theirs, masked) == [numbers[one] for one in symbols]


@pytest.mark.parametrize("name", TRAINED)
@QUICK
@given(text=ANY_TEXT)
def test_ids_of_a_trained_tokenizer_in_transformers(trained, name, text):
    ours, theirs, numbers = trained[name]
    assert ids(theirs, text) == [numbers[one] for one in ours.encode(text).pieces]


@pytest.mark.skipif(not MULTI30K.is_dir(), reason="no ../shared/data: real text")
@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_ids_of_real_text_are_sentencepieces_own(tmp_path, kind):
    """The tokenizers library runs the model; sentencepiece is the oracle."""
    texts = []
    for path in sorted(MULTI30K.glob("[tv][ea][sl]*.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            texts += file.read().splitlines()
    ours = train_tokenizer("sentencepiece", tmp_path, texts=texts, vocab_size=1500, model_type=kind)
    oracle = load_sentencepiece(tmp_path / "sentencepiece.model")
    unknown = oracle.unk_id()
    for text, (found, _) in zip(texts, ours.raw(texts), strict=True):
        wanted = oracle.encode(text)
        assert found == ["<unk>" if number == unknown else oracle.id_to_piece(number) for number in wanted], text


# What is refused


JAPANESE = '{"tokenizer_class": "BertJapaneseTokenizer"}'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config", JAPANESE, "is of BertJapaneseTokenizer, and what that makes of vocab.txt"),
        ("config", JAPANESE, "is of BertJapaneseTokenizer, and what that makes of vocab.txt"),
        ("tokenizer_config", "[1]", r"tokenizer_config.json is not .*\[1\], and must be an object"),
        ("special_tokens_map", "{", "special_tokens_map.json is not the JSON"),
        ("tokenizer_config", '{"cls_token": 5}', "must be a text or an object with its content, got 5"),
        ("tokenizer_config", '{"added_tokens_decoder": {"x": {"content": "a"}}}', "has the number 'x'"),
        ("added_tokens", '{"a": "b"}', "added_tokens.json is not .*a is .b., and must be a whole number"),
    ],
)
def test_settings_that_cannot_be(tmp_path, name, content, message):
    MAKERS["bert"](tmp_path)
    (tmp_path / f"{name}.json").write_text(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)


def test_a_token_of_two_roles_has_one(tmp_path):
    """As GPT-2's, whose end pads; fairseq's symbols are different ones."""
    MAKERS["bert"](tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"pad_token": "[SEP]", "mask_token": "[UNK]"}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.names == {"<s>": "[CLS]", "</s>": "[SEP]", "<unk>": "[UNK]"}


def test_a_trained_file_that_was_changed_is_refused(tmp_path):
    """Two tokens of one number; a part that only a newer library reads."""
    train_tokenizer("bpe", tmp_path, texts=SENTENCES, vocab_size=300)
    path = tmp_path / "tokenizer.json"
    state = json.loads(path.read_text())
    twice = state["model"] | {"vocab": state["model"]["vocab"] | {"x y": 7}}
    newer = r"is not a tokenizer that tokenizers 0.2\S+ reads .*: a newer release may"
    for changed, said in (
        ({"model": twice}, "tokens have 300 numbers: two share one"),
        ({"pre_tokenizer": {"type": "FixedLengthOfTomorrow", "length": 3}}, newer),
    ):
        path.write_text(json.dumps(state | changed))
        with pytest.raises(UserError, match=said):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["sentencepiece and added words", "DeBERTa and an added word", "added by number"])
def test_added_words_beside_masks(pairs, name):
    """What follows an added word is spelt as training had it, in a line with masks too."""
    ours, _ = pairs[name]
    for text in ("city covid19, woman", "(city) covid19.", "covid19 city covid19"):
        full, masked = ours.encode(text).pieces, ours.encode_masked(text.replace("city", "<mask>"))
        place = masked.index("<mask>")
        assert masked[:place] == full[:place] and full[-len(masked) + place + 1 :] == masked[place + 1 :], text


@pytest.mark.parametrize("name", ["bpe", "spaces at the start"])
def test_two_spaces_before_a_mask(pairs, trained, name):
    """The second one is the word's; a token of the first stays."""
    ours = trained[name][0] if name in trained else pairs[name][0]
    word = ours._words[0]
    full, masked = ours.encode(f"a  {word} b").pieces, ours.encode_masked("a  <mask> b")
    assert len(ours.encode(f" {word}").pieces) == 1
    assert [piece for piece in masked if piece != "<mask>"] == [piece for piece in full if piece != f"Ġ{word}"]


def test_the_word_for_a_mask_is_no_added_token(pairs):
    ours, _ = pairs["more special tokens"]
    assert "man" not in ours._words and ours._words


def test_words_are_cut_at_white_space_alone(tmp_path):
    """A pre-tokenizer whose first step cuts at white space keeps it in the export."""
    MAKERS["bert"](tmp_path)
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    steps = [{"type": "WhitespaceSplit"}, {"type": "Punctuation", "behavior": "Isolated"}]
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    ours = load_tokenizer(tmp_path)
    assert ours.encode_masked("a <mask> is.")[:2] == ["a", "<mask>"]
    theirs = exported(ours, ours.numbers, tmp_path, 0, True)
    assert ids(theirs, "a man is.") == own_ids(ours, "a man is.")


def test_an_added_word_is_no_part_of_others(tmp_path):
    """Of `single_word`, in another order of numbers too, which fairseq's is."""
    MAKERS["bert"](tmp_path)
    added = {"added_tokens_decoder": {"9999": {"content": "brexit", "single_word": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(added))
    ours = load_tokenizer(tmp_path)
    numbers = numbers_of(ours)
    theirs = exported(ours, numbers, tmp_path, 0, True)
    for text in ("brexits", "a brexit man"):
        assert ids(theirs, text) == [numbers[one] for one in ours.encode(text).pieces]
