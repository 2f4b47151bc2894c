"""`relpos classify` and fairseq's own hub: raw text through fine-tuned classifiers, from their folders alone."""

from __future__ import annotations

import json
import shutil
from collections import Counter

import pytest
import torch
from fairseq import file_utils
from fairseq.models.roberta import RobertaModel

from helpers.commands import QUIET, call, load, relpos
from helpers.folders import prepare
from helpers.glue_data import write_glue, write_tokenizer
from helpers.roberta import ARCH, OPTIMIZE
from relpos_fairseq.evaluation.classification import Classifier
from relpos_fairseq.models.relpos_roberta import RelPosRobertaModel
from relpos_fairseq.preparation.glue_tasks import GLUE, read_examples, sources_of

SEGMENTS = {"RTE": "head", "SST-2": "none", "STS-B": "none"}  # --segment-encoding of a pair, a sentence, a regression


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(raw data, prepared data, checkpoints moved since their training); the tokenizer is gone."""
    folder = tmp_path_factory.mktemp("glue")
    raw, tokenizer = write_glue(folder / "raw"), write_tokenizer(folder / "tokenizer")
    more = ("--out", folder / "bin", "--tasks", ",".join(SEGMENTS), "--workers", "1")
    prepare("glue", [raw, "--tokenizer-folder", tokenizer, *more])
    shutil.rmtree(tokenizer)
    for name, segments in SEGMENTS.items():
        kind = ["--num-classes", str(GLUE[name].classes), *["--regression-target"] * GLUE[name].regression]
        call(
            *("train", str(folder / "bin" / name), *ARCH, *OPTIMIZE, "--max-update", "6", *kind),
            *("--task", "sentence_prediction", "--criterion", "sentence_prediction", "--batch-size", "8"),
            *("--init-token", "0", "--separator-token", "2", "--max-positions", "32", *QUIET),
            *("--position-scheme", "learned", "--segment-encoding", segments),
            *("--save-dir", str(folder / "trained" / name)),
        )
    shutil.move(folder / "trained", folder / "elsewhere")
    return raw, folder / "bin", folder / "elsewhere"


@pytest.mark.parametrize("name", SEGMENTS)
def test_raw_text_gives_what_the_prepared_data_give(trained, name, tmp_path, capsys) -> None:
    """In the order of the lines, whatever their lengths, with empty lines between."""
    raw, data, checkpoints = trained
    task, checkpoint = GLUE[name], checkpoints / name / "checkpoint_last.pt"
    outputs, _ = Classifier(checkpoint, data / name, cpu=True).outputs("valid")
    rows = list(read_examples(sources_of(task, raw)["valid"], task, "fail", Counter()))
    lines = ["\t".join(filter(None, (row.first, row.second))) for row in rows]
    (tmp_path / "in.txt").write_text("\n\n".join(lines) + "\n")
    capsys.readouterr()
    assert relpos("classify", checkpoint, tmp_path / "in.txt", "--cpu", "--jsonl") == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["line"] for one in found] == list(range(1, 2 * len(lines)))
    assert {one["score" if task.regression else "label"] for one in found[1::2]} == {None}
    for one, output in zip(found[::2], outputs, strict=True):
        if task.regression:
            assert one["score"] == pytest.approx(float(output[0]), abs=1e-4)
            continue
        assert one["label"] == task.labels[int(output.argmax())]
        assert list(one["probabilities"].values()) == pytest.approx(output.softmax(-1).tolist(), abs=1e-5)
    assert relpos("classify", checkpoint, tmp_path / "in.txt", "--cpu") == 0
    plain = capsys.readouterr().out.splitlines()
    first = f"{found[0]['score']:.4f}" if task.regression else found[0]["label"]
    assert plain[0].split("\t")[0] == first and plain[1] == ""


def test_what_cannot_be_classified(trained, tmp_path, capsys) -> None:
    _, _, checkpoints = trained
    pairs, single = (checkpoints / name / "checkpoint_last.pt" for name in ("RTE", "SST-2"))
    for checkpoint, line, more, said in (
        (pairs, "a cat\t ", (), "line 1: the model was trained on pairs"),
        (pairs, "\n\na\tb\tc", (), "line 3: the model was trained on pairs"),
        (single, "a\tb", (), "line 1: the model was trained on sentences: give one sentence a line"),
        (single, "cat " * 40, (), "line 1 has 42 symbols, and the model takes 32: shorten it, or give"),
        (single, "cat " * 40, ("--on-long-line", "cut"), ""),
        (tmp_path / "no.pt", "", (), "no.pt does not exist: give a file"),
    ):
        (tmp_path / "in.txt").write_text(line + "\n")
        assert relpos("classify", checkpoint, tmp_path / "in.txt", "--cpu", *more) == (2 if said else 0)
        assert said in capsys.readouterr().err
    assert relpos("fill", single, tmp_path / "in.txt") == 2
    assert "use relpos classify" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["another", "of another size"])
def test_a_head_that_is_not_there_answers_nothing(trained, name, tmp_path, capsys) -> None:
    """Fairseq would make a random one in its place."""
    head = "sentence_classification_head"
    shutil.copytree(trained[2] / "RTE", tmp_path / "RTE")
    checkpoint = tmp_path / "RTE" / "checkpoint_last.pt"
    state = load(checkpoint)
    if name == "another":
        state["cfg"]["task"]["classification_head_name"] = head = "other"
    else:
        state["cfg"]["task"]["num_classes"] = 3
    torch.save(state, checkpoint)
    (tmp_path / "in.txt").write_text("a cat\ta dog\n")
    assert relpos("classify", checkpoint, tmp_path / "in.txt", "--cpu") == 2
    outputs = 2 if name == "another" else 3
    assert f"lacks the head of its task: '{head}' of {outputs} outputs" in capsys.readouterr().err


def test_a_class_without_a_label_is_named_by_its_number(trained, tmp_path, capsys) -> None:
    """The <mask> that fairseq adds to every dictionary is no label."""
    shutil.copytree(trained[2] / "RTE", tmp_path / "RTE")
    checkpoint = tmp_path / "RTE" / "checkpoint_last.pt"
    state = load(checkpoint)
    state["cfg"]["task"]["num_classes"] = 4
    for name in ("out_proj.weight", "out_proj.bias"):
        name = f"classification_heads.sentence_classification_head.{name}"
        state["model"][name] = torch.cat([state["model"][name]] * 2)
    torch.save(state, checkpoint)
    (tmp_path / "in.txt").write_text("a cat\ta dog\n")
    assert relpos("classify", checkpoint, tmp_path / "in.txt", "--cpu", "--jsonl") == 0
    found = json.loads(capsys.readouterr().out)["probabilities"]
    assert list(found) == [*GLUE["RTE"].labels, "LABEL_2", "LABEL_3"]


def test_fairseqs_own_hub_asks_no_server(trained, monkeypatch) -> None:
    """Its default is GPT-2's BPE from a server; the ids are those of our hub."""
    _, _, checkpoints = trained

    def refuse(path, *_, **__):
        assert not str(path).startswith("http"), path
        return path

    monkeypatch.setattr(file_utils, "cached_path", refuse)
    where = (str(checkpoints / "SST-2"), "checkpoint_last.pt")
    theirs, ours = RobertaModel.from_pretrained(*where).eval(), RelPosRobertaModel.from_pretrained(*where).eval()
    ids = theirs.encode("a red cat", "the dog")
    assert ids.tolist() == ours.encode("a red cat", "the dog").tolist()
    assert theirs.decode(ids) == ["a red cat", "the dog"]
    head = "sentence_classification_head"
    torch.testing.assert_close(theirs.predict(head, ids), ours.predict(head, ids))
    monkeypatch.setattr("relpos_fairseq.inference.checkpoints.hooks.tokenizer_folder", lambda *_: None)
    assert RobertaModel.from_pretrained(*where).bpe is None
