"""`relpos_transformer` as a whole: beside fairseq's own, in decoding, under fairseq's options."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cases import ENCODERS, Case, plan_of, randomize
from helpers.models import batch, fairseq_model, randomized, small_model
from relpos_fairseq.attention import AttentionInputs, attend
from relpos_fairseq.core.placement import Placement
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.models.relpos_transformer import RelPosTransformerModel
from relpos_fairseq.schemes import REGISTER, scheme_names

HYBRIDS = ("learned+m4m", "sinusoidal+shaw", "rope+m4", "m2+m4m+shaw", "rope+t5/t5+shaw")
SCHEMES = (*ENCODERS, *HYBRIDS)


def logits(model: RelPosTransformerModel, source: Tensor, target: Tensor) -> Tensor:
    """Teacher-forced logits (B, T, V)."""
    return model(source, None, target)[0]


def test_sinusoidal_is_fairseqs_transformer() -> None:
    """Same seed: the same parameters to the bit, and the same outputs."""
    ours, theirs = small_model(position_scheme="sinusoidal"), fairseq_model()
    state = ours.state_dict()
    for name, value in theirs.state_dict().items():
        if "embed_positions" not in name:
            assert torch.equal(state[name], value), name
    extra = set(state) - set(theirs.state_dict())
    assert extra == {"encoder.positions.scheme_version", "decoder.positions.scheme_version"}
    source, target = batch()
    real = target.ne(1)  # at padding fairseq embeds no position; nothing reads those rows
    expected = logits(theirs, source, target)[real]
    torch.testing.assert_close(logits(ours, source, target)[real], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_padding_side_of_a_model(scheme: str) -> None:
    """Source padded left or right, alone or in a batch: the same logits."""
    model = randomized(small_model(position_scheme=scheme)).double()
    source, target = batch()
    rolled = source.clone()
    rolled[1] = torch.roll(source[1], -2)  # its padding moves to the right
    real = target.ne(1)
    expected = logits(model, source, target)
    torch.testing.assert_close(logits(model, rolled, target)[real], expected[real])
    alone = logits(model, source[1:2, 2:], target[1:2, :-2])
    torch.testing.assert_close(alone[0], expected[1, :-2])


@pytest.mark.parametrize("scheme", (*SCHEMES, "fox+rope"))
def test_padding_inside_a_row_of_a_model(scheme: str) -> None:
    """What stands at padding between tokens changes no logit of a real one."""
    model = randomized(small_model(position_scheme=scheme)).double()
    source, target = batch()
    source[0, 2:4] = target[2, 3] = 1
    real, found = target.ne(1), []
    for _ in range(2):
        found.append(logits(model, source, target)[real][:, 2:])  # without padding's own logit
        for side in (model.encoder, model.decoder):
            torch.nn.init.ones_(side.embed_tokens.weight[1])
    torch.testing.assert_close(*found)


def test_layer_drop_keeps_layers_and_tables_together() -> None:
    """With LayerDrop each surviving layer still has its own tables."""
    model = small_model(position_scheme="m4", encoder_layers=4, encoder_layerdrop=0.5, decoder_layerdrop=0.5).train()
    source, target = batch()
    torch.manual_seed(2)
    for _ in range(5):
        assert logits(model, source, target).isfinite().all()
    model.eval()
    assert len({id(layer.self_attn.position[0].table) for layer in model.encoder.layers}) == 4


@pytest.mark.parametrize("share", ["layers", "both"])
def test_shared_tables_are_evaluated_once(share: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What layers share is in the checkpoint once, and computed once a forward pass."""
    model = small_model(position_scheme="deberta", position_share=share)
    tables = [name for name in model.state_dict() if name.endswith("query_projection")]
    assert tables == [f"{s}.positions.shared.0.query_projection" for s in ("encoder", "decoder")]
    calls = []
    kind = type(model.encoder.positions.shared[0])
    original = kind.prepare
    monkeypatch.setattr(kind, "prepare", lambda *a: calls.append(1) or original(*a))
    logits(model, *batch())
    assert len(calls) == 2  # encoder and decoder, whatever the number of layers


def test_need_weights_are_true_probabilities() -> None:
    """Asked for weights, attention returns probabilities of every head."""
    model = small_model(position_scheme="shaw")
    source, _ = batch()
    stack: Placement = model.encoder.positions
    positions = stack.positions(source, 1, 2)
    x = model.encoder.embed(source, stack.embed(positions))[0].transpose(0, 1)
    attention = model.encoder.layers[0].self_attn
    padding = source.eq(1)
    out, probs = attention(x, key_padding_mask=padding, need_weights=True, attn_mask=stack.context(positions))
    assert probs.shape == (3, 2, 7, 7)
    torch.testing.assert_close(probs.sum(-1), torch.ones(3, 2, 7))
    assert (probs.transpose(1, 3)[padding] == 0).all()
    plain, none = attention(x, key_padding_mask=padding, attn_mask=stack.context(positions))
    assert none is None
    torch.testing.assert_close(plain, out)


def test_each_side_has_its_scheme() -> None:
    model = small_model(position_scheme="m4", encoder_position_scheme="tupe", decoder_position_scheme="t5")
    assert model.encoder.positions.plan.name == "tupe"
    assert model.decoder.positions.plan.name == "t5"
    assert not model.decoder.positions.shared[0].relation.bidirectional


@pytest.mark.parametrize("scheme", ["shaw", "learned"])
def test_a_skipped_end_leaves_an_empty_source(scheme: str) -> None:
    """Elsewhere </s> is padding; alone it is what there is, and has finite scores and gradients."""
    model = randomized(small_model(position_scheme=scheme, encoder_skips_end=True)).train()
    source, target = torch.tensor([[2, 1, 1], [5, 6, 2]]), torch.tensor([[2, 5], [2, 6]])
    found = logits(model, source, target)
    torch.testing.assert_close(found[1:], logits(model, torch.tensor([[5, 6]]), target[1:]))
    found.sum().backward()
    assert all(each.grad.isfinite().all() for each in model.parameters() if each.grad is not None)


def test_limits_of_length() -> None:
    """A relative model reports no limit, a table its own."""
    assert small_model(position_scheme="m4").max_positions() == (2**31 - 1, 2**31 - 1)
    short = small_model(position_scheme="learned", max_source_positions=9, max_target_positions=8)
    assert short.max_positions() == (9, 8)
    source = torch.full((1, 10), 5)
    with pytest.raises(ValueError, match="learned has a table of 9 .* 10.*--max-source-positions"):
        short.encoder(source)


def test_attention_needs_its_positions() -> None:
    """Calling the module without positions is one clear error."""
    model = small_model(position_scheme="m4")
    with pytest.raises(ValueError, match="PositionContext"):
        model.encoder.layers[0].self_attn(torch.zeros(2, 1, 16))


def test_inference_mode_leaves_nothing_behind() -> None:
    """A model used under inference_mode can be trained afterwards."""
    model = small_model(position_scheme="shaw+t5")
    source, target = batch()
    with torch.inference_mode():
        logits(model, source, target)
    logits(model, source, target).sum().backward()


@pytest.mark.parametrize("backend", ["blocked", "reference"])
def test_autocast_keeps_logits_exact(backend: str) -> None:
    """Under --amp logits stay fp32: M4M's product of three would overflow in half precision."""
    stack = Placement(plan_of(Case("m4m"), dim=16))
    layer = stack.layer_schemes(0)
    randomize(layer, 1)
    positions = Positions(6, 6)
    q, k, v = (torch.randn(2, 2, 6, 16) * 30 for _ in range(3))
    terms = layer.evaluate(positions).terms
    inputs = AttentionInputs(q, k, v, terms, positions, stack.plan.scale)
    expected, _ = attend(inputs, backend)
    with torch.autocast("cpu", dtype=torch.float16):
        got, _ = attend(inputs, backend)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("scheme", ["learned", "tupe", "abs_scalar", "sentence"])
def test_padding_needs_no_row_of_a_table(scheme: str) -> None:
    """Tokens that fit a table are accepted whatever padding a batch gives them."""
    model = small_model(position_scheme=scheme, max_source_positions=10)
    source = torch.full((1, 16), 1)
    source[0, :10] = 5
    out = model.encoder(source)["encoder_out"][0]
    alone = model.encoder(source[:, :10])["encoder_out"][0]
    torch.testing.assert_close(out[:10], alone)
    source[0, :11] = 5
    with pytest.raises(ValueError, match="table of 10 positions"):
        model.encoder(source)


@pytest.mark.parametrize("scheme", ["none", "m4", "shaw", "rope", "tupe"])
def test_a_state_of_other_tokens_is_refused(scheme: str) -> None:
    """A used state for a new batch is one clear error."""
    model = small_model(position_scheme=scheme)
    source, target = batch()
    encoder_out = model.encoder(source, None)
    state: dict = {}
    for step in range(1, 4):
        model.decoder(target[:, :step], encoder_out=encoder_out, incremental_state=state)
    with pytest.raises(ValueError, match="incremental_state holds 4 .* has 1: .*fresh state"):
        model.decoder(target[:, :1], encoder_out=encoder_out, incremental_state=state)


@pytest.mark.parametrize("scheme", scheme_names())
def test_a_prompt_is_read_at_once(scheme: str) -> None:
    """Several tokens that the cache lacks, first and later, give what all tokens give, with padding on the left too."""
    one_way = REGISTER[scheme].causal_only
    sides = {"position_scheme": "none", "decoder_position_scheme": scheme} if one_way else {"position_scheme": scheme}
    model = randomized(small_model(**sides)).double().eval()
    source, target = batch()
    target[:, 0] = 2
    encoder_out = model.encoder(source, None)
    state: dict = {}
    with torch.no_grad():
        whole = model.decoder(target, encoder_out)[0]
        for start, stop in ((0, 3), (3, 4), (4, 6), (6, 7)):
            new = model.decoder(target[:, :stop], encoder_out, state)[0]
            torch.testing.assert_close(new, whole[:, start:stop], rtol=0, atol=1e-9)


def test_decoding_with_recomputation_and_gradients() -> None:
    """A recomputed layer would append to the decoding cache twice; decoding recomputes nothing."""
    model = small_model(position_scheme="shaw", checkpoint_activations=True)
    source, target = batch()
    encoder_out, state = model.encoder(source, None), {}
    steps = [model.decoder(target[:, : t + 1], encoder_out=encoder_out, incremental_state=state)[0] for t in range(3)]
    torch.cat(steps, dim=1).sum().backward()


def test_rope_caches_its_keys_once() -> None:
    """Only where position vectors meet the unrotated keys does decoding keep both."""
    for scheme, both in (("rope", False), ("rope+rel_scalar", False), ("rope+m4", True)):
        model = small_model(position_scheme=scheme)
        source, target = batch()
        state: dict = {}
        model.decoder(target[:, :1], encoder_out=model.encoder(source, None), incremental_state=state)
        cache = model.decoder.layers[0].self_attn._get_input_buffer(state)
        assert ("content_key" in cache.kept) == both
