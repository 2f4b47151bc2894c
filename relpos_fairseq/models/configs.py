"""Define the flat configs of the models with one stack: the same fields on the command line and in hydra."""

import argparse
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, Optional

from fairseq import utils
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models.transformer import DEFAULT_MIN_PARAMS_TO_WRAP, TransformerConfig
from omegaconf import II, OmegaConf

from relpos_fairseq.config import PositionConfig, help_text
from relpos_fairseq.config import help_text as _help
from relpos_fairseq.models.memory_positions import KINDS
from relpos_fairseq.schemes import DEFAULT, EXAMPLE

# ---- What the flat configs of models with a single stack of layers share.


ACTIVATIONS = ChoiceEnum([*utils.get_available_activation_fns(), "swish"])  # of Marian's models
# An encoder or a decoder alone: --position-scheme says all.
_DROPPED = ("encoder_position_scheme", "decoder_position_scheme")


def plain(cfg: Any) -> dict[str, Any]:
    """Return the values of a DictConfig, a Namespace or a dataclass."""
    if OmegaConf.is_config(cfg):
        return OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    return dict(vars(cfg))


SinglePlacement = make_dataclass(
    "SinglePlacement",
    [
        (part.name, str, field(default=part.default, metadata=part.metadata))
        for part in fields(PositionConfig)
        if part.name not in _DROPPED
    ],
    bases=(FairseqDataclass,),
)
SinglePlacement.__module__ = __name__


# ---- The config of decoder-only models: the same fields on the command line and in hydra.
# Names and defaults are those of fairseq's `transformer_lm`, whose position options, character
# embeddings and BASE layers have no place here; the position flags stand beside them.  A named size
# is a config class with other defaults (`sized`).  Command-line flags are made from the class where
# every bool is False: from a size whose default is True fairseq would make a flag that switches it
# off.


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


def nested_decoder(cfg: Any) -> TransformerConfig:
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


# ---- The config of RoBERTa: the same fields on the command line and in hydra.
# The names are those of fairseq's RobertaModel, whose argparse style fails under hydra; the position
# flags stand beside them.  `namespace` is what fairseq's RoBERTa classes read, and `transformer` the
# nested TransformerConfig that its encoder and layers read.


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


# ---- The config of `relpos_transformer_xl`: a decoder's, and what memory needs.


@dataclass
class RelPosTransformerXLConfig(LanguageModelFlags):
    """As the paper's released code: layer norm after blocks, everything from N(0, 0.02)."""

    position_scheme: str = help_text(
        DEFAULT["segment_recurrence"], "position scheme, or several joined by +; any but an absolute one"
    )
    mem_len: int = help_text(150, "tokens before a segment that each layer remembers")
    eval_mem_len: Optional[int] = help_text(  # noqa: UP045
        None, "the same in evaluation; unset: --mem-len"
    )
    same_length: bool = help_text(False, "every token sees as many tokens as memory is long, itself included")
    absolute_memory: bool = help_text(
        False,
        "let positions that are added to the input, and begin anew with each segment, carry memory "
        "all the same: a demonstration of what that costs (Dai et al. 2019, section 3.3)",
    )
    window_positions: ChoiceEnum(KINDS) = help_text(
        KINDS[0],
        "absolute positions over memory and segment, which memory gets anew in every segment: "
        "first adds sinusoids to the first layer's input, every a learned table to every layer's "
        "(attn_type 2 and 3 of the paper's released code, whose position scheme is none)",
    )
    no_attention_bias: bool = help_text(
        False, "projections of attention without biases, as in the paper's released code"
    )
    output_bias: bool = help_text(False, "a bias for each output, as in the paper's released code")
    init_std: float = help_text(0.02, "standard deviation of initial weights")
    proj_init_std: float = help_text(0.01, "the same for the projections of adaptive embeddings")


def check_memory_flags(cfg: Any) -> None:
    """Refuse lengths of memory that make no sense.

    Raises:
        ValueError: names the flag, its value and the way out.
    """
    check_mem_len(cfg.mem_len, "--mem-len")
    evaluated = cfg.mem_len
    if cfg.eval_mem_len is not None:
        check_mem_len(cfg.eval_mem_len, "--eval-mem-len")
        evaluated = cfg.eval_mem_len
    if cfg.same_length and min(cfg.mem_len, evaluated) < 1:
        raise ValueError(
            f"--same-length shows each token as many tokens as memory is long, itself included: "
            f"--mem-len and --eval-mem-len must be >= 1, got {cfg.mem_len} and {evaluated}"
        )


def check_mem_len(mem_len: int, flag: str = "mem_len") -> None:
    """Refuse a negative length.

    Raises:
        ValueError: if it is.
    """
    if mem_len < 0:
        raise ValueError(f"mem_len must be >= 0, got {mem_len} ({flag}; 0 remembers nothing)")
