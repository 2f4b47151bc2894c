"""Conversion from and to Hugging Face's encoders, held against transformers itself and its formulas written anew."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers

from helpers.bert_formula import formula
from helpers.conversion import ROWS, config, random_state
from helpers.formats import DEBERTAS, HEAD, MORE_PIECES, bert, change, change_tensors, deberta, pieces, roberta
from relpos_fairseq.conversion import ConversionError
from relpos_fairseq.conversion.report import Probe
from relpos_fairseq.core.relations import LogClipped
from relpos_fairseq.formats import huggingface_folder as hf_folder
from relpos_fairseq.formats.base import read_encoder
from relpos_fairseq.formats.convert import Job, convert_source
from relpos_fairseq.formats.huggingface_export import save_hf, to_hf
from relpos_fairseq.formats.transformers_folder import read_config
from relpos_fairseq.formats.vocabulary import Vocabulary, of_checkpoint, of_folder
from relpos_fairseq.heads import SPAN_HEAD
from relpos_fairseq.models.building import build_roberta, outputs_of
from relpos_fairseq.saved.model import SavedModel
from relpos_fairseq.text import load_tokenizer, train_tokenizer
from relpos_fairseq.text.assets import asset_files_of

KINDS = ("absolute", "relative_key", "relative_key_query")
pytestmark = pytest.mark.usefixtures("no_grad")


def assert_equal(model, source, close: float, formulas: float) -> None:
    """Our outputs are transformers', in its own order of rows, and so are those of the equations, in fp64."""
    probe = Probe.draw(source.rows, 24, source.values["segment_encoding"] == "input")
    rows, real = torch.tensor(source.origin.rows), probe.real
    types = torch.zeros_like(probe.tokens) if probe.segments is None else probe.segments
    theirs = model.double()(input_ids=rows[probe.tokens], attention_mask=real.long(), token_type_ids=types)
    ours = outputs_of(build_roberta(source.values, source.state), probe.tokens, probe.segments)
    reference = formula(source, probe.tokens, probe.segments)
    if "spans" in ours:
        name, expected = "spans", torch.stack([theirs.start_logits, theirs.end_logits], -1)
    elif "classification" in ours:
        name, expected, real = "classification", theirs.logits, slice(None)
    else:
        name, expected = "logits", theirs.logits[..., rows]
    assert (ours[name] - expected)[real].abs().max() < close
    assert (reference[name] - expected)[real].abs().max() < formulas
    assert any("no masked LM head" in note for note in source.notes) == (name != "logits")


# The maker and what it is given, how close ours and the formula are, and what is read.  Transformers' gelu keeps fp64,
# fairseq's rounds to fp32, which DeBERTa's does; layer norms do in transformers' v1, scales in both.
CLASSES, SPANS = ("ForSequenceClassification", {"num_labels": 3}), ("ForQuestionAnswering", {})
MODELS: dict[str, tuple[Callable, dict, float, float, dict]] = {
    **{f"bert {kind}": (bert, {"kind": kind}, 1e-10, 1e-10, {"layer_norm_eps": 1e-6}) for kind in KINDS},
    **{f"roberta {kind}": (roberta, {"kind": kind}, 1e-5, 1e-10, {"segment_encoding": "none"}) for kind in KINDS},
    **{name: (deberta, {"name": name}, 1e-5, 1e-5, {"pooler_activation_fn": "gelu"}) for name in DEBERTAS},
    **{
        f"{make.__name__}{suffix}": (make, {"suffix": suffix} | more, 1e-5, 1e-10, {})
        for make in (bert, roberta)
        for suffix, more in (CLASSES, SPANS)
    },
    "v3ForSequenceClassification": (deberta, {"name": "v3", "cls": "ForSequenceClassification"}, 1e-5, 1e-5, {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_transformers(tmp_path, name):
    make, given, close, formulas, read = MODELS[name]
    model = make(tmp_path, **given)
    source = read_encoder(tmp_path)
    assert_equal(model, source, close, formulas)
    assert read.items() <= source.values.items()
    assert ("+" in source.plan.name) == ("input" in name)
    assert any("no tokenizer" in note for note in source.notes) == (make is not bert)
    if make is bert:
        assert source.values["segment_encoding"] == "input"
        assert (source.plan.name == "learned") == (given.get("kind", "absolute") == "absolute")


def test_a_release_without_relative_positions_compares_nothing(ways, monkeypatch):
    """Transformers 5 leaves such tables out, with no more than a warning; the conversion is done all the same."""
    model = bert(ways / "first", "relative_key")
    loading = {"missing_keys": [], "unexpected_keys": ["bert.encoder.layer.0.attention.self.distance_embedding.weight"]}
    monkeypatch.setattr(transformers.AutoModelForMaskedLM, "from_pretrained", lambda *_, **__: (model, loading))
    said = ways.convert()
    assert "outputs were not compared on this machine: transformers" in said and "exact" not in said
    assert "does not read the folder as it is" in said


@pytest.mark.parametrize(("kind", "encoding"), [("absolute", "none"), ("relative_key", "input")])
def test_the_only_token_type_of_roberta_is_kept(kind, encoding, tmp_path):
    model = roberta(tmp_path, kind)
    with torch.no_grad():
        model.roberta.embeddings.token_type_embeddings.weight.normal_()
    model.save_pretrained(tmp_path)
    source = read_encoder(tmp_path)
    assert source.values["segment_encoding"] == encoding
    tokens = torch.arange(4, 20)[None]
    given = tokens, torch.zeros_like(tokens) if encoding == "input" else None
    ours = outputs_of(build_roberta(source.values, source.state), *given)
    assert (ours["logits"] - formula(source, *given)["logits"]).abs().max() < 1e-5


def test_gpt2_numbers_are_not_taken_for_pieces(tmp_path):
    """In fairseq's dict.txt "1" is the piece of number 1, though a piece "1" may exist."""
    pieces = ["a", "0", "b", "1", "ab"]
    (tmp_path / "encoder.json").write_text(json.dumps({p: n for n, p in enumerate(pieces)}))
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\na b\n")
    (tmp_path / "dict.txt").write_text("".join(f"{n} 1\n" for n in (4, 1, 0, 2, 3)))
    found = of_checkpoint(asset_files_of(tmp_path), 10, None, None, False, None)
    assert found.rows == list(range(10)) and not found.files
    folder = tmp_path / "made"
    folder.mkdir()
    for name, text in found.made.items():
        (folder / name).write_text(text)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs("ab0")["input_ids"] == [0, 4, 5, 2] and theirs.mask_token_id == 9
    again = of_folder(folder, {"vocab_size": 10, "model_type": "roberta"}, [])
    assert again.rows == list(range(10)) and again.symbols == ["ab", "0", "a", "b", "1"]


def test_only_newlines_end_a_line_of_the_dictionary(tmp_path):
    (tmp_path / "dict.txt").write_text("\u2028 1\nb 1\n", encoding="utf-8")
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n\u2028\nb\n")
    found = of_checkpoint(asset_files_of(tmp_path), 7, None, None, True, None)
    assert found.symbols == ["\u2028", "b"] and found.rows == [2, 0, 3, 1, 5, 6, 4]


def test_heads_have_the_names_that_the_tasks_ask_for():
    """A head of another name would be left out, and fine-tuning begin with a new one."""
    from fairseq.criterions.sentence_prediction import SentencePredictionConfig

    from relpos_fairseq.tasks.question_answering_config import QuestionAnsweringConfig

    assert SPAN_HEAD == QuestionAnsweringConfig().span_head_name
    assert HEAD == SentencePredictionConfig().classification_head_name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [bert, roberta])
def test_the_way_back_gives_the_same_bits(ways, make, kind):
    model = make(ways / "first", kind)
    source = read_encoder(ways / "first")
    told, weights, report = to_hf(source, make.__name__, Vocabulary([], source.origin.rows), None)
    assert report.exact
    (ways / "second").mkdir()
    save_hf(ways / "second", told, weights)
    back, loading = type(model).from_pretrained(ways / "second", output_loading_info=True)
    assert told["architectures"] == [type(model).__name__]
    assert not loading["unexpected_keys"] and not loading["mismatched_keys"]
    ids = torch.arange(4, 24)[None]
    assert torch.equal(model(ids).logits, back.eval()(ids).logits)
    for name, value in model.state_dict().items():
        unused = kind != "absolute" and "position_embeddings" in name
        assert unused or torch.equal(value.float(), back.state_dict()[name]), name


def test_bert_vocabulary_in_fairseqs_order(tmp_path):
    bert(tmp_path, "absolute")
    vocabulary = hf_folder.read_folder(tmp_path, read_config(tmp_path)).vocabulary
    assert vocabulary.rows[:4] == [3, 0, 4, 2] and vocabulary.rows[-1] == 5
    assert vocabulary.symbols[:3] == ["[unused0]", "a", "b"]
    assert sorted(vocabulary.rows) == list(range(40))
    table = torch.randn(40, 3)
    assert torch.equal(vocabulary.put(vocabulary.take(table)), table)


def test_a_converted_bert_has_its_tokenizer_and_finds_the_way_back(ways):
    """Also after training, which forgets where the checkpoint came from."""
    from fairseq.data import Dictionary

    out, model = ways / "ours", bert(ways / "first", "relative_key_query")
    source = read_encoder(ways / "first")
    ways.convert(to="m4")
    dictionary = Dictionary.load(str(out / "dict.txt"))
    tokenizer = load_tokenizer(out)
    tokenizer.check_dictionary(dictionary.indices, "dict.txt")
    assert len(dictionary) + 1 == source.rows
    assert tokenizer.encode("A bad").pieces == ["a", "b", "##a", "##d"]
    again = read_encoder(out / "model.pt")
    assert again.origin.rows == source.origin.rows
    assert of_checkpoint(again.files, again.rows, None, 0, True, 24).rows == source.origin.rows
    ways.back("ours/model.pt")
    assert (ways / "back/vocab.txt").read_text() == (ways / "first/vocab.txt").read_text()
    assert not (ways / "back/dict.txt").exists()
    ids = torch.arange(40)[None, :24]
    assert torch.equal(ways.opened("back", "BertForMaskedLM")(ids).logits, model(ids).logits)


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "sentencepiece"])
def test_our_tokenizer_goes_along_and_comes_back(tmp_path, kind):
    """Ours has pieces alone; transformers needs the special symbols where the model has them."""
    ours, out = tmp_path / "ours", tmp_path / "out"
    ours.mkdir()
    out.mkdir()
    size = 30 if kind == "sentencepiece" else 300
    own = train_tokenizer(kind, ours, texts=["the red cat sat on the mat"] * 3, vocab_size=size)
    rows = ["<s>", "<pad>", "</s>", "<unk>", *own.symbols, "<mask>"]
    found = of_checkpoint(asset_files_of(ours), len(rows), None, None, True, 24)
    for name, text in found.made.items():
        (out / name).write_text(text)
    assert found.rows == list(range(len(rows))), "fairseq's own order: no row moves"
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    middle = ["</s>"] if kind == "wordpiece" else ["</s>", "</s>"]
    first, second = (own.encode(text).pieces for text in ("the cat", "red mat"))
    pieces = ["<s>", *first, *middle, *second, "</s>"]
    encoded = theirs("the cat", "red mat")
    assert encoded["input_ids"] == [rows.index(piece) for piece in pieces]
    # As tasks count them: the second text's own separator is in its segment.
    types = [0] * (1 + len(first) + 1) + [1] * (len(middle) - 1 + len(second) + 1)
    assert encoded["token_type_ids"] == types
    assert theirs.mask_token_id == found.rows[-1] and theirs.pad_token_id == 1
    assert theirs.model_max_length == 24
    again = of_folder(out, {"vocab_size": len(rows), "model_type": "bert"}, [])
    assert again.rows == found.rows and again.symbols == own.symbols


@pytest.fixture(scope="module")
def xlmr(tmp_path_factory) -> Path:
    """A folder with a model of sentencepiece under XLM-R's name, of as many pieces as a random model has rows."""
    folder = tmp_path_factory.mktemp("pieces")
    pieces(folder, vocab_size=ROWS - 2)
    return folder


def test_sentencepiece_goes_back_with_a_fast_tokenizer(xlmr, tmp_path):
    """Transformers' slow tokenizer, which reads the sentencepiece model itself, is the oracle."""
    load_tokenizer(xlmr).save(tmp_path / "ours")
    values = config("learned", activation_fn="gelu")
    source = SavedModel.of(tmp_path, "relpos_roberta", values, random_state(values))
    source.files = {path.name: path for path in (tmp_path / "ours").iterdir()}
    source.outputs = partial(outputs_of, build_roberta(source.values, source.state))
    convert_source(Job("hf-roberta", {}), source).write(tmp_path, print)
    assert (tmp_path / "tokenizer.json").is_file()
    (tmp_path / "sentencepiece.bpe.model").unlink()  # the tokenizer.json stands for itself
    found = transformers.AutoTokenizer.from_pretrained(tmp_path)
    slow = transformers.XLMRobertaTokenizer(str(xlmr / "sentencepiece.bpe.model"))
    for pair in (("the old house", None), ("the <mask> mouse", "a  new horse"), ("", "x")):
        assert found(*pair).input_ids == slow(*pair).input_ids, pair


def test_sentencepiece_is_counted_as_xlm_roberta_does(xlmr):
    """Transformers' XLMRobertaTokenizer is the oracle: fairseq's symbols, pieces, <mask>."""
    numbers = load_tokenizer(xlmr).numbers
    oracle = transformers.XLMRobertaTokenizer(str(xlmr / "sentencepiece.bpe.model"))
    for piece in ("<s>", "<pad>", "</s>", "<unk>", "<mask>", *oracle.get_vocab()):
        assert numbers[piece] == oracle.convert_tokens_to_ids(piece), piece
    config = {"vocab_size": len(numbers), "model_type": "xlm-roberta"}
    assert of_folder(xlmr, config, []).rows == list(range(len(numbers)))


def test_a_vocabulary_without_mask_gets_one():
    vocabulary = Vocabulary(["a"], [0, 1, 2, 3, 4, -1])
    taken = vocabulary.take(torch.ones(5, 2))
    assert taken.shape == (6, 2) and taken[-1].eq(0).all()
    assert vocabulary.put(taken).shape == (5, 2)


def test_rows_beyond_the_vocabulary_are_madeupwords(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(MORE_PIECES) + "\n")
    notes: list[str] = []
    vocabulary = of_folder(tmp_path, {"vocab_size": 43, "model_type": "bert"}, notes)
    assert vocabulary.symbols[-3:] == ["madeupword0000", "madeupword0001", "madeupword0002"]
    assert "3 rows without a symbol" in notes[0]
    with pytest.raises(ConversionError, match="numbers 2 symbols beyond the model's 38 rows"):
        of_folder(tmp_path, {"vocab_size": 38, "model_type": "bert"}, notes)


def test_what_huggingface_cannot_express_is_refused(tmp_path):
    def write(values: dict, family: str = "bert") -> None:
        source = SavedModel.of(tmp_path, "relpos_roberta", values, random_state(values))
        to_hf(source, family, Vocabulary([], list(range(23))), None)

    for scheme in ("rope", "shaw", "rel_scalar", "learned+m4"):
        with pytest.raises(ConversionError, match="relative_key_query .m4. alone"):
            write(config(scheme))
    with pytest.raises(ConversionError, match="segments a head"):
        write(config("learned", segment_encoding="head"))
    with pytest.raises(ConversionError, match="gelu_accurate in RoBERTa's LM head"):
        write(config("learned"), "roberta")
    write(config("m4", position_clip_distance="3"))


@pytest.mark.parametrize("name", ["v1", "v3"])
def test_heads_of_debertas_pre_training_are_left_out_and_said(tmp_path, name):
    """What Microsoft's files of v3 hold beside the model, which the library does not read."""
    model = deberta(tmp_path, name)
    ends = product(("lm_predictions.lm_head", "mask_predictions"), ("dense", "LayerNorm"), ("weight", "bias"))
    names = ["mask_predictions.classifier.weight", *map(".".join, ends)]
    change_tensors(tmp_path, {name: torch.ones(2) for name in names})
    source = read_encoder(tmp_path)
    assert "the mask decoder that it was pre-trained with is left out" in source.notes
    assert source.ledger.lost == [] and names[0] in source.ledger.named("tensors", "neutral")
    assert_equal(model, source, 1e-5, 1e-5)


@pytest.mark.parametrize("size", [(256, 512), (32, 128), (4, 16), (256, 1024)])
def test_buckets_of_deberta(size):
    """LogClipped is make_log_bucket_position, clamped as the released code does."""
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    buckets, farthest = size
    offset = torch.arange(-2 * farthest, 2 * farthest + 1)
    theirs = make_log_bucket_position(offset, buckets, farthest).long() + buckets
    rows = 2 * buckets - 1 - LogClipped(2 * buckets, farthest).of_distance(-offset)
    assert torch.equal(rows, theirs.clamp(0, 2 * buckets - 1))


DROPOUTS = {  # pooler_dropout, cls_dropout, hidden_dropout_prob: ours
    "the pooler's": (0.5, None, 0.1, 0.5),
    "both": (0.5, 0.2, 0.1, 0.5),
    "the last layer's": (0, 0.2, 0.1, 0.2),
    "none": (0, 0.0, 0.1, 0.0),
    "the model's": (0, None, 0.3, 0.3),
}


@pytest.mark.parametrize("name", DROPOUTS)
@pytest.mark.parametrize("relative", [True, False])
def test_dropouts_of_debertas_classifier_are_read_and_written_back(name, relative, tmp_path):
    """Its pooler's activation too, whatever its positions are."""
    pooler, last, hidden, expected = DROPOUTS[name]
    deberta(tmp_path, "v2-own" if relative else "v2-absolute")
    told = {"pooler_dropout": pooler, "cls_dropout": last, "hidden_dropout_prob": hidden}
    change(tmp_path / "config.json", **told, pooler_hidden_act="gelu_new")
    source = read_encoder(tmp_path)
    assert source.values["pooler_dropout"] == expected and source.values["pooler_activation_fn"] == "gelu_accurate"
    assert {"pooler_dropout", "cls_dropout", "pooler_hidden_act"} <= source.ledger.named("keys", "used").keys()
    assert any("the pooler's dropout" in note for note in source.notes) == (pooler not in (0, last))
    if not relative:  # which a BERT of transformers expresses
        assert to_hf(source, "bert", Vocabulary([], source.origin.rows), None)[0]["classifier_dropout"] == expected


@pytest.mark.parametrize("rows", [0.0, 1.0])
def test_rows_of_padding_that_do_not_come_back_are_said(rows, tmp_path):
    roberta(tmp_path, rows=rows)
    notes = [note for note in read_encoder(tmp_path).notes if "2 rows before position 0" in note]
    assert ["go back as 0" in note for note in notes] == [True] * bool(rows)
