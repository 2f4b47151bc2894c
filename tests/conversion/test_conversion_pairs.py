"""Pairs of texts are joined as a folder's own tokenizer joins them, whatever its model: classes equal transformers'."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.commands import relpos
from helpers.conversion import shake
from relpos_fairseq.criterions.question_answering import span_logits
from relpos_fairseq.data.squad import Question, QuestionFile
from relpos_fairseq.formats import in_transformers
from relpos_fairseq.inference.checkpoints.loading import load
from relpos_fairseq.tasks.question_answering import QuestionDataset
from relpos_fairseq.text.folders import load_tokenizer
from relpos_fairseq.text.tokenizer import Pairs, Tokenizer

TEXTS = [f"the {a} {b}s a {c}" for a in ("old", "new") for b in ("see", "hear") for c in ("house", "horse", "mouse")]
LETTERS = [chr(number) for number in range(ord("a"), ord("z") + 1)]
TWO = ("the old mouse", "a new house hears")
BARE = {"model_input_names": ["input_ids", "attention_mask"]}


def wordpiece(folder) -> None:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")


def bpe(folder) -> None:
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(TEXTS, vocab_size=300, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    made.save_model(str(folder))


def pieces(folder) -> None:
    (folder / "lines").write_text("\n".join(TEXTS))
    prefix = str(folder / "sentencepiece.bpe")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "lines"), model_prefix=prefix, vocab_size=22, minloglevel=2
    )
    (folder / "lines").unlink()
    (folder / "sentencepiece.bpe.vocab").unlink()


def with_template(folder, template: str, kind: str = "pair") -> None:
    """Give the folder a tokenizer.json that joins pairs so: A, B, ^ for [CLS], and | for [SEP], each with its type."""
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    path = folder / "tokenizer.json"
    state = json.loads(path.read_text())
    names = {"|": "[SEP]", "^": "[CLS]"}
    state["post_processor"][kind] = [
        {"Sequence": {"id": one, "type_id": int(kind)}}
        if one in "AB"
        else {"SpecialToken": {"id": names[one], "type_id": int(kind)}}
        for one, kind in zip(template[::2], template[1::2], strict=True)
    ]
    path.write_text(json.dumps(state))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    signs=st.permutations("AB").flatmap(
        lambda order: st.tuples(*(st.text("|^", max_size=2) for _ in range(3))).map(
            lambda gaps: gaps[0] + order[0] + gaps[1] + order[1] + gaps[2]
        )
    ),
    types=st.lists(st.sampled_from("01"), min_size=8, max_size=8),
)
def test_a_template_is_ours_or_named(signs: str, types: list[str], tmp_path) -> None:
    """Of any template: what is called usual is joined so by the library, and what can be joined so is called usual."""
    if not (tmp_path / "vocab.txt").exists():
        wordpiece(tmp_path)
    with_template(tmp_path, "".join(map("".join, zip(signs, types, strict=False))))
    ours = load_tokenizer(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    parts = [library.encode(text, add_special_tokens=False).ids for text in TWO]
    found = library.encode(*TWO)
    ends = (ours.numbers["<s>"], ours.numbers["</s>"])
    forms = [Pairs(count, kind) for count in (0, 1) for kind in (False, True)]
    known = [form for form in forms if form.joined(parts, *ends) == (found.ids, found.type_ids)]
    assert [ours.pairs[:2]] * ours.pairs.usual == [form[:2] for form in known]


# Model, its tokenizer's maker, class and settings, and a template of its own.
CASES = {
    "bert, xlm-r's": ("bert", pieces, "XLMRobertaTokenizer", {}, ""),
    "bert, roberta's": ("bert", bpe, "RobertaTokenizer", {}, ""),
    "bert": ("bert", wordpiece, "BertTokenizer", {}, ""),
    "bert without types": ("bert", wordpiece, "BertTokenizer", BARE, ""),
    "bert, two separators": ("bert", wordpiece, "BertTokenizer", {}, "^0A0|0|1B1|1"),
    "bert, one type": ("bert", wordpiece, "BertTokenizer", {}, "^0A0|0|0B0|0"),
    "bert, distilbert's": ("bert", wordpiece, "DistilBertTokenizer", {}, ""),
    "roberta of two types": ("roberta", bpe, "RobertaTokenizer", {}, ""),
    "roberta, bert's": ("roberta", wordpiece, "BertTokenizer", {}, ""),
    "bert, mpnet's": ("bert", None, "MPNetTokenizer", {}, ""),
}


def write(folder, name: str, head: str = "SequenceClassification"):
    """A case's folder and its model."""
    kind, make, cls, settings, template = CASES[name]
    folder.mkdir()
    if make is None:
        words = ["<s>", "<pad>", "</s>", "[UNK]", *LETTERS, *(f"##{letter}" for letter in LETTERS), "<mask>"]
        (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    else:
        make(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": cls} | settings))
    if template:
        with_template(folder, template)
    made = load_tokenizer(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    sizes |= {"max_position_embeddings": 64, "type_vocab_size": 2, "pad_token_id": made.numbers["<pad>"]}
    sizes |= {"vocab_size": 1 + max(made.numbers.values())}
    sizes |= {"num_labels": 3} if head == "SequenceClassification" else {}
    stem = {"bert": "Bert", "roberta": "Roberta"}[kind]
    model = getattr(transformers, f"{stem}For{head}")(getattr(transformers, f"{stem}Config")(**sizes)).eval()
    shake(model)
    model.save_pretrained(folder)
    return model


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_the_class_of_a_pair_is_transformers(name, tmp_path, capsys):
    model = write(tmp_path / "theirs", name)
    assert relpos("convert", tmp_path / "theirs", "--to", "same", "--out", tmp_path / "ours") == 0
    said = capsys.readouterr().out
    if CASES[name][4] and not transformers.__version__.startswith("4."):  # whose class has its own template
        assert "lost      file of the tokenizer: how it joins two texts" in said and "exact     no" in said
        return
    assert "exact     yes" in said and "differ from AutoTokenizer" not in said
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    two = (f" {TWO[0]} ", f"{TWO[1]}  ")
    expected = model(**tokenizer(*two, return_tensors="pt")).logits.softmax(-1)[0]
    (tmp_path / "in").write_text("\t".join(two) + "\n")
    assert relpos("classify", tmp_path / "ours" / "model.pt", tmp_path / "in", "--cpu") == 0
    label, probability = capsys.readouterr().out.split()
    assert int(label.removeprefix("LABEL_")) == expected.argmax()
    assert abs(float(probability) - float(expected.max())) < 2e-4
    if CASES[name][0] == "bert":  # and what goes back joins them so too, which the closing check compares
        assert relpos("convert", tmp_path / "ours", "--to", "hf-bert", "--out", tmp_path / "back") == 0
        again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "back").eval()
        pair = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")(*two, return_tensors="pt")
        torch.testing.assert_close(again(**pair).logits.softmax(-1)[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("template", ["^0B0|0A0|0", "^0A0|0B1", "^0A0|1B1|1"])
def test_pairs_that_no_task_joins_so_are_lost_by_name(template, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(CASES, "odd", ("bert", wordpiece, "BertTokenizer", {}, template))
    write(tmp_path / "theirs", "odd")
    assert relpos("convert", tmp_path / "theirs", "--to", "same", "--out", tmp_path / "ours") == 0
    said = capsys.readouterr().out
    assert "lost      file of the tokenizer: how it joins two texts: not read here" in said and "exact     no" in said


@pytest.mark.parametrize("single", ["^0A0", "A0|0", "^0A0|0|0", "^1A1|1"])
def test_a_text_with_other_symbols_around_it_is_lost_by_name(single, tmp_path, capsys):
    """A masked LM reads no pairs, but texts."""
    write(tmp_path / "theirs", "bert", "MaskedLM")
    with_template(tmp_path / "theirs", single, "single")
    assert relpos("convert", tmp_path / "theirs", "--to", "same", "--out", tmp_path / "ours") == 0
    said = capsys.readouterr().out
    assert "lost      file of the tokenizer: the ids of a text: not read here" in said and "exact     no" in said


def test_a_text_without_symbols_around_it_is_lost_by_name(tmp_path, capsys, monkeypatch):
    """As GPT-2's class leaves it."""
    special = {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    monkeypatch.setitem(CASES, "gpt-2's", ("bert", bpe, "GPT2Tokenizer", special, ""))
    write(tmp_path / "theirs", "gpt-2's", "TokenClassification")
    assert relpos("convert", tmp_path / "theirs", "--to", "same", "--out", tmp_path / "ours") == 0
    said = capsys.readouterr().out
    assert "lost      file of the tokenizer: the ids of a text: not read here" in said and "exact     no" in said


def test_a_class_in_python_does_not_read_tokenizer_json(tmp_path, capsys):
    """BERT's Japanese class of characters beside a tokenizer.json of words."""
    write(tmp_path / "theirs", "bert", "MaskedLM")
    with_template(tmp_path / "theirs", "^0A0|0", "single")
    settings = {"tokenizer_class": "BertJapaneseTokenizer", "word_tokenizer_type": "basic"}
    settings |= {"subword_tokenizer_type": "character"}
    (tmp_path / "theirs" / "tokenizer_config.json").write_text(json.dumps(settings))
    assert relpos("convert", tmp_path / "theirs", "--to", "same", "--out", tmp_path / "ours") == 0
    said = capsys.readouterr().out
    assert "ours are those of tokenizer.json" in said and "exact     no" in said


def test_padding_and_truncation_of_tokenizer_json_say_nothing_of_pairs(tmp_path, capsys):
    """As the files of sentence-transformers have them; transformers sets both by the call."""
    write(tmp_path / "theirs", "bert")
    with_template(tmp_path / "theirs", "^0A0|0", "single")
    path = tmp_path / "theirs" / "tokenizer.json"
    shape = tokenizers.Tokenizer.from_file(str(path))
    shape.enable_padding(length=32, pad_token="[PAD]")
    shape.enable_truncation(max_length=3)
    shape.save(str(path))
    assert relpos("convert", tmp_path / "theirs", "--to", "same", "--out", tmp_path / "ours") == 0
    assert "exact     yes" in capsys.readouterr().out


def test_the_tokenizer_class_of_config_json_is_read(tmp_path, capsys):
    """AutoTokenizer takes it where tokenizer_config.json names none."""
    write(tmp_path / "theirs", "bert, xlm-r's")
    (tmp_path / "theirs" / "tokenizer_config.json").unlink()
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "XLMRobertaTokenizer"}))
    assert relpos("convert", tmp_path / "theirs", "--to", "same", "--out", tmp_path / "ours") == 0
    assert "exact     yes" in capsys.readouterr().out


@torch.no_grad()
def test_questions_have_the_types_of_the_tokenizer(tmp_path):
    """The context of a BERT with XLM-R's tokenizer has the type of the question."""
    model = write(tmp_path / "theirs", "bert, xlm-r's", "QuestionAnswering")
    assert relpos("convert", tmp_path / "theirs", "--to", "same", "--out", tmp_path / "ours") == 0
    pair = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")(*TWO, return_tensors="pt")
    trained = load(tmp_path / "ours" / "model.pt", None, True, "relpos answer")
    file = QuestionFile(Path("questions"), [TWO[1]], [Question("1", TWO[0], 0, (), ())])
    encoded = trained.task.encoder.encode(file, False)
    dataset = QuestionDataset(encoded, trained.task.dictionary, False, False)
    sample = dataset.collater([dataset[0]])
    assert sample["net_input"]["src_tokens"].shape == pair["input_ids"].shape
    found = span_logits(trained.model, sample, trained.cfg.task.span_head_name)
    expected = model(**pair)
    for ours, theirs in zip(found.unbind(-1), (expected.start_logits, expected.end_logits), strict=True):
        allowed = sample["allowed"]
        torch.testing.assert_close(ours[allowed], theirs[allowed], rtol=0, atol=1e-4)


def test_ids_that_are_not_transformers_are_lost_by_name(tmp_path, capsys, monkeypatch):
    """A model of byte pairs with bytes, of which XLM-R's class makes something else."""

    def bytes_too(folder) -> None:
        (folder / "lines").write_text("\n".join(TEXTS))
        sentencepiece.SentencePieceTrainer.train(
            input=str(folder / "lines"),
            model_prefix=str(folder / "sentencepiece.bpe"),
            **{"vocab_size": 290, "model_type": "bpe", "byte_fallback": True, "minloglevel": 2},
        )
        (folder / "lines").unlink()
        (folder / "sentencepiece.bpe.vocab").unlink()

    monkeypatch.setitem(CASES, "bytes", ("roberta", bytes_too, "XLMRobertaTokenizer", {}, ""))
    write(tmp_path / "theirs", "bytes")
    assert relpos("convert", tmp_path / "theirs", "--to", "same", "--out", tmp_path / "ours") == 0
    said = capsys.readouterr().out
    assert "lost      file of the tokenizer: the ids of a text: not read here" in said and "exact     no" in said


def test_texts_that_few_have_are_compared_too(tmp_path, capsys, monkeypatch):
    """A tokenizer that differs in two backticks alone."""
    write(tmp_path / "theirs", "bert")
    ours = load_tokenizer(tmp_path / "theirs")
    state = ours.content()
    step = {"type": "Replace", "pattern": {"String": "``"}, "content": "a"}
    state["normalizer"] = {"type": "Sequence", "normalizers": [step, state["normalizer"]]}
    monkeypatch.setattr(in_transformers, "load_tokenizer", lambda folder: Tokenizer(state, {}, ours.names))
    assert relpos("convert", tmp_path / "theirs", "--to", "same", "--out", tmp_path / "ours") == 0
    said = capsys.readouterr().out
    assert "lost      file of the tokenizer: the ids of a text: not read here" in said and "exact     no" in said


def test_ids_that_were_not_compared_are_named_where_exact_stands(tmp_path, capsys, monkeypatch):
    """As of a class that a release cannot load."""
    write(tmp_path / "theirs", "bert")

    def broken(*given, **more):
        raise ValueError("no such class")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", broken)
    assert relpos("convert", tmp_path / "theirs", "--to", "same", "--out", tmp_path / "ours") == 0
    said = capsys.readouterr().out
    assert "but for   ids of texts, which were not compared: transformers" in said
    assert "exact     yes, but for what is named so" in said


def test_padding_on_the_left_is_named_where_exact_stands(tmp_path, capsys, monkeypatch):
    """Positions of a BERT count it: a text of a padded batch has other outputs than alone."""
    monkeypatch.setitem(CASES, "left", ("bert", wordpiece, "BertTokenizer", {"padding_side": "left"}, ""))
    write(tmp_path / "theirs", "left")
    assert relpos("convert", tmp_path / "theirs", "--to", "same", "--out", tmp_path / "ours") == 0
    said = capsys.readouterr().out
    assert "but for   texts of a padded batch: transformers pads on the left" in said
    assert "exact     yes, but for what is named so" in said


def test_masks_that_stand_otherwise_than_there_are_named_where_exact_stands(tmp_path, capsys):
    """The full stop after a mask begins a word in transformers' XLM-R."""
    write(tmp_path / "theirs", "bert, xlm-r's", "MaskedLM")
    assert relpos("convert", tmp_path / "theirs", "--to", "same", "--out", tmp_path / "ours") == 0
    said = capsys.readouterr().out
    assert "but for   texts such as 'a <mask>.'" in said and "exact     yes, but for what is named so" in said


def test_what_was_lost_before_is_said_again(tmp_path, capsys, monkeypatch):
    """The second conversion is exact, and its result is still no exact one of the first source."""
    monkeypatch.setitem(CASES, "odd", ("bert", wordpiece, "BertTokenizer", {}, "^0B0|0A0|0"))
    write(tmp_path / "theirs", "odd")
    source = tmp_path / "theirs"
    for name in ("first", "second", "third"):
        assert relpos("convert", source, "--to", "same", "--out", tmp_path / name) == 0
        source, said = tmp_path / name, capsys.readouterr().out
        before = "but for   what was lost before: file of the tokenizer: how it joins two texts: not read here\n"
        assert said.count(before) == (name != "first")
        assert ("exact     yes, but for what is named so" if name != "first" else "exact     no") in said
    assert relpos("convert", source, "--to", "hf-bert", "--out", tmp_path / "back") == 0
    assert before in capsys.readouterr().out
