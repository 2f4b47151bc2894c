"""What a wheel and an sdist carry; installed, `--user-dir relpos_fairseq` and the recipes run from any folder."""

from __future__ import annotations

import os
import random
import shutil
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import fairseq
import pytest

from helpers import FULL, ROOT, processes
from helpers.commands import SMALL, TRAIN, Corpus, child_environment
from relpos_fairseq.lab.comparison.run import code_version

SITE = Path(sysconfig.get_path("purelib"))
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
OFFLINE = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
# Of examples/ the pages and what runs; tables of results, pages of a report and pictures stay behind.
KINDS = (".md", ".yaml", ".sh", ".sbatch", ".py")
pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """What a command prints that must succeed, in an environment without this checkout on its path."""
    clean = {name: value for name, value in child_environment().items() if name != "PYTHONPATH"}
    done = processes.run(list(command), cwd=cwd, env=clean | environment, joined=True, anew=True)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, in which building leaves its folders."""
    folder = tmp_path_factory.mktemp("build") / "source"
    skipped = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in ("relpos_fairseq", "examples", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=skipped)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def sdist(source: Path) -> Path:
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", code, source.parent / "sdist", cwd=source)
    (made,) = (source.parent / "sdist").iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """Built of the sdist, which therefore has all that a wheel needs."""
    folder = sdist.parent.with_name("wheel")
    run(*PIP, "wheel", *OFFLINE, sdist, "-w", folder, cwd=sdist.parent)
    (made,) = folder.iterdir()
    return made


def environment(folder: Path, *installed: str | Path) -> Path:
    """Make an environment with fairseq and this package in it, and all else from that of the tests.

    Returns:
        Its folder of programs.
    """
    venv.create(folder, symlinks=True)
    programs = folder / "bin"
    site = Path(run(programs / "python", "-c", "import site; print(site.getsitepackages()[0])", cwd=folder).strip())
    # A folder: .pth files in it, as an editable install's, are not read.
    (site / "packages.pth").write_text(f"{SITE}\n")
    place = Path(fairseq.__file__).parent
    for name in ("fairseq", "fairseq_cli"):
        shutil.copytree(place.with_name(name), site / name)
    for name in ("train", "hydra_train"):
        program = programs / f"fairseq-{name.replace('_', '-')}"
        program.write_text(f'#!/bin/sh\nexec "{programs}/python" -m fairseq_cli.{name} "$@"\n')
        program.chmod(0o755)
    run(*PIP, "--python", programs / "python", "install", *OFFLINE, *installed, cwd=folder)
    return programs


@pytest.fixture(scope="module")
def programs(wheel: Path) -> Path:
    return environment(wheel.parent.with_name("installed"), wheel)


def shipped(folder: Path, *kinds: str) -> set[str]:
    """Files of the checkout below a folder, by their names in it."""
    files = (path for path in folder.rglob("*") if path.suffix in kinds and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix() for path in files}


def test_what_they_carry(sdist: Path, wheel: Path) -> None:
    """Code, pages, kernels and recipes, the licence, and no test."""
    code = (*KINDS, ".c", ".h", ".jinja", ".json")
    package = {f"relpos_fairseq/{name}" for name in shipped(ROOT / "relpos_fairseq", *code)}
    recipes = shipped(ROOT / "examples", *KINDS)
    assert {"relpos_fairseq/attention/native/kernel.c", "relpos_fairseq/patches/README.md"} < package
    assert {"quickstart.sh", "translation/train.sbatch", "roberta/finetune_mrpc.py"} < recipes
    wanted = package | {"relpos_fairseq/py.typed"} | {f"relpos_fairseq/examples/{name}" for name in recipes}
    with zipfile.ZipFile(wheel) as archive:
        files = [name for name in archive.namelist() if ".dist-info/" not in name]
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in archive.namelist())
    assert sorted(files) == sorted(wanted)
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    assert package | {f"examples/{name}" for name in recipes} | {"LICENSE", "README.md", "setup.py"} < files
    assert not [name for name in files if name.startswith(("tests", "relpos_fairseq/examples"))]


def train_elsewhere(programs: Path, corpus: Corpus, folder: Path) -> str:
    """What a training of one update prints, by the command that the pages have, in a folder with nothing of ours."""
    paths = (corpus.binary, "--user-dir", "relpos_fairseq", "--save-dir", folder / "save")
    return run(programs / "fairseq-train", *paths, *SMALL, *TRAIN, "--max-update", "1", "--no-save", cwd=folder)


def test_a_wheel_serves_any_folder(programs: Path, corpus: Corpus, tmp_path: Path) -> None:
    """Results of comparisons count as the checkout's: what trains is the same code."""
    assert "done training" in train_elsewhere(programs, corpus, tmp_path)
    path = Path(run(programs / "relpos", "path", cwd=tmp_path).strip())
    assert path.is_relative_to(programs.parent.resolve()) and (path / "examples" / "quickstart.sh").is_file()
    version = "from relpos_fairseq.lab.comparison.run import code_version; print(code_version())"
    assert run(programs / "python", "-c", version, cwd=tmp_path).splitlines()[-1] == code_version()


@pytest.mark.nightly  # the suite's own install is one
def test_an_editable_install_serves_any_folder(source: Path, corpus: Corpus, tmp_path: Path) -> None:
    """Also where the working folder has a checkout that is called as the package is; edits are seen at once."""
    programs = environment(source.parent / "editable", "--editable", source)
    assert "done training" in train_elsewhere(programs, corpus, tmp_path)
    (tmp_path / "relpos_fairseq").mkdir()
    imported = run(programs / "python", "-c", "import relpos_fairseq; print(relpos_fairseq.__file__)", cwd=tmp_path)
    assert imported.strip() == str(source / "relpos_fairseq" / "__init__.py")
    run(*PIP, "--python", programs / "python", "uninstall", "--yes", "relpos_fairseq", cwd=tmp_path)
    assert not list(programs.parent.glob("lib/*/site-packages/relpos_fairseq*"))


@pytest.mark.nightly
def test_recipes_run_where_they_are_copied_to(programs: Path, corpus: Corpus, tmp_path: Path) -> None:
    """A recipe of hydra and a script, as their pages say it."""
    listed = run(programs / "relpos", "recipes", cwd=tmp_path).splitlines()
    assert {line.split()[0] for line in listed} == shipped(ROOT / "examples", *KINDS[1:])
    run(programs / "relpos", "recipes", "all", "--out", "examples", cwd=tmp_path)
    said = run(
        *(programs / "fairseq-hydra-train", "--config-dir", "examples/translation/config", "--config-name", "tiny"),
        *(f"task.data={corpus.binary}", "task.source_lang=src", "task.target_lang=tgt", "model.position_scheme=m4"),
        *("optimization.max_update=1", "++common.cpu=true", "dataset.num_workers=0", "checkpoint.save_dir=tiny"),
        cwd=tmp_path,
    )
    assert "done training" in said and (tmp_path / "tiny" / "checkpoint_last.pt").is_file()
    draw = random.Random(1)
    lines = (" ".join(draw.choices("the king of a land".split(), k=8)) for _ in range(300))
    (tmp_path / "book.txt").write_text("\n".join(lines) + "\n")
    search = f"{programs}{os.pathsep}{os.environ['PATH']}"
    script = "examples/language_modeling/shakespeare.sh"
    if FULL:  # four commands
        run("bash", script, "book.txt", "out", "alibi", cwd=tmp_path, PATH=search, UPDATES="1")
        assert list((tmp_path / "out" / "alibi-1" / "length").iterdir())
    assert "usage: relpos quickstart" in run("bash", "examples/quickstart.sh", "-h", cwd=tmp_path, PATH=search)
