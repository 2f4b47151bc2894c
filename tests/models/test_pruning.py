"""Models of some of a checkpoint's layers: each layer computes what it computes in the whole model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils, models
from omegaconf import OmegaConf
from torch import Tensor, nn

from helpers import lm_models, roberta
from helpers import models as translation
from relpos_fairseq.models.configs import RelPosRobertaConfig, RelPosTransformerLMConfig, RelPosTransformerXLConfig
from relpos_fairseq.models.pruning import pruning_of
from relpos_fairseq.models.relpos_transformer import RelPosTransformerConfig

LAYERS = 4
ONE, BOTH = ("decoder",), ("encoder", "decoder")
# By architecture: its config, sizes, and stacks.
KINDS: dict[str, tuple[type, dict[str, Any], tuple[str, ...]]] = {
    "relpos_transformer": (
        RelPosTransformerConfig,
        translation.SMALL | {"max_source_positions": 64, "max_target_positions": 64},
        BOTH,
    ),
    "relpos_transformer_lm": (RelPosTransformerLMConfig, lm_models.SMALL | {"tokens_per_sample": 64}, ONE),
    "relpos_transformer_xl": (
        RelPosTransformerXLConfig,
        lm_models.SMALL | {"tokens_per_sample": 64, "mem_len": 8},
        ONE,
    ),
    "relpos_roberta": (RelPosRobertaConfig, roberta.SMALL, ("encoder",)),
}
CASES = [
    ("relpos_transformer_lm", {"position_scheme": "alibi/rope"}, {"decoder": "0,2"}),
    ("relpos_transformer_lm", {"position_scheme": "alibi/rope"}, {"decoder": "2,1"}),
    ("relpos_transformer_lm", {"position_scheme": "alibi/rope", "position_rope_base": "50"}, {"decoder": "0,2"}),
    ("relpos_transformer_lm", {"position_scheme": "m4"}, {"decoder": "1,3"}),
    ("relpos_transformer_lm", {"position_scheme": "m4/t5", "position_share": "layers"}, {"decoder": "1,2,3"}),
    ("relpos_transformer_lm", {"position_scheme": "m4/t5", "position_share": "layers"}, {"decoder": "3"}),
    ("relpos_transformer_lm", {"position_scheme": "rope/deberta+t5/m4", "position_scale": "2"}, {"decoder": "0,1,3"}),
    ("relpos_transformer_lm", {"position_scheme": "rope/deberta/m4/t5"}, {"decoder": "1,3"}),
    ("relpos_transformer_lm", {"position_scheme": "rope/deberta/m4/deberta"}, {"decoder": "1,2,3"}),
    ("relpos_transformer_lm", {"position_scheme": "m4/ deberta"}, {"decoder": "0,2,3"}),
    ("relpos_transformer_lm", {"position_scheme": "alibi/rope/rope"}, {"decoder": "1,2"}),
    ("relpos_transformer_xl", {"position_scheme": "transformer_xl/rope"}, {"decoder": "1,2"}),
    ("relpos_transformer_xl", {"position_scheme": "none", "window_positions": "every"}, {"decoder": "0,2"}),
    ("relpos_transformer_xl", {"position_scheme": "none/t5", "window_positions": "first"}, {"decoder": "1,3"}),
    ("relpos_roberta", {"position_scheme": "alibi/rope"}, {"encoder": "0,2"}),
    (
        "relpos_roberta",
        {"position_scheme": "learned+m4/learned", "segment_encoding": "head", "segment_share": "layers"},
        {"encoder": "1,3"},
    ),
    (
        "relpos_roberta",
        {"position_scheme": "t5/rope", "position_share": "layers", "segment_encoding": "input"},
        {"encoder": "1,3"},
    ),
    ("relpos_transformer", {"position_scheme": "alibi/rope"}, {"decoder": "0,2"}),
    ("relpos_transformer", {"encoder_position_scheme": "t5/m4", "position_share": "layers"}, {"encoder": "1,3"}),
    ("relpos_transformer", {"position_scheme": "m4/rope"}, {"encoder": "0,2", "decoder": "1,2,3"}),
    ("relpos_transformer", {"position_scheme": "m4"}, {"encoder": "1"}),
]


def task() -> SimpleNamespace:
    return roberta.small_task()


def built(arch: str, **values: Any) -> tuple[nn.Module, Any]:
    """Return a model of four layers, every parameter far from neutral, and its config."""
    base, sizes, sides = KINDS[arch]
    config = vars(base()) | sizes | {f"{side}_layers": LAYERS for side in sides} | values | {"_name": arch}
    torch.manual_seed(2)
    cfg = OmegaConf.create({key: getattr(value, "value", value) for key, value in config.items()})
    return lm_models.randomized(models.build_model(cfg, task())), cfg


def save(model: nn.Module, cfg: Any, path: Path) -> Path:
    """Save a checkpoint, as far as loading reads it."""
    extra = {"train_iterator": {"epoch": 1}}
    state = {"cfg": {"model": OmegaConf.to_container(cfg)}, "model": model.state_dict()}
    torch.save(state | {"args": None, "optimizer_history": [{"best_loss": None}], "extra_state": extra}, path)
    return path


def load(path: Path, **overrides: str) -> tuple[nn.Module, Any]:
    """Load a checkpoint as fairseq's commands do, whose --model-overrides are `overrides`."""
    state = checkpoint_utils.load_checkpoint_to_cpu(str(path), overrides)
    model = models.build_model(state["cfg"].model, task(), from_checkpoint=True).double().eval()
    model.load_state_dict(state["model"], strict=True, model_cfg=state["cfg"].model)
    return model, state["cfg"].model


def stack_of(model: nn.Module, side: str) -> nn.Module:
    stack = getattr(model, side)
    return getattr(stack, "sentence_encoder", stack)


def pick(model: nn.Module, keep: dict[str, str]) -> None:
    """Take layers out of a whole model: those that stay keep their numbers, and with these their schemes."""
    for side, text in keep.items():
        stack = stack_of(model, side)
        numbers = sorted(int(number) for number in text.split(","))
        stack.layers = nn.ModuleList(stack.layers[number] for number in numbers)
        stack.num_layers = len(numbers)
        window = getattr(stack, "window", None)
        if window is not None and window.table is not None:
            window.table = nn.Parameter(window.table[numbers])


@torch.no_grad()
def scores(model: nn.Module, arch: str) -> Tensor:
    source, target = translation.batch()
    if arch == "relpos_transformer":
        return model(source, None, target)[0]
    if arch == "relpos_roberta":
        ids = roberta.tokens()
        segments = (ids == 2).cumsum(1).clamp(max=1)
        return model(ids, segments=segments)[0]
    return model(lm_models.stream())[0]


@pytest.mark.parametrize(("arch", "values", "keep"), CASES)
def test_layers_that_stay_compute_the_same(
    tmp_path: Path, arch: str, values: dict[str, Any], keep: dict[str, str]
) -> None:
    """As the whole model from which layers are taken out by hand; and what is saved of it loads without a flag."""
    whole, cfg = built(arch, **values)
    path = save(whole, cfg, tmp_path / "whole.pt")
    pruned, saved = load(path, **{f"{side}_layers_to_keep": text for side, text in keep.items()})
    pick(whole, keep)
    expected = scores(whole, arch)
    assert torch.equal(scores(pruned, arch), expected)
    for side, text in keep.items():
        assert saved[f"{side}_layers"] == len(stack_of(pruned, side).layers) == len(text.split(","))
    again, _ = load(save(pruned, saved, tmp_path / "pruned.pt"))
    assert torch.equal(scores(again, arch), expected)


def test_options_that_a_recipe_leaves_out() -> None:
    """They have the defaults of the size, by which layers are counted."""
    cfg = OmegaConf.create({"_name": "relpos_roberta_tiny", "position_scheme": "m4/t5", "encoder_layers_to_keep": "1"})
    model = models.build_model(cfg, task())
    assert stack_of(model, "encoder").positions.plan.name == cfg.position_scheme == "t5"
    assert (cfg.encoder_layers, cfg.encoder_layers_to_keep) == (1, None)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ("0,4", "give numbers of 0 to 3, each once"),
        ("0,0", "give numbers of 0 to 3, each once"),
        ("0;2", "separated by commas"),
        ("-1", "separated by commas"),
        ("0,", "separated by commas"),
    ],
)
def test_layers_that_are_none(keep: str, message: str) -> None:
    values = vars(RelPosTransformerLMConfig()) | {"decoder_layers": 4, "decoder_layers_to_keep": keep}
    with pytest.raises(ValueError, match=f"^--decoder-layers-to-keep {keep}: .*{message}"):
        pruning_of(values)


def test_a_scale_that_no_scheme_takes() -> None:
    values = {"encoder_layers": 4, "encoder_layers_to_keep": "1,3", "position_scheme": "learned+m4/learned"}
    with pytest.raises(ValueError, match="--encoder-layers-to-keep 1,3: .*--position-scale 2"):
        pruning_of(values | {"position_scale": "2"})
    assert pruning_of(values | {"position_scale": "1"}).options["position_scale"] == "auto"


def test_no_layers_to_keep_changes_nothing() -> None:
    values = vars(RelPosTransformerLMConfig())
    for keep in (None, ""):
        assert pruning_of(values | {"decoder_layers_to_keep": keep}).options == {}
