"""Every command that a page of the project shows is one that its parser takes."""

from __future__ import annotations

import re
import shlex
import subprocess

import pytest
from fairseq import options

from helpers import ROOT
from relpos_fairseq.cli import command
from relpos_fairseq.cli.main import find, load

PARSERS = {"train": "training", "generate": "generation", "validate": "validation", "eval-lm": "eval_lm"}


def shown() -> list[tuple[str, list[str]]]:
    """(page, words) of each command of `relpos` and fairseq in a page's blocks of bash, up to a `>` or `|`."""
    found = []
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for page in listed.split():
        for block in re.findall(r"```(?:bash|sh)\n(.*?)```", (ROOT / page).read_text(), re.S):
            for line in re.sub(r"\\\n\s*", " ", block).splitlines():
                words = re.split(r"\s(?:[>|<]|&&)", f"{line} ")[0]
                words = re.sub(r"^(?:\w+=\S* )+", "", words.strip())
                if re.match(rf"relpos |fairseq-(?:{'|'.join(PARSERS)}) ", words):
                    found.append((page, [word for word in shlex.split(words, comments=True) if word != "..."]))
    return found


@pytest.mark.parametrize(("page", "words"), shown(), ids=lambda part: part if isinstance(part, str) else part[1])
def test_a_command_of_a_page_is_understood(page, words, capsys):
    program, *arguments = words
    if program != "relpos":
        parser = getattr(options, f"get_{PARSERS[program.removeprefix('fairseq-')]}_parser")()
        options.parse_args_and_arch(parser, input_args=arguments)
        return
    name, rest = find(arguments)
    assert name, f"{page}: no command in {words}"
    command.parse(load(name), f"relpos {name}", rest)
