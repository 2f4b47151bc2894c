"""`relpos_transformer_lm`: fairseq's decoder-only transformer with any position scheme."""

from __future__ import annotations

from typing import Any

from fairseq import utils
from fairseq.models import FairseqLanguageModel
from fairseq.models.transformer import Embedding
from fairseq.modules import AdaptiveInput
from torch import Tensor, nn

from relpos_fairseq.core.placement import Placement, PositionMismatchError
from relpos_fairseq.models.configs import (
    LanguageModelFlags,
    RelPosTransformerLMConfig,
    add_flags,
    nested_decoder,
    register_sizes,
    widths,
)
from relpos_fairseq.models.decoder import AdaptiveModel, RelPosDecoder, decoder_positions


class ModelMismatchError(PositionMismatchError):
    """The checkpoint belongs to another model: its tensors have other names or shapes."""


class RelPosLMDecoder(RelPosDecoder):
    """A decoder without cross-attention."""

    @staticmethod
    def make_positions(cfg: Any) -> Placement:
        return decoder_positions(cfg, "language_model", sides=(), length_flag="--tokens-per-sample")


class RelPosLanguageModel(AdaptiveModel, FairseqLanguageModel):
    """Base class of the language models: builds them from flags, and checks the checkpoints that they load."""

    flags: type = LanguageModelFlags
    decoder_class: type[RelPosDecoder] = RelPosLMDecoder

    add_args = classmethod(add_flags)

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> RelPosLanguageModel:
        """Build the model from fairseq's flat config.

        Raises:
            ValueError: a flag is wrong, does not apply or contradicts another.
        """
        config = nested_decoder(cfg)
        embed_tokens = build_embedding(config, task.source_dictionary)
        words = task.target_dictionary
        _check_cutoff("--adaptive-softmax-cutoff", config.adaptive_softmax_cutoff, words)
        decoder = cls.decoder_class(config, words, embed_tokens, no_encoder_attn=True)
        return cls(decoder)

    def load_state_dict(
        self, state_dict: dict[str, Tensor], strict: bool = True, model_cfg: Any = None, args=None
    ) -> Any:
        """Load parameters as fairseq does, after a check that the checkpoint belongs to this model.

        There is no check if `strict` is false.

        Raises:
            ModelMismatchError: the checkpoint belongs to another model.
        """
        if strict:
            refuse_foreign(self.state_dict(), state_dict, type(self).__name__)
        return super().load_state_dict(state_dict, strict, model_cfg, args)


def build_embedding(cfg: Any, dictionary: Any) -> nn.Module:
    """Build the embedding of tokens: adaptive with --adaptive-input, else plain."""
    if not cfg.adaptive_input:
        return Embedding(len(dictionary), cfg.decoder.input_dim, dictionary.pad())
    return AdaptiveInput(
        len(dictionary),
        dictionary.pad(),
        cfg.decoder.input_dim,
        cfg.adaptive_input_factor,
        cfg.decoder.embed_dim,
        _check_cutoff("--adaptive-input-cutoff", cfg.adaptive_input_cutoff, dictionary),
        cfg.quant_noise.pq,
        cfg.quant_noise.pq_block_size,
    )


def _check_cutoff(flag: str, text: str | None, dictionary: Any) -> list[int]:
    """Parse the cut-offs of an adaptive embedding or softmax from the text given to `flag`; without text, none.

    Raises:
        ValueError: the cut-offs do not rise, or exceed the dictionary.
    """
    if text is None:
        return []
    cutoff = utils.eval_str_list(text, type=int)
    if cutoff != sorted(set(cutoff)) or cutoff[0] < 1:
        raise ValueError(f"{flag} must be rising numbers, got {text}")
    if cutoff[-1] > len(dictionary):
        raise ValueError(f"{flag} {text}: the dictionary has only {len(dictionary):,} types; give cut-offs below that")
    return cutoff


def refuse_foreign(own: dict[str, Tensor], saved: dict[str, Tensor], model: str) -> None:
    """Raise an error if a checkpoint's tensors have other names or shapes than the model's.

    Tensors of positions are not compared here: their placement checks them.

    Args:
        own: the model's state dict.
        saved: the checkpoint's.
        model: name of the model's class, for the message.

    Raises:
        ModelMismatchError: names one tensor that differs.
    """
    ours = {name: value for name, value in own.items() if ".position" not in name}
    theirs = {name: value for name, value in saved.items() if ".position" not in name}
    foreign, lacking = sorted(theirs.keys() - ours.keys()), sorted(ours.keys() - theirs.keys())
    other = [n for n in ours if n in theirs and ours[n].shape != theirs[n].shape]
    if foreign:
        what = f"it has {foreign[0]}, which {model} has not"
    elif lacking:
        what = f"it lacks {lacking[0]}, which {model} has"
    elif other:
        sizes = f"{tuple(theirs[other[0]].shape)}, here {tuple(ours[other[0]].shape)}"
        what = f"its {other[0]} is {sizes}"
    else:
        return
    raise ModelMismatchError(f"checkpoint of another model: {what}; give the --arch and sizes that it was trained with")


class RelPosTransformerLanguageModel(RelPosLanguageModel):
    """fairseq's TransformerLanguageModel whose self-attention has a position scheme."""


SIZES: dict[str, dict[str, Any]] = {
    "relpos_transformer_lm": {},
    "relpos_transformer_lm_tiny": widths("decoder", 128, 512, 4, 2),
    # Baevski and Auli 2019 (fairseq's transformer_lm_wiki103)
    "relpos_transformer_lm_wiki103": {
        **widths("decoder", 1024, 4096, 8, 16),
        "dropout": 0.3,
        "attention_dropout": 0.1,
        "activation_dropout": 0.1,
        "adaptive_input": True,
        "adaptive_input_cutoff": "20000,60000",
        "adaptive_softmax_cutoff": "20000,60000",
        "adaptive_softmax_dropout": 0.2,
        "tie_adaptive_weights": True,
        "tie_adaptive_proj": True,
        "no_decoder_final_norm": True,
    },
    # fairseq's transformer_lm_gpt2_small: 24 layers, which OpenAI calls medium
    "relpos_transformer_lm_gpt2_small": {
        **widths("decoder", 1024, 4096, 16, 24),
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "activation_fn": "gelu",
    },
}

globals().update(register_sizes(RelPosTransformerLanguageModel, RelPosTransformerLMConfig, SIZES, __name__))
