"""What a shell needs to complete commands, options, their values and paths."""

import re
from pathlib import Path
from typing import Any

import shtab

from relpos_fairseq.cli.command import Layout, Parser, add_options, roles_of


def script(commands: dict[str, Any], shell: str) -> str:
    """Return the script by which `bash` or `zsh` completes commands, which are classes by their words."""
    return shtab.complete(whole_parser(commands), shell)


def _scheme_names() -> list[str]:
    """Return the names under which schemes are registered, from their files: importing them needs torch."""
    texts = [path.read_text(encoding="utf-8") for path in Path(__file__).parents[1].glob("schemes/*.py")]
    return sorted(name for text in texts for name in re.findall(r'^@register_scheme\("(\w+)"', text, re.M))


def whole_parser(commands: dict[str, Any]) -> Parser:
    """Return one parser of all commands, a group of them being a command of commands, with `complete` at each path."""
    root = Parser(prog="relpos", formatter_class=Layout)
    root.add_argument("--version", action="store_true", help="tell the version")
    groups = {"": root.add_subparsers()}
    for name, declared in commands.items():
        group, _, last = name.rpartition(" ")
        if group not in groups:
            groups[group] = groups[""].add_parser(group, help=f"{group} ...").add_subparsers()
        parser = groups[group].add_parser(last, help=declared.summary, description=declared.summary)
        add_options(parser, declared)
        roles, actions = roles_of(declared), vars(parser)["_actions"]  # argparse has no public list of them
        for action in actions:
            if role := roles.get((action.option_strings or [action.dest])[0]):
                action.complete = shtab.DIRECTORY if role.what == "folder" else shtab.FILE
            elif action.metavar == "SCHEME":
                action.choices = _scheme_names()
            elif isinstance(action.metavar, str) and "|" in action.metavar:  # on|off
                action.choices = action.metavar.split("|")
    return root
