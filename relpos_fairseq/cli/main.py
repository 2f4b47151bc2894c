"""Position schemes for fairseq's transformers: data, models, scores, plots.

Training and generating are fairseq's commands with --user-dir relpos_fairseq.
"""

import difflib
import importlib
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import relpos_fairseq
from relpos_fairseq.cli import command
from relpos_fairseq.io.command import AGAIN, run_command, wait_passively
from relpos_fairseq.io.options import argument
from relpos_fairseq.io.progress import doing
from relpos_fairseq.io.records import writing_as
from relpos_fairseq.version import __version__

# Subcommands in the order of the overview: the file that declares them, the first word of a group, the names in it.
GROUPS = (
    ("quickstart", "", "quickstart"),
    ("compare", "", "compare schemes doctor"),
    ("recipes", "", "recipes path"),
    ("main", "", "completion"),
    ("prepare", "prepare", "wmt lm mlm glue qa"),
    ("prepare", "", "corpus"),
    ("convert", "", "convert average"),
    ("use", "", "translate sample fill answer classify score"),
    ("evaluate", "evaluate", "lm length qa xtreme"),
    ("evaluate", "finetune", "glue xtreme"),
    ("convert", "export", "ct2 onnx transformers"),
    ("compare", "", "plot theorems"),
    ("benchmark", "benchmark", "attention models lm costs serving sampling"),
)
FILES = {f"{group} {name}".strip(): file for file, group, names in GROUPS for name in names.split()}
COMMANDS = list(FILES)


@command.command("completion", "what bash or zsh needs to complete commands, options and paths")
class Completion:
    """Print a script by which a shell completes commands, options, their values, files and folders.

        relpos completion bash > ~/.local/share/bash-completion/completions/relpos
        relpos completion zsh > ~/.zfunc/_relpos  # a folder of $fpath

    A new shell reads it: bash where the package bash-completion is installed (elsewhere, `source` the
    file in ~/.bashrc), zsh where ~/.zshrc has `fpath+=~/.zfunc` before `compinit`.
    """

    shell: str = argument("bash or zsh", choices=("bash", "zsh"))

    def run(self, argv: Sequence[str]) -> None:
        from relpos_fairseq.cli.completion import script

        print(script({name: load(name) for name in COMMANDS}, self.shell))


def main(argv: Sequence[str] | None = None, program: str | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: its words and arguments; None: those of the process.
        program: the name that its help shows; None: `relpos` and its words.

    Returns:
        The exit status, as in `run_command`; 2 for wrong arguments.
    """
    wait_passively()
    relpos_fairseq.is_command = True
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv == ["--version"]:
        print(f"relpos_fairseq {__version__}")
        return 0
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    name, rest = find(argv)
    if name is None:
        return run_command(overview, argv)

    def run(argv: Sequence[str]) -> object:
        given = command.parse(load(name), program or f"relpos {name}", argv)
        with writing_as(f"relpos {name}", command.homes_of(given)):
            command.check(given)
            with doing(f"relpos {name}"):
                return given.run(argv)

    # what is imported is interrupted too
    return run_command(lambda argv: run_command(run, argv, load(name).interrupted), rest, AGAIN)


def find(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the subcommand that arguments begin with, or None, and the arguments after it."""
    for words in (1, 2):
        if (name := " ".join(argv[:words])) in FILES and len(argv) >= words:
            return name, list(argv[words:])
    return None, list(argv)


def load(name: str) -> Any:
    """Return a subcommand's class, from the file that declares it."""
    importlib.import_module(f"relpos_fairseq.cli.{FILES[name]}")
    return command.COMMANDS[name]


def overview(argv: Sequence[str]) -> int:
    """Print all subcommands, or those of a group; returns 2 if help was not asked for."""
    asked = argv[-1:] in (["--help"], ["-h"])
    words = " ".join(argv[: -1 if asked else None])
    names = [name for name in COMMANDS if not words or name.startswith(f"{words} ")]
    if not names:
        known = [*COMMANDS, *(group for _, group, _ in GROUPS if group)]
        close = difflib.get_close_matches(words, known, 1) or difflib.get_close_matches(words.split()[0], known, 1)
        meant = f": did you mean relpos {close[0]}?" if close else ""
        print(f"relpos: error: there is no command {words}{meant} (see relpos --help)", file=sys.stderr)
        return 2
    usage = f"usage: relpos {words + ' ' if words else ''}COMMAND [options]"
    lines = [
        textwrap.fill(load(name).summary, 80, initial_indent=f"  {name:22} ", subsequent_indent=" " * 25)
        for name in names
    ]
    more = "relpos COMMAND --help has more; relpos --version tells the version."
    text = "\n".join([usage, "", __doc__.strip(), "", "commands:", *lines, "", more])
    print(text, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2
