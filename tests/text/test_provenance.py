"""A checkpoint keeps what it was trained with: two models of a folder keep their own text; mixtures are refused."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary

from helpers.commands import QUIET, CommandError, call, relpos, train
from helpers.wmt_text import write_texts
from relpos_fairseq.evaluation.averaging import average, write_average
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.saved.model import SavedModel
from relpos_fairseq.text import assets, provenance


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, prepare_wmt) -> Namespace:
    """Two trainings whose dictionaries have the same size and another order."""
    folder = tmp_path_factory.mktemp("two")
    raw = write_texts(folder / "raw")
    prepare_wmt(raw, folder / "a")
    shutil.copytree(folder / "a", folder / "b")
    shutil.rmtree(folder / "b" / ".stages")  # whose hashes would tell that the dictionaries were exchanged
    for side in ("en", "de"):
        path = folder / "b" / "data-bin" / f"dict.{side}.txt"
        path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    found = Namespace(folder=folder, raw=raw)
    for name in ("a", "b"):
        data = folder / name / "data-bin"
        ema = ("--store-ema",) if name == "a" else ()
        train(SimpleNamespace(binary=data), folder / f"of-{name}", "--max-update", "8", *ema)
        setattr(found, name, Namespace(data=data, checkpoint=folder / f"of-{name}" / "checkpoint_last.pt"))
    return found


def translated(capsys: pytest.CaptureFixture[str], checkpoint: Path, text: Path, *more: object) -> list[str]:
    """The translations of a file."""
    capsys.readouterr()
    assert relpos("translate", checkpoint, text, "--cpu", "--beam", "1", "--max-len-b", "8", *more) == 0
    return capsys.readouterr().out.splitlines()


def test_two_models_of_one_folder_keep_their_own_text(trained, tmp_path, capsys) -> None:
    """Averages that are written side by side, and a training that saves there."""
    text = trained.raw / "test.en"
    write_average([trained.a.checkpoint], tmp_path / "a.pt")
    first = translated(capsys, tmp_path / "a.pt", text)
    write_average([trained.b.checkpoint], tmp_path / "b.pt")
    assert len(assets.text_folders(tmp_path)) == 2
    assert translated(capsys, tmp_path / "a.pt", text) == first == translated(capsys, trained.a.checkpoint, text)
    second = translated(capsys, tmp_path / "b.pt", text)
    assert second == translated(capsys, trained.b.checkpoint, text)
    from fairseq.models.transformer import TransformerModel

    hub = TransformerModel.from_pretrained(str(tmp_path), "b.pt")
    lines = text.read_text().splitlines()[:3]
    assert hub.translate(lines, beam=1, max_len_b=8) == second[:3]
    shutil.rmtree(tmp_path / "text")
    assert relpos("translate", tmp_path / "a.pt", text, "--cpu") == 2
    assert "was trained with another dict." in capsys.readouterr().err


def test_another_dictionary_is_refused_everywhere(trained, tmp_path, capsys) -> None:
    """Of the same size: nothing else would say so."""
    a, b = trained.a, trained.b
    assert relpos("translate", a.checkpoint, trained.raw / "test.en", "--data", b.data, "--cpu") == 2
    assert "was trained with another dict.de.txt, dict.en.txt than" in capsys.readouterr().err
    said = "trained with another source and target dictionary than that of"
    commands = (
        ("generate", "--beam", "1"),
        ("interactive", "--beam", "1", "--input", trained.raw / "test.en"),
        ("validate", "--task", "translation", "--batch-size", "8"),
    )
    for command, *more in commands:
        with pytest.raises((CommandError, ValueError), match=said):
            call(command, b.data, "--path", a.checkpoint, *more, *QUIET)
    shutil.copytree(a.checkpoint.parent, tmp_path / "resumed")
    with pytest.raises((CommandError, ValueError), match=said):
        train(SimpleNamespace(binary=b.data), tmp_path / "resumed", "--max-update", "9", "--store-ema")
    train(SimpleNamespace(binary=a.data), tmp_path / "resumed", "--max-update", "9", "--store-ema")
    with pytest.raises(UserError, match="trained with different dictionaries: source, target"):
        average([a.checkpoint, b.checkpoint])
    begun = ("--finetune-from-model", a.checkpoint, "--max-update", "1")
    assert said in train(SimpleNamespace(binary=b.data), tmp_path / "begun", *begun)  # a warning: it may be meant


def test_the_text_of_another_kind_of_model_comes_after_its_own(trained, tmp_path) -> None:
    """It differs in no file that both have, since both have none."""
    write_average([trained.a.checkpoint], tmp_path / "a.pt")
    (tmp_path / "text").rename(tmp_path / "text-0a1b2c3d")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "dict.txt").write_text("a 1\n")
    assert SavedModel.read(tmp_path / "a.pt").find_text(None) == tmp_path / "text-0a1b2c3d"


def test_a_model_that_was_built_anyway_still_knows_its_text(trained, tmp_path) -> None:
    """An export builds it first, and would write a text/ of the same size that is another training's."""
    shutil.copy(trained.a.checkpoint, tmp_path / "a.pt")
    shutil.copytree(trained.b.checkpoint.parent / "text", tmp_path / "text")
    saved = SavedModel.open(tmp_path / "a.pt")
    saved.build_anyway(None)
    with pytest.raises(UserError, match=r"was trained with another dict\.de\.txt, dict\.en\.txt than"):
        saved.find_text(None)


def test_hashes_survive(trained, tmp_path) -> None:
    """Loading without running anything, averaging, and a checkpoint that holds a moving average."""
    state = torch.load(trained.a.checkpoint, weights_only=True)
    kept = provenance.read(state)
    assert "ema" in state["extra_state"] and kept["dictionaries"].keys() == {"source", "target"}
    assert {"dict.en.txt", "dict.de.txt"} <= kept["files"].keys()
    mean, again = tmp_path / "mean.pt", tmp_path / "again" / "mean.pt"
    write_average([trained.a.checkpoint] * 2, mean)
    write_average([mean], again)
    loaded = checkpoint_utils.load_checkpoint_to_cpu(str(mean))
    for found in (torch.load(mean, weights_only=True), torch.load(again, weights_only=True), loaded):
        assert provenance.read(found) == kept


def test_an_older_checkpoint_loads_as_before(trained, tmp_path, capsys) -> None:
    """It has no hashes, and `text/` beside it."""
    shutil.copytree(trained.a.checkpoint.parent, tmp_path / "old")
    path = tmp_path / "old" / "checkpoint_last.pt"
    state = torch.load(path, weights_only=True)
    del state[provenance.KEY]
    torch.save(state, path)
    text = trained.raw / "test.en"
    assert translated(capsys, path, text) == translated(capsys, trained.a.checkpoint, text)
    translated(capsys, path, text, "--data", trained.b.data)


def test_a_hash_is_of_symbols_in_their_order(tmp_path: Path) -> None:
    """Counts, which nothing reads, may differ; what a stranger wrote in the place of hashes is not compared."""
    words = Dictionary()
    for symbol in ("the", "ä", "a#b", "#fairseq:overwrite"):
        words.add_symbol(symbol, 3)
    task = SimpleNamespace(source_dictionary=words, target_dictionary=None, cfg=SimpleNamespace(data="x"))
    hashes = provenance.of_task(task)
    assert hashes.keys() == {"source"}
    state = {provenance.KEY: {"dictionaries": hashes, "files": {}}}
    provenance.check_task(state, task, "a.pt")
    for other in ({}, {provenance.KEY: 3}, {provenance.KEY: {"dictionaries": [1]}}, {provenance.KEY: {"files": None}}):
        provenance.check_task(other, task, "a.pt")
    words.symbols[-1], words.symbols[-2] = words.symbols[-2], words.symbols[-1]
    with pytest.raises(UserError, match="a.pt was trained with another source dictionary than that of x"):
        provenance.check_task(state, task, "a.pt")
    counted, less, other = (tmp_path / f"dict.{name}.txt" for name in "abc")
    counted.write_text("the 3\nä 2\na 1 #fairseq:overwrite\n")
    less.write_text("the 9\nä 9\na 9\n")
    other.write_text("ä 9\nthe 9\na 9\n")
    kept = {"files": provenance.of_files({"dict.txt": counted})}
    assert provenance.differing(kept, {"dict.txt": less, "bpe.codes": other}) == []
    assert provenance.differing(kept, {"dict.txt": other}) == ["dict.txt"]


@pytest.mark.parametrize(
    "edit", ['"tokenizer": "moses"=>"tokenizer": "none"', '"bpe": "subword-nmt"=>"bpe": "none"', "*=>{}", "*=>"]
)
def test_a_manifest_that_was_edited_is_not_the_trainings(trained, tmp_path, capsys, edit: str) -> None:
    """By it text becomes other symbols; removed, text would be taken for symbols."""
    models = shutil.copytree(trained.a.checkpoint.parent, tmp_path / "models")
    manifest = models / "text" / "manifest.json"
    old, new = edit.split("=>")
    content = manifest.read_text()
    assert old == "*" or old in content
    manifest.write_text(new if old == "*" else content.replace(old, new))
    if not new:
        manifest.unlink()
    assert relpos("translate", models / "checkpoint_last.pt", trained.raw / "test.en", "--cpu") == 2
    assert "was trained with another manifest.json than" in capsys.readouterr().err


def test_the_hub_refuses_text_that_is_read_otherwise(trained, tmp_path) -> None:
    """Whether the folder is that beside the checkpoint or one that is named."""
    from fairseq.models.transformer import TransformerModel

    data, models = shutil.copytree(trained.folder / "a", tmp_path / "a"), str(trained.a.checkpoint.parent)
    name = trained.a.checkpoint.name
    own = TransformerModel.from_pretrained(models, name)
    named = TransformerModel.from_pretrained(models, name, str(data / "data-bin"))
    assert named.encode("The house.").tolist() == own.encode("The house.").tolist()
    (data / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="trained with another manifest.json than .*data-bin holds .it has none"):
        TransformerModel.from_pretrained(models, name, str(data / "data-bin"))


def test_a_manifest_may_name_other_versions(trained, tmp_path, capsys) -> None:
    models = shutil.copytree(trained.a.checkpoint.parent, tmp_path / "models")
    manifest = models / "text" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"versions": {"python": "4"}}))
    text = trained.raw / "test.en"
    assert translated(capsys, models / "checkpoint_last.pt", text) == translated(capsys, trained.a.checkpoint, text)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_averaged(tmp_path, value):
    for name, tensor in (("a.pt", torch.ones(3)), ("b.pt", torch.tensor([1.0, value, 1.0]))):
        torch.save({"model": {"w": tensor}}, tmp_path / name)
    for paths in (["a.pt", "b.pt"], ["b.pt", "a.pt"]):
        with pytest.raises(UserError, match="b.pt holds w, which is not finite"):
            write_average([tmp_path / one for one in paths], tmp_path / "mean.pt")
    assert not (tmp_path / "mean.pt").exists()
