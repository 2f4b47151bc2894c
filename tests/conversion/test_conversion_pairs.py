"""Pairs of texts are joined as a folder's own tokenizer joins them, whatever its model: classes equal transformers'."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import tokenizers
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.formats import WORDPIECES, bpe, change, encoder, pieces, with_template, wordpiece
from relpos_fairseq.criterions.question_answering import span_logits
from relpos_fairseq.data.squad import Question, QuestionFile
from relpos_fairseq.formats import in_transformers
from relpos_fairseq.inference.checkpoints.loading import load
from relpos_fairseq.tasks.question_answering import QuestionDataset
from relpos_fairseq.text.folders import load_tokenizer
from relpos_fairseq.text.tokenizer import Pairs, Tokenizer

TWO = ("the old mouse", "a new house hears")
BARE = {"model_input_names": ["input_ids", "attention_mask"]}
pytestmark = pytest.mark.usefixtures("no_grad")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    signs=st.from_regex(r"[|^]{0,2}(A[|^]{0,2}B|B[|^]{0,2}A)[|^]{0,2}", fullmatch=True),
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


def mpnets(folder) -> None:
    words = ["<s>", "<pad>", "</s>", "[UNK]", *WORDPIECES[5:], "<mask>"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")


def byte_pairs(folder) -> None:
    """A model of byte pairs with bytes, of which XLM-R's class makes something else."""
    pieces(folder, vocab_size=290, model_type="bpe", byte_fallback=True)


GPT2 = {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
# Model, its tokenizer's maker, class and settings, and a template of its own.
CASES = {
    "bert, xlm-r's": ("Bert", pieces, "XLMRobertaTokenizer", {}, ""),
    "bert, roberta's": ("Bert", bpe, "RobertaTokenizer", {}, ""),
    "bert": ("Bert", wordpiece, "BertTokenizer", {}, ""),
    "bert without types": ("Bert", wordpiece, "BertTokenizer", BARE, ""),
    "bert, two separators": ("Bert", wordpiece, "BertTokenizer", {}, "^0A0|0|1B1|1"),
    "bert, one type": ("Bert", wordpiece, "BertTokenizer", {}, "^0A0|0|0B0|0"),
    "bert, distilbert's": ("Bert", wordpiece, "DistilBertTokenizer", {}, ""),
    "roberta of two types": ("Roberta", bpe, "RobertaTokenizer", {}, ""),
    "roberta, bert's": ("Roberta", wordpiece, "BertTokenizer", {}, ""),
    "bert, mpnet's": ("Bert", mpnets, "MPNetTokenizer", {}, ""),
}
OTHERS = {
    "bert, gpt-2's": ("Bert", bpe, "GPT2Tokenizer", GPT2, ""),
    "bert, padded left": ("Bert", wordpiece, "BertTokenizer", {"padding_side": "left"}, ""),
    "roberta, bytes": ("Roberta", byte_pairs, "XLMRobertaTokenizer", {}, ""),
    "bert, swapped": ("Bert", wordpiece, "BertTokenizer", {}, "^0B0|0A0|0"),
    "bert, no end": ("Bert", wordpiece, "BertTokenizer", {}, "^0A0|0B1"),
    "bert, types": ("Bert", wordpiece, "BertTokenizer", {}, "^0A0|1B1|1"),
}


def write(folder, name: str, head: str = "SequenceClassification"):
    """A case's folder and its model."""
    kind, make, cls, settings, template = (CASES | OTHERS)[name]
    folder.mkdir()
    make(folder)
    change(folder / "tokenizer_config.json", tokenizer_class=cls, **settings)
    if template:
        with_template(folder, template)
    made = load_tokenizer(folder)
    sizes = {"vocab_size": 1 + max(made.numbers.values()), "pad_token_id": made.numbers["<pad>"], "type_vocab_size": 2}
    sizes |= {"num_labels": 3} if head == "SequenceClassification" else {}
    return encoder(folder, f"{kind}For{head}", None, hidden_size=32, max_position_embeddings=64, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_class_of_a_pair_is_transformers(name, ways):
    model = write(ways / "first", name)
    said = ways.convert()
    if CASES[name][4] and not transformers.__version__.startswith("4."):  # whose class has its own template
        assert "lost      file of the tokenizer: how it joins two texts" in said and "exact     no" in said
        return
    assert "exact     yes" in said and "differ from AutoTokenizer" not in said
    two = (f" {TWO[0]} ", f"{TWO[1]}  ")
    expected = model(**ways.tokenizer("first")(*two, return_tensors="pt")).logits.softmax(-1)[0]
    (ways / "in").write_text("\t".join(two) + "\n")
    label, probability = ways.run("classify", ways / "ours/model.pt", ways / "in", "--cpu").split()
    assert int(label.removeprefix("LABEL_")) == expected.argmax()
    assert abs(float(probability) - float(expected.max())) < 2e-4
    if CASES[name][0] == "Bert":  # and what goes back joins them so too, which the closing check compares
        ways.back()
        again = ways.opened("back", "AutoModelForSequenceClassification")
        pair = ways.tokenizer("back")(*two, return_tensors="pt")
        torch.testing.assert_close(again(**pair).logits.softmax(-1)[0], expected, rtol=0, atol=1e-5)


def single(template: str):
    """Other symbols around a text."""
    return lambda folder: with_template(folder, template, "single")


def in_python(folder) -> None:
    """A class in Python does not read tokenizer.json: BERT's Japanese one of characters, beside one of words."""
    single("^0A0|0")(folder)
    (folder / "tokenizer_config.json").unlink()
    told = {"tokenizer_class": "BertJapaneseTokenizer", "word_tokenizer_type": "basic"}
    change(folder / "tokenizer_config.json", **told, subword_tokenizer_type="character")


def padded_and_cut(folder) -> None:
    """As the files of sentence-transformers; transformers sets both by the call, so they say nothing of pairs."""
    single("^0A0|0")(folder)
    path = folder / "tokenizer.json"
    shape = tokenizers.Tokenizer.from_file(str(path))
    shape.enable_padding(length=32, pad_token="[PAD]")
    shape.enable_truncation(max_length=3)
    shape.save(str(path))


def named_by_config(folder) -> None:
    """AutoTokenizer takes config.json's class where tokenizer_config.json names none."""
    (folder / "tokenizer_config.json").unlink()
    change(folder / "config.json", tokenizer_class="XLMRobertaTokenizer")


LOST = "lost      file of the tokenizer: {}: not read here".format
IDS, PAIRS = LOST("the ids of a text"), LOST("how it joins two texts")
BUT_FOR, NO, YES = "exact     yes, but for what is named so", "exact     no", "exact     yes"
LEFT = "texts of a padded batch: transformers pads on the left"
SAID = {
    "of pairs, swapped": ("bert, swapped", "SequenceClassification", None, PAIRS, NO),
    "of pairs without an end": ("bert, no end", "SequenceClassification", None, PAIRS, NO),
    "of pairs, types": ("bert, types", "SequenceClassification", None, PAIRS, NO),
    # A masked LM reads no pairs, but texts.
    "no separator": ("bert", "MaskedLM", single("^0A0"), IDS, NO),
    "no class symbol": ("bert", "MaskedLM", single("A0|0"), IDS, NO),
    "two separators": ("bert", "MaskedLM", single("^0A0|0|0"), IDS, NO),
    "types": ("bert", "MaskedLM", single("^1A1|1"), IDS, NO),
    "nothing around a text": ("bert, gpt-2's", "TokenClassification", None, IDS, NO),
    "bytes": ("roberta, bytes", "SequenceClassification", None, IDS, NO),
    "in Python": ("bert", "MaskedLM", in_python, "ours are those of tokenizer.json", NO),
    "padding and truncation": ("bert", "SequenceClassification", padded_and_cut, YES, YES),
    "named by config.json": ("bert, xlm-r's", "SequenceClassification", named_by_config, YES, YES),
    # Positions of a BERT count padding: a text of a padded batch has other outputs than alone.
    "padded left": ("bert, padded left", "SequenceClassification", None, f"but for   {LEFT}", BUT_FOR),
    # The full stop after a mask begins a word in transformers' XLM-R.
    "masks": ("bert, xlm-r's", "MaskedLM", None, "but for   texts such as 'a <mask>.'", BUT_FOR),
}


@pytest.mark.parametrize("name", SAID)
def test_what_a_tokenizer_does_otherwise_is_named(name, ways):
    """Where `exact` stands: as lost, or as what is not as there."""
    case, head, spoil, said, exact = SAID[name]
    write(ways / "first", case, head)
    if spoil:
        spoil(ways / "first")
    told = ways.convert()
    assert said in told and exact in told


def test_questions_have_the_types_of_the_tokenizer(ways):
    """The context of a BERT with XLM-R's tokenizer has the type of the question."""
    model = write(ways / "first", "bert, xlm-r's", "QuestionAnswering")
    ways.convert()
    pair = ways.tokenizer("first")(*TWO, return_tensors="pt")
    trained = load(ways / "ours/model.pt", None, True, "relpos answer")
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


def test_texts_that_few_have_are_compared_too(ways, monkeypatch):
    """A tokenizer that differs in two backticks alone."""
    write(ways / "first", "bert")
    ours = load_tokenizer(ways / "first")
    state = ours.content()
    step = {"type": "Replace", "pattern": {"String": "``"}, "content": "a"}
    state["normalizer"] = {"type": "Sequence", "normalizers": [step, state["normalizer"]]}
    monkeypatch.setattr(in_transformers, "load_tokenizer", lambda folder: Tokenizer(state, {}, ours.names))
    said = ways.convert()
    assert IDS in said and NO in said


def test_ids_that_were_not_compared_are_named_where_exact_stands(ways, monkeypatch):
    """As of a class that a release cannot load."""
    write(ways / "first", "bert")
    broken = mock.Mock(side_effect=ValueError("no such class"))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", broken)
    said = ways.convert()
    assert "but for   ids of texts, which were not compared: transformers" in said and BUT_FOR in said


def test_what_was_lost_before_is_said_again(ways):
    """The second conversion is exact, and its result is still no exact one of the first source."""
    write(ways / "first", "bert, swapped")
    before = "but for   what was lost before: file of the tokenizer: how it joins two texts: not read here\n"
    assert before not in ways.convert(out="second")
    for source, out in (("second", "third"), ("third", "fourth")):
        said = ways.convert(source, out)
        assert said.count(before) == 1 and BUT_FOR in said
    assert before in ways.back("fourth")
