"""One tokenizer a folder: its ids are AutoTokenizer's, whatever files and settings it has, and survive every way."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers import ROOT
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.text import load_tokenizer, train_tokenizer
from relpos_fairseq.text.folders import transformers_files

ODD = ROOT.parent / "shared" / "odd"
needs_odd = pytest.mark.skipif(not ODD.is_dir(), reason="no ../shared/odd: texts and folders as people have them")
QUICK = settings(max_examples=60, deadline=None)
SENTENCES = [
    "Ich möchte die Häuser in İstanbul sehen, Zoë!",
    "A man is riding a bike, and a woman laughs.",
    "東京 is a city; 北京 too. covid19 was new (in 2019).",
    "  two  spaces, a tab\tand ﬁne ligatures ½ e\u0301 ",
]
ANY_TEXT = st.lists(
    st.one_of(
        st.sampled_from([*" ".join(SENTENCES).split(), "covid19", "[E1]", "Covid19", "e\u0301", "\ufb01\u0301"]),
        st.text(st.characters(exclude_categories=("Cs",)), max_size=5),
        st.sampled_from([" ", "  ", "\u3000", "\n", "\x85", "\u200b"]),
    ),
    max_size=12,
)
NAMES = ("@", "<s>", "<pad>", "</s>", "<unk>", "<mask>", "[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")  # text to us
ANY_TEXT = ANY_TEXT.map("".join).filter(lambda text: not any(name in text for name in NAMES))


def lines() -> list[str]:
    """Odd lines, of which neither fairseq's nor a library's own symbols are any."""
    if not ODD.is_dir():
        return []
    return [line.decode("utf-8", "replace") for line in (ODD / "lines.txt").read_bytes().split(b"\n")]


# Folders that a release of transformers wrote


def wordpiece_folder(folder: Path) -> None:
    words = sorted({word for text in SENTENCES for word in text.lower().replace(",", " ,").split()})
    letters = sorted(set("".join(SENTENCES + [text.lower() for text in SENTENCES])) - set(" \t"))
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{one}" for one in letters), *words]
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(pieces)) + "\n", encoding="utf-8")


def bpe_folder(folder: Path, special: Sequence[str] = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")) -> None:
    train_tokenizer("bpe", folder, texts=SENTENCES * 3, vocab_size=340)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    vocabulary = {name: number for number, name in enumerate(special[:4])}
    vocabulary |= {piece: number + 4 for piece, number in model["vocab"].items()} | {
        special[4]: len(model["vocab"]) + 4
    }
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(model["merges"]) + "\n")
    for name in ("tokenizer.json", "dict.txt"):
        (folder / name).unlink()


def sentencepiece_folder(folder: Path, name: str, **more) -> None:
    import sentencepiece

    with (folder / name).open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(SENTENCES * 9), model_writer=model, vocab_size=110, hard_vocab_limit=False, **more
        )


DEBERTA = dict(pad_id=0, bos_id=1, eos_id=2, unk_id=3, pad_piece="[PAD]", bos_piece="[CLS]", eos_piece="[SEP]")
DEBERTA |= {"unk_piece": "[UNK]"}
MAKERS = {
    "bert": wordpiece_folder,
    "roberta": bpe_folder,
    "deberta": lambda folder: bpe_folder(folder, ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")),
    "xlm-roberta": lambda folder: sentencepiece_folder(folder, "sentencepiece.bpe.model"),
    "deberta-v2": lambda folder: sentencepiece_folder(folder, "spm.model", **DEBERTA),
    "albert": lambda folder: sentencepiece_folder(
        folder, "spiece.model", **DEBERTA | {"pad_piece": "<pad>", "unk_piece": "<unk>"}
    ),
}
ENTITY = {"content": "[E1]", "lstrip": True, "rstrip": True, "single_word": False, "normalized": False, "special": True}
WORD = {
    "content": "covid19",
    "lstrip": False,
    "rstrip": False,
    "single_word": True,
    "normalized": True,
    "special": False,
}
TOLD = {"cls_token": "@c", "sep_token": "@s", "pad_token": "@p", "unk_token": "[UNK]", "mask_token": "@m"}
# model type, tokenizer_config.json, special_tokens_map.json, added_tokens.json
SETTINGS = {
    "no settings": ("bert", None, None, None),
    "cased": ("bert", {"do_lower_case": False}, None, None),
    "cased without accents": ("bert", {"do_lower_case": False, "strip_accents": True}, None, None),
    "uncased with accents": ("bert", {"strip_accents": False}, None, None),
    "ideographs are no words": ("bert", {"tokenize_chinese_chars": False}, None, None),
    "added by number": ("bert", {"added_tokens_decoder": {"{n}": WORD, "{n+1}": ENTITY}}, None, None),
    "added by file": ("bert", {}, {"additional_special_tokens": ["[E1]"]}, {"covid19": 0, "[E1]": 1}),
    "named by map": ("bert", {"cls_token": "@x"}, TOLD, None),
    "more special tokens": ("bert", {"additional_special_tokens": ["[E1]", "man"]}, None, None),
    "split special tokens": ("bert", {"split_special_tokens": True, "additional_special_tokens": ["[E1]"]}, None, None),
    "spaces at the start": ("roberta", {"add_prefix_space": True}, None, None),
    "bytes and an added word": ("roberta", {}, None, {"covid19": 0, "東京": 1}),
    "bytes of DeBERTa": ("deberta", {"tokenizer_class": "DebertaTokenizer"}, None, {"covid19": 0}),
    "sentencepiece": ("xlm-roberta", None, None, None),
    "sentencepiece and added words": ("xlm-roberta", {}, {"additional_special_tokens": [ENTITY]}, {"covid19": 0}),
    "DeBERTa": ("deberta-v2", {}, None, None),
    "DeBERTa in lower case": ("deberta-v2", {"do_lower_case": True, "split_by_punct": True}, None, None),
    "DeBERTa and an added word": ("deberta-v2", {"added_tokens_decoder": {"{n+1}": WORD}}, None, None),
    "ALBERT": ("albert", None, None, None),
    "ALBERT with capitals and accents": ("albert", {"do_lower_case": False, "keep_accents": True}, None, None),
}


class Made(dict):
    """What a fixture made, by name; its repr is short."""

    __repr__ = object.__repr__


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    made = {}
    for name, (kind, config, special, added) in SETTINGS.items():
        folder = made[name] = tmp_path_factory.mktemp("folder")
        MAKERS[kind](folder)
        if kind == "albert" or (kind, config) == ("xlm-roberta", None):
            config = config or {}
        size = len(load_tokenizer(folder).numbers)
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))
        for file, content in (("tokenizer_config", config), ("special_tokens_map", special), ("added_tokens", added)):
            if file == "added_tokens" and added:
                content = {token: size + number for token, number in added.items()}
            if content is not None:
                text = json.dumps(content).replace("{n}", str(size)).replace("{n+1}", str(size + 1))
                (folder / f"{file}.json").write_text(text)
    return made


@pytest.fixture(scope="module")
def pairs(folders) -> dict[str, tuple]:
    """Our tokenizer and transformers' of each folder."""
    read = transformers.AutoTokenizer.from_pretrained
    return Made({name: (load_tokenizer(folder), read(folder)) for name, folder in folders.items()})


def own_ids(tokenizer, text: str) -> list[int]:
    return [tokenizer.numbers[piece] for piece in tokenizer.encode(text).pieces]


@pytest.mark.parametrize("name", SETTINGS)
@QUICK
@given(text=ANY_TEXT)
def test_ids_are_those_of_autotokenizer(pairs, name, text):
    ours, theirs = pairs[name]
    assert theirs.is_fast
    assert own_ids(ours, text) == theirs(text, add_special_tokens=False)["input_ids"]


@needs_odd
@pytest.mark.parametrize("name", SETTINGS)
def test_ids_of_odd_lines(pairs, name):
    ours, theirs = pairs[name]
    for line in lines():
        assert own_ids(ours, line) == theirs(line, add_special_tokens=False)["input_ids"], line


@needs_odd
def test_ids_of_folders_as_people_have_them():
    with gzip.open(ODD / "folders" / "ids.json.gz") as file:
        right = json.load(file)
    release = transformers.__version__
    for name, expected in right.get(release, right["4.46.3"]).items():
        tokenizer = load_tokenizer(ODD / "folders" / name)
        for text, ids in zip(right["texts"], expected, strict=True):
            assert own_ids(tokenizer, text) == ids, (name, text)


@pytest.mark.parametrize("name", SETTINGS)
def test_special_symbols_are_named(pairs, name):
    """Symbols of fairseq have the numbers of transformers' special tokens; in text their names are text."""
    ours, theirs = pairs[name]
    roles = {"<s>": "cls", "<pad>": "pad", "</s>": "sep", "<unk>": "unk", "<mask>": "mask"}
    for symbol, role in roles.items():
        assert ours.numbers[symbol] == getattr(theirs, f"{role}_token_id"), symbol
        assert not {"<s>", "<pad>", "</s>", "<mask>"} & {*ours.encode(f"a {getattr(theirs, f'{role}_token')} b").pieces}
    assert not set(roles) & set(ours.symbols)


# The way out


@pytest.mark.parametrize("name", SETTINGS)
def test_written_for_transformers_and_read_again(pairs, name, tmp_path):
    """In another order of numbers too: added tokens keep their flags, special ones their names."""
    ours, theirs = pairs[name]
    turned = dict(zip(ours.numbers, reversed(range(len(ours.numbers))), strict=True))
    for numbers in (ours.numbers, turned):
        for file, text in transformers_files(ours, numbers, 1, False, 99).items():
            (tmp_path / file).write_text(text, encoding="utf-8")
        again, read = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert again.numbers == numbers and again.names == ours.names and read.model_max_length == 99
        for text in [*SENTENCES, "covid19[E1] Covid19 [E1]covid19", "xcovid19 x", *lines()]:
            ids = [numbers[piece] for piece in ours.encode(text).pieces]
            assert read(text, add_special_tokens=False)["input_ids"] == ids, text
            assert own_ids(again, text) == ids, text


# Masks

TRAINED = {
    "bpe": {"vocab_size": 400},
    "wordpiece": {"vocab_size": 300},
    "wordpiece uncased": {"vocab_size": 300, "lowercase": True},
    "sentencepiece": {"vocab_size": 110},
    "sentencepiece bpe": {"vocab_size": 110, "model_type": "bpe"},
    "sentencepiece bytes": {"vocab_size": 380, "byte_fallback": True},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, tuple]:
    """A tokenizer of each kind, and what AutoTokenizer makes of it."""
    made = Made()
    for name, options in TRAINED.items():
        folder = tmp_path_factory.mktemp("trained")
        ours = train_tokenizer(name.split()[0], folder, texts=SENTENCES * 9, **options)
        numbers = {s: n for n, s in enumerate(["<s>", "<pad>", "</s>", "<unk>", *ours.symbols, "<mask>"])}
        for file, text in transformers_files(ours, numbers, 1, False).items():
            (folder / file).write_text(text, encoding="utf-8")
        made[name] = ours, transformers.AutoTokenizer.from_pretrained(folder), numbers
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
    assert theirs(masked, add_special_tokens=False)["input_ids"] == [numbers[one] for one in symbols]


@pytest.mark.parametrize("name", TRAINED)
@QUICK
@given(text=ANY_TEXT)
def test_ids_of_a_trained_tokenizer_in_transformers(trained, name, text):
    ours, theirs, numbers = trained[name]
    assert theirs(text, add_special_tokens=False)["input_ids"] == [numbers[one] for one in ours.encode(text).pieces]


# What is refused


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config.json": '{"tokenizer_class": "BertJapaneseTokenizer"}'}, "names the class BertJapaneseTok"),
        ({"tokenizer_config.json": "[1]"}, r"tokenizer_config.json must hold an object, got '\[1\]'"),
        ({"special_tokens_map.json": "{"}, "special_tokens_map.json is no JSON"),
        ({"tokenizer_config.json": '{"cls_token": 5}'}, "must be a text or an object with its content, got 5"),
        ({"tokenizer_config.json": '{"added_tokens_decoder": {"x": {"content": "a"}}}'}, "has the number 'x'"),
        ({"added_tokens.json": '{"a": "b"}'}, "added_tokens.json: an added token has the number 'b'"),
    ],
)
def test_settings_that_cannot_be(tmp_path, files, message):
    wordpiece_folder(tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)


def test_a_newer_librarys_file_is_one_line(tmp_path):
    train_tokenizer("bpe", tmp_path, texts=SENTENCES, vocab_size=300)
    path = tmp_path / "tokenizer.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps(state | {"pre_tokenizer": {"type": "FixedLengthOfTomorrow", "length": 3}}))
    with pytest.raises(UserError, match=r"tokenizer.json: no tokenizer.json that tokenizers 0.2\S+ reads; a newer"):
        load_tokenizer(tmp_path)
