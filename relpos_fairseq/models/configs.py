"""Flat configs of the models: the same fields on the command line and in hydra; and their named sizes.

- `LanguageModelFlags`, `RelPosTransformerLMConfig`: names and defaults are those of fairseq's `transformer_lm`,
  without its position options, character embeddings and BASE layers, and with the position flags.
- `RelPosTransformerXLConfig`: a language model's, and the options of memory.
- `RelPosRobertaConfig`: the names are those of fairseq's RobertaModel, whose argparse style fails under
  hydra, with the position flags.

A named size is a config class with other defaults (`sized`), registered with a model class of its own
(`register_sizes`).  Command-line flags are made from the class where every bool is False: from a size
whose default is True fairseq would make a flag that switches it off.  `nested_decoder`, `namespace` and
`transformer` build from a flat config what fairseq's classes read.
"""

import argparse
import dataclasses
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, Optional

from fairseq import utils
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import register_model
from fairseq.models.transformer import DEFAULT_MIN_PARAMS_TO_WRAP, TransformerConfig
from omegaconf import II, OmegaConf

from relpos_fairseq.core.config import PositionConfig, help_text
from relpos_fairseq.models.memory_positions import KINDS
from relpos_fairseq.models.pruning import pruning_of
from relpos_fairseq.schemes import DEFAULT, EXAMPLE

DEFAULT_LENGTH = 1024
ACTIVATIONS = ChoiceEnum([*utils.get_available_activation_fns(), "swish"])  # of Marian's models
# A model with one stack has --position-scheme alone.
_DROPPED = ("encoder_position_scheme", "decoder_position_scheme")


def plain(cfg: Any) -> dict[str, Any]:
    """Return the values of a DictConfig, a Namespace or a dataclass, with those that change where layers are kept."""
    if OmegaConf.is_config(cfg):
        values = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    else:
        values = dict(vars(cfg))
    return values | pruning_of(values).options


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
        None, "layers to keep of --decoder-layers, from 0 and separated by commas, each with its own scheme"
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
    """Every option of a language model; layer norm comes before blocks, as in fairseq's `transformer_lm`."""

    decoder_normalize_before: bool = help_text(True, "layer norm before each block, not after it")


def flat_values(cfg: Any) -> dict[str, Any]:
    """Return the values of a flat config as fairseq's nested one is made of them, but for lengths."""
    flat = {key: value for key, value in plain(cfg).items() if not key.startswith("_")}
    for key in ("decoder_input_dim", "decoder_output_dim"):
        flat[key] = flat.get(key) or flat["decoder_embed_dim"]
    return flat | {"no_token_positional_embeddings": True}


def nested_decoder(cfg: Any) -> TransformerConfig:
    """Return fairseq's nested config of a decoder from a flat one, with all other fields as attributes.

    Raises:
        ValueError: options that exclude each other.
    """
    flat = flat_values(cfg)
    lengths = (flat.get("max_target_positions"), flat.get("tokens_per_sample"), DEFAULT_LENGTH)
    flat["max_target_positions"] = next(n for n in lengths if isinstance(n, int))
    if flat["offload_activations"]:
        flat["checkpoint_activations"] = True
    _check(flat)
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


@dataclass
class RelPosRobertaConfig(SinglePlacement):
    """Every option of fairseq's RoBERTa, and every option of positions."""

    position_scheme: str = help_text(DEFAULT["masked_lm"], f"position scheme, or several joined by + ({EXAMPLE})")
    encoder_layers: int = help_text(12, "number of layers")
    encoder_embed_dim: int = help_text(768, "width of the model")
    encoder_ffn_embed_dim: int = help_text(3072, "width of the feed-forward layers")
    encoder_attention_heads: int = help_text(12, "number of attention heads")
    activation_fn: ACTIVATIONS = help_text("gelu", "activation of feed-forward layers and LM head")
    pooler_activation_fn: ACTIVATIONS = help_text("tanh", "activation of classification heads")
    encoder_normalize_before: bool = help_text(False, "layer norm before each block, not after it")
    no_layernorm_embedding: bool = help_text(False, "no layer norm of the embeddings")
    layer_norm_eps: float = help_text(1e-5, "epsilon of every layer norm (RoBERTa 1e-5, BERT 1e-12)")
    dropout: float = help_text(0.1, "dropout probability")
    attention_dropout: float = help_text(0.1, "dropout probability of attention probabilities")
    activation_dropout: float = help_text(0.0, "dropout probability after the activation")
    pooler_dropout: float = help_text(0.0, "dropout probability in classification and span heads")
    # Optional: fairseq does not read `int | None`.
    max_positions: Optional[int] = help_text(  # noqa: UP045
        None, "positions that tables cover; unset: the task's --tokens-per-sample"
    )
    load_checkpoint_heads: bool = help_text(False, "register the heads that a checkpoint has")
    untie_weights_roberta: bool = help_text(False, "output projection of its own, not the embedding")
    encoder_layerdrop: float = help_text(0.0, "LayerDrop probability")
    encoder_layers_to_keep: Optional[str] = help_text(  # noqa: UP045
        None, "layers to keep of --encoder-layers, from 0 and separated by commas, each with its own scheme"
    )
    checkpoint_activations: bool = help_text(False, "recompute layers in the backward pass")
    offload_activations: bool = help_text(False, "as that, keeping their inputs in CPU memory")
    quant_noise_pq: float = help_text(0.0, "quantisation noise (iterative PQ)")
    quant_noise_pq_block_size: int = help_text(8, "its block size")
    quant_noise_scalar: float = help_text(0.0, "scalar quantisation noise")
    mha_reg_scale_factor: float = help_text(0.0, "weight of adaptive pruning's loss of heads")
    ffn_reg_scale_factor: float = help_text(0.0, "weight of adaptive pruning's loss of feed-forwards")
    min_params_to_wrap: int = help_text(DEFAULT_MIN_PARAMS_TO_WRAP, "smallest layer that FSDP wraps")


def namespace(cfg: Any, task_positions: int) -> argparse.Namespace:
    """Return the options as a complete Namespace, which fairseq's RoBERTa classes read.

    Where the config does not say `max_positions`, it is the length of the task's samples.
    """
    values = plain(cfg)
    known = {part.name: part.default for part in fields(RelPosRobertaConfig)}
    args = argparse.Namespace(**{name: values.get(name, default) for name, default in known.items() if name != "_name"})
    for name in ("activation_fn", "pooler_activation_fn"):
        setattr(args, name, str(getattr(args, name)))
    args.max_positions = args.max_positions or task_positions
    args.layernorm_embedding = not args.no_layernorm_embedding
    args.no_scale_embedding = args.no_token_positional_embeddings = True
    return args


def transformer(args: argparse.Namespace) -> TransformerConfig:
    """Return the nested config that fairseq's transformer encoder and layers read, with the position fields."""
    values = vars(args) | {"max_source_positions": args.max_positions}
    return TransformerConfig.from_namespace(argparse.Namespace(**values))


@dataclass
class RelPosTransformerXLConfig(LanguageModelFlags):
    """Options of Transformer-XL; defaults as in the released code: layer norm after blocks, weights from N(0, 0.02)."""

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
    """Raise an error for negative lengths of memory, and --same-length without memory.

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
    """Raise an error for a negative length.

    Raises:
        ValueError: the length is negative.
    """
    if mem_len < 0:
        raise ValueError(f"mem_len must be >= 0, got {mem_len} ({flag}; 0 remembers nothing)")


def sized(name: str, base: type[FairseqDataclass], **values: Any) -> type[FairseqDataclass]:
    """Make the config class of a named size, whose defaults are `values`.

    Raises:
        ValueError: if a value names no field.
    """
    known = {part.name: part for part in fields(base)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"{name}: unknown fields {', '.join(unknown)}")
    changed = [
        (key, known[key].type, dataclasses.field(default=value, metadata=known[key].metadata))
        for key, value in values.items()
    ]
    return make_dataclass(name, changed, bases=(base,))


def widths(side: str, width: int, ffn: int, heads: int, layers: int) -> dict[str, int]:
    """Return the fields of an encoder's or a decoder's sizes."""
    return {
        f"{side}_embed_dim": width,
        f"{side}_ffn_embed_dim": ffn,
        f"{side}_attention_heads": heads,
        f"{side}_layers": layers,
    }


def add_flags(model: type, parser: Any) -> None:
    """Add every field of a model's config, whose defaults are the config's, not argparse's."""
    config = getattr(model, "flags", None) or getattr(model, "__dataclass")  # noqa: B009
    gen_parser_from_dataclass(parser, config(), delete_default=True)


def register_sizes(
    model: type, base: type[FairseqDataclass], sizes: dict[str, dict[str, Any]], module: str
) -> dict[str, type]:
    """Register a class and a config for every size.

    Args:
        model: the model that every size's class derives from.
        base: its config.
        sizes: by name, the defaults in which a size differs from `base`.
        module: whose names the returned classes become: pickle looks for them there.
    """
    made = {}
    for name, values in sizes.items():
        title = "".join(part.capitalize() for part in name.split("_"))
        config = base
        if values:
            config = sized(f"{title}Config", base, **values)
            config.__module__ = module
        named = {"__doc__": f"`{name}`.", "__module__": module}
        made[title] = type(title, (model,), named)
        made[config.__name__] = config
        register_model(name, dataclass=config)(made[title])
    return made
