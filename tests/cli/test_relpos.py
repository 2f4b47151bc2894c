"""The command `relpos`: what it says of itself, how fast, and how it ends."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from unittest.mock import Mock

import pytest

from helpers import ROOT
from helpers.commands import relpos
from relpos_fairseq.cli import main
from relpos_fairseq.cli.command import READERS, check, parser_of, roles_of
from relpos_fairseq.cli.convert import POSITIONS
from relpos_fairseq.cli.main import COMMANDS, load
from relpos_fairseq.data.answer_spans import LONG_QUESTION
from relpos_fairseq.evaluation.xtreme import FLAGS
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.lab.comparison.protocols import PROTOCOLS
from relpos_fairseq.metrics.answer_scores import METRICS
from relpos_fairseq.saved.identity import POSITION_FIELDS
from relpos_fairseq.tasks.question_answering_config import UNANSWERABLE
from relpos_fairseq.version import __version__

# Prints the seconds and the modules of every --help: one process, so that none hides another's.
HELPS = """
import contextlib, io, json, sys, time
from relpos_fairseq.cli.main import COMMANDS, main
found = {}
for name in ["", *sys.argv[1:]]:
    began, text = time.perf_counter(), io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main([*name.split(), "--help"])
    heavy = [part for part in ("torch", "fairseq") if part in sys.modules]
    found[name] = [time.perf_counter() - began, heavy, text.getvalue()]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def helps() -> dict[str, list]:
    """Subcommand to seconds, heavy modules and text of its --help."""
    command = [sys.executable, "-c", HELPS, *COMMANDS]
    wide = os.environ | {"COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=wide)
    return json.loads(done.stdout)


def test_every_help_answers_at_once(helps):
    """The whole of them in a few seconds even on a busy machine, and without torch or fairseq."""
    heavy = {name: modules for name, (_, modules, _) in helps.items() if modules}
    assert not heavy
    assert sum(seconds for seconds, _, _ in helps.values()) < 5


def test_every_command_says_what_it_does(helps):
    overview = helps[""][2]
    for name in COMMANDS:
        assert f" {name} {load(name).summary} " in " ".join(overview.split())
        text = helps[name][2]
        assert text.startswith(f"usage: relpos {name} ") and "--help" in text


def test_help_fits_a_terminal(helps, capsys):
    """Within 80 columns, on whatever terminal; `relpos help X` is `relpos X --help`."""
    wide = [f"{name}: {line}" for name, (_, _, text) in helps.items() for line in text.splitlines() if len(line) > 80]
    assert wide == []
    with pytest.raises(SystemExit):
        relpos("help", "score")
    assert capsys.readouterr().out.startswith("usage: relpos score ")


def test_the_version(shell):
    assert shell("--version") == f"relpos_fairseq {__version__}\n"


def test_a_command_that_is_interrupted_before_it_is_imported_says_so(capsys, monkeypatch):
    monkeypatch.setattr(main, "load", Mock(side_effect=KeyboardInterrupt))
    assert relpos("average", "a.pt", "--out", "b.pt") == 130
    assert capsys.readouterr().err == "interrupted; nothing is kept: the same command starts over\n"


def test_groups_are_listed(shell):
    listed = shell("prepare --help")
    assert "prepare wmt" in listed and "benchmark lm" not in listed
    assert relpos("prepare") == relpos() == 2


def test_quickstart_says_its_options_before_anything_is_installed(tmp_path):
    """By a Python without any package, in a folder without .venv; nothing is installed for it."""
    (tmp_path / "relpos_fairseq").symlink_to(ROOT / "relpos_fairseq")
    (tmp_path / "examples").mkdir()
    shutil.copy(ROOT / "examples/quickstart.sh", tmp_path / "examples")
    bare = tmp_path / "bin" / "python3"
    bare.parent.mkdir()
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    environment = os.environ | {"PATH": f"{bare.parent}{os.pathsep}{os.environ['PATH']}"}
    run = ["bash", tmp_path / "examples/quickstart.sh", "--help"]
    done = subprocess.run(run, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: relpos quickstart ")
    assert not (tmp_path / ".venv").exists()


def test_pip_installs_the_command():
    entry = "relpos = relpos_fairseq.cli.main:main"
    assert f'"{entry}"' in (ROOT / "setup.py").read_text()


def test_what_parsers_offer_is_what_jobs_take():
    """Parsers are torch-free, so what they offer is written once more in them."""
    qa = options("evaluate qa")
    assert qa["metric"].choices == METRICS
    assert qa["on_long_question"].choices == LONG_QUESTION
    assert qa["unanswerable"].choices == UNANSWERABLE
    assert options("finetune glue")["protocol"].choices == tuple(PROTOCOLS)
    assert set(FLAGS.values()) <= set(options("evaluate xtreme"))
    hidden = {"position_scheme", "attention_backend"}
    assert {name for name, _, _ in POSITIONS} == set(POSITION_FIELDS) - hidden


def options(name: str) -> dict[str, argparse.Action]:
    """A command's options by their destination."""
    return {action.dest: action for action in parser_of(load(name), name)._actions}


def pairs_of_paths() -> list[tuple[str, str, str]]:
    """Every command's outputs with its every input, as its fields declare them."""
    found = []
    for name in COMMANDS:
        roles = {one.lstrip("-").replace("-", "_"): role for one, role in roles_of(load(name)).items()}
        reads = [one for one, role in roles.items() if role.reads and not role.writes]
        found += [(name, out, read) for out, role in roles.items() if role.writes and not role.reads for read in reads]
    return found


def test_every_path_says_what_is_done_with_it() -> None:
    """A field that is a path, or a list of them, has a role."""
    bare_path = re.compile(r"(?<!Annotated\[)pathlib\.(_local\.)?Path\b")
    for name in COMMANDS:
        bare = [one.name for one in fields(load(name)) if bare_path.search(str(one.type))]
        assert not bare, (name, bare)


def test_no_number_is_nan_or_infinite_and_no_text_is_broken(capsys) -> None:
    """Of every option of every command: the line has its name."""
    values, tried = {READERS[float]: ("nan", "-inf", "1e999"), READERS[str]: ("a\udcff",)}, 0
    for name in COMMANDS:
        parser = parser_of(load(name), name)
        for action in parser._actions:
            for value in values.get(action.type, ()) if action.option_strings and not action.choices else ():
                option = action.option_strings[0]
                with pytest.raises(SystemExit):
                    parser.parse_args([f"{option}={value}"])
                said = f"error: argument {option}.*: (must be a finite|is not UTF-8)"
                assert re.search(said, capsys.readouterr().err)
                tried += 1
    assert tried > 100


@pytest.mark.parametrize(
    "locale", [{"LC_ALL": "C.UTF-8"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_a_text_is_utf8_in_every_locale(locale: dict[str, str]) -> None:
    """The bytes of the command line, whatever Python takes them for."""
    words = "import sys; from relpos_fairseq.cli.command import READERS; print(ascii(READERS[str](sys.argv[1])))"
    wrong = "ArgumentTypeError: is not UTF-8 at its character 2"
    for given, said in (("\u00e9\u65e5".encode(), "'\\xe9\\u65e5'"), (b"a\xff", wrong)):
        run, environment = [sys.executable, "-c", words, given], os.environ | locale
        done = subprocess.run(run, env=environment, capture_output=True, text=True)
        assert said in done.stdout + done.stderr


def row_of(name: str) -> str:
    """A command's row in the page: what it reads, what it writes, and what it goes on with."""
    roles = roles_of(load(name)).items()
    kinds = ((True, False), (False, True), (True, True))
    cells = [[one for one, role in roles if (role.reads, role.writes) == kind] for kind in kinds]
    row = " | ".join([f"| `{name}`", *(" ".join(f"`{one}`" for one in cell) for cell in cells)])
    return row.replace("  ", " ") + " |"


def test_the_page_has_what_every_command_reads_and_writes() -> None:
    page = (ROOT / "relpos_fairseq" / "cli" / "README.md").read_text()
    rows = [line for line in page.splitlines() if line[:3] == "| `"]
    assert rows == [row_of(name) for name in COMMANDS if roles_of(load(name))]


@pytest.mark.parametrize("linked", [False, True])
def test_no_command_writes_over_what_it_reads(tmp_path, linked):
    """Also under another name: a link, or a way around."""
    (tmp_path / "d").mkdir()
    path, other = tmp_path / "a.txt", tmp_path / "d" / ".." / "a.txt"
    path.write_text("mine\n")
    if linked:
        other = tmp_path / "b.txt"
        other.symlink_to(path)
    pairs = pairs_of_paths()
    assert len(pairs) > 60 and {name for name, *_ in pairs} > {"translate", "average", "convert", "fill", "score"}
    for name, out, read in pairs:
        declared = load(name)
        given = declared.__new__(declared)
        for one in fields(declared):
            setattr(given, one.name, None)
        setattr(given, read, str(path) if read == "context" else path)
        setattr(given, out, other)
        with pytest.raises(UserError, match=f"{out.replace('_', '-')} .* is also an input .*{read.replace('_', '-')}"):
            check(given)


def test_waiting_threads_sleep_in_every_command():
    """The variable is there before torch is loaded, whose OpenMP reads it then."""
    clean = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    code = (
        "import os, sys; from relpos_fairseq.cli.main import main; assert 'torch' not in sys.modules; "
        "main(['schemes']); assert os.environ['OMP_WAIT_POLICY'] == 'passive'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=clean, capture_output=True)
