"""Files of others where a command writes: none is replaced or removed, and the error names it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import FULL, ROOT
from helpers.commands import relpos
from helpers.fault_jobs import JOBS, Inputs, finished
from helpers.folders import contents
from relpos_fairseq.cli.command import roles_of
from relpos_fairseq.cli.main import COMMANDS, load
from relpos_fairseq.io.files import sha256_of

pytestmark = pytest.mark.slow
THESIS = b"Chapter 1, of which there is no copy.\n"
# fairseq-train writes its checkpoints itself; a comparison's work is a folder by its own hash.
WRITING = [name for name in JOBS if not name.startswith("train") and name != "compare"]
TRIED = 3 if FULL else 1  # files of a job


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
    flags = ("--text", inputs.text, "--shares", "0.8,0.1,0.1", "--level", "char", "--workers", "1")
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
        (checkpoint, ("average", inputs.translator, "--out", checkpoint)),
        (models / "MODEL_CARD.md", ("translate", checkpoint, source, "--out", models / "MODEL_CARD.md")),
        (
            glue / "CoLA" / "train.tsv",
            ("prepare", "glue", glue, "--tokenizer-folder", inputs.tokenizer, "--text", glue / "CoLA" / "train.tsv"),
        ),
        (glue / "CoLA" / "dev.tsv", ("prepare", "glue", glue, "--tokenizer-folder", inputs.tokenizer, "--out", glue)),
    )
    for file, words in cases:
        before = sha256_of(file)
        assert relpos(*words) == 2, words
        assert file.name in capsys.readouterr().err
        assert sha256_of(file) == before, words


def test_a_command_replaces_no_other_commands_file(inputs: Inputs, tmp_path: Path, capsys) -> None:
    made = tmp_path / "a.txt"
    assert relpos("translate", inputs.translator, source_in(tmp_path), "--out", made, "--beam", "1") == 0
    score = ("score", inputs.wmt / "test.de", "--reference", inputs.wmt / "test.de", "--target-lang", "de")
    assert relpos(*score, "--out", made) == 2
    assert "a.txt is there already and was written by relpos translate: move it" in capsys.readouterr().err


LM = ("prepare", "lm", "--shares", "0.8,0.1,0.1", "--level", "char", "--workers", "1")


@pytest.mark.parametrize("moved", ["state", "folder", "unwritable"])
def test_a_folder_is_gone_on_with_wherever_its_records_are(inputs: Inputs, tmp_path: Path, monkeypatch, moved) -> None:
    """On another machine or in a container, with the same options and with others: its own notes lie in it."""
    out, other = tmp_path / "out", tmp_path / "other.txt"
    other.write_text(inputs.text.read_text()[:-2000])
    if moved == "unwritable":
        monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")
    assert relpos(*LM, "--text", inputs.text, "--out", out) == 0
    translate = ("translate", inputs.translator, source_in(tmp_path), "--out", tmp_path / "a.txt")
    assert relpos(*translate, "--beam", "1") == 0
    if moved == "state":
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    elif moved == "folder":
        out = shutil.copytree(out, tmp_path / "copy")
    assert relpos(*LM, "--text", other, "--out", out) == 0
    assert relpos(*LM, "--text", other, "--out", out) == 0
    if moved != "state":
        assert (
            relpos("translate", inputs.translator, source_in(tmp_path), "--out", tmp_path / "a.txt", "--beam", "2") == 0
        )


def source_in(folder: Path) -> Path:
    """A text to translate."""
    (folder / "in.txt").write_text("w1 w2\n")
    return folder / "in.txt"


def test_tables_of_a_folder_that_was_copied(inputs: Inputs, tmp_path: Path, monkeypatch) -> None:
    """What was written beside no stamp: a second run has another result and other records outside."""
    flags = (
        "evaluate",
        "length",
        inputs.lm,
        "--data",
        inputs.stream,
        "--lengths",
        "8,16",
        "--mem-len",
        "0",
        "--tokens",
    )
    assert relpos(*flags, "60", "--out", tmp_path / "a") == 0
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    assert relpos(*flags, "40", "--out", tmp_path / "b") == 0


def test_a_comparison_goes_on_with_what_a_kill_left(inputs: Inputs, tmp_path: Path, monkeypatch) -> None:
    """Checkpoints of fairseq-train and scores, which no stamp lists yet, with other records outside."""
    work, results = tmp_path / "work", tmp_path / "results"
    run = ("compare", "run", inputs.spec, "--work", work, "--results", results, "--keep-models")
    assert relpos(*run) == 0
    for stamp in work.rglob(".stages/*.json"):
        if stamp.stem.startswith(("score-", "train")):
            stamp.unlink()
    shutil.rmtree(results)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    assert relpos(*run) == 0


@pytest.mark.parametrize("name", [".stages/notes.json", ".partial-s.json", ".partial-1-s.json"])
def test_no_name_makes_a_file_ours(inputs: Inputs, tmp_path: Path, name: str) -> None:
    """Neither of a folder that notes of ours may lie in, nor of a temporary file, nor beside an output."""
    (tmp_path / ".stages").mkdir()
    (tmp_path / name).write_bytes(THESIS)
    score = ("score", inputs.wmt / "test.de", "--reference", inputs.wmt / "test.de", "--target-lang", "de", "--out")
    assert relpos(*score, tmp_path / name) == 2
    assert relpos(*score, tmp_path / "s.json") == 0
    assert (tmp_path / name).read_bytes() == THESIS


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "file", "folder", "linked folder"])
def test_what_lies_where_records_would_is_let_be(inputs: Inputs, tmp_path: Path, kind: str) -> None:
    """Nothing is written through a link or to a stranger's file, and no pipe is waited for; runs go on without."""
    out, mine = tmp_path / "out", tmp_path / "mine"
    notes = out / ".stages"
    (tmp_path / "elsewhere").mkdir()
    if kind == "linked folder":
        out.mkdir()
        notes.symlink_to(tmp_path / "elsewhere")
    else:
        notes.mkdir(parents=True)
        mine.write_bytes(THESIS)
        make = {"link": lambda p: p.symlink_to(mine), "dangling": lambda p: p.symlink_to(tmp_path / "none")}
        make |= {"pipe": os.mkfifo, "file": lambda p: p.write_bytes(THESIS), "folder": Path.mkdir}
        make[kind](notes / "written")
    for pairs in ("500", "400"):
        assert relpos("corpus", "--out", out, "--train", pairs) == 0
    assert kind == "linked folder" or mine.read_bytes() == THESIS
    assert kind != "file" or (notes / "written").read_bytes() == THESIS
    assert not (tmp_path / "none").exists() and not list((tmp_path / "elsewhere").iterdir())


def test_a_damaged_line_hides_no_other_record(inputs: Inputs, tmp_path: Path) -> None:
    assert relpos("corpus", "--out", tmp_path / "out", "--train", "500") == 0
    with (tmp_path / "out" / ".stages" / "written").open("ab") as file:
        file.write(b'\xff\xfe\0{"by')
    assert relpos("corpus", "--out", tmp_path / "out", "--train", "400") == 0


def test_a_strangers_note_stays(inputs: Inputs, tmp_path: Path) -> None:
    """A temporary name of another machine, and a file beside stamps that is none."""
    out = tmp_path / "out"
    assert relpos(*LM, "--text", inputs.text, "--out", out) == 0
    (out / ".stages" / "mine.json").write_bytes(THESIS)
    other = tmp_path / "other.txt"
    other.write_text(inputs.text.read_text()[:-2000])
    assert relpos(*LM, "--text", other, "--out", out) == 0
    assert (out / ".stages" / "mine.json").read_bytes() == THESIS
    strange = tmp_path / ".partial-0123abcd.1.1.1-n.txt"
    strange.write_bytes(THESIS)
    assert relpos("translate", inputs.translator, source_in(tmp_path), "--out", strange, "--beam", "1") == 2
    assert strange.read_bytes() == THESIS


def test_a_pipe_in_a_folder_is_no_file_of_ours(inputs: Inputs, tmp_path: Path) -> None:
    flags = ("prepare", "glue", inputs.glue, "--tokenizer-folder", inputs.tokenizer, "--workers", "1", "--tasks", "RTE")
    assert relpos(*flags, "--out", tmp_path / "out") == 0
    os.mkfifo(tmp_path / "out" / "RTE" / "pipe")
    assert relpos(*flags, "--out", tmp_path / "out", "--max-length", "20") == 2
    assert (tmp_path / "out" / "RTE" / "pipe").is_fifo()


def test_standard_output_may_be_a_file(inputs: Inputs, tmp_path: Path) -> None:
    """Of a shell's `>`, which is no file of another."""
    words = ("-m", "relpos_fairseq.cli", "translate", inputs.translator, source_in(tmp_path), "--beam", "1")
    with (tmp_path / "out.txt").open("w") as file:
        run = [sys.executable, *map(str, words), "--out", "/dev/stdout"]
        assert subprocess.run(run, stdout=file, cwd=ROOT, timeout=300).returncode == 0
    assert (tmp_path / "out.txt").read_text().count("\n") == 1


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
