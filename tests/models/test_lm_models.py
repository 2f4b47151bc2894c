"""`relpos_transformer_lm`: every scheme, causal, in decoding, beside fairseq's own."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig, base_lm_architecture
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor

from helpers.lm_models import SMALL, randomized, small_lm, small_xl, stream
from helpers.models import small_task
from relpos_fairseq.core.placement import generation_of
from relpos_fairseq.schemes import scheme_class, scheme_names

HYBRIDS = ("learned+m4m", "sinusoidal+shaw", "rope+m4", "m2+m4m+shaw", "rope+t5/t5+m4m")
SCHEMES = (*scheme_names(), *HYBRIDS)
EXACT = {"rtol": 0, "atol": 1e-11}
PAD = 1
ADAPTIVE = {
    "adaptive_input": True,
    "adaptive_input_cutoff": "8,16",
    "adaptive_softmax_cutoff": "8,16",
    "tie_adaptive_weights": True,
    "tie_adaptive_proj": True,
    "adaptive_input_factor": 2.0,
    "adaptive_softmax_factor": 2.0,
}


def fairseq_lm(**values) -> TransformerLanguageModel:
    """Fairseq's own language model of the same sizes, which its arguments' defaults make."""
    torch.manual_seed(1)
    args = Namespace(**(vars(TransformerLanguageModelConfig()) | SMALL | values))
    args.decoder_input_dim = args.decoder_output_dim = args.decoder_embed_dim
    base_lm_architecture(args)
    return TransformerLanguageModel.build_model(args, small_task()).eval()


@pytest.mark.parametrize("values", [{}, ADAPTIVE, {"share_decoder_input_output_embed": True}])
def test_sinusoidal_is_fairseqs_language_model(values: dict) -> None:
    """Same seed: the same parameters to the bit, and the same outputs."""
    ours, theirs = small_lm(position_scheme="sinusoidal", **values), fairseq_lm(**values)
    state = ours.state_dict()
    for name, value in theirs.state_dict().items():
        if "embed_positions" not in name and "_float_tensor" not in name:
            assert torch.equal(state[name], value), name
    assert set(state) - set(theirs.state_dict()) == {"decoder.positions.scheme_version"}
    tokens = stream(3, 9)
    torch.testing.assert_close(ours(tokens)[0], theirs(tokens)[0], rtol=0, atol=1e-5)
    assert ours.get_normalized_probs(ours(tokens), True).shape == (3, 9, 24)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_causal(scheme: str) -> None:
    """What comes later changes nothing."""
    model = randomized(small_lm(position_scheme=scheme))
    tokens = stream(2, 10)
    tokens[1, 4] = 2  # a sentence's end, which `sentence` counts from
    before = model(tokens)[0]
    later = tokens.clone()
    later[:, 6:] = stream(2, 4, seed=8)
    torch.testing.assert_close(model(later)[0][:, :6], before[:, :6], **EXACT)
    torch.testing.assert_close(model(tokens[:, :6])[0], before[:, :6], **EXACT)


@pytest.mark.parametrize("flags", [{"scaling": s} for s in ("linear", "ntk", "yarn", "dynamic")] + [{"log_n": "on"}])
def test_a_generation_holds_the_factor_of_rope(flags: dict) -> None:
    """Each step of 30 tokens through two layers, trained on 8, equals the full pass of the generation's length."""
    given = {f"position_rope_{name}": value for name, value in ({"length": "8"} | flags).items()}
    model = randomized(small_lm(position_scheme="rope", decoder_layers=2, max_target_positions=40, **given))
    tokens = stream(2, 30)

    def steps() -> Tensor:
        state: dict = {}
        return torch.cat([model(tokens[:, :t], incremental_state=state)[0] for t in range(1, 31)], dim=1)

    with generation_of(30):
        torch.testing.assert_close(steps(), model(tokens)[0], **EXACT)
    with generation_of(40):
        longer = model(tokens)[0]
    torch.testing.assert_close(steps(), longer, **EXACT)  # whose length nobody told: the longest of the flags
    search = SequenceGenerator([model], model.decoder.dictionary, beam_size=2, max_len_b=29, min_len=9)
    [[best, *_]] = search.generate([model], {"net_input": {"src_tokens": tokens[:1, :5]}}, bos_token=2)
    written = torch.cat([torch.tensor([2]), best["tokens"][:-1]])[None]
    with generation_of(30):
        scores = model.get_normalized_probs(model(written), True)[0]
    expected = scores.gather(1, best["tokens"][:, None])[:, 0]
    torch.testing.assert_close(best["positional_scores"], expected, rtol=0, atol=1e-5)


LAYERED = {
    "rope/none": ("rope", "none"),
    "t5/rope+t5/m4+tupe": ("t5", "rope+t5", "m4+tupe", "t5"),
    "sinusoidal+shaw/sinusoidal+deberta": ("sinusoidal+shaw", "sinusoidal+deberta"),
}


@pytest.mark.parametrize("scheme", LAYERED)
def test_each_layer_is_that_of_its_own_scheme(scheme: str) -> None:
    """With the tables of the others left out, layer by layer, shared tables among them."""
    parts = LAYERED[scheme]
    scale = {"position_scale": "1.5"} if "tupe" in scheme else {}
    values = {"decoder_layers": len(parts)} | scale
    model = randomized(small_lm(position_scheme=scheme, **values))
    tokens = stream(2, 7)
    _, extra = model(tokens)
    states, saved = extra["inner_states"], model.state_dict()
    names = [member.name for member in model.decoder.positions.shared]
    for layer, part in enumerate(parts):
        alone = randomized(small_lm(position_scheme=part, **values))
        shared = "decoder.positions.shared."
        with torch.no_grad():
            for name, parameter in alone.named_parameters():
                if name.startswith(shared):  # numbered among those that its own layers share
                    number, rest = name.removeprefix(shared).split(".", 1)
                    member = alone.decoder.positions.shared[int(number)].name
                    parameter.copy_(saved[f"{shared}{names.index(member)}.{rest}"])
                elif f"layers.{layer}." in name or ".layers." not in name:
                    parameter.copy_(saved[name])
        _, context = alone.decoder.place(tokens, None)
        out, _, _ = alone.decoder.layers[layer](states[layer], self_attn_mask=context)
        torch.testing.assert_close(states[layer + 1], out, **EXACT)


def test_a_layered_scheme_is_remembered() -> None:
    model = small_lm(position_scheme="rope/none")
    assert model.decoder.positions.plan.describe() == "rope/none scale=1 segments=none"


PLACED = [name for name in SCHEMES if scheme_class(name.split("+")[0]).uses_positions]


@pytest.mark.parametrize("scheme", PLACED)
def test_training_draws_its_positions(scheme: str) -> None:
    """From torch's seed and the number of the batch since it was set; evaluation draws none."""
    flags = {"position_random_range": "40", "position_scheme": scheme}
    model, tokens = randomized(small_lm(**flags, decoder_layers=3)), stream(2, 9)
    plain = randomized(small_lm(position_scheme=scheme, decoder_layers=3))
    assert torch.equal(model(tokens)[0], plain(tokens)[0])
    plain.load_state_dict(model.train().state_dict())

    def batches(seed: int, number: int = 2) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        torch.rand(seed)  # other use of random numbers changes nothing
        return [model(tokens)[0] for _ in range(number)]

    first, second = batches(5)
    others = (second, batches(6, 1)[0], plain.train()(tokens)[0])
    assert all(map(torch.equal, batches(5), (first, second)))
    assert not any(torch.allclose(first, other, rtol=0, atol=1e-6) for other in others)


def test_a_batch_longer_than_the_range_is_refused() -> None:
    model = small_lm(position_scheme="m4", position_random_range="8").train()
    with pytest.raises(ValueError, match="--position-random-range 8: the batch has 9 tokens"):
        model(stream(2, 9))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("left", [False, True])
def test_a_row_does_not_depend_on_its_batch(scheme: str, left: bool) -> None:
    """Alone, or padded on either side among others."""
    model = randomized(small_lm(position_scheme=scheme))
    row = stream(1, 6)
    batch = stream(3, 9, seed=5)
    batch[1] = PAD
    place = slice(3, 9) if left else slice(0, 6)
    batch[1, place] = row[0]
    torch.testing.assert_close(model(batch)[0][1, place], model(row)[0][0], **EXACT)


@pytest.mark.parametrize("make", [small_lm, small_xl])
def test_adaptive_softmax_scores_every_word(make) -> None:
    """Adaptive probabilities are probabilities, and the loss that trains gives them."""
    model = make(position_scheme="t5", **ADAPTIVE).double()
    tokens = stream(2, 7)
    out = model(tokens)
    log_probs = model.get_normalized_probs(out, True)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(2, 7).double())
    logits, targets = model.decoder.adaptive_softmax(out[0], tokens)
    parts = zip(logits, targets, strict=True)
    loss = sum(
        torch.nn.functional.cross_entropy(part, target, reduction="sum") for part, target in parts if part is not None
    )
    expected = -log_probs.gather(-1, tokens[:, :, None]).sum()
    torch.testing.assert_close(loss, expected)
    assert model.decoder.adaptive_softmax.tail[0][0].weight is model.decoder.embed_tokens.embeddings[1][1].weight


def test_a_table_sets_the_longest_input() -> None:
    """Learned positions refuse what they have no row for, and name the task's flag."""
    model = small_lm(position_scheme="learned", max_target_positions=8)
    assert model.max_positions() == 8
    with pytest.raises(ValueError, match="table of 8 positions .*--tokens-per-sample"):
        model(stream(1, 9))
    longest = small_lm(position_scheme="shaw", max_target_positions=8)
    assert longest.max_positions() > 10**6
    assert longest(stream(1, 90))[0].isfinite().all()
