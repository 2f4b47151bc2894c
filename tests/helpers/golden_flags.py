"""What users type: options of every command, and names and flags that fairseq is given.

tests/cli/golden_flags.json holds them as version 7983f42 had them.  It is not made anew when the
code changes; a name may be added to it by hand.  It was made by

    PYTHONPATH=OLD python tests/helpers/golden_flags.py OLD > tests/cli/golden_flags.json

where OLD is a worktree of that version.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

MODELS = [f"relpos_{name}" for name in ("transformer", "transformer_lm", "transformer_xl", "roberta")]
OPTION = re.compile(r"(?:^|, )(--?[A-Za-z][\w-]*)")


def help_of(root: Path, name: str) -> str:
    """What `relpos ...`, or a script of scripts/, prints for --help."""
    first, *words = name.split()
    program = ["bash", str(root / "scripts" / name)]
    if first == "relpos":
        program = [sys.executable, "-m", "relpos_fairseq.cli", *words]
    done = subprocess.run(
        [*program, "--help"],
        env=os.environ | {"COLUMNS": "100", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{name} --help ended with {done.returncode}: {done.stderr[-1000:]}")
    return done.stdout


def options_in(text: str) -> list[str]:
    """Option strings of a help text: argparse's left column, or the usage of a shell script."""
    if "\noptions:" not in text:
        return sorted(set(re.findall(r"(?<=\[)--[\w-]+", text)))
    lines = [line[2:].split("  ")[0] for line in text.splitlines() if line.startswith("  -")]
    return sorted({option for line in lines for option in OPTION.findall(line)})


def positionals_in(text: str) -> list[str]:
    """Names of the arguments without a dash, in the order of the help text."""
    _, _, section = text.partition("\npositional arguments:\n")
    lines = section.split("\n\n")[0].splitlines()
    return [re.split(r" {2,}", line[2:])[0] for line in lines if re.match(r"  \S", line)]


def command_flags(root: Path, name: str) -> dict[str, list[str]]:
    """Options and arguments of a command."""
    text = help_of(root, name)
    return {"options": options_in(text), "positionals": positionals_in(text)}


def registered_names() -> dict[str, list[str]]:
    """Names of every kind of thing that fairseq knows: architectures, tasks, criterions, ..."""
    from fairseq.models import ARCH_MODEL_REGISTRY
    from fairseq.registry import REGISTRIES
    from fairseq.tasks import TASK_REGISTRY

    found = {kind: list(part["registry"]) for kind, part in REGISTRIES.items()}
    return {**found, "architecture": list(ARCH_MODEL_REGISTRY), "task": list(TASK_REGISTRY)}


def flags_of(registered: Any) -> list[str]:
    """Flags that a model, task or criterion adds to fairseq-train."""
    parser = argparse.ArgumentParser(add_help=False)
    registered.add_args(parser)
    # argparse has no public list of its actions.
    return [option for action in parser._actions for option in action.option_strings]


def values_of(architecture: str) -> dict[str, str]:
    """What an architecture's name alone sets, by the names of hydra, as text."""
    from fairseq.models import MODEL_DATACLASS_REGISTRY

    values = vars(MODEL_DATACLASS_REGISTRY[architecture]())
    return {name: str(value) for name, value in values.items() if name != "_name"}


def main(root: Path) -> None:
    """Print what golden_flags.json holds."""
    before = registered_names()
    from fairseq.criterions import CRITERION_REGISTRY
    from fairseq.models import ARCH_MODEL_REGISTRY
    from fairseq.tasks import TASK_REGISTRY

    import relpos_fairseq  # noqa: F401  registers the plugin
    from relpos_fairseq.cli.main import COMMANDS

    after = registered_names()
    added = {kind: sorted(set(names) - set(before[kind])) for kind, names in after.items()}
    found = {
        "commands": {name: command_flags(root, f"relpos {name}") for name in COMMANDS},
        "names": {kind: names for kind, names in added.items() if names},
        "model_flags": {name: sorted(flags_of(ARCH_MODEL_REGISTRY[name])) for name in MODELS},
        "task_flags": {name: sorted(flags_of(TASK_REGISTRY[name])) for name in added["task"]},
        "criterion_flags": {name: sorted(flags_of(CRITERION_REGISTRY[name])) for name in added["criterion"]},
        "values": {name: values_of(name) for name in added["architecture"]},
    }
    print(json.dumps(found, indent=1, sort_keys=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
