"""What fairseq-hydra-train makes of the recipes in examples/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

RECIPES = ("roberta/config/glue", "translation/config/papers")  # a base and what differs


def composed(folder: Path, name: str, *overrides: str, hydra: bool = False):
    """Return the config that `fairseq-hydra-train --config-dir folder --config-name name` makes.

    Args:
        folder: of recipes.
        name: a recipe's.
        overrides: as on the command line.
        hydra: whether hydra's own part is in it.
    """
    from fairseq.dataclass.initialize import hydra_init
    from hydra import compose, initialize_config_dir

    hydra_init(name)
    with initialize_config_dir(str(folder.resolve()), version_base="1.1"):
        return compose(name, overrides=list(overrides), return_hydra_config=hydra)


def said(folder: Path, name: str) -> dict[str, Any]:
    """Return what a recipe changes of fairseq's defaults, by dotted names, and where it writes."""
    from fairseq.dataclass.configs import FairseqConfig
    from omegaconf import MISSING, OmegaConf

    found = flattened(OmegaConf.to_container(composed(folder, name, hydra=True)))
    default = flattened(OmegaConf.to_container(OmegaConf.structured(FairseqConfig)))
    kept = ("hydra.job.chdir", "hydra.run.dir")
    left = ("model.", "task.eval_bleu")  # ??? here: what is not said
    found = {k: v for k, v in found.items() if not (v == MISSING and k.startswith(left))}
    return {
        key: value
        for key, value in sorted(found.items())
        if key in kept or not (key.startswith("hydra.") or default.get(key, "") == value)
    }


def flattened(values: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one, with dotted names."""
    if not isinstance(values, dict):
        return {prefix: getattr(values, "value", values)}
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flattened(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def names(folder: Path) -> list[str]:
    """Return the recipes of a folder that are launched; a base is not."""
    files = (path.stem for path in folder.glob("*.yaml"))
    return sorted(name for name in files if "base" not in name)
