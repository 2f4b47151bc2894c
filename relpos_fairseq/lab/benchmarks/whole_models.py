"""Build whole models for translation and masked language modelling, and return functions to be timed: their steps.

Translation compares this package's model with fairseq's own `transformer`.  Both have the same sizes, random sentences
and beam search, and both train with fairseq's own `adam` and `label_smoothed_cross_entropy`.  This package's optimizer
and loss are timed separately, with fairseq's model.  Masked language modelling trains `relpos_roberta` with any scheme
and any number of layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from fairseq import utils
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.data import Dictionary
from fairseq.data.language_pair_dataset import collate
from fairseq.models.transformer import TransformerModelBase
from fairseq.optim.adam import FairseqAdam, FairseqAdamConfig
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor, nn

from relpos_fairseq.criterions.cross_entropy import RelPosLabelSmoothedCrossEntropyCriterion
from relpos_fairseq.lab.benchmarks.workload import scheme_and_backend, takes_clip
from relpos_fairseq.models.configs import RelPosRobertaConfig
from relpos_fairseq.models.relpos_roberta import SIZES as ROBERTA_SIZES
from relpos_fairseq.models.relpos_roberta import RelPosRobertaModel
from relpos_fairseq.models.relpos_transformer import SIZES, RelPosTransformerConfig, RelPosTransformerModel, nested
from relpos_fairseq.optim.adam import RelPosAdam

# ---------------------------------------------------------------------------------------------------------------------
# Translation.

FAIRSEQ = "fairseq"  # name of the row for fairseq's own transformer
FAIRSEQS_OWN = (FairseqAdam, LabelSmoothedCrossEntropyCriterion)
# Rows for training only: fairseq's transformer with this package's optimizer, with its loss, and with both.
GAINS = {
    f"{FAIRSEQ}, relpos_adam": (RelPosAdam, FAIRSEQS_OWN[1]),
    f"{FAIRSEQ}, relpos_label_smoothed_cross_entropy": (FAIRSEQS_OWN[0], RelPosLabelSmoothedCrossEntropyCriterion),
    f"{FAIRSEQ}, both": (RelPosAdam, RelPosLabelSmoothedCrossEntropyCriterion),
}
PREFIX = "relpos_transformer"


MULTI30K = {"embed_dim": 256, "ffn_embed_dim": 512, "attention_heads": 4, "layers": 3}  # as its example has them
MODEL_SIZES = {
    "multi30k": {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in MULTI30K.items()},
    "base": {},
    **{name.removeprefix(PREFIX + "_"): values for name, values in SIZES.items() if values},
}


@dataclass(frozen=True)
class TranslationSetting:
    """Sizes of a translation model and of a batch of sentences."""

    size: str  # a name of MODEL_SIZES
    vocab_size: int  # words of the vocabulary that both languages share
    batch_size: int  # sentences of a batch
    length: int  # tokens of the longest sentence; the shortest has three quarters of it
    beam: int  # width of the beam search
    dropout: float  # in training
    dtype: torch.dtype  # of parameters
    device: torch.device  # where it runs


def small_task(words: int) -> SimpleNamespace:
    """Return a stand-in for fairseq's task: one dictionary of `words` made-up words for both languages."""
    dictionary = Dictionary()
    for number in range(words):
        dictionary.add_symbol(f"w{number}")
    return SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)


def translation_model(name: str, setting: TranslationSetting) -> nn.Module:
    """Build the translation model of a row, with seeded initial values.

    `name` is `FAIRSEQ`, or a scheme and perhaps a backend as `label_of` joins them.
    """
    config = RelPosTransformerConfig()
    values = MODEL_SIZES[setting.size] | {"share_all_embeddings": True, "dropout": setting.dropout}
    if name != FAIRSEQ:
        values["position_scheme"], values["attention_backend"] = scheme_and_backend(name)
    for key, value in values.items():
        setattr(config, key, value)
    torch.manual_seed(1)
    task = small_task(setting.vocab_size)
    if name == FAIRSEQ:
        own = nested(config)
        own.no_token_positional_embeddings = False
        model = TransformerModelBase.build_model(own, task)
    else:
        model = RelPosTransformerModel.build_model(config, task)
    return model.to(setting.device, setting.dtype)


def sentences(setting: TranslationSetting) -> dict:
    """Return a batch of random sentence pairs as fairseq collates it, the same in every run."""
    generator = torch.Generator().manual_seed(2)
    shortest = max(1, setting.length * 3 // 4)

    def sentence() -> torch.Tensor:
        count = int(torch.randint(shortest, setting.length + 1, (), generator=generator))
        words = torch.randint(4, setting.vocab_size + 4, (count,), generator=generator)
        words[-1] = 2
        return words

    samples = [{"id": row, "source": sentence(), "target": sentence()} for row in range(setting.batch_size)]
    batch = collate(samples, pad_idx=1, eos_idx=2, left_pad_source=True)
    return utils.move_to_cuda(batch) if setting.device.type == "cuda" else batch


def make_optimizer(kind: type[FairseqAdam], model: Any) -> FairseqAdam:
    """Return an optimizer of the class `kind`, with a learning rate so small that weights hardly change."""
    config = FairseqAdamConfig(adam_betas="(0.9, 0.98)", lr=[1e-6])
    config.tpu = False
    return kind(config, [part for part in model.parameters() if part.requires_grad])


def translation_training_step(name: str, setting: TranslationSetting) -> Callable[[], object]:
    """Return a function that makes one training step (forward, loss, backward, optimizer) and returns the loss.

    Optimizer and loss are fairseq's own for every model; rows of `GAINS` replace one or both.
    """
    optimizer_kind, criterion_kind = GAINS.get(name, FAIRSEQS_OWN)
    model = translation_model(FAIRSEQ if name in GAINS else name, setting).train()
    task = small_task(setting.vocab_size)
    criterion = criterion_kind(task, False, label_smoothing=0.1)
    optimizer = make_optimizer(optimizer_kind, model)
    batch = sentences(setting)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss, size, _ = criterion(model, batch)
        (loss / size).backward()
        optimizer.step()
        return loss.detach() / size

    return step


def generation(name: str, setting: TranslationSetting) -> Callable[[], object]:
    """Return a function that translates a batch by beam search, into exactly `length` tokens for each sentence."""
    model = translation_model(name, setting).eval()
    model.make_generation_fast_(beamable_mm_beam_size=None, need_attn=False)
    words = small_task(setting.vocab_size).target_dictionary
    search = SequenceGenerator([model], words, beam_size=setting.beam, max_len_b=setting.length, min_len=setting.length)
    batch = sentences(setting)
    return lambda: search.generate([model], batch)


# ---------------------------------------------------------------------------------------------------------------------
# Masked language modelling.

MASKED = 0.15  # of the tokens, as BERT
SPECIAL = 5  # <s>, <pad>, </s>, <unk> and <mask>


@dataclass(frozen=True)
class MaskedLMSetting:
    """Sizes of a masked language model and of a batch."""

    size: str  # `base` or `small`: a named size of relpos_roberta
    layers: int  # number of layers; 0: as many as `size` has
    vocab_size: int  # entries of the vocabulary, with special ones
    positions: int  # positions that tables cover
    clip: int | None  # clip distance of schemes that take one; None: their own default
    batch_size: int  # rows
    length: int  # tokens of a row
    dropout: float  # everywhere, in training
    dtype: torch.dtype  # of parameters
    device: torch.device  # where it runs


def sizes_of(size: str) -> dict[str, int]:
    """Return width, feed-forward width, heads and layers of a named size."""
    return ROBERTA_SIZES[f"relpos_roberta_{size}"]


def masked_lm(name: str, setting: MaskedLMSetting) -> RelPosRobertaModel:
    """Build the masked language model of a row, with seeded initial values.

    `name` is a scheme and perhaps a backend, as `label_of` joins them.
    """
    dictionary = small_task(setting.vocab_size - SPECIAL).source_dictionary
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


def count_parameters(model: Any) -> int:
    """Return the number of parameters, shared ones counted once."""
    return sum(part.numel() for part in model.parameters())


def _text(setting: MaskedLMSetting) -> tuple[Tensor, Tensor]:
    """Return random tokens (B, T), and True at those that are masked (B, T), the same in every run."""
    generator = torch.Generator().manual_seed(4)
    shape = (setting.batch_size, setting.length)
    tokens = torch.randint(4, setting.vocab_size - 1, shape, generator=generator)
    masked = torch.rand(shape, generator=generator) < MASKED
    masked[:, 0] = True
    return tokens.to(setting.device), masked.to(setting.device)


def masked_lm_training_step(name: str, setting: MaskedLMSetting) -> Callable[[], object]:
    """Return a function that makes one training step (forward, loss of masked tokens, backward, `relpos_adam`)."""
    model = masked_lm(name, setting).train()
    optimizer = make_optimizer(RelPosAdam, model)
    tokens, masked = _text(setting)
    inputs = tokens.masked_fill(masked, setting.vocab_size - 1)

    def step() -> float:
        logits, _ = model(inputs, masked_tokens=masked)
        loss = F.cross_entropy(logits.float(), tokens[masked])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def masked_lm_inference(name: str, setting: MaskedLMSetting) -> Callable[[], object]:
    """Return a function that computes the features (last hidden states) of all tokens, without gradients."""
    model = masked_lm(name, setting).eval()
    tokens, _ = _text(setting)
    return torch.no_grad()(lambda: model(tokens, features_only=True)[0])
