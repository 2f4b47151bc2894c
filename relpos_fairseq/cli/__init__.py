"""The command `relpos`.

A file of this folder is one subcommand: its docstring describes it, `HELP` says it in a line,
`add_arguments` declares its options, and `run` imports the job and starts it.  Nothing heavy is
imported before that, so that every `--help` answers at once.
"""

import sys
from pathlib import Path


def door(*command: str) -> None:
    """Run a subcommand as a script of its own, with the process's arguments; exit with its status.

    Args:
        command: the words after `relpos`, say `prepare`, `wmt`.
    """
    from relpos_fairseq.cli.main import main

    sys.exit(main([*command, *sys.argv[1:]], program=Path(sys.argv[0]).name))
