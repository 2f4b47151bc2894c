"""Token classification and multiple choice: exported, trained in transformers, and converted back."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from fairseq import checkpoint_utils
from safetensors.torch import load_file

from helpers.exported import CLASSIFIED, computing_otherwise, spoilt_before, write_checkpoint
from helpers.formats import change, change_checkpoint, change_tensors
from relpos_fairseq.export import transformers_folder
from relpos_fairseq.formats.base import read_encoder
from relpos_fairseq.heads import CHOICES, CLASSIFIER, HEAD, SPANS, TOKENS

KEPT = {"_name": "sentence_ranking", "num_classes": 3, "init_token": 0, "separator_token": 2, "max_option_length": 7}
RANKING = KEPT | {"criterion": "sentence_ranking", "ranking_head_name": "mine", "save_dir": "elsewhere"}
RANKING |= {"task": "sentence_ranking"}
CASES = {
    "tokens": (TOKENS, {"tokens": 3}),
    "choices": (CHOICES, {"classes": 1, "task": RANKING}),
    "classes": (CLASSIFIER, {"classes": 3, "task": CLASSIFIED}),
}
SHAPES = {"tokens": ((2, 7), torch.tensor([[-100, 0, 1, 2, 2, -100, 1], [0, 1, -100, 2, 0, 1, -100]]))}
SHAPES |= {"choices": ((2, 3, 7), torch.tensor([2, 0])), "classes": ((2, 7), torch.tensor([2, 0]))}


def drawn(kind):
    shape, labels = SHAPES[kind]
    return torch.randint(4, 40, shape, generator=torch.Generator().manual_seed(5)), labels


def exported(kind, ways, **more):
    """A checkpoint's model and path, the folder's model, and what the command said."""
    head, values = CASES[kind]
    model, checkpoint = write_checkpoint(ways.here, "bpe", **values | more)
    said = ways.export("model.pt")
    return model, checkpoint, ways.opened("out", head.auto), said


@pytest.mark.parametrize("segments", ["none", "input"])
@pytest.mark.parametrize("kind", CASES)
@torch.no_grad()
def test_logits_and_loss_are_the_checkpoints(kind, segments, ways):
    model, _, loaded, said = exported(kind, ways, segment_encoding=segments)
    said, piped = " ".join(said.split()), " and its pipeline" * (kind != "choices")
    assert f"opened by {CASES[kind][0].auto} of tr" in said and f": ids, logits, loss{piped} are ours" in said
    tokens, labels = drawn(kind)
    tokens[..., 0, -2:] = 1
    types = (torch.arange(7) > 3).long().expand_as(tokens)
    found = loaded(tokens, attention_mask=(tokens != 1).long(), token_type_ids=types, labels=labels)
    how = {"token_head_name": "entities"} if kind == "tokens" else {"classification_head_name": "mine"}
    expected = model(tokens.view(-1, 7), segments=types.reshape(-1, 7), **how)[0].view(found.logits.shape)
    torch.testing.assert_close(found.logits, expected, rtol=0, atol=1e-5)
    assert found.logits.shape == ((2, 7, 3) if kind == "tokens" else (2, 3))
    taken = expected.log_softmax(-1).flatten(0, -2)[torch.arange(labels.numel()), labels.flatten().clamp(min=0)]
    torch.testing.assert_close(found.loss, -taken[labels.flatten() >= 0].mean())


@pytest.mark.parametrize("kind", CASES)
def test_they_train_and_save_and_load(kind, ways):
    *_, model, _ = exported(kind, ways)
    tokens, labels = drawn(kind)
    before = model(tokens, labels=labels).loss
    before.backward()
    torch.optim.SGD(model.parameters(), lr=1e-2).step()
    after = model(tokens, labels=labels)
    assert after.loss < before
    model.save_pretrained(ways / "again")
    again = ways.opened("again", CASES[kind][0].auto)
    torch.testing.assert_close(again(tokens).logits, after.logits, rtol=0, atol=1e-6)  # MKL goes by where tensors lie


@pytest.mark.parametrize("kind", CASES)
def test_the_way_back_is_exact(kind, ways):
    _, checkpoint, model, _ = exported(kind, ways)
    assert kind == "choices" or model.config.id2label == {0: "yes", 1: "no", 2: "perhaps"}  # as the data names them
    ways.convert("out", "back")
    first, back = read_encoder(checkpoint), read_encoder(ways / "back")
    ours = ("classification_heads.mine.", f"classification_heads.{HEAD}.")
    if kind == "tokens":
        ours = ("token_heads.entities.", "token_heads.token_classification.")
    assert {name.replace(*ours) for name in first.state} == set(back.state)
    for name, value in first.state.items():
        assert torch.equal(back.state[name.replace(*ours)], value), name
    ways.export("back/model.pt", "second")
    weights = [load_file(ways / part / "model.safetensors") for part in ("out", "second")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    configs = [ways.told(part) for part in ("out", "second")]
    assert configs[0]["architectures"] == configs[1]["architectures"] == [f"RelPos{CASES[kind][0].suffix}"]
    assert configs[0].get("id2label") == configs[1].get("id2label")


def test_a_ranking_keeps_its_task_and_no_other_option(ways):
    """And fairseq loads the converted checkpoint by it."""
    exported("choices", ways)
    task = ways.told("out")["task"]
    assert "save_dir" not in task and task["classification_head_name"] == HEAD
    ways.convert("out", "back")
    made = torch.load(ways / "back/model.pt", weights_only=True)["cfg"]
    assert {name: made["task"][name] for name in KEPT} == KEPT
    told = {"_name": "sentence_ranking", "ranking_head_name": HEAD, "num_classes": 3, "save_predictions": None}
    assert made["criterion"] == told
    (ways / "data/input0").mkdir(parents=True)
    (ways / "data/input0/dict.txt").write_text((ways / "back/dict.txt").read_text())
    where = [str(ways / "back/model.pt")]
    [model], _, task = checkpoint_utils.load_model_ensemble_and_task(where, {"data": str(ways / "data")})
    assert type(task).__name__ == "SentenceRankingTask" and task.args.num_classes == 3
    state, head = read_encoder(ways / "back").state, model.classification_heads[HEAD].state_dict()
    for name in ("dense.weight", "out_proj.bias"):
        assert torch.equal(head[name], state[f"classification_heads.{HEAD}.{name}"])


def test_another_head_of_transformers_is_another_task(ways):
    """A multiple-choice folder that was saved with a classifier, and a classifier's with choices."""
    exported("choices", ways)
    how = {"ignore_mismatched_sizes": True}
    ways.opened("out", CLASSIFIER.auto, num_labels=4, **how).save_pretrained(ways / "classes")
    task = read_encoder(ways / "classes").task
    assert task["_name"] == "sentence_prediction" and "num_classes" not in task and not task["regression_target"]
    ways.opened("classes", CHOICES.auto, **how).save_pretrained(ways / "choices")
    assert read_encoder(ways / "choices").task["_name"] == "sentence_ranking"


def test_one_head_of_classes_is_exported(ways):
    """config.json names the classes of one."""
    write_checkpoint(ways.here, "bpe", classes=3, tokens=4, spans=True)
    assert "has the heads mine, entities: name one by --head" in ways.unexported()
    for name, auto, classes in (("mine", CLASSIFIER.auto, 3), ("entities", TOKENS.auto, 4)):
        ways.export("model.pt", name, "--head", name)
        loaded = ways.opened(name, auto)
        assert loaded.config.num_labels == classes and auto.endswith(loaded.config.architectures[0][6:])


def test_heads_of_one_name_are_named_by_their_place(ways):
    def rename(state: dict) -> None:
        state["model"] = {name.replace(".spans.", ".mine."): value for name, value in state["model"].items()}

    _, checkpoint = write_checkpoint(ways.here, "bpe", classes=3, spans=True)
    change_checkpoint(checkpoint, rename)
    said = "has classification_heads.mine, span_heads.mine"
    assert said in ways.unexported("model.pt", "--head", "mine")
    assert said in ways.refused("model.pt", "--head", "mine", to="hf-roberta")
    for name, auto in (("classification_heads.mine", CLASSIFIER.auto), ("span_heads.mine", SPANS.auto)):
        ways.export("model.pt", name, "--head", name)
        said = ways.back("model.pt", f"{name}-back", "--head", name, to="hf-roberta")
        assert all(auto.endswith(ways.told(folder)["architectures"][0][7:]) for folder in (name, f"{name}-back"))
        assert "head" in said and "exports it" in said


def heavier(folder, cls) -> None:
    [name] = (name for name in load_file(folder / "model.safetensors") if re.search("_heads.*out_proj.weight", name))
    change_tensors(folder, {name: lambda state: state[name] + torch.eye(len(state[name]))[:, :1]})


def renamed(folder, cls) -> None:
    change(folder / "config.json", "id2label", **{"1": "other"})


LOSS = partial(computing_otherwise, line="found.loss = found.loss and found.loss * 2")
ALONE = partial(computing_otherwise, line="found.logits *= 1 + (len(found.logits) == 1)")


@pytest.mark.parametrize(
    ("kind", "spoil", "said"),
    [
        ("tokens", heavier, "its logits differ from ours by"),
        ("choices", heavier, "its logits differ from ours by"),
        ("tokens", renamed, "its names of classes are"),
        ("tokens", ALONE, "its token-classification differ from ours by"),
        ("tokens", LOSS, "its loss differ from ours by"),
        ("choices", LOSS, "its loss differ from ours by"),
    ],
)
def test_what_differs_is_not_exported(kind, spoil, said, ways, monkeypatch, request):
    if spoil in (heavier, renamed):  # no code
        request.getfixturevalue("opener_stays")
    cls, values = f"RelPos{CASES[kind][0].suffix}", CASES[kind][1]
    spoilt_before(monkeypatch, transformers_folder, "check_written", lambda folder: spoil(folder, cls))
    write_checkpoint(ways.here, "bpe", **values)
    assert said in ways.unexported()
