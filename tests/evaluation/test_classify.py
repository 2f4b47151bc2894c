"""`relpos classify` and fairseq's own hub: raw text through fine-tuned classifiers, from their folders alone."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from fairseq import file_utils
from fairseq.models.roberta import RobertaModel

from helpers.commands import call
from helpers.folders import prepare
from helpers.formats import change_checkpoint
from helpers.glue_data import write_glue, write_tokenizer
from helpers.roberta import ARCH, OPTIMIZE
from relpos_fairseq.evaluation.classification import Classifier
from relpos_fairseq.models.relpos_roberta import RelPosRobertaModel
from relpos_fairseq.preparation.glue_tasks import GLUE, read_examples, sources_of

TASK = """--task sentence_prediction --criterion sentence_prediction --max-update 6 --batch-size 8 --init-token 0
    --separator-token 2 --max-positions 32 --position-scheme learned""".split()
SEGMENTS = {"RTE": "head", "SST-2": "none", "STS-B": "none"}  # --segment-encoding of a pair, a sentence, a regression


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder of data, raw and prepared, and of checkpoints moved since their training; the tokenizer is gone."""
    folder = tmp_path_factory.mktemp("glue")
    raw, tokenizer = write_glue(folder / "raw"), write_tokenizer(folder / "tokenizer")
    more = ("--out", folder / "bin", "--tasks", ",".join(SEGMENTS), "--workers", "1")
    prepare("glue", [raw, "--tokenizer-folder", tokenizer, *more])
    shutil.rmtree(tokenizer)
    for name, segments in SEGMENTS.items():
        kind = ["--num-classes", str(GLUE[name].classes), *["--regression-target"] * GLUE[name].regression]
        where = ("--segment-encoding", segments, "--save-dir", folder / "trained" / name)
        call("train", folder / "bin" / name, *ARCH, *OPTIMIZE, *TASK, *kind, *where)
    shutil.move(folder / "trained", folder / "elsewhere")
    return folder


def checkpoint_of(trained: Path, name: str) -> Path:
    return trained / "elsewhere" / name / "checkpoint_last.pt"


@pytest.fixture
def changed(trained, tmp_path):
    """A function that changes what the checkpoint of RTE holds, in a copy of its folder."""
    shutil.copytree(trained / "elsewhere" / "RTE", tmp_path / "RTE")
    (tmp_path / "in.txt").write_text("a cat\ta dog\n")
    return lambda change: change_checkpoint(tmp_path / "RTE" / "checkpoint_last.pt", change)


@pytest.mark.parametrize("name", SEGMENTS)
def test_raw_text_gives_what_the_prepared_data_give(trained, name, tmp_path, shell) -> None:
    """In the order of the lines, whatever their lengths, with empty lines between."""
    task, checkpoint = GLUE[name], checkpoint_of(trained, name)
    outputs, _ = Classifier(checkpoint, trained / "bin" / name, cpu=True).outputs("valid")
    rows = list(read_examples(sources_of(task, trained / "raw")["valid"], task, "fail", Counter()))
    lines = ["\t".join(filter(None, (row.first, row.second))) for row in rows]
    (tmp_path / "in.txt").write_text("\n\n".join(lines) + "\n")
    found = shell.objects(f"classify {checkpoint} in.txt --cpu --jsonl")
    assert [one["line"] for one in found] == list(range(1, 2 * len(lines)))
    assert {one["score" if task.regression else "label"] for one in found[1::2]} == {None}
    for one, output in zip(found[::2], outputs, strict=True):
        if task.regression:
            assert one["score"] == pytest.approx(float(output[0]), abs=1e-4)
            continue
        assert one["label"] == task.labels[int(output.argmax())]
        assert list(one["probabilities"].values()) == pytest.approx(output.softmax(-1).tolist(), abs=1e-5)
    plain = shell(f"classify {checkpoint} in.txt --cpu").splitlines()
    first = f"{found[0]['score']:.4f}" if task.regression else found[0]["label"]
    assert plain[0].split("\t")[0] == first and plain[1] == ""


@pytest.mark.parametrize(
    ("name", "line", "said"),
    [
        ("RTE", "a cat\t ", "line 1: the model was trained on pairs"),
        ("RTE", "\n\na\tb\tc", "line 3: the model was trained on pairs"),
        ("SST-2", "a\tb", "line 1: the model was trained on sentences: give one sentence a line"),
        ("SST-2", "cat " * 40, "line 1 has 42 symbols, and the model takes 32: shorten it, or give"),
    ],
)
def test_what_cannot_be_classified(trained, name, line, said, tmp_path, shell) -> None:
    (tmp_path / "in.txt").write_text(line + "\n")
    assert said in shell.refused(f"classify {checkpoint_of(trained, name)} in.txt --cpu")


def test_a_long_line_is_cut_and_another_task_named(trained, tmp_path, shell) -> None:
    (tmp_path / "in.txt").write_text("cat " * 40 + "\n")
    shell(f"classify {checkpoint_of(trained, 'SST-2')} in.txt --cpu --on-long-line cut")
    assert "use relpos classify" in shell.refused(f"fill {checkpoint_of(trained, 'SST-2')} in.txt")


def test_a_head_that_is_not_there_answers_nothing(changed, shell) -> None:
    """Fairseq would make a random one in its place."""
    wrong = {"num_classes": (3, "sentence_classification_head"), "classification_head_name": ("other", "other")}
    for option, (value, head) in wrong.items():
        changed(lambda state, name=option, new=value: state["cfg"]["task"].update({name: new}))
        error = shell.refused("classify RTE/checkpoint_last.pt in.txt --cpu")
        assert f"lacks the head of its task: '{head}' of 3 outputs" in error


def test_a_class_without_a_label_is_named_by_its_number(changed, shell) -> None:
    """The <mask> that fairseq adds to every dictionary is no label."""

    def with_four_classes(state: dict) -> None:
        state["cfg"]["task"]["num_classes"] = 4
        for name in ("out_proj.weight", "out_proj.bias"):
            name = f"classification_heads.sentence_classification_head.{name}"
            state["model"][name] = torch.cat([state["model"][name]] * 2)

    changed(with_four_classes)
    [found] = shell.objects("classify RTE/checkpoint_last.pt in.txt --cpu --jsonl")
    assert list(found["probabilities"]) == [*GLUE["RTE"].labels, "LABEL_2", "LABEL_3"]


def test_fairseqs_own_hub_asks_no_server(trained, monkeypatch) -> None:
    """Its default is GPT-2's BPE from a server; the ids are those of our hub."""

    def refuse(path, *_, **__):
        assert not str(path).startswith("http"), path
        return path

    monkeypatch.setattr(file_utils, "cached_path", refuse)
    where = (str(trained / "elsewhere" / "SST-2"), "checkpoint_last.pt")
    theirs, ours = RobertaModel.from_pretrained(*where).eval(), RelPosRobertaModel.from_pretrained(*where).eval()
    ids = theirs.encode("a red cat", "the dog")
    assert ids.tolist() == ours.encode("a red cat", "the dog").tolist()
    assert theirs.decode(ids) == ["a red cat", "the dog"]
    head = "sentence_classification_head"
    torch.testing.assert_close(theirs.predict(head, ids), ours.predict(head, ids))
    monkeypatch.setattr("relpos_fairseq.inference.checkpoints.hooks.tokenizer_folder", lambda *_: None)
    assert RobertaModel.from_pretrained(*where).bpe is None
