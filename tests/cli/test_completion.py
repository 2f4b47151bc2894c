"""`relpos completion`: bash and zsh themselves complete by its scripts."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT
from relpos_fairseq.cli.completion import _scheme_names
from relpos_fairseq.schemes import scheme_names

BASH = """
source ./script
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_shtab_relpos
printf '%s\\n' "${COMPREPLY[@]}"
"""
ZSHRC = """
fpath=($ZDOTDIR $fpath)
PS1='> '
autoload -Uz compinit && compinit -u -D
bindkey '^I' complete-word
show() { print -r -- "BUFFER=<$BUFFER>" }
zle -N show
bindkey '^X^P' show
"""
# A line that is begun, its last word apart, and all that the word can become.
LINES = [
    ("relpos tra", ["translate"]),
    ("relpos prepare ", ["wmt", "lm", "mlm", "glue", "qa"]),
    ("relpos evaluate le", ["length"]),
    ("relpos translate --qu", ["--quantization"]),
    ("relpos translate --quantization ", ["int8", "bf16"]),
    ("relpos translate --quantization i", ["int8"]),
    ("relpos translate mod", ["model.pt"]),
    ("relpos translate model.pt in.", ["in.txt"]),
    ("relpos export ct2 model.pt --out fol", ["folder"]),  # no file where a folder is meant
    ("relpos average --la", ["--last", "--last-updates"]),
    ("relpos compare st", ["status"]),
    ("relpos convert model.pt --to alibi_", ["alibi_learned"]),
    ("relpos schemes log", ["log_cpb"]),
    ("relpos completion z", ["zsh"]),
    ("relpos convert model.pt --position-share ", ["none", "heads", "layers", "both"]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with files to complete, and the scripts of both shells."""
    made = tmp_path_factory.mktemp("completion")
    (made / "folder").mkdir()
    for name in ("model.pt", "in.txt", "folder.txt"):
        (made / name).touch()
    for shell, name in (("bash", "script"), ("zsh", "_relpos")):
        run = [sys.executable, "-m", "relpos_fairseq.cli", "completion", shell]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        (made / name).write_bytes(subprocess.run(run, env=environment, check=True, capture_output=True).stdout)
    (made / ".zshrc").write_text(ZSHRC)
    return made


@pytest.mark.parametrize(("line", "expected"), LINES)
def test_bash_completes(folder, line, expected):
    run = ["bash", "--norc", "-c", BASH, "bash", *line.split(" ")]
    said = subprocess.run(run, cwd=folder, capture_output=True, text=True, check=True)
    assert said.stdout.split() == expected


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh")
@pytest.mark.parametrize(("line", "expected"), [one for one in LINES if len(one[1]) == 1])
def test_zsh_completes(folder, line, expected):
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execvpe("zsh", ["zsh", "-i"], os.environ | {"ZDOTDIR": str(folder), "TERM": "dumb", "COLUMNS": "200"})
    said, typed = b"", False
    while not (found := re.search(rb"BUFFER=<(.*?)[ /]?>", said)) and select.select([terminal], [], [], 20)[0]:
        said += os.read(terminal, 65536)
        if not typed and b"> " in said:  # the prompt
            os.write(terminal, f"{line}\t\x18\x10".encode())
            typed = True
    os.close(terminal)
    os.waitpid(process, 0)
    assert found and found[1].decode() == f"{line.rpartition(' ')[0]} {expected[0]}", said


def test_a_script_needs_neither_torch_nor_fairseq():
    code = (
        "import sys; from relpos_fairseq.cli.main import main; main(['completion', 'bash']); "
        "sys.exit(bool({'torch', 'fairseq'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=ROOT)


def test_every_scheme_is_completed():
    assert _scheme_names() == sorted(scheme_names())
