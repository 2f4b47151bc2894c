"""Small language models of the tests, built without a command line."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cases import randomize
from helpers.models import config_of, small_task
from relpos_fairseq.models.configs import RelPosTransformerLMConfig, RelPosTransformerXLConfig
from relpos_fairseq.models.relpos_transformer_lm import RelPosLanguageModel, RelPosTransformerLanguageModel
from relpos_fairseq.models.relpos_transformer_xl import RelPosTransformerXLModel
from relpos_fairseq.schemes import REGISTER

SMALL = {
    "decoder_embed_dim": 16,
    "decoder_ffn_embed_dim": 24,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "dropout": 0.0,
    "max_target_positions": 64,
}
WORDS = 20
# Schemes that a language model may use with memory, and some hybrids of them.
RELATIVE = [name for name, scheme in REGISTER.items() if not scheme.absolute]
CARRYING = (*RELATIVE, "rope+m4", "m2+m4m+shaw", "transformer_xl+m2+t5", "rope+t5/t5+m4")
ABSOLUTE = [name for name, scheme in REGISTER.items() if scheme.absolute]


def lm_config(base: type, **values: Any) -> Any:
    """A flat config of a small model."""
    return config_of(base, **(SMALL | values))


def randomized(model: RelPosLanguageModel) -> RelPosLanguageModel:
    """The model in fp64 and evaluation mode, every parameter far from neutral."""
    model = model.double().eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise * 0.2)
    for name, module in model.named_modules():
        if name.endswith((".position", ".positions")):
            randomize(module, len(name))
    return model


def small_lm(words: int = WORDS, **values: Any) -> RelPosTransformerLanguageModel:
    """A small language model as it starts, in evaluation mode."""
    torch.manual_seed(1)
    config = lm_config(RelPosTransformerLMConfig, **values)
    return RelPosTransformerLanguageModel.build_model(config, small_task(words)).eval()


def small_xl(words: int = WORDS, **values: Any) -> RelPosTransformerXLModel:
    """A small model with memory as it starts, in evaluation mode."""
    torch.manual_seed(1)
    config = lm_config(RelPosTransformerXLConfig, **({"mem_len": 8} | values))
    return RelPosTransformerXLModel.build_model(config, small_task(words)).eval()


def stream(rows: int = 2, length: int = 12, seed: int = 0) -> Tensor:
    """(B, T) tokens without padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, 4 + WORDS, (rows, length), generator=generator)
