"""Commands as classes: a field's type and declaration say how its text is read."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT
from relpos_fairseq.cli import command
from relpos_fairseq.cli.main import load
from relpos_fairseq.io.options import argument, flag, option, required


@pytest.fixture
def declared(monkeypatch):
    """A command with a field of every kind."""
    monkeypatch.setattr(command, "COMMANDS", {})

    @command.command("try out", "try it", interrupted="try again")
    class Try:
        """Try what can be declared.

            relpos try out FILE

        More of it.
        """

        files: list[str] = argument("what is read", metavar="FILE")
        count: int = option(3, "how many (%(default)s)")
        share: float | None = option(None, group="how")
        names: list[str] = option([], group="how")
        lengths: list[int] | None = option(None, type=command.numbers)
        quick: bool = flag("at once")
        text: str = option("", exclusive=1)
        file: str | None = option(None, exclusive=1)
        needed: int = required()

    return Try


def test_fields_are_read_by_their_types(declared):
    words = "a b --needed 4 --share 0.5 --names x y --lengths 1,2 --quick --text t".split()
    given = command.parse(declared, "relpos try out", words)
    assert vars(given) == {
        **{"files": ["a", "b"], "count": 3, "share": 0.5, "names": ["x", "y"], "lengths": [1, 2]},
        **{"quick": True, "text": "t", "file": None, "needed": 4},
    }
    assert (declared.summary, declared.interrupted) == ("try it", "try again")
    assert command.COMMANDS == {"try out": declared}


@pytest.mark.parametrize("words", ["a --needed 4 b", "--needed 4 a b", "a b --needed 4", "a --quick b --needed 4"])
def test_arguments_stand_anywhere(declared, words):
    found = command.parse(declared, "relpos try out", words.split())
    assert found.files == ["a", "b"] and found.needed == 4


def test_what_is_given_several_times_is_one_list():
    words = ["checkpoint.pt", "--data", "d", "--out", "o", "--override", "a=1", "--override=b"]
    assert command.parse(load("evaluate length"), "relpos evaluate length", words).override == ["a=1", "b"]
    assert command.parse(load("evaluate length"), "relpos evaluate length", words[:5]).override == []


def test_defaults_of_two_calls_are_not_one_list(declared):
    one, other = (command.parse(declared, "relpos try out", ["a", "--needed", "1"]) for _ in range(2))
    one.names.append("x")
    assert other.names == [] == command.parse(declared, "relpos try out", ["a", "--needed", "1"]).names


NINES = "9" * 30


@pytest.mark.parametrize(
    ("words", "message"),
    {
        "a": "the following arguments are required: --needed",
        "a --needed x": "argument --needed: must be a whole number of at most 18 digits, got x",
        f"a --needed {NINES}": f"argument --needed: must be a whole number of at most 18 digits, got {NINES}",
        "a --needed 1 --text t --file f": "argument --file: not allowed with argument --text",
    }.items(),
)
def test_wrong_arguments_are_one_line(declared, capsys, words, message):
    with pytest.raises(SystemExit) as ended:
        command.parse(declared, "relpos try out", words.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"relpos try out: error: {message} (see --help)\n"


def test_help_is_the_docstring_and_the_fields(declared):
    text = command.parser_of(declared, "relpos try out").format_help()
    assert text.startswith("usage: relpos try out ")
    assert "\nTry what can be declared.\n\n    relpos try out FILE\n\nMore of it.\n" in text
    assert "how many (3)" in text and "\nhow:\n  --share SHARE\n" in text


@pytest.mark.parametrize(
    ("streams", "status", "said"),
    [
        (">&-", 2, "error: standard output is closed: send it to a file, or to /dev/null\n"),
        ("2>&- >out", 0, ""),
        ("<&- >out", 0, ""),
        (">&- 2>&-", 2, ""),
    ],
)
def test_closed_streams(streams: str, status: int, said: str, tmp_path: Path) -> None:
    """Their numbers are taken, so that no file that is opened later gets what is printed."""
    line = f"{shlex.quote(sys.executable)} -m relpos_fairseq.cli schemes m4 {streams}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, encoding="utf-8")
    assert (done.returncode, done.stderr) == (status, said)
    assert status or "m4" in (tmp_path / "out").read_text()
