"""Classes of exported models, built small without a folder; and those that generate beside fairseq's model of them."""

from __future__ import annotations

from typing import Any

import torch

from helpers.lm_models import lm_config, randomized, small_xl
from helpers.models import small_config, small_model, small_task
from helpers.roberta import SMALL
from relpos_fairseq.export import transformers as ours
from relpos_fairseq.models.configs import RelPosRobertaConfig, RelPosTransformerLMConfig, RelPosTransformerXLConfig
from relpos_fairseq.models.relpos_transformer_lm import RelPosTransformerLanguageModel
from relpos_fairseq.schemes import REGISTER

ROWS, SEGMENT = 24, 16
CAUSAL, MEMORY, SEQ2SEQ = ours.RelPosForCausalLM, ours.RelPosWithMemoryForCausalLM, ours.RelPosForSeq2SeqLM
MODEL, CHOICES, ANSWERS = ours.RelPosModel, ours.RelPosForMultipleChoice, ours.RelPosForQuestionAnswering
ENCODERS = list(dict.fromkeys(ours.AUTO.values()))
LANGUAGE = [CAUSAL, MEMORY]
GENERATING = [*LANGUAGE, SEQ2SEQ]
EVERY = [*ENCODERS, *GENERATING]


def values_of(config: Any, **values: Any) -> dict[str, Any]:
    """The options of a config, some of them changed."""
    for name, value in values.items():
        assert hasattr(config, name), name
        setattr(config, name, value)
    return {name: value for name, value in vars(config).items() if not name.startswith("_")}


def built(cls: type, scheme: str = "m4", **values: Any) -> Any:
    """A small model of one of our classes, in fp64 and evaluation mode."""
    torch.manual_seed(1)
    if issubclass(cls, ours.RelPosPreTrained):
        own = values_of(RelPosRobertaConfig(), **SMALL, max_positions=40, position_scheme=scheme, **values)
        config = ours.RelPosConfig(own, ROWS, num_labels=3)
    elif cls is SEQ2SEQ:
        own = values_of(small_config(position_scheme=scheme, **values))
        config = ours.RelPosTranslationConfig(own, ROWS, source_rows=ROWS, eos_token_id=2)
    elif cls is MEMORY:
        values = {"tokens_per_sample": SEGMENT, "mem_len": 20, "position_scheme": "transformer_xl"} | values
        own = values_of(lm_config(RelPosTransformerXLConfig, **values))
        config = ours.RelPosMemoryConfig(own, ROWS, pad_token_id=1)
    else:
        own = values_of(lm_config(RelPosTransformerLMConfig, position_scheme=scheme, **values))
        config = ours.RelPosLanguageConfig(own, ROWS)
    return cls(config).double().eval()


def drawn(cls: type, length: int = 7) -> dict[str, torch.Tensor]:
    """Input of a model."""
    shape = (2, 3, length) if cls is CHOICES else (2, length)
    draw = torch.Generator().manual_seed(5)
    given = {"input_ids": torch.randint(4, ROWS, shape, generator=draw)}
    if cls is SEQ2SEQ:
        given["decoder_input_ids"] = torch.randint(4, ROWS, (2, 5), generator=draw)
    return given


def _with_weights(twin: Any, model: Any) -> Any:
    twin.model.load_state_dict(model.state_dict())
    return twin


def translation(scheme: str, seed: int) -> tuple[Any, Any]:
    """A small model, of which most let sentences end, and its twin for transformers."""
    values = {"max_source_positions": 64, "max_target_positions": 64}
    if scheme in REGISTER and REGISTER[scheme].causal_only:
        values["decoder_position_scheme"], scheme = scheme, "none"
    model = ending(randomized(small_model(seed, position_scheme=scheme, **values)))
    return model, _with_weights(built(SEQ2SEQ, scheme, **values), model)


def language(scheme: str, seed: int) -> tuple[Any, Any]:
    """The same for a language model."""
    config = lm_config(RelPosTransformerLMConfig, position_scheme=scheme)
    torch.manual_seed(seed)
    model = ending(randomized(RelPosTransformerLanguageModel.build_model(config, small_task())))
    return model, _with_weights(built(CAUSAL, scheme), model)


def with_memory(scheme: str) -> tuple[Any, Any, torch.Tensor]:
    """A small model of segments of 4 tokens, its twin for transformers, and prompts of 6."""
    values = {"mem_len": 6, "tokens_per_sample": 4, "position_scheme": scheme}
    model = randomized(small_xl(**values))
    prompt = torch.randint(4, ROWS, (3, 6), generator=torch.Generator().manual_seed(6))
    return model, _with_weights(built(MEMORY, **values), model), prompt


@torch.no_grad()
def ending(model: Any) -> Any:
    """Let tokens depend on what is before them, and </s> be as likely as the best of others."""
    draw = torch.Generator().manual_seed(7)
    decoder = model.decoder
    decoder.embed_tokens.weight[4:] = 1.5 * torch.randn(20, 16, generator=draw).double()
    rows = 0.5 * torch.randn(24, 16, generator=draw).double()
    tokens = torch.randint(4, 24, (8, 12), generator=draw)
    encoded = model.encoder(tokens) if hasattr(model, "encoder") else None
    features = decoder.extract_features(tokens, encoded)[0].flatten(0, 1)
    common = features.mean(0)
    rows -= (rows @ common)[:, None] * common / common.square().sum()
    likely = (features @ rows.T).amax(-1).mean()
    rows[2] = 0.5 * rows[2] + 0.9 * likely * common / common.square().sum()
    decoder.output_projection.weight.copy_(rows)
    return model
