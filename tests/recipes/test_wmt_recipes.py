"""The recipes of the papers' translation table: each says what it trains, and trains."""

from __future__ import annotations

import pytest

from helpers import commands as cli
from helpers import recipes

PAPERS = cli.CONFIGS / "papers"
NAMES = sorted(path.stem for path in PAPERS.glob("wmt1*.yaml"))
# Shaw et al. 2018, section 4.1: feed-forward width, clip, sharing, dropout, updates, rate d^-0.5.
SHAW = {"wmt14_shaw": (1024, 16, "none", 0.1, 100_000, 512), "wmt14_shaw_big": (4096, 8, "heads", 0.3, 300_000, 1024)}
# Chen et al. 2021, table 6.
TABLE = {
    "sinusoidal": ("28.33", "31.82", "21.15"),
    "shaw": ("29.23", "32.37", "21.47"),
    "t5": ("29.17", "31.81", "21.31"),
    "rel_scalar": ("29.22", "31.91", "21.71"),
}
PAIRS = ("wmt15_en_de", "wmt15_de_en", "wmt18_en_cs")


def composed(name: str, *overrides: str):
    """The config that fairseq-hydra-train makes of a recipe."""
    return recipes.composed(PAPERS, name, f"common.user_dir={cli.USER_DIR}", *overrides)


def test_a_recipe_for_every_row():
    assert NAMES == sorted(f"{pair}_{scheme}" for pair in PAIRS for scheme in TABLE)
    readme = (cli.CONFIGS.parent / "README.md").read_text()
    for scheme, scores in TABLE.items():
        assert f"| `{scheme}` | {' | '.join(scores)} |" in readme


@pytest.mark.parametrize("name", NAMES)
def test_recipe_is_its_row(name):
    pair, scheme = name[:11], name[12:]
    cfg = composed(name)
    year, source, target = pair.split("_")
    assert (cfg.task.source_lang, cfg.task.target_lang) == (source, target)
    assert cfg.model.position_scheme == scheme
    if scheme == "rel_scalar":  # Chen2021, section 3: "without bucketing and clipping"
        assert cfg.model.position_clip_distance == 0
    assert cfg.model._name == "relpos_transformer_wmt_en_de"
    assert cfg.task.data == f"data/{year}.{source}-{target}/data-bin"
    assert cfg.checkpoint.save_dir == f"checkpoints/{name}"
    assert cfg.dataset.max_tokens * cfg.optimization.update_freq[0] == 32768
    head = (PAPERS / f"{name}.yaml").read_text().split("\ndefaults:")[0]
    assert head.rstrip().endswith(f"--config-name {name}")
    assert TABLE[scheme][PAIRS.index(pair)] in head


@pytest.mark.parametrize("name", SHAW)
def test_recipe_is_shaws(name):
    inner, clip, share, dropout, updates, width = SHAW[name]
    cfg = recipes.composed(cli.CONFIGS, name, f"common.user_dir={cli.USER_DIR}")
    model = cfg.model
    sizes = [model.get(f"{side}_ffn_embed_dim", 4096) for side in ("encoder", "decoder")]
    assert sizes == [inner, inner] and model._name.endswith("_big") == (width == 1024)
    assert (model.position_scheme, model.position_clip_distance) == ("shaw", clip)
    assert (model.position_share, model.dropout) == (share, dropout)
    assert cfg.optimization.max_update == updates and cfg.optimizer.adam_eps == 1e-9
    assert cfg.optimization.lr[0] == pytest.approx((width * 4000) ** -0.5, rel=0.02)
    assert cfg.task.data == "data/wmt14.en-de/data-bin"
