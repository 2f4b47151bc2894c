"""Packed weights, int8 and plain layers agree, over all schemes, in steps and at once; training goes on after."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from fairseq.modules.quant_noise import quant_noise
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.models.building import build_generating
from relpos_fairseq.nn.packed import (
    KINDS,
    BFloat16Linear,
    PackedLinear,
    QuantizedLinear,
    can_pack,
    pack,
    prepare,
    quantize,
)
from relpos_fairseq.schemes import REGISTER, scheme_names

pytestmark = pytest.mark.skipif(not can_pack(), reason="torch without oneDNN")
SIZES = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in (("embed_dim", 16), ("ffn_embed_dim", 24), ("layers", 2), ("attention_heads", 2))
}
ROWS = 29
ERROR = 0.05 if torch.cpu._is_vnni_supported() else 0.1  # of int8, whose inputs have 7 bits without VNNI


def translation(scheme: str) -> nn.Module:
    torch.manual_seed(3)
    values = SIZES | {"decoder_position_scheme": scheme, "max_source_positions": 32, "max_target_positions": 32}
    values["encoder_position_scheme"] = "shaw" if REGISTER.get(scheme) and REGISTER[scheme].causal_only else scheme
    model = build_generating("relpos_transformer", values, (ROWS, ROWS)).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape) * 0.1)
    return model


@torch.no_grad()
def scores(model: nn.Module, steps: bool) -> torch.Tensor:
    draw = torch.Generator().manual_seed(4)
    source, target = (torch.randint(4, ROWS, (3, 9), generator=draw) for _ in range(2))
    source[1, -2:] = 1
    encoded = model.encoder(source)
    if not steps:
        return model.decoder(target, encoded)[0]
    state: dict = {}
    parts = []
    for end in range(1, 10):
        parts.append(model.decoder(target[:, :end], encoded, incremental_state=state)[0])
        model.decoder.reorder_incremental_state_scripting(state, torch.arange(3))
    return torch.cat(parts, 1)


@pytest.mark.parametrize("scheme", scheme_names())
def test_every_scheme_computes_the_same(scheme):
    model = translation(scheme)
    plain = {steps: scores(model, steps) for steps in (False, True)}
    packed = copy.deepcopy(model)
    pack(packed)
    assert any(isinstance(part, PackedLinear) for part in packed.modules())
    assert packed.state_dict().keys() == model.state_dict().keys()
    for steps, expected in plain.items():
        torch.testing.assert_close(scores(packed, steps), expected, rtol=1e-5, atol=1e-5)
    for kind in KINDS:
        if KINDS[kind].problem():
            continue
        reduced = copy.deepcopy(model)
        quantize(reduced, kind)
        for steps, expected in plain.items():
            apart = (scores(reduced, steps) - expected).abs().max()
            assert 0 < apart < ERROR * expected.abs().max(), (kind, apart)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["relpos_transformer_lm", "relpos_transformer_xl"])
def test_language_models_too(kind, bias):
    """Without biases of attention too, as the original Transformer-XL is."""
    torch.manual_seed(3)
    more = {} if bias or kind == "relpos_transformer_lm" else {"no_attention_bias": True}
    values = (
        more | {name: value for name, value in SIZES.items() if name.startswith("decoder")} | {"position_scheme": "t5"}
    )
    model = build_generating(kind, values | {"max_target_positions": 16, "tokens_per_sample": 16}, (ROWS, ROWS)).eval()
    tokens = torch.randint(4, ROWS, (2, 9))
    with torch.no_grad():
        expected = model.decoder(tokens)[0]
        prepare(model)
        torch.testing.assert_close(model.decoder(tokens)[0], expected, rtol=1e-5, atol=1e-5)
        quantize(model, "int8")
        assert 0 < (model.decoder(tokens)[0] - expected).abs().max() < ERROR * expected.abs().max()


@given(
    rows=st.integers(1, 300), width=st.integers(1, 70), out=st.integers(1, 70), bias=st.booleans(), lead=st.booleans()
)
@settings(max_examples=200, deadline=None)
def test_a_layer_is_the_layer_that_it_was(rows, width, out, bias, lead):
    torch.manual_seed(rows)
    layer = nn.Linear(width, out, bias)
    given = torch.randn(2, rows, width) if lead else torch.randn(rows, 2 * width)[:, ::2]
    with torch.inference_mode():
        expected = layer(given)
        torch.testing.assert_close(PackedLinear(layer)(given), expected, rtol=1e-5, atol=1e-5)
        found = QuantizedLinear(layer)
        # One step of the input's and of the weight's scale for each channel, at most.
        steps = (given.abs().max() * 2 / 127 + 1e-6) * layer.weight.abs().sum(1)
        steps = steps + layer.weight.abs().amax(1) / 127 * given.abs().sum(-1, keepdim=True)
        assert bool(((found(given) - expected).abs() <= steps + 1e-5).all())
        torch.testing.assert_close(found.weight, layer.weight, rtol=0, atol=float(layer.weight.abs().max()) / 127)


def test_bf16_rounds_weights_and_inputs_alone():
    """Sums are in fp32: the output is that of rounded weights, inputs and biases."""
    if problem := BFloat16Linear.problem():
        pytest.skip(problem)
    torch.manual_seed(1)
    layers = [nn.Linear(40, 24), nn.Linear(40, 17)]
    given = torch.randn(5, 3, 40)
    with torch.inference_mode():
        for layer in layers:
            reduced = BFloat16Linear(layer)
            assert torch.equal(reduced.weight, layer.weight.bfloat16().float())
            expected = nn.functional.linear(given.bfloat16().float(), reduced.weight, reduced.bias)
            torch.testing.assert_close(reduced(given), expected, rtol=1e-2, atol=1e-5)
        joined = BFloat16Linear(*map(BFloat16Linear, layers))
        assert torch.equal(joined(given), torch.cat([BFloat16Linear(layer)(given) for layer in layers], -1))


def test_training_goes_on_after_packing_and_weights_that_change_are_packed_anew():
    model = translation("m4")
    pack(model)
    before = scores(model, True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(4, ROWS, (3, 9))
    loss = model(tokens, torch.tensor([9] * 3), tokens)[0].square().mean()
    loss.backward()
    assert all(part.weight.grad is not None for part in model.modules() if isinstance(part, PackedLinear))
    optimizer.step()
    after = scores(model, True)
    assert (after - before).abs().max() > 1e-3
    fresh = translation("m4")
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(after, scores(fresh, True), rtol=1e-5, atol=1e-5)
    model.load_state_dict(translation("m4").state_dict())
    torch.testing.assert_close(scores(model, True), before, rtol=1e-5, atol=1e-5)


def test_the_projections_of_one_input_are_one_product(monkeypatch):
    """q, k and v of a step, keys and values of the source."""
    model = translation("m4")
    pack(model)
    attention = model.decoder.layers[0].self_attn
    called, honest = [], PackedLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", lambda layer, rows: called.append(layer) or honest(layer, rows))
    scores(model, True)
    assert attention.q_proj not in called and attention.queries_keys_values is not None
    assert model.decoder.layers[0].encoder_attn.keys_values is not None


def test_a_packed_model_is_copied_and_saved_and_one_in_int8_is_not(tmp_path):
    model = translation("alibi")
    pack(model)
    expected = scores(model, True)
    assert torch.equal(scores(copy.deepcopy(model), True), expected)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    quantize(model, "int8")
    with pytest.raises(UserError, match="int8 is not saved"):
        model.state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_reduced_is_copied_takes_no_weights_and_is_reduced_once(kind):
    if problem := KINDS[kind].problem():
        pytest.skip(problem)
    model = translation("m4")
    state = model.state_dict()
    quantize(model, kind)
    assert torch.equal(scores(copy.deepcopy(model), True), scores(model, True))
    with pytest.raises(UserError, match=f"a model in {kind} takes no weights: load them first"):
        model.load_state_dict(state)
    with pytest.raises(UserError, match=f"the model is in {kind} already"):
        quantize(model, "int8")


def test_layers_trained_with_noise_are_reduced_too():
    model = translation("m4")
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, quant_noise(child, 0.1, 8))
    quantize(model, "int8")
    assert not any(type(part) is nn.Linear for part in model.modules())


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("scheme", ["none", "m4", "alibi", "tupe", "rope"])
def test_a_search_is_copied(scheme, is_packed):
    """The state between two steps, by deepcopy and by pickle."""
    model = translation(scheme)
    if is_packed:
        pack(model)
    tokens = torch.randint(4, ROWS, (3, 6), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        encoded = model.encoder(tokens)
        state: dict = {}
        for end in range(1, 6):
            model.decoder(tokens[:, :end], encoded, state)
        others = copy.deepcopy(state), pickle.loads(pickle.dumps(state))
        expected = model.decoder(tokens, encoded, state)[0]
        for other in others:
            torch.testing.assert_close(model.decoder(tokens, encoded, other)[0], expected, rtol=0, atol=0)


def test_half_precision_and_fp64_are_computed_as_they_were():
    layer = nn.Linear(8, 8).double()
    given = torch.randn(3, 8, dtype=torch.float64)
    assert torch.equal(PackedLinear(layer)(given), layer(given))
    assert not PackedLinear(layer).product.applies_to(given)


@pytest.mark.parametrize(
    ("device", "kind", "message"),
    [
        ("cpu", "int3", "--quantization int3: one of int8, bf16"),
        ("cpu", "bf16", "--quantization bf16: this processor has none"),
        ("meta", "int8", "for CPUs, and the model is on meta"),
    ],
)
def test_what_cannot_be_is_said(device, kind, message, monkeypatch):
    monkeypatch.setattr(BFloat16Linear, "problem", staticmethod(lambda: "this processor has none"))
    with pytest.raises(UserError, match=message):
        quantize(nn.Linear(2, 2, device=device), kind)


def test_what_an_optimizer_writes_through_data_is_packed_anew():
    """As fairseq's optimizers do; a forward pass with gradients says that a weight may change."""
    model = translation("m4")
    pack(model)
    scores(model, True)
    source = torch.randint(4, ROWS, (2, 5))
    model(source, torch.full((2,), 5), source)[0].sum().backward()
    for parameter in model.parameters():
        parameter.data.mul_(1.1)
    fresh = copy.deepcopy(model)
    for steps in (False, True):
        assert torch.equal(scores(model, steps), scores(fresh, steps))


def test_parts_that_are_replaced_pruned_or_watched_after_packing_count():
    model = translation("alibi")
    pack(model)
    before = scores(model, True)
    attention, layer = model.decoder.layers[0].self_attn, model.decoder.layers[1]
    seen: list = []
    handle = attention.q_proj.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(scores(model, True), before, rtol=1e-5, atol=1e-5)
    assert seen
    handle.remove()
    prune.l1_unstructured(layer.fc1, "weight", 0.5)
    assert not torch.allclose(scores(model, True), before)
    prune.remove(layer.fc1, "weight")
    before = scores(model, True)
    attention.q_proj = nn.Sequential(attention.q_proj, nn.Hardtanh(-1e-3, 1e-3))
    assert not torch.allclose(scores(model, True), before)


def test_a_layer_that_is_watched_is_not_packed():
    model, seen = translation("none"), []
    model.decoder.layers[0].fc1.register_forward_hook(lambda *_: seen.append(1))
    pack(model)
    scores(model, True)
    assert seen


def test_integers_of_another_machine_are_its_own(monkeypatch):
    """Pickled here, they are multiplied by torch where no kernel can."""
    from relpos_fairseq.attention.native import layer as kernel

    layer = QuantizedLinear(nn.Linear(20, 7))
    data, given = pickle.dumps(layer), torch.randn(4, 20)
    assert torch.equal(pickle.loads(data)(given), layer(given))
    monkeypatch.setattr(kernel, "packs_integers", lambda _: False)
    other = pickle.loads(data)
    torch.testing.assert_close(other.weight, layer.weight)
    torch.testing.assert_close(other(given), layer(given), rtol=0, atol=0.1)


@pytest.mark.parametrize("kind", [PackedLinear, QuantizedLinear])
def test_inputs_of_another_width_are_refused(kind):
    with torch.no_grad(), pytest.raises((ValueError, RuntimeError), match="8|packB"):
        kind(nn.Linear(8, 4))(torch.randn(3, 5))
