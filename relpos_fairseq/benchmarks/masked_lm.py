"""RoBERTa as cost tables run it: the real model of a scheme, with as many layers as one likes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F  # noqa: N812
from fairseq.data import Dictionary
from torch import Tensor, nn

from relpos_fairseq.benchmarks.whole_models import make_optimizer
from relpos_fairseq.benchmarks.workload import scheme_and_backend, takes_clip
from relpos_fairseq.models.configs import RelPosRobertaConfig
from relpos_fairseq.models.relpos_roberta import SIZES, RelPosRobertaModel
from relpos_fairseq.optim.adam import RelPosAdam

MASKED = 0.15  # of the tokens, as BERT
SPECIAL = 5  # <s>, <pad>, </s>, <unk> and <mask>


@dataclass(frozen=True)
class MaskedLMSetting:
    """A step of masked language modelling."""

    size: str  # `base` or `small`: a named size of relpos_roberta
    layers: int  # how many of its layers; 0: all
    vocabulary: int  # entries of the vocabulary, with special ones
    positions: int  # that tables cover
    clip: int | None  # clip distance of schemes that take one; None: their own default
    batch: int  # rows
    length: int  # tokens of each
    dropout: float  # everywhere, in training
    dtype: torch.dtype  # of parameters
    device: torch.device  # where it runs


def sizes_of(size: str) -> dict[str, int]:
    """Return width, feed-forward width, heads and layers of a named size."""
    return SIZES[f"relpos_roberta_{size}"]


def masked_lm(name: str, setting: MaskedLMSetting) -> RelPosRobertaModel:
    """Build the model of a scheme (and backend: `label_of`), with seeded initial values."""
    dictionary = Dictionary()
    for number in range(setting.vocabulary - SPECIAL):
        dictionary.add_symbol(f"w{number}")
    dictionary.add_symbol("<mask>")
    task = SimpleNamespace(source_dictionary=dictionary, max_positions=lambda: setting.positions)
    config = RelPosRobertaConfig()
    for size, value in sizes_of(setting.size).items():
        setattr(config, size, value)
    config.encoder_layers = setting.layers or config.encoder_layers
    scheme, config.attention_backend = scheme_and_backend(name)
    config.position_scheme = scheme
    config.dropout = config.attention_dropout = setting.dropout
    if setting.clip is not None and takes_clip(scheme):
        config.position_clip_distance = str(setting.clip)
    torch.manual_seed(1)
    return RelPosRobertaModel.build_model(config, task).to(setting.device, setting.dtype)


def count_parameters(model: nn.Module) -> int:
    """Count all parameters, shared ones once."""
    return sum(part.numel() for part in model.parameters())


def _text(setting: MaskedLMSetting) -> tuple[Tensor, Tensor]:
    """Return (B, T) tokens and which of them are masked, the same in every run."""
    generator = torch.Generator().manual_seed(4)
    shape = (setting.batch, setting.length)
    tokens = torch.randint(4, setting.vocabulary - 1, shape, generator=generator)
    masked = torch.rand(shape, generator=generator) < MASKED
    masked[:, 0] = True
    return tokens.to(setting.device), masked.to(setting.device)


def masked_lm_training_step(name: str, setting: MaskedLMSetting) -> Callable[[], object]:
    """Return a step: forward, loss of the masked tokens, backward, `relpos_adam`."""
    model = masked_lm(name, setting).train()
    optimizer = make_optimizer(RelPosAdam, model)
    tokens, masked = _text(setting)
    inputs = tokens.masked_fill(masked, setting.vocabulary - 1)

    def step() -> float:
        logits, _ = model(inputs, masked_tokens=masked)
        loss = F.cross_entropy(logits.float(), tokens[masked])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def masked_lm_inference(name: str, setting: MaskedLMSetting) -> Callable[[], object]:
    """Return a forward pass to the features of every token."""
    model = masked_lm(name, setting).eval()
    tokens, _ = _text(setting)
    return torch.no_grad()(lambda: model(tokens, features_only=True)[0])
