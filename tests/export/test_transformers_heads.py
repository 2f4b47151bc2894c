"""Token classification and multiple choice: exported, trained in transformers, and converted back."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from fairseq import checkpoint_utils
from safetensors.torch import load_file, save_file

from helpers.commands import relpos
from helpers.exported import write_checkpoint
from relpos_fairseq.export import transformers_folder
from relpos_fairseq.formats.base import read_encoder
from relpos_fairseq.heads import CHOICES, CLASSIFIER, HEAD, TOKENS, head_of

RANKING = {
    "_name": "sentence_ranking",
    "task": "sentence_ranking",
    "criterion": "sentence_ranking",
    "ranking_head_name": "mine",
    "num_classes": 3,
    "init_token": 0,
    "separator_token": 2,
    "max_option_length": 7,
    "save_dir": "elsewhere",
}
CASES = {"tokens": (TOKENS, {"tokens": 3}), "choices": (CHOICES, {"classes": 1, "task": RANKING})}
SHAPES = {"tokens": ((2, 7), torch.tensor([[-100, 0, 1, 2, 2, -100, 1], [0, 1, -100, 2, 0, 1, -100]]))}
SHAPES["choices"] = ((2, 3, 7), torch.tensor([2, 0]))


def drawn(kind):
    shape, labels = SHAPES[kind]
    return torch.randint(4, 40, shape, generator=torch.Generator().manual_seed(5)), labels


def exported(kind, folder, **more):
    head, values = CASES[kind]
    model, checkpoint = write_checkpoint(folder, "bpe", **values | more)
    assert relpos("export", "transformers", checkpoint, "--out", folder / "out") == 0
    auto = getattr(transformers, head.auto)
    return model, checkpoint, auto.from_pretrained(folder / "out", trust_remote_code=True).eval(), auto


@pytest.mark.parametrize("segments", ["none", "input"])
@pytest.mark.parametrize("kind", CASES)
@torch.no_grad()
def test_logits_and_loss_are_the_checkpoints(kind, segments, tmp_path, capsys):
    model, _, loaded, auto = exported(kind, tmp_path, segment_encoding=segments)
    said = " ".join(capsys.readouterr().out.split())
    piped = " and its pipeline" * (kind == "tokens")
    assert f"opened by {auto.__name__} of transformers" in said and f": ids, logits, loss{piped} are ours" in said
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
def test_they_train_and_save_and_load(kind, tmp_path):
    *_, model, auto = exported(kind, tmp_path)
    tokens, labels = drawn(kind)
    before = model(tokens, labels=labels).loss
    before.backward()
    torch.optim.SGD(model.parameters(), lr=1e-2).step()
    after = model(tokens, labels=labels)
    assert after.loss < before
    model.save_pretrained(tmp_path / "again")
    again = auto.from_pretrained(tmp_path / "again", trust_remote_code=True).eval()
    torch.testing.assert_close(again(tokens).logits, after.logits, rtol=0, atol=1e-6)  # MKL goes by where tensors lie


@pytest.mark.parametrize("kind", CASES)
def test_the_way_back_is_exact(kind, tmp_path):
    _, checkpoint, *_ = exported(kind, tmp_path)
    assert relpos("convert", tmp_path / "out", "--to", "same", "--out", tmp_path / "back") == 0
    first, back = read_encoder(checkpoint), read_encoder(tmp_path / "back")
    ours = {"tokens": ("token_heads.entities.", "token_heads.token_classification.")}.get(
        kind, ("classification_heads.mine.", f"classification_heads.{HEAD}.")
    )
    assert {name.replace(*ours) for name in first.state} == set(back.state)
    for name, value in first.state.items():
        assert torch.equal(back.state[name.replace(*ours)], value), name
    assert relpos("export", "transformers", tmp_path / "back" / "model.pt", "--out", tmp_path / "second") == 0
    weights = [load_file(tmp_path / part / "model.safetensors") for part in ("out", "second")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    configs = [json.loads((tmp_path / part / "config.json").read_text()) for part in ("out", "second")]
    assert configs[0]["architectures"] == configs[1]["architectures"] == [f"RelPos{CASES[kind][0].suffix}"]
    assert configs[0].get("id2label") == configs[1].get("id2label")


def test_names_of_token_classes_are_the_datas(tmp_path):
    *_, model, _ = exported("tokens", tmp_path)
    assert model.config.id2label == {0: "yes", 1: "no", 2: "perhaps"}


def test_a_ranking_keeps_its_task_and_no_other_option(tmp_path):
    """And fairseq loads the converted checkpoint by it."""
    exported("choices", tmp_path)
    task = json.loads((tmp_path / "out" / "config.json").read_text())["task"]
    assert "save_dir" not in task and task["classification_head_name"] == HEAD
    assert relpos("convert", tmp_path / "out", "--to", "same", "--out", tmp_path / "back") == 0
    made = torch.load(tmp_path / "back" / "model.pt", weights_only=True)["cfg"]
    kept = ("_name", "num_classes", "init_token", "separator_token", "max_option_length")
    assert {name: made["task"][name] for name in kept} == {name: RANKING[name] for name in kept}
    assert made["criterion"] == {
        "_name": "sentence_ranking",
        "ranking_head_name": HEAD,
        "num_classes": 3,
        "save_predictions": None,
    }
    (tmp_path / "data" / "input0").mkdir(parents=True)
    (tmp_path / "data" / "input0" / "dict.txt").write_text((tmp_path / "back" / "dict.txt").read_text())
    where = [str(tmp_path / "back" / "model.pt")]
    [model], _, task = checkpoint_utils.load_model_ensemble_and_task(where, {"data": str(tmp_path / "data")})
    assert type(task).__name__ == "SentenceRankingTask" and task.args.num_classes == 3
    state = read_encoder(tmp_path / "back").state
    for name in ("dense.weight", "out_proj.bias"):
        assert torch.equal(
            model.classification_heads[HEAD].state_dict()[name], state[f"classification_heads.{HEAD}.{name}"]
        )


def test_another_head_of_transformers_is_another_task(tmp_path):
    """A multiple-choice folder that was saved with a classifier, and a classifier's with choices."""
    exported("choices", tmp_path)
    how = {"trust_remote_code": True, "ignore_mismatched_sizes": True}
    auto = transformers.AutoModelForSequenceClassification
    auto.from_pretrained(tmp_path / "out", num_labels=4, **how).save_pretrained(tmp_path / "classes")
    task = read_encoder(tmp_path / "classes").task
    assert task["_name"] == "sentence_prediction" and "num_classes" not in task and not task["regression_target"]
    auto = transformers.AutoModelForMultipleChoice
    auto.from_pretrained(tmp_path / "classes", **how).save_pretrained(tmp_path / "choices")
    assert read_encoder(tmp_path / "choices").task["_name"] == "sentence_ranking"


def test_heads_are_told_apart():
    for suffix, head in (
        ("ForTokenClassification", TOKENS),
        ("ForSequenceClassification", CLASSIFIER),
        ("ForMultipleChoice", CHOICES),
    ):
        assert head_of({"architectures": [f"RelPos{suffix}"]}, "folder") is head
        assert head.auto == f"AutoModel{suffix}"


def test_one_head_of_classes_is_exported(tmp_path, capsys):
    """config.json names the classes of one."""
    _, checkpoint = write_checkpoint(tmp_path, "bpe", classes=3, tokens=4, spans=True)
    assert relpos("export", "transformers", checkpoint, "--out", tmp_path / "out") == 2
    assert "has the heads mine, entities: name one by --head" in capsys.readouterr().err
    for name, auto, classes in (
        ("mine", transformers.AutoModelForSequenceClassification, 3),
        ("entities", transformers.AutoModelForTokenClassification, 4),
    ):
        assert relpos("export", "transformers", checkpoint, "--out", tmp_path / name, "--head", name) == 0
        loaded = auto.from_pretrained(tmp_path / name, trust_remote_code=True)
        assert loaded.config.num_labels == classes and auto.__name__.endswith(loaded.config.architectures[0][6:])


@pytest.mark.parametrize(
    ("kind", "spoilt", "said"),
    [
        ("tokens", "weights", "its logits differ from ours by"),
        ("choices", "weights", "its logits differ from ours by"),
        ("tokens", "names", "its names of classes are"),
        ("tokens", "pipeline", "its token-classification differ from ours by"),
        ("tokens", "loss", "its loss differ from ours by"),
        ("choices", "loss", "its loss differ from ours by"),
    ],
)
def test_what_differs_is_not_exported(kind, spoilt, said, tmp_path, monkeypatch, capsys, request):
    if spoilt in ("weights", "names"):  # no code
        request.getfixturevalue("opener_stays")
    original = transformers_folder.check_written

    def check(folder, *given, **how):
        if spoilt == "weights":
            weights = load_file(folder / "model.safetensors")
            name = next(name for name in weights if "_heads" in name and name.endswith("out_proj.weight"))
            weights[name][0] += 1.0
            save_file(weights, folder / "model.safetensors", {"format": "pt"})
        if spoilt == "names":
            config = json.loads((folder / "config.json").read_text())
            config["id2label"]["1"] = "other"
            (folder / "config.json").write_text(json.dumps(config))
        if spoilt in ("loss", "pipeline"):  # the folder's own code may compute something else
            code = {
                "loss": "    found = run(self, *given, **how)\n    found.loss = found.loss and found.loss * 2\n",
                "pipeline": "    found = run(self, *given, **how)\n    found.logits *= 1 + (len(found.logits) == 1)\n",
            }[spoilt]
            cls = f"RelPos{CASES[kind][0].suffix}"
            code = (
                f"run = {cls}.forward\ndef other(self, *given, **how):\n{code}    return found\n{cls}.forward = other\n"
            )
            with (folder / "relpos_code.py").open("a") as file:
                file.write(code)
        return original(folder, *given, **how)

    monkeypatch.setattr(transformers_folder, "check_written", check)
    _, checkpoint = write_checkpoint(tmp_path, "bpe", **CASES[kind][1])
    assert relpos("export", "transformers", checkpoint, "--out", tmp_path / "out") == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
