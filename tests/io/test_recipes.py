"""The recipes of examples/: listed with their first lines, and copied whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers import ROOT, USER_DIR


def contents(folder: Path) -> dict[str, bytes]:
    """Recipes and pages below a folder, without tables of results and pictures."""
    files = (path for path in folder.rglob("*") if path.suffix in (".md", ".yaml", ".sh", ".sbatch", ".py"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_every_recipe_is_listed_with_what_it_says_first(shell) -> None:
    listed = dict(line.split(maxsplit=1) for line in shell("recipes").splitlines())
    assert set(listed) == {name for name in contents(ROOT / "examples") if not name.endswith(".md")}
    assert listed["translation/train.sbatch"] == "Trains a recipe of config/papers on one or several nodes:"
    assert listed["roberta/finetune_mrpc.py"] == "Fine-tune an exported RoBERTa on MRPC with transformers' Trainer."
    assert listed["comparison/corpus.yaml"].startswith("The built-in grammar")


@pytest.mark.parametrize(("name", "source"), [("all", ""), ("translation", "translation")])
def test_copies_are_whole(shell, tmp_path: Path, name: str, source: str) -> None:
    """A second copy changes nothing, and one over a recipe that was edited is refused."""
    out = tmp_path / "below" / "copy"
    for _ in range(2):
        shell(f"recipes {name} --out below/copy")
        assert len(contents(out)) == len([path for path in out.rglob("*") if path.is_file()])
        assert contents(out) == contents(ROOT / "examples" / source)
    edited = next(out.rglob("tiny.yaml"))
    edited.write_text("mine\n")
    shell.refused(f"recipes {name} --out below/copy")
    assert edited.read_text() == "mine\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "recipes nope --out OUT",
            "there is no folder of recipes nope: name one of all, comparison, language_modeling, ",
        ),
        ("recipes ../tests --out OUT", "there is no folder of recipes ../tests: "),
        ("recipes translation", "NAME and --out go together"),
        ("recipes --out OUT", "NAME and --out go together"),
    ],
)
def test_what_cannot_be_copied_is_one_line(shell, tmp_path, line, said) -> None:
    assert shell.refused(line).startswith(f"error: {said}") and not list(tmp_path.iterdir())


def test_an_installation_without_examples_says_so(shell, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("relpos_fairseq.io.recipes.USER_DIR", tmp_path / "relpos_fairseq")
    assert f"{tmp_path / 'relpos_fairseq'} has no examples in it or beside it" in shell.refused("recipes")


def test_the_packages_folder_is_told(shell) -> None:
    assert shell("path") == f"{USER_DIR}\n"
