"""Position schemes for fairseq's transformers: data, conversion, evaluation, pictures, benchmarks.

Training and generating are fairseq's own commands with --user-dir relpos_fairseq.
"""

import argparse
import ast
import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

from relpos_fairseq.cli.parser import Parser
from relpos_fairseq.engine.command import AGAIN, CONTINUE, run_command

# Subcommands in the order of the overview: the first word of a group, or none, and the names in it.
GROUPS = (
    ("", "quickstart compare schemes doctor"),
    ("prepare", "wmt lm mlm glue qa"),
    ("", "corpus convert average translate sample fill answer score"),
    ("evaluate", "lm length qa xtreme"),
    ("finetune", "glue xtreme"),
    ("export", "ct2 onnx transformers"),
    ("", "plot theorems"),
    ("benchmark", "attention models lm costs kernels preparation serving"),
)
COMMANDS = [f"{group} {name}".strip() for group, names in GROUPS for name in names.split()]

# Those that keep what is done, and go on from there.
CONTINUED = ("quickstart", "prepare", "finetune")


def main(argv: Sequence[str] | None = None, program: str | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: its words and arguments; None: those of the process.
        program: what its help calls it; None: `relpos` and its words.

    Returns:
        The exit status, as in `run_command`; 2 for wrong arguments.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    name, rest = find(argv)
    if name is None:
        return overview(argv)
    module = load(name)
    continues = name.startswith(CONTINUED)
    said = getattr(module, "INTERRUPTED", CONTINUE if continues else AGAIN)
    job = partial(read, module, program or f"relpos {name}")
    return run_command(lambda argv: job(argv)(), rest, said)


def find(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the subcommand that arguments begin with, or None, and the arguments after it."""
    for words in (1, 2):
        if (name := " ".join(argv[:words])) in COMMANDS and len(argv) >= words:
            return name, list(argv[words:])
    return None, list(argv)


def load(name: str) -> ModuleType:
    """Import a subcommand's file, which has its words for a name."""
    return importlib.import_module(f"relpos_fairseq.cli.{name.replace(' ', '_')}")


def read(module: ModuleType, program: str, argv: Sequence[str]) -> Callable[[], int | None]:
    """Parse a subcommand's arguments; returns its job, not started yet."""
    parser = Parser(prog=program, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    module.add_arguments(parser)
    return partial(module.run, parser.parse_args(argv), argv)


def overview(argv: Sequence[str]) -> int:
    """Print all subcommands, or those of a group; returns 2 if help was not asked for."""
    asked = argv[-1:] in (["--help"], ["-h"])
    words = " ".join(argv[: -1 if asked else None])
    names = [name for name in COMMANDS if not words or name.startswith(f"{words} ")]
    if not names:
        print(f"relpos: error: there is no command {words} (see relpos --help)", file=sys.stderr)
        return 2
    usage = f"usage: relpos {words + ' ' if words else ''}COMMAND [options]"
    lines = [f"  {name:22} {summary(name)}" for name in names]
    more = "relpos COMMAND --help has more."
    text = "\n".join([usage, "", __doc__.strip(), "", "commands:", *lines, "", more])
    print(text, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def summary(name: str) -> str:
    """Return a subcommand in a line, its `HELP`, from its file as it lies there."""
    path = Path(__file__).with_name(f"{name.replace(' ', '_')}.py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "HELP":
            return ast.literal_eval(statement.value)
    raise ValueError(f"cli/{path.name} has no HELP, its command in one line")
