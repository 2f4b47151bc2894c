"""What users type: names and flags that fairseq is given.

tests/cli/golden_flags.json holds them as version 7983f42 had them.  It is not made anew when the
code changes; a name may be added to it by hand.  It was made by

    PYTHONPATH=OLD python tests/helpers/golden_flags.py > tests/cli/golden_flags.json

where OLD is a worktree of that version.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

MODELS = [f"relpos_{name}" for name in ("transformer", "transformer_lm", "transformer_xl", "roberta")]


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


def main() -> None:
    """Print what golden_flags.json holds."""
    before = registered_names()
    from fairseq.criterions import CRITERION_REGISTRY
    from fairseq.models import ARCH_MODEL_REGISTRY
    from fairseq.tasks import TASK_REGISTRY

    import relpos_fairseq  # noqa: F401  registers the plugin

    after = registered_names()
    added = {kind: sorted(set(names) - set(before[kind])) for kind, names in after.items()}
    found = {
        "names": {kind: names for kind, names in added.items() if names},
        "model_flags": {name: sorted(flags_of(ARCH_MODEL_REGISTRY[name])) for name in MODELS},
        "task_flags": {name: sorted(flags_of(TASK_REGISTRY[name])) for name in added["task"]},
        "criterion_flags": {name: sorted(flags_of(CRITERION_REGISTRY[name])) for name in added["criterion"]},
        "values": {name: values_of(name) for name in added["architecture"]},
    }
    print(json.dumps(found, indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
