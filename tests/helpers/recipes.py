"""What fairseq-hydra-train makes of the recipes in examples/."""

from __future__ import annotations

from pathlib import Path


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
