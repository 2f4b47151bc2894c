"""evaluate_xtreme.py: every language that is there, one table, nothing twice."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from fairseq.data import data_utils

from helpers.commands import call, evaluate, load, relpos_job
from helpers.folders import prepare
from helpers.glue_data import write_tokenizer, write_xnli
from helpers.roberta import ARCH, OPTIMIZE
from relpos_fairseq.evaluation import classification, questions
from relpos_fairseq.evaluation.xtreme import QA_FILES, by_language, mean_of_means, question_files, trials_of
from relpos_fairseq.io.errors import UserError

TASK = (
    "--task sentence_prediction --criterion sentence_prediction_glue --num-classes 3 --init-token 0 "
    "--separator-token 2 --max-positions 40 --classification-head-name nli"
).split()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """XNLI of English and German, prepared."""
    folder = tmp_path_factory.mktemp("xnli")
    tokenizer, raw = write_tokenizer(folder / "tokenizer"), write_xnli(folder / "raw", "xtreme")
    prepare("glue", [raw, "--tokenizer-folder", tokenizer, "--out", folder, "--tasks", "XNLI", "--workers", "1"])
    return folder / "XNLI"


@pytest.fixture(scope="module")
def model(tmp_path_factory, data) -> Path:
    """A classifier that has learned little, with segments."""
    folder = tmp_path_factory.mktemp("model")
    brief = "--max-update 6 --batch-size 4 --segment-encoding head --position-scheme rel_scalar".split()
    call("train", data, *ARCH, *OPTIMIZE, *TASK, *brief, "--save-dir", folder)
    return folder / "checkpoint_last.pt"


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory, data, model) -> Path:
    out = tmp_path_factory.mktemp("evaluated") / "out"
    relpos_job("evaluate", "xtreme", "--out", out, "--xnli-model", model, "--xnli", data)
    return out


def test_accuracy_is_fairseqs_own(evaluated, data, model):
    found = json.loads((evaluated / "xtreme.json").read_text())["XNLI"]
    assert set(found) == {"en", "de"}
    for language, accuracy in found.items():
        subset = ("--valid-subset", f"test_{language}", "--batch-size", "3")
        output = evaluate("validate", data, model, *TASK, *subset, "--log-format", "json")
        logged = re.search(r'(?:valid_|test_.._|")accuracy": "?([\d.]+)', output)[1]
        assert float(logged) == pytest.approx(accuracy, abs=0.01)


def test_predictions_are_a_label_a_line(evaluated):
    lines = (evaluated / "XNLI" / "test-de.tsv").read_text().splitlines()
    assert len(lines) == 8 and set(lines) <= {"contradiction", "entailment", "neutral"}


def test_test_sets_without_labels_are_predicted_and_shown(tmp_path, data, model):
    """Beside labelled ones, and alone, where validation sets are scored."""
    some, none = tmp_path / "some", tmp_path / "none"
    for folder, languages in ((some, ("de",)), (none, ("de", "en"))):
        shutil.copytree(data, folder)
        for name in languages:
            for path in (folder / "label").glob(f"test_{name}.*"):
                path.unlink()
        relpos_job("evaluate", "xtreme", "--out", folder / "out", "--xnli-model", model, "--xnli", folder)
    found = json.loads((some / "out" / "xtreme.json").read_text())["XNLI"]
    assert found["de"] is None and found["en"] is not None
    table = (some / "out" / "xtreme.md").read_text()
    assert re.search(r"\| de +\| no labels +\|", table)
    assert f"| {found['en']:.2f} " in next(row for row in table.splitlines() if "| mean " in row)
    written = {path.name for path in (none / "out" / "XNLI").iterdir()}
    assert written == {"dev-en.tsv", "test-en.tsv", "test-de.tsv"}
    found = json.loads((none / "out" / "xtreme.json").read_text())["XNLI"]
    assert found["de"] is None and found["en"] is not None


def rows_of(results: dict) -> list[list[str]]:
    """The cells of the table of some results."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in by_language(trials_of(results)).splitlines()]


def test_table_has_english_first_and_zero_shot_means(evaluated):
    results = {"XNLI": {"en": 80.0, "de": 70.0, "zh": 60.0}, "XQuAD": {"de": [50.0, 40.0], "ar": [30.0, 20.0]}}
    rows = rows_of(results)
    assert rows[0] == ["language", "XNLI (accuracy)", "XQuAD (F1 / EM)"]
    assert rows[2:] == [
        ["en", "80.00", "-"],
        ["ar", "-", "30.00 / 20.00"],
        ["de", "70.00", "50.00 / 40.00"],
        ["zh", "60.00", "-"],
        ["mean", "70.00", "40.00 / 30.00"],
        ["mean without English", "65.00", "40.00 / 30.00"],
    ]


def test_of_trials_the_median_is_shown():
    """Of each number; and the median of means, which is not the mean of medians, 45."""
    de, zh = (70.0, 50.0, 60.0), (30.0, 20.0, 90.0)
    results = {f"XNLI-trial{n}": {"de": de[n], "zh": zh[n]} for n in range(3)}
    results |= {f"XQuAD-trial{n}": {"de": [float(n), 9.0 - n]} for n in (1, 2, 4)}
    rows = rows_of(results)
    assert rows[0][1:] == ["XNLI (accuracy, median of 3)", "XQuAD (F1 / EM, median of 3)"]
    assert rows[2:4] == [["de", "60.00", "2.00 / 7.00"], ["zh", "30.00", "-"]]
    assert rows[4] == ["mean", "50.00", "2.00 / 7.00"]


def test_trials_are_evaluated_one_by_one(tmp_path, data, model):
    """A copy of the model is a trial like it."""
    other = tmp_path / "other.pt"
    shutil.copy(model, other)
    given = ("--out", tmp_path / "out", "--xnli", data)
    relpos_job("evaluate", "xtreme", *given, "--xnli-model", model, other)
    found = json.loads((tmp_path / "out" / "xtreme.json").read_text())
    assert found["XNLI-trial1"] == found["XNLI-trial2"] and len(found) == 2
    assert (tmp_path / "out" / "XNLI-trial2" / "test-de.tsv").is_file()
    assert "median of 2" in (tmp_path / "out" / "xtreme.md").read_text()


def test_questions_go_through_evaluate_qa_once(tmp_path, monkeypatch, shell):
    asked = []

    def fake(options):
        asked.append(options)
        names = [path.name.split(".json")[0] for path in options.files]
        return {name: {"f1": 50.0, "exact": 40.0, "total": 3} for name in names}

    monkeypatch.setattr(questions, "evaluate", fake)
    (tmp_path / "model.pt").write_bytes(b"x")
    mlqa = ("test-context-de-question-de", "dev-context-de-question-de", "test-context-de-question-en")
    for name in ("xquad.en.json", "xquad.de.json.gz", *(f"{one}.json" for one in mlqa)):
        (tmp_path / name).write_text(name)
    line = "evaluate xtreme --out out --qa-model model.pt --xquad . --mlqa . '--qa-flags=--on-long-question truncate'"
    assert "unchanged" not in shell(line)
    assert "unchanged" in shell(line)
    assert len(asked) == 2
    assert [options.metric for options in asked] == ["squad", "mlqa"]
    assert [path.name for path in asked[1].files] == ["test-context-de-question-de.json"]
    assert [options.on_long_question for options in asked] == ["truncate", "truncate"]
    (tmp_path / "xquad.de.json.gz").write_text("other")
    shell(line)
    assert len(asked) == 3


FILES = {  # of each data set, and the language of each; None: not to be read
    "XQuAD": {"xquad.el.json": "el", "xquad.en.json.gz": "en"},
    "TyDiQA-GoldP": {"tydiqa.ar.dev.json": "ar", "tydiqa.goldp.fi.dev.json": "fi", "tydiqa-goldp-dev-korean.json": "ko"}
    | {"tydiqa.en.train.json": None, "tydiqa-goldp-v1.1-dev.json": None},
    "MLQA": {"dev-context-vi-question-vi.json": "vi", "test-context-vi-question-es.json": None},
}


@pytest.mark.parametrize(("data_set", "files"), FILES.items(), ids=FILES)
def test_file_names_of_every_data_set(data_set, files, tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    for name in files:
        (inner / name).touch()
    found = {key: path.name for key, path in question_files(data_set, tmp_path).items()}
    assert found == {language: name for name, language in files.items() if language}
    (inner / next(iter(files)).replace(next(iter(files.values())), "zh")).symlink_to("nowhere")
    with pytest.raises(UserError, match="is none: put the file there or remove it"):
        question_files(data_set, tmp_path)


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
@torch.no_grad()
def test_a_converted_classifier_is_evaluated_as_it_was_trained(tmp_path, data, kind, shell):
    """Its own separators, segments and order of labels; transformers is the oracle."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)  # its answers differ
    labels = ["ENTAILMENT", "NEUTRAL", "CONTRADICTION"]
    size = len((data / "input0" / "dict.txt").read_text().splitlines()) + 5
    bert = kind == "Bert"
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    sizes |= {"vocab_size": size, "max_position_embeddings": 60, "type_vocab_size": 1 + bert}
    names = {"id2label": dict(enumerate(labels)), "label2id": {name: n for n, name in enumerate(labels)}}
    own = {"initializer_range": 0.5, "pad_token_id": 1 - bert}
    config = getattr(transformers, f"{kind}Config")(**sizes, **names, **own)
    theirs = getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    shell("convert theirs --to same --out ours")
    path = tmp_path / "ours" / "model.pt"
    ours = classification.Classifier(path, data, cpu=True)
    predicted, right = ours.predict("test_de")
    rows = load(path)["conversion"]["rows"]
    first, second = (data_utils.load_indexed_dataset(str(data / part / "test_de")) for part in ("input0", "input1"))
    for index, answer in enumerate(predicted):
        start, between = [0, *first[index].tolist()], [] if kind == "Bert" else [2]
        rest = [*between, *second[index].tolist()]
        ids = torch.tensor([[rows[number] for number in start + rest]])
        types = torch.tensor([[0] * len(start) + [int(kind == "Bert")] * len(rest)])
        logits = theirs(input_ids=ids, token_type_ids=types).logits
        sample = torch.tensor([start + rest])
        segments = types if kind == "Bert" else None
        mine, _ = ours.model(sample, classification_head_name=ours.head, segments=segments)
        assert torch.allclose(mine, logits, atol=1e-5)
        assert answer == labels[int(logits.argmax())].lower()
    assert len(set(predicted)) > 1 and set(right) <= set(ours.names)
    # The folder is enough for fairseq's tools.
    alone = classification.Classifier(path, tmp_path / "ours", cpu=True)
    assert alone.names == labels


def test_a_conversion_keeps_the_classifier_s_task(tmp_path, data, model, shell):
    for scheme, out in (("learned+rel_scalar", "out"), ("same", "same")):
        shell(f"convert <model> --data <data> --to {scheme} --approximate --out {out}")
    before, after = (load(one)["cfg"]["task"] for one in (model, tmp_path / "out" / "model.pt"))
    assert after == before | {"data": "."}
    paths = (tmp_path / "same" / "model.pt", model)
    found, wanted = (classification.Classifier(one, data).predict("test_de") for one in paths)
    assert found == wanted


def test_a_converted_classifier_of_other_classes_is_refused(tmp_path):
    with pytest.raises(ValueError, match="predicts yes, no, and the data's labels are a, b"):
        classification.in_order(["yes", "no"], ["a", "b"], tmp_path)


def test_another_task_s_checkpoint_is_refused(tmp_path, data, model):
    """Before its task looks for a dictionary where none is."""
    state = load(model)
    state["cfg"]["task"] = {"_name": "masked_lm", "data": "."}
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(ValueError, match="is of task masked_lm, which relpos classify does not run: use relpos fill"):
        classification.Classifier(tmp_path / "model.pt", data)


def test_average_is_the_papers():
    """Chen2021's first rows of Table 5: means of seven numbers."""
    assert f"{mean_of_means([67.0, [66.0, 49.9], [56.2, 41.0], [59.0, 47.9]]):.1f}" == "55.3"
    assert f"{mean_of_means([68.4, [69.2, 54.4], [58.8, 43.6], [62.9, 49.9]]):.1f}" == "58.2"
    assert mean_of_means([67.0, None, [56.2, 41.0], [59.0, 47.9]]) is None
    everything = {"XNLI": {"en": 60.0}} | dict.fromkeys(QA_FILES, {"en": [50.0, 40.0]})
    assert rows_of(everything)[3][1:] == ["60.00", *["50.00 / 40.00"] * 3, "47.14"]
