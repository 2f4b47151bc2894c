"""Raw text to symbols and back, at every level, and what lies beside a checkpoint."""

from __future__ import annotations

import shutil

import pytest
import sentencepiece
from fairseq.data import Dictionary, data_utils
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.folders import contents, prepare
from helpers.wmt_text import write_texts
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import write_json
from relpos_fairseq.text import assets, train_tokenizer
from relpos_fairseq.text.assets import LevelText, SymbolText, TokenizerText, read_text
from relpos_fairseq.text.dictionary import read_dictionary

LINES = ["the house , a tree", "an old man  sees", "x«y» 5 % über", "a child & a dog\tsee it"]


@pytest.mark.parametrize("level", ["char", "byte"])
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=60)
def test_characters_and_bytes_are_the_text(level: str, text: str) -> None:
    symbols = LevelText(level).encode(text)
    assert not any(set(symbol) & set(" \n\t\u3000") for symbol in symbols)
    assert symbols.count("</s>") == text.count("\n")
    assert LevelText(level).decode(symbols) == text


@pytest.fixture(scope="module", params=["word", "sentencepiece", "char", "byte"])
def corpus(request, tmp_path_factory):
    """(level, data folder, its text) of a language model."""
    folder = tmp_path_factory.mktemp(request.param)
    text = folder / "text.txt"
    text.write_text("\n".join(LINES * 8) + "\n")
    more = ["--vocab-size", "34"] if request.param == "sentencepiece" else []
    level = ["--level", request.param, "--out", folder / "data", *more]
    prepare("lm", ["--text", text, "--shares", "0.8,0.2", *level, "--workers", "1"])
    return request.param, folder / "data", text.read_text()


def test_symbols_are_those_of_the_binarised_text(corpus) -> None:
    """Against what `prepare lm` wrote, which fairseq reads; and text comes back, streamed too."""
    level, data, text = corpus
    words = Dictionary.load(str(data / "dict.txt"))
    split = data_utils.load_indexed_dataset(str(data / "train"), words)
    ids = [number for n in range(len(split)) for number in split[n].tolist()]
    given = read_text(data)
    symbols, stream = given.encode(text), given.stream()
    assert [words.index(symbol) for symbol in symbols][: len(ids)] == ids
    back = text if level in ("char", "byte") else "\n".join(" ".join(one.split()) for one in text.split("\n"))
    assert given.decode(symbols) == "".join([*map(stream, symbols), stream(None)]) == back


def test_pieces_of_bytes_are_text(tmp_path) -> None:
    """Sentencepiece's own decoder is the oracle, a character in several byte pieces included."""
    model = tmp_path / "sentencepiece.model"
    options = {"vocab_size": 300, "byte_fallback": True, "hard_vocab_limit": False, "minloglevel": 2}
    with model.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(LINES * 8), model_writer=file, **options)
    given = LevelText("sentencepiece", model)
    library = sentencepiece.SentencePieceProcessor(model_file=str(model))
    for line in ("the 猫 sees 🐈 über", "  a tree ", "猫"):
        symbols = given.encode(line)
        assert any(symbol.startswith("<0x") for symbol in symbols) == ("猫" in line)
        assert given.decode(symbols) == library.decode(symbols) == " ".join(line.split())


@pytest.fixture(scope="module", params=["subword-nmt", "sentencepiece"])
def parallel(request, tmp_path_factory, prepare_wmt):
    """(folder of `prepare wmt`, its raw text)."""
    folder = tmp_path_factory.mktemp("wmt")
    raw = write_texts(folder / "raw")
    for path in raw.iterdir():  # what normalising and tokenising change
        path.write_text(path.read_text().replace(".\n", ", “five” & so-so.\n", 3))
    prepare_wmt(raw, folder / "out", "--bpe", request.param, "--tokenizer", "moses")
    return folder / "out", raw


def test_sentences_are_cut_as_the_test_set_was(parallel, tmp_path) -> None:
    """From the folder that training copies, after the data is gone; and they come back."""
    out, raw = parallel
    copied = assets.copy_assets(out / "data-bin", tmp_path)
    moved = out.rename(tmp_path / "moved")
    try:
        for language in ("en", "de"):
            given = read_text(copied, language)
            wanted = (moved / "units" / f"test.{language}").read_text().splitlines()
            lines = (raw / f"test.{language}").read_text().splitlines()
            assert [" ".join(given.encode(line)) for line in lines] == wanted
            plain = [line.replace("“", '"').replace("”", '"') for line in lines]
            assert [given.decode(units.split()) for units in wanted] == plain
        with pytest.raises(UserError, match=r"is of en and de, and the model asks for cs"):
            read_text(copied, "cs")
    finally:
        moved.rename(out)


def test_what_is_copied_is_whole_and_new(parallel, tmp_path) -> None:
    out, _ = parallel
    copied = assets.copy_assets(out / "data-bin", tmp_path)
    assert copied == tmp_path / "text" and {"manifest.json", "dict.en.txt", "dict.de.txt"} < set(contents(copied))
    inode = copied.stat().st_ino
    assert assets.copy_assets(out / "data-bin", tmp_path) == copied
    assert copied.stat().st_ino == inode  # the same is left alone
    assert assets.copy_assets(copied, tmp_path) == copied  # a training on its own text/
    before = contents(copied)
    (copied / "dict.cs.txt").write_text("left by another training 1\n")
    other = assets.copy_assets(out / "data-bin", tmp_path)
    assert assets.HASHED.fullmatch(other.name) and contents(other) == before
    assert assets.copy_assets(out / "data-bin", tmp_path) == other == assets.copy_assets(other, tmp_path)
    assert contents(copied).keys() == {*before, "dict.cs.txt"}
    (other / "dict.en.txt").write_text("changed 1\n")
    with pytest.raises(UserError, match=rf"{other.name} does not hold what its name says"):
        assets.copy_assets(out / "data-bin", tmp_path)


def test_a_users_text_is_not_touched(parallel, tmp_path) -> None:
    """A folder of that name may hold anything."""
    out, _ = parallel
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "thesis.tex").write_text("years")
    copied = assets.copy_assets(out / "data-bin", tmp_path)
    assert copied != tmp_path / "text" and contents(tmp_path / "text") == {"thesis.tex": b"years"}
    assert assets.find_assets(tmp_path / "a.pt", None) == copied


def test_a_tokenizer_that_lies_there_is_taken(tmp_path) -> None:
    train_tokenizer("wordpiece", tmp_path / "data", texts=LINES * 4, vocab_size=80)
    (tmp_path / "data" / "input0").mkdir()
    for path in (tmp_path / "data").glob("*.*"):
        shutil.copy(path, tmp_path / "data" / "input0")
    copied = assets.copy_assets(tmp_path / "data" / "input0", tmp_path)
    given = read_text(copied)
    assert isinstance(given, TokenizerText)
    assert given.decode(given.encode(LINES[1])) == "an old man sees"
    assert set(given.encode(LINES[0])) <= set(read_dictionary(copied / "dict.txt"))
    assert "input0/dict.txt" in contents(assets.copy_assets(tmp_path / "data", tmp_path / "glue"))


def test_without_a_word_about_it_text_is_symbols(tmp_path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dict.txt").write_text("a 1\n")
    write_json(tmp_path / "manifest.json", {"level": "byte", "outputs": {"other": {}}})
    assert isinstance(read_text(tmp_path / "data"), SymbolText)  # the manifest is another folder's
    write_json(tmp_path / "manifest.json", {"level": "byte", "outputs": {"data": {}}})
    assert read_text(tmp_path / "data").encode("ab") == ["97", "98"]
    checkpoint = tmp_path / "checkpoints" / "checkpoint_best.pt"
    with pytest.raises(UserError, match=r"no text/ beside .* with --data \(it was data/x\)"):
        assets.find_assets(checkpoint, None, "data/x")
    with pytest.raises(UserError, match=r"--data .* has no dict.txt"):
        assets.find_assets(checkpoint, tmp_path, "")
    assert assets.find_assets(checkpoint, tmp_path / "data", "") == tmp_path / "data"
