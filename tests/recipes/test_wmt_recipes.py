"""The recipes of the papers' translation table: each says what it trains, and trains."""

from __future__ import annotations

import pytest

from helpers import commands as cli
from helpers import recipes

PAPERS = cli.CONFIGS / "papers"
NAMES = sorted(path.stem for path in PAPERS.glob("wmt1*.yaml"))
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
    assert cfg.model._name == "relpos_transformer_wmt_en_de"
    assert cfg.task.data == f"data/{year}.{source}-{target}/data-bin"
    assert cfg.checkpoint.save_dir == f"checkpoints/{name}"
    assert cfg.dataset.max_tokens * cfg.optimization.update_freq[0] == 32768
    head = (PAPERS / f"{name}.yaml").read_text().split("\ndefaults:")[0]
    assert head.rstrip().endswith(f"--config-name {name}")
    assert TABLE[scheme][PAIRS.index(pair)] in head


@pytest.mark.slow
def test_recipe_trains(tmp_path):
    from fairseq_cli.hydra_train import _hydra_main

    corpus = cli.write_corpus(tmp_path / "corpus")
    shape = {"embed_dim": 16, "ffn_embed_dim": 16, "layers": 1, "attention_heads": 2}
    small = [f"+model.{side}_{k}={v}" for side in ("encoder", "decoder") for k, v in shape.items()]
    data = [f"task.data={corpus.binary}", "task.source_lang=src", "task.target_lang=tgt"]
    short = ["optimization.max_update=1", "dataset.num_workers=0", "++common.cpu=true"]
    save = f"checkpoint.save_dir={tmp_path / 'saved'}"
    cfg = composed("wmt15_en_de_rel_scalar", *small, *data, *short, save)
    with cli.captured() as stream:
        _hydra_main(cfg)
    assert "num_updates: 1" in stream.getvalue()
    saved = cli.load(tmp_path / "saved" / "checkpoint_last.pt")["cfg"]["model"]
    assert saved["position_scheme"] == "rel_scalar" and saved["encoder_embed_dim"] == 16
