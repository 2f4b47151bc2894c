"""Files of others where a command writes: none is replaced or removed, and the error names it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from helpers.commands import relpos
from helpers.fault_jobs import JOBS, Inputs, finished, write_inputs
from helpers.folders import contents
from relpos_fairseq.cli.command import roles_of
from relpos_fairseq.cli.main import COMMANDS, load
from relpos_fairseq.io.files import sha256_of

pytestmark = pytest.mark.slow
THESIS = b"Chapter 1, of which there is no copy.\n"
# fairseq-train writes its checkpoints itself; a comparison's work is a folder by its own hash.
WRITING = [name for name in JOBS if not name.startswith("train") and name != "compare"]
TRIED = 3  # files of a job


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize("name", WRITING)
def test_no_command_replaces_a_file_that_it_has_not_written(inputs: Inputs, tmp_path: Path, name: str) -> None:
    """Of every kind of file that it writes, by its own names; its own it writes again."""
    job, log = JOBS[name], tmp_path / "log"
    (tmp_path / "own").mkdir()
    assert finished(lambda: job(inputs, tmp_path / "own"), log) == 0, log.read_text()
    made = sorted(contents(tmp_path / "own", ".stages"))
    for number in range(min(TRIED, len(made))):
        file = made[number * len(made) // TRIED]
        out = tmp_path / str(number)
        (out / file).parent.mkdir(parents=True)
        (out / file).write_bytes(THESIS)
        log.unlink()
        assert finished(lambda out=out: job(inputs, out), log) == 2, (file, log.read_text())
        errors = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and str(Path(file).parts[0]) in errors[0], (file, log.read_text())
        assert (out / file).read_bytes() == THESIS


# What was lost once.


def stamped(folder: Path) -> Path:
    """A folder whose stamp names a file of a user's, with another hash than it has."""
    (folder / ".stages").mkdir(parents=True)
    (folder / "thesis.tex").write_bytes(THESIS)
    described = {"thesis.tex": {"bytes": len(THESIS), "sha256": "0" * 64}}
    stamp = {"parameters": {}, "inputs": {}, "versions": {}, "outputs": described, "counts": {}}
    (folder / ".stages" / "old.json").write_text(json.dumps(stamp))
    return folder / "thesis.tex"


@pytest.mark.parametrize("name", ["vocab.txt", "thesis.bin", "results.json"])
def test_prepare_wmt_beside_files_of_others(inputs: Inputs, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "out" / "data-bin"
    folder.mkdir(parents=True)
    (folder / name).write_bytes(THESIS)
    flags = ("--from-dir", inputs.wmt, "--out", tmp_path / "out", "--vocab-size", "60", "--workers", "1")
    assert relpos("prepare", "wmt", "en-de", *flags) == 2
    assert (folder / name).read_bytes() == THESIS


def test_a_stamp_removes_no_file_that_it_does_not_describe(inputs: Inputs, tmp_path: Path, capsys) -> None:
    thesis = stamped(tmp_path / "out")
    flags = ("--text", inputs.text, "--split", "0.8,0.1,0.1", "--level", "char", "--workers", "1")
    assert relpos("prepare", "lm", *flags, "--out", tmp_path / "out") == 2
    assert "thesis.tex is there already and was not written by this command" in capsys.readouterr().err
    assert thesis.read_bytes() == THESIS


def test_outputs_on_files_of_other_commands(inputs: Inputs, tmp_path: Path, capsys) -> None:
    """A data folder's, the text's beside a checkpoint, a task's: read by the same command, or made by another."""
    data = shutil.copytree(inputs.stream, tmp_path / "data")
    glue = shutil.copytree(inputs.glue, tmp_path / "glue")
    models = shutil.copytree(inputs.translator.parent, tmp_path / "models")
    checkpoint, source = models / "checkpoint_last.pt", tmp_path / "in.txt"
    source.write_text("w1 w2\n")
    unit = next(path for path in sorted((models / "text").iterdir()) if path.is_file())
    cases = (
        (data / "valid.bin", ("evaluate", "lm", inputs.lm, "--data", data, "--by-token", data / "valid.bin")),
        (unit, ("translate", checkpoint, source, "--out", unit)),
        (checkpoint, ("average", "--inputs", inputs.translator, "--output", checkpoint)),
        (models / "MODEL_CARD.md", ("translate", checkpoint, source, "--out", models / "MODEL_CARD.md")),
        (
            glue / "CoLA" / "train.tsv",
            ("prepare", "glue", glue, "--tokenizer", inputs.tokenizer, "--text", glue / "CoLA" / "train.tsv"),
        ),
        (glue / "CoLA" / "dev.tsv", ("prepare", "glue", glue, "--tokenizer", inputs.tokenizer, "--out", glue)),
    )
    for file, words in cases:
        before = sha256_of(file)
        assert relpos(*words) == 2, words
        assert file.name in capsys.readouterr().err
        assert sha256_of(file) == before, words


def test_a_device_is_written_to(inputs: Inputs, tmp_path: Path) -> None:
    """As other programs do: no temporary file beside /dev/null takes its place."""
    source = tmp_path / "in.txt"
    source.write_text("w1 w2\n")
    assert relpos("translate", inputs.translator, source, "--out", "/dev/null") == 0
    assert Path("/dev/null").is_char_device()


def test_every_output_of_a_command_is_declared() -> None:
    """What fault jobs write stands in a field that says so."""
    for name in JOBS.keys() & set(COMMANDS):
        assert any(role.writes for role in roles_of(load(name)).values()), name
