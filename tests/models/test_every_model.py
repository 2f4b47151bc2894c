"""What all kinds of models have in common: their start, sizes, refusals, and forms of training and evaluation."""

from __future__ import annotations

import pickle
from argparse import Namespace
from collections.abc import Callable
from functools import partial

import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY, MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from torch import Tensor, nn

from cases import ENCODERS
from helpers import lm_models
from helpers.every_model import PADDING, language_model, recurrent, roberta, translation
from helpers.lm_models import ABSOLUTE, small_lm, small_xl
from helpers.models import assert_same_start, batch, randomized, small_model
from helpers.roberta import small_roberta
from relpos_fairseq.core.placement import PositionMismatchError
from relpos_fairseq.models import relpos_roberta, relpos_transformer, relpos_transformer_lm, relpos_transformer_xl
from relpos_fairseq.models.relpos_transformer_lm import ModelMismatchError
from relpos_fairseq.schemes import scheme_names

OTHER_MODEL = ModelMismatchError, "checkpoint of another model: "
OTHER_SCHEME = PositionMismatchError, "trained with "
HYBRIDS = ("learned+m4m", "sinusoidal+shaw", "rope+m4", "m2+m4m+shaw")
STARTS = [
    *((small_model, scheme) for scheme in (*ENCODERS, *HYBRIDS, "rope+t5/t5+shaw")),
    *((small_lm, scheme) for scheme in (*scheme_names(), *HYBRIDS, "rope+t5/t5+m4m")),
    *((small_xl, scheme) for scheme in ("m4", "transformer_xl", "rope", "t5")),
]


@pytest.mark.parametrize(("make", "scheme"), STARTS)
def test_the_scheme_changes_no_other_initial_value(make: Callable, scheme: str) -> None:
    """All that two schemes share starts equal; M4M alone sets biases of q and k (test_roberta.py has RoBERTa's)."""
    assert_same_start(make(position_scheme="none"), make(position_scheme=scheme), scheme)


def decoder(scheme: str) -> tuple[Callable[..., Tensor], nn.Module, Tensor]:
    """What three beams of a translation's one sentence, padded left, are decoded by; its decoder; and tokens."""
    model = randomized(small_model(position_scheme=scheme)).double()
    source, target = batch()
    encoded = model.encoder(source[1:2].expand(3, -1), None)
    return partial(model.decoder, encoder_out=encoded), model.decoder, target.masked_fill(target == PADDING, 5)


def language_decoder(scheme: str) -> tuple[Callable[..., Tensor], nn.Module, Tensor]:
    """The same of a language model's three rows."""
    model = lm_models.randomized(small_lm(position_scheme=scheme))
    return model, model.decoder, lm_models.stream(3, 9)


@pytest.mark.parametrize(
    ("make", "scheme"),
    [(decoder if make is small_model else language_decoder, scheme) for make, scheme in STARTS if make is not small_xl],
)
def test_decoding_equals_the_full_forward(make: Callable, scheme: str) -> None:
    """Token by token with beams reordered after four, in fp64."""
    decode, module, tokens = make(scheme)
    order, state = torch.tensor([1, 0, 0]), {}
    mixed = torch.cat([tokens[order, :4], tokens[:, 4:]], dim=1)
    steps = [decode(tokens[:, :t], incremental_state=state)[0][order] for t in range(1, 5)]
    module.reorder_incremental_state_scripting(state, order)
    steps += [decode(mixed[:, :t], incremental_state=state)[0] for t in range(5, mixed.size(1) + 1)]
    torch.testing.assert_close(torch.cat(steps, dim=1), decode(mixed)[0], rtol=0, atol=1e-11)


SHARED = [*((scheme, share) for scheme in ("shaw", "t5", "m4m", "tupe", "learned+m4") for share in ("auto", "layers"))]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    ("make", "scheme", "values"),
    [
        *((translation, scheme, {"position_share": share}) for scheme, share in SHARED),
        *((roberta, scheme, {"position_share": "layers"}) for scheme in ("shaw", "t5", "m4m", "tupe")),
        (roberta, "learned", {"segment_encoding": "head"}),
        (recurrent, "transformer_xl", {}),
    ],
)
def test_activation_checkpointing(make: Callable, scheme: str, values: dict, offload: bool) -> None:
    """Recomputed layers give the same loss and gradients, tables that layers share and memory included."""
    found = []
    for checkpointed in (False, True):
        recomputed = {"checkpoint_activations": checkpointed, "offload_activations": checkpointed and offload}
        model, given, _ = make(scheme, **values, **recomputed)
        if "segment_encoding" in values:
            given["segments"] = (torch.arange(9) > 3).long().expand(3, -1)
        loss = model.train()(**given)[0].square().mean()
        loss.backward()
        found.append({"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()})
    for name, value in found[0].items():
        assert value is not None, name
        torch.testing.assert_close(found[1][name], value, msg=name)


@pytest.mark.parametrize(
    ("make", "scheme"),
    [*((translation, scheme) for scheme in ("shaw", "m4m", "tupe", "rope+m4", "kerple")), (roberta, "m4m")],
)
def test_low_precision(make: Callable, scheme: str) -> None:
    """A bfloat16 model stays near fp32 (test_xl.py has models with memory)."""
    model, given, _ = make(scheme)
    expected = model(**given)[0]
    assert (model.bfloat16()(**given)[0].float() - expected).abs().max() < 0.1 * expected.abs().max()


SIZES = {
    name: values
    for module in (relpos_transformer, relpos_transformer_lm, relpos_transformer_xl, relpos_roberta)
    for name, values in module.SIZES.items()
}


@pytest.mark.parametrize("name", SIZES)
def test_named_sizes(name: str) -> None:
    """Each size is a class and a config of its own, which pickle finds; fairseq's own numbers are taken as they are."""
    model, config = MODEL_REGISTRY[name], MODEL_DATACLASS_REGISTRY[name]
    assert pickle.loads(pickle.dumps(model)) is model and pickle.loads(pickle.dumps(config)) is config
    made = pickle.loads(pickle.dumps(config()))
    assert all(getattr(made, key) == value for key, value in SIZES[name].items())
    theirs = Namespace()
    if (fill := ARCH_CONFIG_REGISTRY.get(name.removeprefix("relpos_"))) and not name.endswith("_tiny"):
        fill(theirs)
        assert {key: getattr(theirs, key) for key in SIZES[name]} == SIZES[name]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("relpos_transformer_lm", {"decoder_normalize_before": True}),
        ("relpos_transformer_xl_wt103_base", {"decoder_layers": 16, "decoder_embed_dim": 410, "mem_len": 150}),
        ("relpos_transformer_xl_wt103_large", {"decoder_layers": 18, "decoder_embed_dim": 1024, "mem_len": 384}),
        ("relpos_transformer_xl_enwik8_base", {"decoder_layers": 12, "decoder_embed_dim": 512, "mem_len": 512}),
        *(
            (
                f"relpos_roberta{size}",
                dict(zip(("layers", "embed_dim", "ffn_embed_dim", "attention_heads"), widths, strict=True)),
            )
            for size, widths in {
                "": (12, 768, 3072, 12),
                "_tiny": (2, 128, 512, 4),
                "_small": (4, 512, 2048, 8),
                "_base": (12, 768, 3072, 12),
                "_large": (24, 1024, 4096, 16),
            }.items()
        ),
    ],
)
def test_sizes_are_the_papers(name: str, values: dict) -> None:
    """Of RoBERTas the encoder's widths, whose positions are learned."""
    made = MODEL_DATACLASS_REGISTRY[name]()
    if "roberta" in name:
        values = {f"encoder_{key}": value for key, value in values.items()} | {"position_scheme": "learned"}
    assert {key: getattr(made, key) for key in values} == values


@pytest.mark.parametrize("make", [translation, language_model, recurrent, roberta])
def test_whole_models_can_be_pickled(make: Callable, tmp_path) -> None:
    model, given, _ = make("m4")
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    torch.testing.assert_close(loaded.eval()(**given)[0], model(**given)[0], rtol=0, atol=0)


ADAPTIVE = {"adaptive_input": True, "adaptive_input_cutoff": "8,16", "adaptive_softmax_cutoff": "8,16"}
TIED = ADAPTIVE | {"tie_adaptive_weights": True, "tie_adaptive_proj": True}
OUTPUT = {"share_decoder_input_output_embed": True}
DRAWN = {"position_scheme": "m4", "position_random_at": "always"}


@pytest.mark.parametrize(
    ("make", "flags", "message"),
    [
        (small_model, {"encoder_attention_heads": 3}, "embed_dim 16 and 3 heads"),
        (small_model, {"segment_encoding": "head"}, "translation supplies no segments"),
        (small_model, {"position_scheme": "cope"}, "cope counts back .*--encoder-position-scheme"),
        (small_model, DRAWN | {"position_random_range": "40"}, "random-at always: a decoder writes token by token"),
        (small_roberta, DRAWN, "random-at always: nothing is drawn: give --position-ran"),
        *(
            (small_roberta, {"position_scheme": scheme, "max_positions": 8}, "--max-positions 8 is smaller .* 12")
            for scheme in ("learned", "tupe", "learned+m4")
        ),
        (small_lm, {"adaptive_input": True}, "--adaptive-input needs --adaptive-input-cutoff"),
        (small_lm, ADAPTIVE | {"adaptive_input_cutoff": "8,400"}, "-cutoff 8,400: the dictionary has only 24 types"),
        (small_lm, {"adaptive_softmax_cutoff": "9,8"}, "--adaptive-softmax-cutoff must be rising numbers"),
        (small_lm, {"tie_adaptive_weights": True}, "--tie-adaptive-weights needs --adaptive-input and"),
        (
            small_lm,
            TIED | {"adaptive_softmax_cutoff": "8,12"},
            "got --adaptive-input-cutoff 8,16 and --adaptive-softmax-cutoff 8,12",
        ),
        (
            small_lm,
            TIED | {"adaptive_input_factor": 2.0, "adaptive_softmax_factor": 4.0},
            "--adaptive-input-factor 2.0 and",
        ),
        (small_lm, TIED | OUTPUT, "with adaptive input and softmax use --tie-adaptive-weights"),
        (
            small_lm,
            OUTPUT | {"decoder_input_dim": 8},
            "needs equal --decoder-input-dim and --decoder-output-dim, got 8 and 16",
        ),
        (small_lm, {"segment_encoding": "input"}, "language modelling supplies no segments"),
        (small_lm, {"position_scheme": "m4", "position_reset_cls": "on"}, "a decoder has no .CLS."),
        (small_lm, {"position_scheme": "shaws"}, "unknown position scheme 'shaws'"),
        (small_lm, {"position_scheme": "learned+m4/m4"}, "learned is added to the input.*: join it to m4 too"),
        (small_lm, {"position_scheme": "m4/rope/t5"}, "is for 3 layers, and decoder has 2"),
        (small_lm, {"position_scheme": "rope//none"}, "unknown position scheme ''"),
        (
            small_lm,
            {"position_scheme": "none", "position_random_range": "20"},
            "--position-random-range 20 does not apply to position scheme none",
        ),
        (
            small_lm,
            {"position_scheme": "learned", "position_random_range": "65"},
            "table of position scheme learned has 64 .*--tokens-per-sample 65",
        ),
        (small_lm, {"position_scheme": "m4", "position_random_range": "-1"}, "random_range must be >= 0, got -1"),
        (small_xl, {"position_scheme": "m4", "position_random_range": "20"}, "20 cannot carry memory"),
        (small_xl, {"mem_len": -1}, r"mem_len must be >= 0, got -1 \(--mem-len"),
        (small_xl, {"eval_mem_len": -2}, r"mem_len must be >= 0, got -2 \(--eval-mem-len"),
        (small_xl, {"same_length": True, "mem_len": 0}, "--same-length .*must be >= 1, got 0"),
        (small_xl, {"position_scheme": "rope", "clamp_len": "4"}, "--clamp-len 4 does not apply"),
        (small_xl, {"segment_encoding": "head"}, "language modelling supplies no segments"),
        (small_xl, {"position_reset_cls": "on"}, "--position-reset-cls on"),
        *(
            (small_xl, {"position_scheme": scheme}, "cannot carry memory: .*temporal confusion, Dai 2019")
            for scheme in (*ABSOLUTE, "learned+m4m", "rope+abs_scalar")
        ),
        # Positions in the logits carry none even where it is asked for.
        (small_xl, {"position_scheme": "tupe", "absolute_memory": True}, "cannot carry memory"),
        (
            small_xl,
            {"position_scheme": "m4m", "no_attention_bias": True},
            "--no-attention-bias: position scheme m4m starts from",
        ),
    ],
)
def test_wrong_flags(make: Callable, flags: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**flags)


M4 = {"position_scheme": "m4"}
M4M = {"position_scheme": "m4m"}


@pytest.mark.parametrize(
    ("saved", "flags", "loaded", "others", "error", "message"),
    [
        (small_lm, M4, small_xl, M4 | {"decoder_normalize_before": True}, OTHER_MODEL, "lacks decoder.segment_recurr"),
        (small_xl, M4, small_lm, M4, OTHER_MODEL, "has decoder.segment_recurrence"),
        (small_model, M4, small_lm, M4, OTHER_MODEL, "has decoder.layers.0.encoder_attn"),
        (
            *(small_lm, M4 | {"decoder_ffn_embed_dim": 8}, small_lm, M4, OTHER_MODEL),
            r"its decoder.layers.0.fc1.weight is \(8, 16\), here \(24, 16\)",
        ),
        *(
            (make, M4, make, M4M, OTHER_SCHEME, ".m4 .*the flags say .m4m")
            for make in (small_lm, small_xl, small_roberta)
        ),
        (
            *(small_lm, {"position_scheme": "rope/none"}, small_lm, {"position_scheme": "none/rope"}, OTHER_SCHEME),
            r"\[rope/none .* say \[none/rope ",
        ),
    ],
)
def test_checkpoints_of_another_model(saved, flags: dict, loaded, others: dict, error: tuple, message: str) -> None:
    """One clear error, not a list of tensors."""
    kind, beginning = error
    with pytest.raises(kind, match=f"{beginning}.*{message}"):
        loaded(**others).load_state_dict(dict(saved(**flags).state_dict()))
