"""Every head of transformers' encoders: there and back, its loss and names in the export."""

from __future__ import annotations

import re

import pytest
import torch
import transformers
from safetensors.torch import load_file

from helpers.conversion import config, random_state
from helpers.exported import CLASSIFIED, write_checkpoint
from helpers.formats import HEAD, NAMES, PIECES, change_checkpoint, change_tensors, encoder
from relpos_fairseq.export.model_adapters import WholeModel
from relpos_fairseq.formats.base import read_encoder
from relpos_fairseq.saved.checkpoint import checkpoint_of
from relpos_fairseq.saved.model import SavedModel

FLOATS = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
CLASSES = "ForSequenceClassification"
TAGS = torch.tensor([[0, -100, 2, 1], [1, 1, 2, -100]])
SPANS = {"start_positions": torch.tensor([1, 0]), "end_positions": torch.tensor([2, 1])}
MULTI = {"problem_type": "multi_label_classification"}
REGRESSION = {"problem_type": "regression"}
# class, config, --head, labels
CASES = {
    "none": ("Model", {"type_vocab_size": 1}, None, {}),
    "masked": ("ForMaskedLM", {}, None, {"labels": torch.tensor([[5, -100, 7, 8]] * 2)}),
    "pre-training": ("ForPreTraining", {}, None, {}),
    "classes": (CLASSES, NAMES, HEAD, {"labels": torch.tensor([2, 0])}),
    "labels": (CLASSES, NAMES | MULTI, HEAD, {"labels": FLOATS}),
    "unnamed labels": (CLASSES, {"num_labels": 3}, HEAD, {"labels": FLOATS}),
    "one label": (CLASSES, {"num_labels": 1} | MULTI, HEAD, {"labels": FLOATS[:, 1:2]}),
    "regression": (CLASSES, {"num_labels": 1} | REGRESSION, HEAD, {"labels": FLOATS[:, 1]}),
    "unnamed regression": (CLASSES, {"num_labels": 1}, HEAD, {"labels": FLOATS[:, 1]}),
    "three values": (CLASSES, NAMES | REGRESSION, HEAD, {"labels": FLOATS}),
    "spans": ("ForQuestionAnswering", {}, "question_answering", SPANS),
    "tokens": ("ForTokenClassification", NAMES, "token_classification", {"labels": TAGS}),
    "choices": ("ForMultipleChoice", {}, HEAD, {"labels": torch.tensor([1])}),
}
IDS = torch.tensor([[2, 9, 12, 3], [2, 7, 20, 3]])
pytestmark = pytest.mark.usefixtures("no_grad")


def written(ways, name):
    """A case's model, in `first`."""
    suffix, values, _, _ = CASES[name]
    return encoder(ways / "first", f"Bert{suffix}", **values)


@pytest.mark.parametrize("name", CASES)
def test_there_and_back(name, ways):
    """Every output, poolers and next-sentence heads too, the loss, and what config.json says of the head."""
    suffix, values, head, labels = CASES[name]
    model = written(ways, name)
    said = ways.convert()
    assert "exact     yes" in said and "\nlost " not in said
    ledger = ways.ledger()
    assert sorted(key for keys in ledger["keys"].values() for key in keys) == sorted(ways.told("first"))
    assert all(why for kind in ledger.values() for why in kind.get("neutral", {}).values())
    opened, _ = SavedModel.open(ways / "ours/model.pt").build_anyway(None)  # as `export onnx` has it
    assert head is None or head in WholeModel(opened).heads
    ways.back("ours/model.pt", "back", *(("--head", head) if head else ()))
    back = type(model).from_pretrained(ways / "back").eval()
    ids = IDS[None] if suffix == "ForMultipleChoice" else IDS
    before, after = model(ids, **labels), back(ids, **labels)
    assert before.keys() == after.keys()
    for key, value in before.items():
        torch.testing.assert_close(after[key], value, rtol=1e-5, atol=1e-5)
    told = [ways.told(part) for part in ("first", "back")]
    assert told[0]["architectures"] == told[1]["architectures"] == [f"Bert{suffix}"]
    for key in ("problem_type", "type_vocab_size"):
        assert told[0].get(key) == told[1].get(key)
    if suffix in (CLASSES, "ForTokenClassification"):
        assert back.config.id2label == model.config.id2label and back.config.label2id == model.config.label2id


@pytest.mark.parametrize("name", CASES)
def test_losses_and_names_of_the_export(name, ways):
    """Of another scheme, as its folder goes back with its own head, which nobody has to name."""
    suffix, values, head, labels = CASES[name]
    model = written(ways, name)
    ways.convert(to="learned+m4")
    assert "exact     yes" in ways.back()
    assert ways.told("first")["architectures"] == ways.told("back")["architectures"]
    weights = [load_file(ways / part / "model.safetensors") for part in ("first", "back")]
    for key in weights[0].keys() & weights[1].keys():
        assert torch.equal(weights[0][key], weights[1][key])
    assert {key for key in weights[0] if "classifier" in key or "qa_outputs" in key} <= weights[1].keys()
    if not labels:
        return
    ways.export()
    exported = ways.opened("out", f"Auto{'ModelFor' + suffix[3:]}")
    tokenizers = [ways.tokenizer(part) for part in ("first", "out")]
    first, second = (one(["a z", "c 8"], return_tensors="pt") for one in tokenizers)
    moved = dict(labels)
    if suffix == "ForMaskedLM":  # its labels are ids, which our folder numbers otherwise
        moved["labels"] = labels["labels"].clone()
        for number in (5, 7, 8):
            moved["labels"][labels["labels"] == number] = tokenizers[1].convert_tokens_to_ids(PIECES[number])
    if suffix == "ForMultipleChoice":
        first, second = ({name: value[None] for name, value in part.items()} for part in (first, second))
    expected, found = model(**first, **labels), exported(**second, **moved)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-4, atol=1e-4)
    if suffix in (CLASSES, "ForTokenClassification"):
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
        assert suffix[3] == "T" or exported.config.problem_type == values.get("problem_type")
        if "id2label" in values:
            assert exported.config.id2label == model.config.id2label
    if head:  # which is left behind: it is lost, and nothing is called exact
        change_checkpoint(ways / "ours/model.pt", lambda state: state["conversion"].pop("head"))  # as a training does
        said = ways.back(out="other")
        assert f"lost      head {head}: --head {head} exports it" in said and "exact     no" in said


@pytest.mark.parametrize("name", ["classes", "labels", "one label", "regression", "three values"])
def test_classify_says_what_the_pipeline_says(name, ways):
    values = CASES[name][1]
    written(ways, name)
    ways.convert()
    (ways / "lines.txt").write_text("a z c\nb 8\n")
    ours = ways.lines("classify", ways / "ours/model.pt", ways / "lines.txt", "--jsonl", "--cpu")
    pipeline = transformers.pipeline("text-classification", model=str(ways / "first"), top_k=None, device="cpu")
    for one, theirs in zip(ours, pipeline(["a z c", "b 8"]), strict=True):
        scores = {row["label"]: pytest.approx(row["score"], abs=1e-4) for row in theirs}
        if "regression" in str(values.get("problem_type")):
            found = one["scores"] if "scores" in one else [one["score"]]
            assert found == [scores[label] for label in pipeline.model.config.id2label.values()]
        else:
            assert one["probabilities"] == scores
            if name == "labels":
                assert one["labels"] == [label for label in ("neg", "neu", "pos") if one["probabilities"][label] > 0.5]


def test_a_converted_classifier_takes_sentences_and_pairs(ways):
    """Which of them it was trained on no config.json says; test_conversion_pairs.py has the classes of pairs."""
    written(ways, "classes")
    ways.convert()
    (ways / "in.txt").write_text("a z\nb 0\tc 8 d\n\n")
    rows = ways.lines("classify", ways / "ours/model.pt", ways / "in.txt", "--jsonl")
    assert [row["label"] is None for row in rows] == [False, False, True]
    (ways / "in.txt").write_text("a\tb\tc\n")
    said = ways.run("classify", ways / "ours/model.pt", ways / "in.txt", status=2)
    assert "line 1: a converted model takes one sentence, or two, parted by a tab" in said


def test_what_is_kept_is_not_forced_on_another_family(ways):
    """RoBERTa has no next-sentence head: the way to it drops what BERT's folder kept, and names it."""
    encoder(ways / "first", "BertForPreTraining", hidden_act="gelu")
    ways.convert()
    assert ways.told("ours", "conversion.json")["kept"] == [
        f"{name}.{part}" for name in ("bert.pooler.dense", "cls.seq_relationship") for part in ("bias", "weight")
    ]
    said = ways.back(to="hf-roberta")
    assert "lost      tensor cls.seq_relationship.weight: roberta has none" in said and "exact     no" in said
    assert ways.told("back")["architectures"] == ["RobertaForMaskedLM"]


def test_a_trained_classifiers_labels_are_in_the_folder(ways):
    """As its data names them, in text/ beside the checkpoint."""
    write_checkpoint(ways.here, "wordpiece", "learned", classes=3, task=CLASSIFIED)
    ways.back("model.pt", "out", "--head", "mine")
    assert ways.opened("out", "AutoModelForSequenceClassification").config.id2label == {0: "yes", 1: "no", 2: "perhaps"}


def test_names_of_classes_go_with_their_own_head(ways):
    """Not with the head of spans beside it, nor with one of another number of outputs that was trained later."""
    written(ways, "classes")
    change_tensors(ways / "first", {"qa_outputs.weight": torch.randn(2, 16), "qa_outputs.bias": torch.randn(2)})
    ways.convert()

    def with_five(state):
        for name in ("dense.weight", "dense.bias", "out_proj.weight", "out_proj.bias"):
            value = state["model"][f"classification_heads.{HEAD}.{name}"]
            state["model"][f"classification_heads.five.{name}"] = value[[0] * 5] if "out" in name else value

    change_checkpoint(ways / "ours/model.pt", with_five)
    three, five = {str(n): name for n, name in NAMES["id2label"].items()}, {str(n): f"LABEL_{n}" for n in range(5)}
    for head, expected in (("question_answering", None), (HEAD, three), ("five", five)):
        ways.back("ours/model.pt", head, "--head", head)
        ways.export("ours/model.pt", f"{head}-ours", "--head", head)
        assert [ways.told(part).get("id2label") for part in (head, f"{head}-ours")] == [expected] * 2


# id2label and label2id of config.json, and what is said where a dictionary cannot have the names, if anything.
ODD_NAMES = {
    "swapped": ({"0": "LABEL_1", "1": "LABEL_0"}, {"x": 1}, None),
    "mixed": ({"0": "neg", "1": "LABEL_1", "2": " led"}, {"x": 1}, None),
    "alike": ({"0": "A", "1": "A", "2": ""}, {"x": 1}, "of ['A', 'A', ''] one is"),
    "lines": ({"0": "a\nb", "1": "<s>", "2": "c"}, {"a\nb": 0, "<s>": 1, "c": 2}, ""),
    "absent": (None, None, None),
}


@pytest.mark.parametrize("name", ODD_NAMES)
def test_names_of_classes_come_back_as_they_were(name, ways):
    """Those of which a dictionary has lines are its lines; the library calls LABEL_n what has no name."""
    names, numbers, said = ODD_NAMES[name]
    encoder(ways / "first", f"Bert{CLASSES}", num_labels=len(names or NAMES["id2label"]))
    ways.tell(id2label=names, label2id=numbers)
    told = ways.convert()
    assert ("note      classes are named LABEL_0, LABEL_1, ...: " in told) == bool(said)
    if said is not None:
        assert said in told
        assert (ways / "ours/label/dict.txt").read_text() == "LABEL_0 1\nLABEL_1 1\nLABEL_2 1\n"
    ways.back("ours/model.pt", "back", "--head", HEAD)
    back = ways.told("back")
    if names:
        assert back["id2label"] == names and back["label2id"] == numbers
    else:
        assert back["id2label"]["2"] == "LABEL_2"


TIES = {"default": {}, "tied": {"tie_word_embeddings": True}, "untied": {"tie_word_embeddings": False}}


@pytest.mark.parametrize("name", TIES)
def test_another_output_projection_is_read_where_the_library_reads_it(name, ways):
    """Of a folder, and of the exported one that was made of it: elsewhere the tensor is tied and says nothing."""
    encoder(ways / "first", "BertForMaskedLM", tie_word_embeddings=False)
    told = ways.told("first")
    del told["tie_word_embeddings"]
    (ways / "first/config.json").unlink()
    ways.tell(**told | TIES[name])
    model = ways.opened("first", "BertForMaskedLM")
    assert torch.equal(model.cls.predictions.decoder.weight, model.get_input_embeddings().weight) == (name != "untied")
    ways.convert()
    neutral = ways.ledger()["tensors"].get("neutral", {}).get("cls.predictions.decoder.weight")
    assert neutral == (None if name == "untied" else "tied, as its library ties it")
    ways.back()
    back = ways.opened("back", "BertForMaskedLM")
    assert back.config.tie_word_embeddings == (name != "untied")
    torch.testing.assert_close(back(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)
    ways.export()
    key = "roberta.encoder.lm_head.weight"
    state = load_file(ways / "out/model.safetensors")
    assert (key in state) == (name == "untied")
    change_tensors(
        ways / "out", {key: state.get(key, state["roberta.encoder.sentence_encoder.embed_tokens.weight"] + 1)}
    )
    again, first = (read_encoder(ways / part).state["encoder.lm_head.weight"] for part in ("out", "ours/model.pt"))
    assert torch.equal(again, first)


@pytest.mark.parametrize(("length", "expected"), [("${model.max_positions}", 20), (None, 20), (512, 20), (7, 7)])
def test_windows_of_questions_are_no_longer_than_the_model(length, expected):
    """An option that refers to another one, or is not set, says nothing."""
    values = config("learned")
    state = random_state(values) | {"span_heads.mine.out_proj.weight": torch.ones(2, 16)}
    task = {"_name": "question_answering", "tokens_per_sample": length, "doc_stride": 5, "span_head_name": None}
    made = checkpoint_of("relpos_roberta", values, state, task)["cfg"]["task"]
    assert (made["tokens_per_sample"], made["doc_stride"], made["span_head_name"]) == (expected, 5, "mine")


@pytest.mark.parametrize("family", ["XLMRoberta", "Roberta"])
@pytest.mark.parametrize("pooled", [True, False])
def test_a_model_without_a_head_comes_back_as_one(family, pooled, ways):
    """Of RoBERTa's family XLM-R's too, with its pooler or without one, in half precision."""
    model = encoder(ways / "first", f"{family}Model", None, pooled=pooled)
    model.half().save_pretrained(ways / "first")
    ways.convert()
    ways.back("ours/model.pt", to="hf-roberta")
    assert ways.told("back")["architectures"] == ["RobertaModel"]
    before, after = model.float()(IDS), ways.opened("back", "AutoModel", add_pooling_layer=pooled)(IDS)
    for name in ("last_hidden_state", *["pooler_output"] * pooled):
        torch.testing.assert_close(after[name], before[name], rtol=1e-5, atol=1e-5)


def test_the_last_layer_norm_needs_no_version(ways):
    """Where layer norms come before blocks: it stays on every way, and without fairseq's number of a version too."""
    _, checkpoint = write_checkpoint(ways.here, "bpe", encoder_normalize_before=True)
    tokens = torch.tensor([[0, 7, 9, 11, 2]])

    def features(name):
        return SavedModel.open(ways / name).build_anyway(None)[0](tokens, features_only=True)[0]

    expected = features("model.pt")
    for to in ("same", "learned+m4"):
        ways.convert("model.pt", to, to=to)
    ways.export("model.pt")
    ways.convert("out", "back")
    change_checkpoint(checkpoint, lambda state: state["model"].pop("encoder.sentence_encoder.version"))
    for name in ("same/model.pt", "learned+m4/model.pt", "back/model.pt", "model.pt"):
        assert torch.equal(features(name), expected), name


@pytest.mark.parametrize("separators", ["auto", "1", "2"])
def test_questions_are_answered_with_their_separators(separators, ways):
    task = {"_name": "question_answering", "separators": separators, "span_head_name": "spans"}
    _, checkpoint = write_checkpoint(ways.here, "bpe", spans=True, task=task, max_positions=64)
    asked = ("answer", checkpoint, "the old mouse sees a horse", "the new house", "--cpu", "--jsonl")
    assert ways.lines(*asked)[0]["question"] == "the new house"


def test_a_dictionary_of_another_size_does_not_go_along(ways):
    write_checkpoint(ways.here, "bpe")
    path = ways / "text/dict.txt"
    path.write_text("".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[:-3]), encoding="utf-8")
    for said in (ways.refused("model.pt"), ways.unexported()):
        assert re.search(r"text/dict.txt makes \d+ rows, and the model has \d+: it is another", said)


HEADS = ("Model", "ForMaskedLM", CLASSES, "ForQuestionAnswering", "ForTokenClassification", "ForMultipleChoice")


@pytest.mark.parametrize("head", HEADS)
def test_every_head_of_distilbert_is_exact(head, ways):
    values = {"num_labels": 2 if head == "ForQuestionAnswering" else 3, "activation": "relu"}
    encoder(ways / "first", f"DistilBert{head}", sinusoidal_pos_embds=head == "Model", **values)
    said = ways.convert()
    assert "exact     yes" in said and "compared  with transformers" in said and "lost" not in said
    if head == CLASSES:
        assert "cannot express a classifier with relu after its first layer" in ways.refused("ours", to="hf-bert")
        ways.export()
    elif head == "ForMaskedLM":
        ways.back()
