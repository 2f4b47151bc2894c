"""The recipes of examples/language_modeling: every one is a config that trains."""

from __future__ import annotations

import re

import pytest

import relpos_fairseq  # noqa: F401  registers the models
from helpers.commands import ROOT, USER_DIR
from helpers.segment_corpus import write_corpus

CONFIGS = ROOT / "examples" / "language_modeling" / "config"
# layers, width, ffn, heads, memory, tokens a block, rows, updates: the released scripts' numbers.
RECIPES = {
    "wt103_base": (16, 410, 2100, 10, 150, 150, 60, 200_000),
    "wt103_large": (18, 1024, 4096, 16, 384, 384, 128, 4_000_000),
    "enwik8": (12, 512, 2048, 8, 512, 512, 22, 400_000),
    "shakespeare": (3, 128, 384, 4, 128, 64, 24, 600),
    "words": (2, 64, 128, 4, 64, 64, 16, 240),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("recipes"))


def composed(corpus, recipe: str, *overrides: str):
    """The config that fairseq-hydra-train makes of a recipe."""
    from fairseq.dataclass.initialize import hydra_init
    from hydra import compose, initialize_config_dir

    hydra_init(recipe)
    data = [f"task.data={corpus}", f"common.user_dir={USER_DIR}"]
    with initialize_config_dir(str(CONFIGS), version_base="1.1"):
        return compose(recipe, overrides=[*data, *overrides])


def test_every_recipe_is_tested():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(RECIPES)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_says_what_it_trains(corpus, recipe):
    from fairseq.models import MODEL_DATACLASS_REGISTRY
    from omegaconf import OmegaConf

    cfg = composed(corpus, recipe)
    model = OmegaConf.merge(vars(MODEL_DATACLASS_REGISTRY[cfg.model._name]()), cfg.model)
    assert RECIPES[recipe] == (
        *(model.decoder_layers, model.decoder_embed_dim, model.decoder_ffn_embed_dim),
        *(model.decoder_attention_heads, model.mem_len, cfg.task.tokens_per_sample),
        *(cfg.dataset.batch_size, cfg.optimization.max_update),
    )
    text = (CONFIGS / f"{recipe}.yaml").read_text()
    assert all(len(line) <= 112 for line in text.splitlines())
    if "Not run here" in text:
        assert re.search(r"Dai et al. 2019: \d+M parameters", text)
