"""The config of RoBERTa: the same fields on the command line and in hydra.

The names are those of fairseq's RobertaModel, whose argparse style fails under hydra; the position
flags stand beside them.  `namespace` is what fairseq's RoBERTa classes read, and `transformer` the
nested TransformerConfig that its encoder and layers read.
"""

import argparse
from dataclasses import dataclass, fields
from typing import Any, Optional

from fairseq.models.transformer import DEFAULT_MIN_PARAMS_TO_WRAP, TransformerConfig

from relpos_fairseq.config import help_text as _help
from relpos_fairseq.models.config.single_stack import ACTIVATIONS, SinglePlacement, plain
from relpos_fairseq.schemes import DEFAULT, EXAMPLE


@dataclass
class RelPosRobertaConfig(SinglePlacement):
    """Every option of fairseq's RoBERTa, and every option of positions."""

    position_scheme: str = _help(DEFAULT["masked_lm"], f"position scheme, or several joined by + ({EXAMPLE})")
    encoder_layers: int = _help(12, "number of layers")
    encoder_embed_dim: int = _help(768, "width of the model")
    encoder_ffn_embed_dim: int = _help(3072, "width of the feed-forward layers")
    encoder_attention_heads: int = _help(12, "number of attention heads")
    activation_fn: ACTIVATIONS = _help("gelu", "activation of feed-forward layers and LM head")
    pooler_activation_fn: ACTIVATIONS = _help("tanh", "activation of classification heads")
    encoder_normalize_before: bool = _help(False, "layer norm before each block, not after it")
    no_layernorm_embedding: bool = _help(False, "no layer norm of the embeddings")
    layer_norm_eps: float = _help(1e-5, "epsilon of every layer norm (RoBERTa 1e-5, BERT 1e-12)")
    dropout: float = _help(0.1, "dropout probability")
    attention_dropout: float = _help(0.1, "dropout probability of attention probabilities")
    activation_dropout: float = _help(0.0, "dropout probability after the activation")
    pooler_dropout: float = _help(0.0, "dropout probability in classification and span heads")
    # Optional: fairseq does not read `int | None`.
    max_positions: Optional[int] = _help(  # noqa: UP045
        None, "positions that tables cover; unset: the task's --tokens-per-sample"
    )
    load_checkpoint_heads: bool = _help(False, "register the heads that a checkpoint has")
    untie_weights_roberta: bool = _help(False, "output projection of its own, not the embedding")
    encoder_layerdrop: float = _help(0.0, "LayerDrop probability")
    encoder_layers_to_keep: Optional[str] = _help(  # noqa: UP045
        None, "layers to keep of a checkpoint trained with LayerDrop, separated by commas"
    )
    checkpoint_activations: bool = _help(False, "recompute layers in the backward pass")
    offload_activations: bool = _help(False, "as that, keeping their inputs in CPU memory")
    quant_noise_pq: float = _help(0.0, "quantisation noise (iterative PQ)")
    quant_noise_pq_block_size: int = _help(8, "its block size")
    quant_noise_scalar: float = _help(0.0, "scalar quantisation noise")
    mha_reg_scale_factor: float = _help(0.0, "weight of adaptive pruning's loss of heads")
    ffn_reg_scale_factor: float = _help(0.0, "weight of adaptive pruning's loss of feed-forwards")
    min_params_to_wrap: int = _help(DEFAULT_MIN_PARAMS_TO_WRAP, "smallest layer that FSDP wraps")


def namespace(cfg: Any, task_positions: int) -> argparse.Namespace:
    """The options as fairseq's RoBERTa classes read them: a plain, complete Namespace.

    Where the config does not say `max_positions`, it is the length of the task's samples.
    """
    values = plain(cfg)
    known = {part.name: part.default for part in fields(RelPosRobertaConfig)}
    args = argparse.Namespace(**{name: values.get(name, default) for name, default in known.items() if name != "_name"})
    for name in ("activation_fn", "pooler_activation_fn"):
        setattr(args, name, str(getattr(args, name)))
    args.max_positions = args.max_positions or task_positions
    if args.encoder_layers_to_keep:
        args.encoder_layers = len(args.encoder_layers_to_keep.split(","))
    args.layernorm_embedding = not args.no_layernorm_embedding
    args.no_scale_embedding = args.no_token_positional_embeddings = True
    return args


def transformer(args: argparse.Namespace) -> TransformerConfig:
    """What fairseq's transformer encoder and layers read, position fields included."""
    values = vars(args) | {"max_source_positions": args.max_positions}
    return TransformerConfig.from_namespace(argparse.Namespace(**values))
