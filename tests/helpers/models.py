"""Small models of the tests, built without a command line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models.transformer import TransformerModelBase
from torch import Tensor, nn

from cases import randomize
from relpos_fairseq.models.relpos_transformer import RelPosTransformerConfig, RelPosTransformerModel, nested

SMALL = {
    "encoder_embed_dim": 16,
    "encoder_ffn_embed_dim": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_embed_dim": 16,
    "decoder_ffn_embed_dim": 24,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "dropout": 0.0,
}

BIASES = ("self_attn.q_proj.bias", "self_attn.k_proj.bias")


def small_task(words: int = 20) -> SimpleNamespace:
    """A task with a dictionary of `words` words for both languages."""
    dictionary = Dictionary()
    for number in range(words):
        dictionary.add_symbol(f"w{number}")
    return SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)


def config_of(base: type, **values: Any) -> Any:
    """A config with some of its fields changed."""
    config = base()
    for name, value in values.items():
        if not hasattr(config, name):
            raise AttributeError(f"no field {name}")
        setattr(config, name, value)
    return config


def small_config(**values: Any) -> RelPosTransformerConfig:
    """A flat config of a small model."""
    return config_of(RelPosTransformerConfig, **(SMALL | values))


def small_model(seed: int = 1, **values: Any) -> RelPosTransformerModel:
    """A small model in evaluation mode."""
    torch.manual_seed(seed)
    return RelPosTransformerModel.build_model(small_config(**values), small_task()).eval()


def fairseq_model(**values: Any) -> TransformerModelBase:
    """Fairseq's own transformer of the same sizes."""
    torch.manual_seed(1)
    config = nested(small_config(**values))
    config.no_token_positional_embeddings = False
    return TransformerModelBase.build_model(config, small_task()).eval()


def randomized(model: nn.Module) -> nn.Module:
    """The model with position parameters far from neutral."""
    for name, module in model.named_modules():
        if name.endswith(("position", "positions")):
            randomize(module, len(name))
    return model


def batch(rows: int = 3, length: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Source tokens padded left, and target tokens that begin with eos, padded right."""
    generator = torch.Generator().manual_seed(seed)
    source, target = (torch.randint(4, 24, (rows, length), generator=generator) for _ in range(2))
    source[:, -1] = 2
    target[:, 0] = 2
    source[1, :2] = 1
    target[1, -2:] = 1
    return source, target


def assert_same_start(plain: nn.Module, model: nn.Module, scheme: str) -> None:
    """All that a model of a scheme shares with a plain one starts equal.

    M4M alone sets biases of q and k.
    """
    without = dict(plain.named_parameters())
    for name, value in model.named_parameters():
        biased = "m4m" in scheme and name.endswith(BIASES)
        if name in without and not biased:
            assert torch.equal(without[name], value), name
        else:
            assert biased or ".position" in name, name
