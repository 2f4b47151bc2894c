"""Linear layers by the kernel in C, and a decoder layer's step, are those of torch and of fairseq."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers import commands as cli
from helpers.attention_calls import threads
from helpers.models import batch, small_model
from relpos_fairseq.attention.native import build, layer
from relpos_fairseq.attention.native.candidates import candidates
from relpos_fairseq.modules.layer_step import CHANGES
from relpos_fairseq.nn.decoding_cache import DecodingCache
from relpos_fairseq.nn.packed import pack, quantize
from relpos_fairseq.schemes import scheme_names

pytestmark = pytest.mark.skipif(build.problem() is not None, reason="no C compiler")
near = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)


@st.composite
def layers(draw):
    """Rows, a weight and a bias or none; rows lie apart, or one behind the other."""
    rows, outputs = draw(st.integers(0, 150)), draw(st.integers(1, 150))
    inputs = draw(st.one_of(st.integers(1, 90), st.integers(500, 1100)))
    torch.manual_seed(draw(st.integers(0, 99)))
    apart = draw(st.booleans())
    x = torch.randn(rows, inputs + 7)[:, 3 : 3 + inputs] if apart else torch.randn(rows, inputs)
    return x, torch.randn(outputs, inputs), torch.randn(outputs) if draw(st.booleans()) else None


@settings(deadline=None)
@given(layers(), st.integers(1, 3))
def test_a_linear_layer(given, number):
    """Of any sizes and threads: as in fp64, to some units in the last place of the sum of absolute values."""
    x, weight, bias = given
    with threads(number), pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "WORK_OF_A_THREAD", 1)
        found = layer.linear(x, layer.pack(weight, bias))
    none = torch.zeros(len(weight))
    expected = F.linear(x.double(), weight.double(), (none if bias is None else bias).double())
    most = F.linear(x.abs(), weight.abs(), none if bias is None else bias.abs())
    assert found.shape == expected.shape and bool(((found - expected).abs() <= 1e-6 * most + 1e-30).all())


@settings(deadline=None)
@given(layers(), st.integers(0, 4), st.integers(1, 9))
def test_candidates_of_a_projection(given, first, best):
    """Those of its outputs, none of which is kept."""
    x, weight, bias = given
    weight = torch.cat([weight, torch.randn(700, weight.size(1))])
    bias = None if bias is None else torch.cat([bias, torch.randn(700)])
    packed = layer.pack(weight, bias)
    logits = layer.linear(x, packed)
    found, units = candidates(x, first, best, 0.7, packed)
    expected, chosen = candidates(logits, first, best, 0.7)
    assert torch.equal(units, chosen)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("x", [torch.zeros(3, 29), torch.zeros(3, 30, dtype=torch.float64)], ids=["inputs", "type"])
def test_what_is_not_a_layers_is_refused(x):
    """The kernel has an address alone: it would read past the end, or numbers of another type."""
    packed = layer.pack(torch.randn(50, 30), None)
    for call in (lambda: layer.linear(x, packed), lambda: candidates(x, 1, 2, 1.0, packed)):
        with pytest.raises(ValueError, match="of 30 inputs in torch.float32 was given"):
            call()


def steps(model: nn.Module, beams: int = 2, length: int = 9) -> Tensor:
    """Scores of a decoder's steps, whose rows a search selects; later steps have fewer rows."""
    source, _ = batch(4, 9)
    target = torch.randint(4, 24, (4 * beams, length), generator=torch.Generator().manual_seed(2))
    target[:, 0] = 2
    with torch.no_grad():
        encoded = model.encoder(source)
        encoded = model.encoder.reorder_encoder_out(encoded, torch.arange(4).repeat_interleave(beams))
        state: dict = {}
        found = []
        for end in range(1, length):
            found.append(model.decoder(target[:, :end], encoded, incremental_state=state, alignment_layer=-1)[0][:, -1])
            order = torch.arange(len(target)).view(-1, beams).flip(1).flatten()
            order = order[beams:] if end == 7 else order
            target = target[order]
            model.decoder.reorder_incremental_state_scripting(state, order)
            encoded = model.encoder.reorder_encoder_out(encoded, order)
    return torch.cat(found)


def joined(model: nn.Module) -> list[Any]:
    return [one.step for one in model.decoder.layers]


@pytest.mark.parametrize("values", [{}, {"decoder_normalize_before": True}, {"activation_fn": "gelu"}], ids=str)
def test_steps_of_a_decoder(values, monkeypatch):
    """As without it, of layers that normalise before or after; another activation is not the kernel's."""
    model = small_model(decoder_position_scheme="m4", **values)
    for part in model.modules():
        if isinstance(part, nn.LayerNorm):
            nn.init.normal_(part.weight, 1, 0.3)
            nn.init.normal_(part.bias, 0, 0.3)
    expected = steps(model)
    pack(model)
    called, honest = [], layer.layer
    monkeypatch.setattr(layer, "layer", lambda *given: called.append(1) or honest(*given))
    near(steps(model), expected)
    assert all((one is None) == ("activation_fn" in values) for one in joined(model))
    assert bool(called) == ("activation_fn" not in values)


@pytest.mark.parametrize("scheme", scheme_names())
def test_steps_of_every_scheme(scheme, monkeypatch):
    """As without the kernel, past the nearest keys and a cache's first room; for some, self-attention too."""
    model = small_model(decoder_position_scheme=scheme)
    expected, given, honest = steps(model, length=70), [], layer.layer
    pack(model)

    def called(form: Any, x: Tensor, attention: Any, *more: Any) -> Tensor:
        given.append(isinstance(attention, layer.Step))
        return honest(form, x, attention, *more)

    monkeypatch.setattr(layer, "layer", called)
    near(steps(model, length=70), expected)
    if scheme in ("shaw", "m4", "t5", "deberta"):
        assert sum(given) > 0.9 * len(given)


def test_keys_have_products_when_they_leave_the_near_part():
    """Those that the kernel wrote, of a term that multiplies the content."""
    model = small_model(decoder_position_scheme="m4m", position_clip_distance=3)
    expected = steps(model, length=20)
    pack(model)
    near(steps(model, length=20), expected)


@torch.no_grad()
@pytest.mark.parametrize("source", [False, True])
def test_keys_of_another_type_are_refused(source):
    """Those of steps under autocast: the kernel would read them as its own type."""
    model = small_model(decoder_position_scheme="m4", no_cross_attention=not source)
    pack(model)
    tokens, state = torch.full((4, 3), 5), {}
    encoded = model.encoder(batch(4, 9)[0]) if source else None
    with torch.autocast("cpu"):
        model.decoder(tokens[:, :1], encoded, incremental_state=state)
    with pytest.raises((ValueError, RuntimeError), match="fresh incremental state|same dtype"):
        model.decoder(tokens[:, :2], encoded, incremental_state=state)


@torch.no_grad()
def test_a_batch_may_have_no_rows():
    """As where all sentences have ended."""
    model = small_model(decoder_position_scheme="m4", no_cross_attention=True)
    pack(model)
    state: dict = {}
    for end in (1, 2):
        model.decoder(torch.full((3, end), 5), None, incremental_state=state)
    model.decoder.reorder_incremental_state_scripting(state, torch.zeros(0, dtype=torch.long))
    found = model.decoder(torch.full((0, 3), 5), None, incremental_state=state)[0]
    assert found.shape[:2] == (0, 1)


@torch.no_grad()
@pytest.mark.parametrize("change", ["eps", "normalize_before", "forward"])
def test_what_changes_between_sequences_counts(change):
    """An epsilon, where norms stand, and what stands in place of a layer's own function."""
    model = small_model(decoder_position_scheme="t5")
    plain = copy.deepcopy(model)
    pack(model)
    before = steps(model)
    for one in (model, plain):
        layer_of = one.decoder.layers[0]
        if change == "eps":
            layer_of.final_layer_norm.eps = 1.0
        elif change == "normalize_before":
            layer_of.normalize_before = True
        else:
            layer_of.self_attn.out_proj.forward = torch.zeros_like
    after = steps(model)
    near(after, steps(plain))
    assert not torch.allclose(after, before)


@torch.no_grad()
def test_norms_that_are_replaced_outlive_a_sequence():
    """The kernel has their addresses."""
    model = small_model(decoder_position_scheme="t5")
    pack(model)
    state, encoded = {}, model.encoder(batch(4, 9)[0])
    model.decoder(torch.full((4, 1), 5), encoded, incremental_state=state)
    held, norm = model.decoder.layers[0].self_attn.cache(state).form, model.decoder.layers[0].final_layer_norm
    place = norm.weight.data_ptr()
    norm.weight.data = norm.weight.data.clone()
    assert held.call.final_norm.weight == place
    assert place in [part.data_ptr() for part in held.kept]


@torch.no_grad()
def test_a_key_that_the_kernel_keeps_has_room():
    """Where a first step stands for the equal rows of a beam, and where rows have ended."""
    cache = DecodingCache()
    cache.append({"key": torch.zeros(2, 1, 1, 4), "value": torch.zeros(2, 1, 1, 4)}, None)
    cache.is_read_by_rows = True
    cache.reorder(torch.tensor([0, 0, 1, 1, 1]), {})
    kept = cache.reserve(5)
    assert all(part.shape == (5, 1, 2, 4) for part in kept.values())
    assert cache.length == 2
    cache.reorder(torch.tensor([4]), {})
    with pytest.raises(ValueError, match="holds 1 rows"):
        cache.reserve(5)


def test_threads_take_rows_and_find_the_same(monkeypatch):
    """Each its own sources, padding and queries."""
    model = small_model(decoder_position_scheme="t5")
    pack(model)
    alone = steps(model, beams=9)
    monkeypatch.setattr(layer, "WORK_OF_A_THREAD", 1)
    with threads(5):
        torch.testing.assert_close(steps(model, beams=9), alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("option", CHANGES)
def test_what_the_kernel_has_not_is_fairseqs(option):
    """Options of NormFormer, which no flag of ours sets."""
    model = small_model()
    for one in model.decoder.layers:
        width = one.fc1.out_features if option == "ffn_layernorm" else one.embed_dim
        scale = nn.Parameter(torch.full((one.nh if option == "c_attn" else width,), 1.5))
        setattr(one, option, nn.LayerNorm(width) if option.endswith(("ln", "norm")) else scale)
    expected = steps(model)
    pack(model)
    assert joined(model) == [None] * len(model.decoder.layers)
    near(steps(model), expected)


def test_a_layer_in_int8_has_a_step_of_its_own():
    """As its parts one by one; no weights of before."""
    model = small_model(decoder_position_scheme="m4")
    pack(model)
    before = joined(model)
    quantize(model, "int8")
    assert not any(one is other for one, other in zip(joined(model), before, strict=True))
    found = steps(model)
    for one in model.decoder.layers:
        one.step = None
    near(found, steps(model))


@pytest.mark.skipif(not layer.packs_integers(torch.zeros(1, 1)), reason="no instructions for integers")
@settings(deadline=None)
@given(layers(), st.booleans(), st.sampled_from([0.0, 1e-41, 1e-30, 1.0, 1e20]))
def test_a_linear_layer_in_integers(given, is_positive, size):
    """Off by half a level of each input and half a step of the zero, and no more: rows are alone."""
    x, weight, bias = given
    x = (x.abs() if is_positive else x) * size
    packed = layer.pack_integers(*layer.integers_of(weight), bias)
    found, (integers, scales) = layer.linear(x, packed), packed.integers
    read = integers.double() * scales[:, None]
    torch.testing.assert_close(read, weight.double(), rtol=0, atol=float(weight.abs().max()) / 250)
    expected = F.linear(x.double(), read, None if bias is None else bias.double())
    level = (x.amax(1).clamp(min=0) - x.amin(1).clamp(max=0)) / 125  # with 7 bits
    most = level[:, None] * read.abs().sum(1) * 0.51 + 1e-5 * (expected.abs() + 1)
    assert bool(((found - expected).abs() <= most).all())
    if len(x):
        torch.testing.assert_close(layer.linear(x[-1:], packed), found[-1:], rtol=1e-6, atol=1e-6)
        x = x.clone()
        x[0, -1] = math.nan
        assert bool(layer.linear(x, packed)[0].isnan().all())


def test_weights_and_norms_that_change_are_read_anew():
    model = small_model()
    pack(model)
    before = steps(model)
    other = small_model(seed=2)
    model.load_state_dict(other.state_dict())
    near(steps(model), steps(other))
    assert not torch.allclose(steps(model), before)
    for part in (model, other):
        for norm in part.modules():
            if isinstance(norm, nn.LayerNorm):
                norm.weight = nn.Parameter(norm.weight.detach() * 1.5)
    near(steps(model), steps(other))


def test_a_copy_reads_its_own_weights():
    model = small_model()
    pack(model)
    expected = steps(model)
    twin = copy.deepcopy(model)
    assert all(one.layer is own for one, own in zip(joined(twin), twin.decoder.layers, strict=True))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    assert torch.equal(steps(twin), expected)


def test_hooks_run_and_what_replaces_a_layer_is_asked():
    model = small_model()
    pack(model)
    layers, expected, seen = model.decoder.layers, steps(model), []
    handle = layers[0].fc1.register_forward_hook(lambda *_: seen.append(1))
    near(steps(model), expected)
    assert seen
    handle.remove()
    layers[1].fc2 = nn.Sequential(layers[1].fc2, nn.Hardtanh(-1e-9, 1e-9))
    assert not torch.allclose(steps(model), expected)
    layers[1].fc2, layers[1].final_layer_norm = layers[1].fc2[0], nn.LayerNorm(layers[1].embed_dim, bias=False)
    assert bool(steps(model).isfinite().all())


def test_dropout_and_gradients_are_fairseqs(monkeypatch):
    """Dropout that stays in inference, training, and gradients: the kernel is not asked."""
    model = small_model(dropout=0.5)
    pack(model)
    monkeypatch.setattr(layer, "layer", lambda *_: pytest.fail("the kernel has no dropout"))
    for part in model.modules():
        if hasattr(part, "apply_during_inference"):
            part.apply_during_inference = True
    steps(model)
    plain = small_model()
    pack(plain)
    source, target = batch()
    found = plain.decoder(target[:, :1], plain.encoder(source), incremental_state={})[0]
    assert found.requires_grad


def test_no_number_stays_none():
    """NaN goes through the feed-forward network, as through torch's relu."""
    model = small_model()
    pack(model)
    with torch.no_grad():
        model.decoder.layers[0].fc1.bias[0] = math.nan
    assert bool(steps(model).isnan().all())


SMALL_STACK = """
import threading, torch
from relpos_fairseq.attention.native import layer

threading.stack_size(192 * 1024)
found = []

def multiply(packed, x, weight):
    expected = x @ weight.T
    found.append(float((layer.linear(x, packed) - expected).abs().max() / expected.abs().max()))

weight, wide = torch.randn(40, 2048), torch.ones(40, 16384)
calls = [(layer.pack(weight, None), torch.randn(500, 2048), weight)]
if layer.packs_integers(weight):
    calls.append((layer.pack_integers(wide.char(), torch.ones(40), None), torch.ones(60, 16384), wide))
for call in calls:
    thread = threading.Thread(target=multiply, args=call)
    thread.start()
    thread.join()
print(len(found), max(found) < 1e-2)
"""


def test_a_thread_may_have_a_small_stack(tmp_path):
    """As musl gives one, or OMP_STACKSIZE: what rows are packed in lies elsewhere."""
    script = tmp_path / "multiply.py"
    script.write_text(SMALL_STACK)
    expected = 2 if layer.packs_integers(torch.zeros(1, 1)) else 1
    assert cli.command("python", script).split()[-2:] == [str(expected), "True"]
