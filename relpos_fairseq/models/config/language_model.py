"""The config of decoder-only models: the same fields on the command line and in hydra.

Names and defaults are those of fairseq's `transformer_lm`, whose position options, character
embeddings and BASE layers have no place here; the position flags stand beside them.  A named size
is a config class with other defaults (`sized`).  Command-line flags are made from the class where
every bool is False: from a size whose default is True fairseq would make a flag that switches it
off.
"""

import argparse
from dataclasses import dataclass
from typing import Any, Optional

from fairseq.models.transformer import DEFAULT_MIN_PARAMS_TO_WRAP, TransformerConfig
from omegaconf import II

from relpos_fairseq.config import help_text
from relpos_fairseq.models.config.single_stack import ACTIVATIONS, SinglePlacement, plain

DEFAULT_LENGTH = 1024


@dataclass
class LanguageModelFlags(SinglePlacement):
    """Every option of a decoder-only transformer, and every option of positions."""

    activation_fn: ACTIVATIONS = help_text("relu", "activation of the feed-forward layers")
    dropout: float = help_text(0.1, "dropout probability")
    attention_dropout: float = help_text(0.0, "dropout probability of attention probabilities")
    activation_dropout: float = help_text(0.0, "dropout probability after the activation")
    decoder_embed_dim: int = help_text(512, "width of the model")
    # Optional: fairseq does not read `int | None`.
    decoder_input_dim: Optional[int] = help_text(  # noqa: UP045
        None, "width of the embedding; unset: --decoder-embed-dim"
    )
    decoder_output_dim: Optional[int] = help_text(  # noqa: UP045
        None, "width that the output projection reads; unset: --decoder-embed-dim"
    )
    decoder_ffn_embed_dim: int = help_text(2048, "width of the feed-forward layers")
    decoder_layers: int = help_text(6, "number of layers")
    decoder_attention_heads: int = help_text(8, "number of attention heads")
    decoder_normalize_before: bool = help_text(False, "layer norm before each block, not after it")
    no_decoder_final_norm: bool = help_text(
        False, "no layer norm after the last layer (only where layer norm comes before blocks)"
    )
    adaptive_softmax_cutoff: Optional[str] = help_text(  # noqa: UP045
        None, "cut-offs of the adaptive softmax, separated by commas; needs --criterion adaptive_loss"
    )
    adaptive_softmax_dropout: float = help_text(0.0, "dropout of the tails' projections")
    adaptive_softmax_factor: float = help_text(4.0, "each band is narrower by this factor")
    share_decoder_input_output_embed: bool = help_text(False, "one matrix for the embedding and the output projection")
    adaptive_input: bool = help_text(False, "adaptive input: rarer words have narrower embeddings")
    adaptive_input_factor: float = help_text(4.0, "each band is narrower by this factor")
    adaptive_input_cutoff: Optional[str] = help_text(  # noqa: UP045
        None, "cut-offs of the adaptive input, separated by commas"
    )
    tie_adaptive_weights: bool = help_text(False, "adaptive softmax and adaptive input share their embeddings")
    tie_adaptive_proj: bool = help_text(False, "adaptive softmax and adaptive input share their projections")
    layernorm_embedding: bool = help_text(False, "layer norm of the embedding")
    no_scale_embedding: bool = help_text(False, "do not multiply embeddings by sqrt(width)")
    checkpoint_activations: bool = help_text(False, "recompute layers in the backward pass")
    offload_activations: bool = help_text(False, "as that, keeping their inputs in CPU memory")
    decoder_layerdrop: float = help_text(0.0, "LayerDrop probability")
    decoder_layers_to_keep: Optional[str] = help_text(  # noqa: UP045
        None, "layers to keep of a checkpoint trained with LayerDrop, separated by commas"
    )
    quant_noise_pq: float = help_text(0.0, "quantisation noise (iterative PQ)")
    quant_noise_pq_block_size: int = help_text(8, "its block size")
    quant_noise_scalar: float = help_text(0.0, "scalar quantisation noise")
    scale_fc: bool = help_text(False, "NormFormer: layer norm inside the feed-forward layers")
    scale_attn: bool = help_text(False, "NormFormer: layer norm after attention")
    scale_heads: bool = help_text(False, "NormFormer: a learned scale a head")
    scale_resids: bool = help_text(False, "NormFormer: a learned scale of the residual")
    min_params_to_wrap: int = help_text(DEFAULT_MIN_PARAMS_TO_WRAP, "smallest layer FSDP wraps")
    # The task has these flags; without a help text fairseq does not add them twice.
    tokens_per_sample: int = II("task.tokens_per_sample")
    max_target_positions: Optional[int] = II("task.max_target_positions")  # noqa: UP045


@dataclass
class RelPosTransformerLMConfig(LanguageModelFlags):
    """As fairseq's `transformer_lm`, which always puts layer norm before blocks."""

    decoder_normalize_before: bool = help_text(True, "layer norm before each block, not after it")


def nested(cfg: Any) -> TransformerConfig:
    """Fairseq's nested config of a decoder, carrying all other fields, from a flat one.

    Raises:
        ValueError: options that exclude each other.
    """
    flat = {key: value for key, value in plain(cfg).items() if not key.startswith("_")}
    lengths = (flat.get("max_target_positions"), flat.get("tokens_per_sample"), DEFAULT_LENGTH)
    flat["max_target_positions"] = next(n for n in lengths if isinstance(n, int))
    for key in ("decoder_input_dim", "decoder_output_dim"):
        flat[key] = flat.get(key) or flat["decoder_embed_dim"]
    if flat["decoder_layers_to_keep"]:
        flat["decoder_layers"] = len(flat["decoder_layers_to_keep"].split(","))
    if flat["offload_activations"]:
        flat["checkpoint_activations"] = True
    _check(flat)
    flat["no_token_positional_embeddings"] = True
    return TransformerConfig.from_namespace(argparse.Namespace(**flat))


def _check(flat: dict[str, Any]) -> None:
    if flat["segment_encoding"] != "none":
        raise ValueError(
            f"--segment-encoding {flat['segment_encoding']}: language modelling supplies no segments; leave it at none"
        )
    if flat["adaptive_input"] and not flat["adaptive_input_cutoff"]:
        raise ValueError("--adaptive-input needs --adaptive-input-cutoff, such as 20000,60000")
    if flat["tie_adaptive_weights"]:
        _check_tied(flat)
    if flat["share_decoder_input_output_embed"]:
        if flat["adaptive_input"] or flat["adaptive_softmax_cutoff"]:
            raise ValueError(
                "--share-decoder-input-output-embed is for plain embeddings: with adaptive input "
                "and softmax use --tie-adaptive-weights"
            )
        if flat["decoder_input_dim"] != flat["decoder_output_dim"]:
            raise ValueError(
                f"--share-decoder-input-output-embed needs equal --decoder-input-dim and "
                f"--decoder-output-dim, got {flat['decoder_input_dim']} and "
                f"{flat['decoder_output_dim']}"
            )


def _check_tied(flat: dict[str, Any]) -> None:
    if not (flat["adaptive_input"] and flat["adaptive_softmax_cutoff"]):
        raise ValueError("--tie-adaptive-weights needs --adaptive-input and --adaptive-softmax-cutoff")
    for first, second in (
        ("adaptive_input_cutoff", "adaptive_softmax_cutoff"),
        ("adaptive_input_factor", "adaptive_softmax_factor"),
        ("decoder_input_dim", "decoder_output_dim"),
    ):
        if flat[first] != flat[second]:
            names = [f"--{name.replace('_', '-')} {flat[name]}" for name in (first, second)]
            raise ValueError(f"--tie-adaptive-weights needs equal values, got {' and '.join(names)}")
