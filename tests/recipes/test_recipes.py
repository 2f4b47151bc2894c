"""Recipes say what they train: the released scripts' and the papers' numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fairseq.models import MODEL_DATACLASS_REGISTRY
from omegaconf import OmegaConf

import relpos_fairseq  # noqa: F401  registers the models
from helpers import commands as cli
from helpers import recipes

LM = cli.ROOT / "examples" / "language_modeling" / "config"
PAPERS = cli.CONFIGS / "papers"
NAMES = sorted(path.stem for path in PAPERS.glob("wmt1*.yaml"))
# layers, width, ffn, heads, memory, tokens a block, rows, updates: the released scripts' numbers.
RELEASED = {
    "wt103_base": (16, 410, 2100, 10, 150, 150, 60, 200_000),
    "wt103_large": (18, 1024, 4096, 16, 384, 384, 128, 4_000_000),
    "enwik8": (12, 512, 2048, 8, 512, 512, 22, 400_000),
    "shakespeare": (3, 128, 384, 4, 128, 64, 24, 600),
    "words": (2, 64, 128, 4, 64, 64, 16, 240),
}
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


def composed(folder: Path, name: str):
    """The config that fairseq-hydra-train makes of a recipe."""
    return recipes.composed(folder, name, f"common.user_dir={cli.USER_DIR}")


def test_every_recipe_is_tested():
    assert {path.stem for path in LM.glob("*.yaml")} == set(RELEASED)
    assert NAMES == sorted(f"{pair}_{scheme}" for pair in PAIRS for scheme in TABLE)
    readme = (cli.CONFIGS.parent / "README.md").read_text()
    for scheme, scores in TABLE.items():
        assert f"| `{scheme}` | {' | '.join(scores)} |" in readme


@pytest.mark.parametrize("recipe", RELEASED)
def test_recipe_is_the_released_script(recipe):
    cfg = composed(LM, recipe)
    model = OmegaConf.merge(vars(MODEL_DATACLASS_REGISTRY[cfg.model._name]()), cfg.model)
    assert RELEASED[recipe] == (
        *(model.decoder_layers, model.decoder_embed_dim, model.decoder_ffn_embed_dim),
        *(model.decoder_attention_heads, model.mem_len, cfg.task.tokens_per_sample),
        *(cfg.dataset.batch_size, cfg.optimization.max_update),
    )
    text = (LM / f"{recipe}.yaml").read_text()
    assert all(len(line) <= 112 for line in text.splitlines())
    if "Not run here" in text:
        assert re.search(r"Dai et al. 2019: \d+M parameters", text)


@pytest.mark.parametrize("name", NAMES)
def test_recipe_is_its_row(name):
    pair, scheme = name[:11], name[12:]
    cfg = composed(PAPERS, name)
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
    cfg = composed(cli.CONFIGS, name)
    model = cfg.model
    sizes = [model.get(f"{side}_ffn_embed_dim", 4096) for side in ("encoder", "decoder")]
    assert sizes == [inner, inner] and model._name.endswith("_big") == (width == 1024)
    assert (model.position_scheme, model.position_clip_distance) == ("shaw", clip)
    assert (model.position_share, model.dropout) == (share, dropout)
    assert cfg.optimization.max_update == updates and cfg.optimizer.adam_eps == 1e-9
    assert cfg.optimization.lr[0] == pytest.approx((width * 4000) ** -0.5, rel=0.02)
    assert cfg.task.data == "data/wmt14.en-de/data-bin"
