"""Every head of transformers' encoders: there and back, its loss and names in the export, refusals by name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from helpers.commands import relpos
from helpers.conversion import config, random_state, shake
from helpers.exported import write_checkpoint
from relpos_fairseq.export.model_adapters import WholeModel
from relpos_fairseq.formats.base import read_encoder
from relpos_fairseq.saved.checkpoint import checkpoint_of
from relpos_fairseq.saved.model import SavedModel

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", *"012345678"]
SIZES = {
    "vocab_size": len(PIECES),
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 30,
}
NAMES = {"id2label": {0: "neg", 1: "neu", 2: "pos"}, "label2id": {"neg": 0, "neu": 1, "pos": 2}}
HEAD = "sentence_classification_head"
FLOATS = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
# class, config, --head, labels
CASES = {
    "none": ("Model", {}, None, {}),
    "masked": ("ForMaskedLM", {}, None, {"labels": torch.tensor([[5, -100, 7, 8]] * 2)}),
    "pre-training": ("ForPreTraining", {}, None, {}),
    "classes": ("ForSequenceClassification", NAMES, HEAD, {"labels": torch.tensor([2, 0])}),
    "labels": (
        "ForSequenceClassification",
        NAMES | {"problem_type": "multi_label_classification"},
        HEAD,
        {"labels": FLOATS},
    ),
    "unnamed labels": ("ForSequenceClassification", {"num_labels": 3}, HEAD, {"labels": FLOATS}),
    "one label": (
        "ForSequenceClassification",
        {"num_labels": 1, "problem_type": "multi_label_classification"},
        HEAD,
        {"labels": FLOATS[:, 1:2]},
    ),
    "regression": (
        "ForSequenceClassification",
        {"num_labels": 1, "problem_type": "regression"},
        HEAD,
        {"labels": FLOATS[:, 1]},
    ),
    "unnamed regression": ("ForSequenceClassification", {"num_labels": 1}, HEAD, {"labels": FLOATS[:, 1]}),
    "three values": ("ForSequenceClassification", NAMES | {"problem_type": "regression"}, HEAD, {"labels": FLOATS}),
    "spans": (
        "ForQuestionAnswering",
        {},
        "question_answering",
        {"start_positions": torch.tensor([1, 0]), "end_positions": torch.tensor([2, 1])},
    ),
    "tokens": (
        "ForTokenClassification",
        NAMES,
        "token_classification",
        {"labels": torch.tensor([[0, -100, 2, 1], [1, 1, 2, -100]])},
    ),
    "choices": ("ForMultipleChoice", {}, HEAD, {"labels": torch.tensor([1])}),
}


def write(folder: Path, suffix: str, family: str = "Bert", **values):
    """A random model with a head and a tokenizer."""
    config = getattr(transformers, f"{family}Config")(**SIZES | values)
    model = getattr(transformers, f"{family}{suffix}")(config).eval()
    shake(model)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    return model


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_there_and_back(name, tmp_path):
    """Every output, poolers and next-sentence heads too, the loss, and what config.json says of the head."""
    suffix, values, head, labels = CASES[name]
    model = write(tmp_path / "first", suffix, **values)
    assert relpos("convert", tmp_path / "first", "--to", "same", "--out", tmp_path / "ours") == 0
    chosen = ["--head", head] if head else []
    made = tmp_path / "ours" / "model.pt"
    opened, _ = SavedModel.open(made).build_anyway(None)  # as `export onnx` has it
    assert head is None or head in WholeModel(opened).heads
    assert relpos("convert", made, "--to", "hf-bert", *chosen, "--out", tmp_path / "back") == 0
    back = type(model).from_pretrained(tmp_path / "back").eval()
    ids = torch.tensor([[2, 9, 12, 3], [2, 7, 20, 3]])
    ids = ids[None] if suffix == "ForMultipleChoice" else ids
    before, after = model(ids, **labels), back(ids, **labels)
    assert before.keys() == after.keys()
    for key, value in before.items():
        torch.testing.assert_close(after[key], value, rtol=1e-5, atol=1e-5)
    told = [json.loads((tmp_path / part / "config.json").read_text()) for part in ("first", "back")]
    assert told[0]["architectures"] == told[1]["architectures"] == [f"Bert{suffix}"]
    assert told[0].get("problem_type") == told[1].get("problem_type")
    if suffix in ("ForSequenceClassification", "ForTokenClassification"):
        assert back.config.id2label == model.config.id2label and back.config.label2id == model.config.label2id


@pytest.mark.parametrize("name", [name for name, (_, _, _, labels) in CASES.items() if labels])
@torch.no_grad()
def test_losses_and_names_of_the_export(name, tmp_path):
    suffix, values, _, labels = CASES[name]
    model = write(tmp_path / "first", suffix, **values)
    assert relpos("convert", tmp_path / "first", "--to", "learned+m4", "--out", tmp_path / "ours") == 0
    assert relpos("export", "transformers", tmp_path / "ours" / "model.pt", "--out", tmp_path / "out") == 0
    auto = getattr(transformers, f"Auto{'ModelFor' + suffix[3:]}")
    exported = auto.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    tokenizers = [transformers.AutoTokenizer.from_pretrained(tmp_path / part) for part in ("first", "out")]
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
    if suffix in ("ForSequenceClassification", "ForTokenClassification"):
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
        assert suffix[3] == "T" or exported.config.problem_type == values.get("problem_type")
        if "id2label" in values:
            assert exported.config.id2label == model.config.id2label


@torch.no_grad()
def test_a_converted_classifier_takes_sentences_and_pairs(tmp_path, capsys):
    """Which of them it was trained on no config.json says; the probabilities are transformers'."""
    model = write(tmp_path / "first", "ForSequenceClassification", **NAMES)
    assert relpos("convert", tmp_path / "first", "--to", "same", "--out", tmp_path / "ours") == 0
    (tmp_path / "in.txt").write_text("a z\nb 0\tc 8 d\n\n")
    capsys.readouterr()
    assert relpos("classify", tmp_path / "ours" / "model.pt", tmp_path / "in.txt", "--jsonl") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "first")
    for row, texts in zip(rows, (["a z"], ["b 0", "c 8 d"]), strict=False):
        wanted = model(**tokenizer(*texts, return_tensors="pt")).logits.softmax(-1)[0].tolist()
        assert list(row["probabilities"].values()) == pytest.approx(wanted, abs=1e-5)
    assert rows[2]["label"] is None
    (tmp_path / "in.txt").write_text("a\tb\tc\n")
    assert relpos("classify", tmp_path / "ours" / "model.pt", tmp_path / "in.txt") == 2
    assert "line 1: a converted model takes one sentence, or two, parted by a tab" in capsys.readouterr().err


def test_other_heads_are_refused_by_name(tmp_path, capsys):
    suffix = "ForNextSentencePrediction"
    write(tmp_path / "first", suffix)
    assert relpos("convert", tmp_path / "first", "--to", "same", "--out", tmp_path / "ours") == 2
    said = capsys.readouterr().err
    assert f"is a Bert{suffix}, whose head no model here has" in said and "Traceback" not in said
    assert not (tmp_path / "ours").exists()


def test_what_is_kept_is_not_forced_on_another_family(tmp_path):
    """RoBERTa has no next-sentence head: the way to it drops what BERT's folder kept."""
    write(tmp_path / "first", "ForPreTraining", hidden_act="gelu")
    assert relpos("convert", tmp_path / "first", "--to", "same", "--out", tmp_path / "ours") == 0
    made = tmp_path / "ours" / "model.pt"
    assert json.loads((tmp_path / "ours" / "conversion.json").read_text())["kept"] == [
        "bert.pooler.dense.bias",
        "bert.pooler.dense.weight",
        "cls.seq_relationship.bias",
        "cls.seq_relationship.weight",
    ]
    assert relpos("convert", made, "--to", "hf-roberta", "--out", tmp_path / "roberta") == 0
    config = json.loads((tmp_path / "roberta" / "config.json").read_text())
    assert config["architectures"] == ["RobertaForMaskedLM"]


def test_a_trained_classifiers_labels_are_in_the_folder(tmp_path):
    """As its data names them, in text/ beside the checkpoint."""
    task = {"_name": "sentence_prediction", "classification_head_name": "mine", "num_classes": 3, "init_token": 0}
    _, checkpoint = write_checkpoint(tmp_path, "wordpiece", "learned", classes=3, task=task)
    arguments = ("--to", "hf-bert", "--head", "mine", "--out", tmp_path / "out")
    assert relpos("convert", checkpoint, *arguments) == 0
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert loaded.config.id2label == {0: "yes", 1: "no", 2: "perhaps"}


@pytest.mark.parametrize("name", ["classes", "labels", "one label", "regression", "three values"])
def test_classify_says_what_the_pipeline_says(name, tmp_path, capsys):
    suffix, values, _, _ = CASES[name]
    write(tmp_path / "first", suffix, **values)
    assert relpos("convert", tmp_path / "first", "--to", "same", "--out", tmp_path / "ours") == 0
    (tmp_path / "lines.txt").write_text("a z c\nb 8\n")
    capsys.readouterr()
    assert relpos("classify", tmp_path / "ours" / "model.pt", tmp_path / "lines.txt", "--jsonl", "--cpu") == 0
    ours = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    pipeline = transformers.pipeline("text-classification", model=str(tmp_path / "first"), top_k=None, device="cpu")
    for one, theirs in zip(ours, pipeline(["a z c", "b 8"]), strict=True):
        scores = {row["label"]: pytest.approx(row["score"], abs=1e-4) for row in theirs}
        if "regression" in str(values.get("problem_type")):
            found = one["scores"] if "scores" in one else [one["score"]]
            assert found == [scores[label] for label in pipeline.model.config.id2label.values()]
        else:
            assert one["probabilities"] == scores
            if name == "labels":
                assert one["labels"] == [label for label in ("neg", "neu", "pos") if one["probabilities"][label] > 0.5]


ODD_NAMES = {
    "swapped": {"0": "LABEL_1", "1": "LABEL_0"},
    "mixed": {"0": "neg", "1": "LABEL_1", "2": " led"},
    "alike": {"0": "A", "1": "A", "2": ""},
}


def test_names_that_are_not_taken_are_said(tmp_path, capsys):
    write(tmp_path / "first", "ForSequenceClassification", id2label={0: "A", 1: "A", 2: "B"}, num_labels=3)
    assert relpos("convert", tmp_path / "first", "--to", "same", "--out", tmp_path / "ours") == 0
    assert "note      classes are named LABEL_0, LABEL_1, ...: of ['A', 'A', 'B'] one is" in capsys.readouterr().out


@torch.no_grad()
def test_names_of_classes_go_with_their_own_head(tmp_path):
    """Not with the head of spans beside it, nor with one of another number of outputs that was trained later."""
    write(tmp_path / "first", "ForSequenceClassification", **NAMES)
    file = tmp_path / "first" / "model.safetensors"
    more = {"qa_outputs.weight": torch.randn(2, 16), "qa_outputs.bias": torch.randn(2)}
    save_file(load_file(file) | more, file, {"format": "pt"})
    assert relpos("convert", tmp_path / "first", "--to", "same", "--out", tmp_path / "ours") == 0
    made = tmp_path / "ours" / "model.pt"
    state = torch.load(made, weights_only=True)
    for name in ("dense.weight", "dense.bias", "out_proj.weight", "out_proj.bias"):
        value = state["model"][f"classification_heads.{HEAD}.{name}"]
        state["model"][f"classification_heads.five.{name}"] = (
            value[:1].expand(5, *value.shape[1:]) if "out" in name else value
        )
    torch.save(state, made)
    told = {}
    for head in ("question_answering", HEAD, "five"):
        assert relpos("convert", made, "--to", "hf-bert", "--head", head, "--out", tmp_path / head) == 0
        assert relpos("export", "transformers", made, "--out", tmp_path / f"{head}-ours", "--head", head) == 0
        for part in (head, f"{head}-ours"):
            told[part] = json.loads((tmp_path / part / "config.json").read_text()).get("id2label")
    three, five = {str(n): name for n, name in NAMES["id2label"].items()}, {str(n): f"LABEL_{n}" for n in range(5)}
    assert told == {
        **{"question_answering": None, HEAD: three, "five": five},
        **{"question_answering-ours": None, f"{HEAD}-ours": three, "five-ours": five},
    }


TIES = {"default": {}, "tied": {"tie_word_embeddings": True}, "untied": {"tie_word_embeddings": False}}


@pytest.mark.parametrize("name", TIES)
@torch.no_grad()
def test_another_output_projection_is_read_where_the_library_reads_it(name, tmp_path):
    """Of a folder, and of the exported one that was made of it: elsewhere the tensor is tied and says nothing."""
    write(tmp_path / "first", "ForMaskedLM", tie_word_embeddings=False)
    path = tmp_path / "first" / "config.json"
    told = json.loads(path.read_text())
    del told["tie_word_embeddings"]
    path.write_text(json.dumps(told | TIES[name]))
    model = transformers.BertForMaskedLM.from_pretrained(tmp_path / "first").eval()
    assert torch.equal(model.cls.predictions.decoder.weight, model.get_input_embeddings().weight) == (name != "untied")
    assert relpos("convert", tmp_path / "first", "--to", "same", "--out", tmp_path / "ours") == 0
    tensors = json.loads((tmp_path / "ours" / "conversion.json").read_text())["ledger"]["tensors"]
    neutral = tensors.get("neutral", {}).get("cls.predictions.decoder.weight")
    assert neutral == (None if name == "untied" else "tied, as its library ties it")
    assert relpos("convert", tmp_path / "ours", "--to", "hf-bert", "--out", tmp_path / "back") == 0
    back = transformers.BertForMaskedLM.from_pretrained(tmp_path / "back").eval()
    assert back.config.tie_word_embeddings == (name != "untied")
    ids = torch.tensor([[2, 9, 12, 3]])
    torch.testing.assert_close(back(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    made = tmp_path / "ours" / "model.pt"
    assert relpos("export", "transformers", made, "--out", tmp_path / "out") == 0
    file, key = tmp_path / "out" / "model.safetensors", "roberta.encoder.lm_head.weight"
    state = load_file(file)
    assert (key in state) == (name == "untied")
    embedding = state["roberta.encoder.sentence_encoder.embed_tokens.weight"]
    save_file({key: embedding + 1} | state, file, {"format": "pt"})
    again, first = (read_encoder(part).state["encoder.lm_head.weight"] for part in (tmp_path / "out", made))
    assert torch.equal(again, first)


def test_an_untied_head_without_its_weight_is_incomplete(tmp_path, capsys):
    write(tmp_path / "first", "ForMaskedLM")
    path = tmp_path / "first" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | TIES["untied"]))
    assert relpos("convert", tmp_path / "first", "--to", "same", "--out", tmp_path / "ours") == 2
    assert "the head lacks cls.predictions.decoder.weight" in capsys.readouterr().err


@pytest.mark.parametrize(("length", "expected"), [("${model.max_positions}", 20), (None, 20), (512, 20), (7, 7)])
def test_windows_of_questions_are_no_longer_than_the_model(length, expected):
    """An option that refers to another one, or is not set, says nothing."""
    values = config("learned")
    state = random_state(values) | {"span_heads.mine.out_proj.weight": torch.ones(2, 16)}
    task = {"_name": "question_answering", "tokens_per_sample": length, "doc_stride": 5, "span_head_name": None}
    made = checkpoint_of("relpos_roberta", values, state, task)["cfg"]["task"]
    assert (made["tokens_per_sample"], made["doc_stride"], made["span_head_name"]) == (expected, 5, "mine")


def test_token_types_come_back_as_they_were(tmp_path):
    write(tmp_path / "first", "ForMaskedLM", type_vocab_size=1)
    assert relpos("convert", tmp_path / "first", "--to", "same", "--out", tmp_path / "ours") == 0
    assert relpos("convert", tmp_path / "ours", "--to", "hf-bert", "--out", tmp_path / "back") == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text())["type_vocab_size"] == 1


@pytest.mark.parametrize("name", ODD_NAMES)
def test_names_of_classes_come_back_as_they_were(name, tmp_path):
    write(tmp_path / "first", "ForSequenceClassification", num_labels=len(ODD_NAMES[name]))
    path = tmp_path / "first" / "config.json"
    told = json.loads(path.read_text()) | {"id2label": ODD_NAMES[name], "label2id": {"x": 1}}
    path.write_text(json.dumps(told))
    assert relpos("convert", tmp_path / "first", "--to", "same", "--out", tmp_path / "ours") == 0
    made = tmp_path / "ours" / "model.pt"
    assert relpos("convert", made, "--to", "hf-bert", "--head", HEAD, "--out", tmp_path / "back") == 0
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert back["id2label"] == ODD_NAMES[name] and back["label2id"] == {"x": 1}


@pytest.mark.parametrize("family", ["XLMRoberta", "Roberta"])
@pytest.mark.parametrize("pooled", [True, False])
def test_a_model_without_a_head_comes_back_as_one(family, pooled, tmp_path):
    """Of RoBERTa's family XLM-R's too, with its pooler or without one, in half precision."""
    values = SIZES | {"type_vocab_size": 1, "pad_token_id": 1}
    config = getattr(transformers, f"{family}Config")(**values)
    model = getattr(transformers, f"{family}Model")(config, add_pooling_layer=pooled).eval()
    shake(model)
    model.half().save_pretrained(tmp_path / "first")
    assert relpos("convert", tmp_path / "first", "--to", "same", "--out", tmp_path / "ours") == 0
    made = tmp_path / "ours" / "model.pt"
    assert relpos("convert", made, "--to", "hf-roberta", "--out", tmp_path / "back") == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text())["architectures"] == ["RobertaModel"]
    back = transformers.AutoModel.from_pretrained(tmp_path / "back", add_pooling_layer=pooled).eval()
    ids = torch.tensor([[0, 9, 12, 2]])
    with torch.no_grad():
        before, after = model.float()(ids), back(ids)
    torch.testing.assert_close(after.last_hidden_state, before.last_hidden_state, rtol=1e-5, atol=1e-5)
    if pooled:
        torch.testing.assert_close(after.pooler_output, before.pooler_output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": 5}, "architectures must be a list of names, got 5"),
        ({"problem_type": "ranking"}, "problem_type 'ranking' is none of single_label_classification"),
        ({"max_position_embeddings": 2}, "has 2 positions"),
    ],
)
def test_configs_that_cannot_be(values, message, tmp_path, capsys):
    write(tmp_path / "first", "ForMaskedLM")
    path = tmp_path / "first" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    assert relpos("convert", tmp_path / "first", "--to", "same", "--out", tmp_path / "ours") == 2
    assert message in capsys.readouterr().err


def test_a_weight_that_is_no_number_is_named(tmp_path, capsys):
    model = write(tmp_path / "first", "ForMaskedLM")
    model.bert.encoder.layer[1].output.dense.bias.data[0] = float("nan")
    model.save_pretrained(tmp_path / "first")
    assert relpos("convert", tmp_path / "first", "--to", "same", "--out", tmp_path / "ours") == 2
    assert "bert.encoder.layer.1.output.dense.bias holds NaN" in capsys.readouterr().err


@pytest.mark.parametrize("name", CASES)
def test_a_folder_goes_back_with_its_own_head(name, tmp_path, capsys):
    """Nobody has to name it; a head that is left behind is lost, and nothing is called exact."""
    suffix, values, head, _ = CASES[name]
    write(tmp_path / "first", suffix, **values)
    assert relpos("convert", tmp_path / "first", "--to", "learned+m4", "--out", tmp_path / "ours") == 0
    capsys.readouterr()
    assert relpos("convert", tmp_path / "ours", "--to", "hf-bert", "--out", tmp_path / "back") == 0
    assert "exact     yes" in capsys.readouterr().out
    configs = [json.loads((tmp_path / part / "config.json").read_text()) for part in ("first", "back")]
    assert configs[0]["architectures"] == configs[1]["architectures"]
    weights = [load_file(tmp_path / part / "model.safetensors") for part in ("first", "back")]
    for key in weights[0].keys() & weights[1].keys():
        assert torch.equal(weights[0][key], weights[1][key])
    assert {key for key in weights[0] if "classifier" in key or "qa_outputs" in key} <= weights[1].keys()
    if head:
        state = torch.load(tmp_path / "ours" / "model.pt", weights_only=False)
        del state["conversion"]["head"]  # as a training drops it
        torch.save(state, tmp_path / "ours" / "model.pt")
        assert relpos("convert", tmp_path / "ours", "--to", "hf-bert", "--out", tmp_path / "other") == 0
        said = capsys.readouterr().out
        assert f"lost      head {head}: --head {head} exports it" in said and "exact     no" in said


@torch.no_grad()
def test_the_last_layer_norm_stays(tmp_path):
    """Where layer norms come before blocks; fairseq takes a state without its number of a version for an older one."""
    _, checkpoint = write_checkpoint(tmp_path, "bpe", encoder_normalize_before=True)
    tokens = torch.tensor([[0, 7, 9, 11, 2]])
    expected = SavedModel.open(checkpoint).build_anyway(None)[0](tokens, features_only=True)[0]
    for to in ("same", "learned+m4"):
        assert relpos("convert", checkpoint, "--to", to, "--out", tmp_path / to) == 0
        made, _ = SavedModel.open(tmp_path / to / "model.pt").build_anyway(None)
        assert torch.equal(made(tokens, features_only=True)[0], expected)
    assert relpos("export", "transformers", checkpoint, "--out", tmp_path / "theirs") == 0
    assert relpos("convert", tmp_path / "theirs", "--to", "same", "--out", tmp_path / "back") == 0
    made, _ = SavedModel.open(tmp_path / "back" / "model.pt").build_anyway(None)
    assert torch.equal(made(tokens, features_only=True)[0], expected)


@pytest.mark.parametrize("separators", ["auto", "1", "2"])
def test_questions_are_answered_with_their_separators(separators, tmp_path, capsys):
    task = {"_name": "question_answering", "separators": separators, "span_head_name": "spans"}
    _, checkpoint = write_checkpoint(tmp_path, "bpe", spans=True, task=task, max_positions=64)
    given = ("--cpu", "--jsonl")
    assert relpos("answer", checkpoint, "the old mouse sees a horse", "the new house", *given) == 0
    assert json.loads(capsys.readouterr().out)["question"] == "the new house"


def test_a_dictionary_of_another_size_does_not_go_along(tmp_path, capsys):
    _, checkpoint = write_checkpoint(tmp_path, "bpe")
    path = tmp_path / "text" / "dict.txt"
    path.write_text("".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[:-3]), encoding="utf-8")
    assert relpos("convert", checkpoint, "--to", "same", "--out", tmp_path / "out") == 2
    assert re.search(r"text/dict.txt makes \d+ rows, and the model has \d+: it is another", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


@torch.no_grad()
def test_the_last_layer_norm_needs_no_version(tmp_path):
    """A file of ours that lost fairseq's number is no older one."""
    _, checkpoint = write_checkpoint(tmp_path, "bpe", encoder_normalize_before=True)
    tokens = torch.tensor([[0, 7, 9, 11, 2]])
    expected = SavedModel.open(checkpoint).build_anyway(None)[0](tokens, features_only=True)[0]
    state = torch.load(checkpoint, weights_only=True)
    del state["model"]["encoder.sentence_encoder.version"]
    torch.save(state, checkpoint)
    assert torch.equal(SavedModel.open(checkpoint).build_anyway(None)[0](tokens, features_only=True)[0], expected)
