"""Files of others where a command writes: none is replaced or removed, and the error names it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import FULL, ROOT
from helpers.fault_jobs import JOBS, Inputs, finished
from helpers.folders import contents
from helpers.shell import Shell
from relpos_fairseq.cli.command import roles_of
from relpos_fairseq.cli.main import COMMANDS, load

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


LM = "prepare lm --shares 0.8,0.1,0.1 --level char --workers 1"
WMT = "prepare wmt en-de --from-dir {0.wmt} --out out --vocab-size 60 --workers 1"
SCORE = "score {0.wmt}/test.de --reference {0.wmt}/test.de --target-lang de --out"
TRANSLATE = "translate {0.translator} in.txt --beam 1 --out"
GLUE = "prepare glue glue --tokenizer-folder {0.tokenizer} --workers 1"
# What was lost once: a file of a user's, of a data folder, of a task, or of the text beside a checkpoint, and the line.
KEPT = [
    ("out/data-bin/vocab.txt", WMT),
    ("out/data-bin/thesis.bin", WMT),
    ("out/data-bin/results.json", WMT),
    ("stamped/thesis.tex", f"{LM} --text {{0.text}} --out stamped"),
    ("data/valid.bin", "evaluate lm {0.lm} --data data --by-token data/valid.bin"),
    ("models/text/dict.src.txt", f"{TRANSLATE} models/text/dict.src.txt"),
    ("models/checkpoint_last.pt", "average {0.translator} --out models/checkpoint_last.pt"),
    ("models/MODEL_CARD.md", "translate models/checkpoint_last.pt in.txt --out models/MODEL_CARD.md"),
    ("glue/CoLA/train.tsv", f"{GLUE} --text glue/CoLA/train.tsv"),
    ("glue/CoLA/dev.tsv", f"{GLUE} --out glue"),
    # No name makes a file ours: of a folder of notes, of a temporary file here or on another machine.
    (".stages/notes.json", f"{SCORE} .stages/notes.json"),
    (".partial-s.json", f"{SCORE} .partial-s.json"),
    (".partial-1-s.json", f"{SCORE} .partial-1-s.json"),
    (".partial-0123abcd.1.1.1-n.txt", f"{TRANSLATE} .partial-0123abcd.1.1.1-n.txt"),
]


@pytest.fixture
def run(inputs: Inputs, shell: Shell, tmp_path: Path) -> Callable[[str], str]:
    """Lines that succeed, in a folder with a text to translate and one that is shorter than the inputs'."""
    (tmp_path / "in.txt").write_text("w1 w2\n")
    (tmp_path / "other.txt").write_text(inputs.text.read_text()[:-2000])
    return lambda line: shell(line.format(inputs))


@pytest.fixture
def refused(inputs: Inputs, shell: Shell, run: object) -> Callable[[str], str]:
    """Lines there that fail."""
    return lambda line: shell.refused(line.format(inputs))


@pytest.mark.parametrize(("name", "line"), KEPT)
def test_outputs_on_files_of_others(inputs: Inputs, tmp_path: Path, run, refused, name: str, line: str) -> None:
    """Whoever wrote it: it stays and is named, and another run beside it changes nothing."""
    for part, source in {"data": inputs.stream, "glue": inputs.glue, "models": inputs.translator.parent}.items():
        if name.startswith(part):
            shutil.copytree(source, tmp_path / part)
    if name.startswith("stamped"):  # a stamp that describes it, with another hash than it has
        described = {"thesis.tex": {"bytes": len(THESIS), "sha256": "0" * 64}}
        stamp = {"parameters": {}, "inputs": {}, "versions": {}, "outputs": described, "counts": {}}
        (tmp_path / "stamped/.stages").mkdir(parents=True)
        (tmp_path / "stamped/.stages/old.json").write_text(json.dumps(stamp))
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists() or "data-bin" in name:
        file.write_bytes(THESIS)
    before = file.read_bytes()
    assert file.name in refused(line)
    if line.startswith("score"):
        run(f"{SCORE} s.json")
    assert file.read_bytes() == before


def test_a_command_replaces_no_other_commands_file(run, refused) -> None:
    run(f"{TRANSLATE} a.txt")
    assert "a.txt is there already and was written by relpos translate: move it" in refused(f"{SCORE} a.txt")


@pytest.mark.parametrize("moved", ["state", "folder", "unwritable"])
def test_a_folder_is_gone_on_with_wherever_its_records_are(tmp_path: Path, monkeypatch, run, moved: str) -> None:
    """On another machine or in a container, with the same options and with others: its own notes lie in it."""
    if moved == "unwritable":
        monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")
    run(f"{LM} --text {{0.text}} --out out")
    run(f"{TRANSLATE} a.txt")
    if moved == "state":
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    if moved == "folder":
        shutil.copytree(tmp_path / "out", tmp_path / "copy")
    for _ in range(2):
        run(f"{LM} --text other.txt --out {'copy' if moved == 'folder' else 'out'}")
    if moved != "state":
        run("translate {0.translator} in.txt --beam 2 --out a.txt")


def test_tables_of_a_folder_that_was_copied(tmp_path: Path, monkeypatch, run) -> None:
    """What was written beside no stamp: a second run has another result and other records outside."""
    line = "evaluate length {0.lm} --data {0.stream} --lengths 8,16 --mem-len 0"
    run(f"{line} --tokens 60 --out a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    run(f"{line} --tokens 40 --out b")


@pytest.mark.nightly
def test_a_comparison_goes_on_with_what_a_kill_left(tmp_path: Path, monkeypatch, run) -> None:
    """Checkpoints of fairseq-train and scores, which no stamp lists yet, with other records outside."""
    line = "compare run {0.spec} --work work --results results --keep-models"
    run(line)
    for stamp in (tmp_path / "work").rglob(".stages/*.json"):
        if stamp.stem.startswith(("score-", "train")):
            stamp.unlink()
    shutil.rmtree(tmp_path / "results")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    run(line)


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "file", "folder", "linked folder"])
def test_what_lies_where_records_would_is_let_be(tmp_path: Path, run, kind: str) -> None:
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
        run(f"corpus --out out --train {pairs}")
    assert kind == "linked folder" or mine.read_bytes() == THESIS
    assert kind != "file" or (notes / "written").read_bytes() == THESIS
    assert not (tmp_path / "none").exists() and not list((tmp_path / "elsewhere").iterdir())


def test_a_damaged_line_hides_no_other_record(tmp_path: Path, run) -> None:
    run("corpus --out out --train 500")
    with (tmp_path / "out/.stages/written").open("ab") as file:
        file.write(b'\xff\xfe\0{"by')
    run("corpus --out out --train 400")


def test_a_strangers_note_stays(tmp_path: Path, run) -> None:
    """A file beside stamps that is none."""
    run(f"{LM} --text {{0.text}} --out out")
    (tmp_path / "out/.stages/mine.json").write_bytes(THESIS)
    run(f"{LM} --text other.txt --out out")
    assert (tmp_path / "out/.stages/mine.json").read_bytes() == THESIS


def test_a_pipe_in_a_folder_is_no_file_of_ours(tmp_path: Path, run, refused) -> None:
    line = GLUE.replace("glue glue", "glue {0.glue}") + " --tasks RTE --out out"
    run(line)
    os.mkfifo(tmp_path / "out/RTE/pipe")
    refused(f"{line} --max-length 20")
    assert (tmp_path / "out/RTE/pipe").is_fifo()


def test_standard_output_may_be_a_file(inputs: Inputs, tmp_path: Path, run) -> None:
    """Of a shell's `>`, which is no file of another."""
    words = f"-m relpos_fairseq.cli {TRANSLATE} /dev/stdout".format(inputs).replace("in.txt", str(tmp_path / "in.txt"))
    with (tmp_path / "out.txt").open("w") as file:
        assert subprocess.run([sys.executable, *words.split()], stdout=file, cwd=ROOT, timeout=300).returncode == 0
    assert (tmp_path / "out.txt").read_text().count("\n") == 1


def test_a_device_is_written_to(run) -> None:
    """As other programs do: no temporary file beside /dev/null takes its place."""
    run(f"{TRANSLATE} /dev/null")
    assert Path("/dev/null").is_char_device()


def test_every_output_of_a_command_is_declared() -> None:
    """What fault jobs write stands in a field that says so."""
    for name in JOBS.keys() & set(COMMANDS):
        assert any(role.writes for role in roles_of(load(name)).values()), name
