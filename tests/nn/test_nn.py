"""`relpos_fairseq.nn`: the attention of fairseq's models, for models that are not fairseq's."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch.func import functional_call, grad, jvp, vmap

from cases import CASES, LIKE_OTHERS, randomize
from helpers import FULL, ROOT, processes
from helpers.forms import told_apart
from relpos_fairseq.core.placement import Placement
from relpos_fairseq.modules.multihead_attention import RelPosMultiheadAttention
from relpos_fairseq.nn import AttentionCache, PositionAttention, PositionDecoderLayer, PositionEncoderLayer
from relpos_fairseq.schemes import scheme_names

WIDTH, HEADS, LENGTH = 8, 2, 9
PARTS = ("weight", "bias")
CASES_HERE = [case for case in CASES if "sentence" not in case.scheme and "clamp_len" not in case.flags]


def build(case, causal: bool) -> PositionAttention:
    module = PositionAttention(WIDTH, HEADS, case.scheme, causal=causal, max_positions=16, **case.flags)
    randomize(module.double(), 3)
    return module.eval()


def states(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("case", CASES_HERE if FULL else told_apart(CASES_HERE), ids=str)
def test_is_the_attention_of_fairseqs_models(case):
    """The same weights give the same output in `RelPosMultiheadAttention`, and steps of decoding the whole pass."""
    causal = case.causal_only or "reset_cls" not in str(case.flags)
    ours, x = build(case, causal), states(2, LENGTH, WIDTH)
    segments = (torch.arange(LENGTH) > 3).long().expand(2, -1) if "segment_encoding" in case.flags else None
    mask = torch.zeros(2, LENGTH, dtype=torch.bool)
    mask[1, :2] = True
    placement = Placement(ours.positions.plan)
    theirs = RelPosMultiheadAttention(WIDTH, HEADS, placement.layer_schemes(0), ours.scale).double().eval()
    theirs.load_state_dict({n: x for n, x in ours.state_dict().items() if not n.startswith("positions.")})
    placement.double().load_state_dict(ours.positions.state_dict())
    for padding in (None, mask):
        tokens = torch.zeros(2, LENGTH, dtype=torch.long) if padding is None else padding.long()
        added, context = placement.of(tokens, 1, 2, segments=segments)
        given = x if added is None else x + added
        expected, _ = theirs(given.transpose(0, 1), key_padding_mask=padding, attn_mask=context)
        found = ours(x, padding, segments=segments)
        real = slice(None) if padding is None else ~padding
        torch.testing.assert_close(found[real], expected.transpose(0, 1)[real], rtol=0, atol=1e-12)
        if causal and "scaling" not in str(case.flags):
            cache, rows = AttentionCache(), []
            with torch.no_grad():
                for step in range(LENGTH):
                    one = slice(step, step + 1)
                    part = None if segments is None else segments[:, : step + 1]
                    rows.append(
                        ours(x[:, one], None if padding is None else padding[:, one], cache=cache, segments=part)
                    )
            torch.testing.assert_close(torch.cat(rows, 1)[real], found[real], rtol=0, atol=1e-9)


@pytest.mark.parametrize("scheme", ["none", "m4", "transformer_xl", "rope", "shaw+rope"])
def test_memory_and_window(scheme):
    """States of an earlier segment serve as its tokens did, and a window hides what lies before it."""
    module = PositionAttention(WIDTH, HEADS, scheme, causal=True).double().eval()
    x = states(2, LENGTH, WIDTH)
    whole, (out, probs) = module(x), module(x[:, 4:], memory=x[:, :4], need_weights=True)
    torch.testing.assert_close(out, whole[:, 4:], rtol=0, atol=1e-12)
    assert probs.shape == (2, HEADS, LENGTH - 4, LENGTH)
    near = module(x, window=3, need_weights=True)[1]
    assert bool((near.tril(-3) == 0).all()) and bool((near[..., 5, 3:6] > 0).all())


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_layer_without_positions_is_torchs(norm_first):
    ours = PositionEncoderLayer(WIDTH, HEADS, 16, "none", norm_first=norm_first).double().eval()
    theirs = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 16, norm_first=norm_first, batch_first=True).double().eval()
    randomize(theirs, 5)
    named = {"fc1": "linear1", "fc2": "linear2", "self_attn_layer_norm": "norm1", "final_layer_norm": "norm2"}
    state = {f"{new}.{part}": theirs.state_dict()[f"{old}.{part}"] for new, old in named.items() for part in PARTS}
    for part in PARTS:
        rows = getattr(theirs.self_attn, f"in_proj_{part}").chunk(3)
        state |= {f"self_attn.{name}_proj.{part}": own for name, own in zip("qkv", rows, strict=True)}
        state[f"self_attn.out_proj.{part}"] = getattr(theirs.self_attn.out_proj, part)
    ours.load_state_dict(ours.state_dict() | state)
    x = states(2, LENGTH, WIDTH)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm_first", [False, True])
def test_layers_learn_and_decode(norm_first):
    """A step of the decoder layer with a cache is the whole pass; every parameter has a gradient."""
    encoder = PositionEncoderLayer(WIDTH, HEADS, 16, "m4", norm_first=norm_first, clip_distance=3).double()
    decoder = PositionDecoderLayer(WIDTH, HEADS, 16, "rope+m4", norm_first=norm_first, activation="gelu").double()
    x, source = states(2, LENGTH, WIDTH), states(2, 5, WIDTH)
    hidden = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    decoder(x, encoder_out=encoder(source, hidden), encoder_padding_mask=hidden).square().sum().backward()
    assert [n for n, p in (*encoder.named_parameters(), *decoder.named_parameters()) if p.grad is None] == []
    encoder.eval(), decoder.eval()
    with torch.no_grad():
        read = encoder(source, hidden)
        whole = decoder(x, encoder_out=read, encoder_padding_mask=hidden)
        cache = AttentionCache()
        steps = [
            decoder(x[:, t : t + 1], encoder_out=read, encoder_padding_mask=hidden, cache=cache) for t in range(LENGTH)
        ]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=0, atol=1e-10)
    cache.reorder(torch.tensor([1, 1]))
    assert cache.rows == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"scheme": "m5"}, "m5"),
        ({"scheme": "m4", "clip": 3}, "no option clip: choose from .*clip_distance"),
        ({"scheme": "t5", "clip_distance": 3}, "does not apply to position scheme t5"),
        ({"scheme": "m4/none"}, "one attention has one scheme"),
        ({"scheme": "sentence"}, "</s>"),
        ({"scheme": "m3", "backend": "sdpa"}, "sdpa cannot evaluate"),
        ({"scheme": "cope"}, "sees no later key"),
    ],
)
def test_refusals(given, said):
    with pytest.raises(ValueError, match=said):
        PositionAttention(WIDTH, HEADS, **given)
    with pytest.raises(ValueError, match="causal=True"):
        PositionAttention(WIDTH, HEADS, "m4")(states(1, 2, WIDTH).float(), cache=AttentionCache())


@pytest.mark.parametrize(
    ("shape", "given", "said"),
    [
        ((5, WIDTH), {}, r"x must be \(batch, length, 8\)"),
        ((2, 5, WIDTH + 1), {}, r"got \(2, 5, 9\)"),
        ((2, 5, WIDTH), {"key_padding_mask": torch.zeros(2, 1)}, r"key_padding_mask must be \(2, 5\), got \(2, 1\)"),
        ((2, 5, WIDTH), {"segments": torch.zeros(2, 1)}, r"segments must be \(2, 5\)"),
        ((2, 5, WIDTH), {"window": 0}, "window must be >= 1"),
    ],
)
def test_shapes_are_checked(shape, given, said):
    """A mask of one column would else hide all keys or none, without a word."""
    with pytest.raises(ValueError, match=said):
        PositionAttention(WIDTH, HEADS, "m4")(torch.zeros(shape), **given)
    with pytest.raises(ValueError, match="segments must be .* got None"):
        PositionAttention(WIDTH, HEADS, "m4", segment_encoding="head")(torch.zeros(2, 5, WIDTH))


def test_a_mask_of_minus_infinity_is_one_of_true():
    module, x = PositionAttention(WIDTH, HEADS, "learned+m4").double().eval(), states(2, 5, WIDTH)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[0, :2] = True
    added = torch.zeros(2, 5).masked_fill(mask, float("-inf"))
    torch.testing.assert_close(module(x, added)[~mask], module(x, mask)[~mask], rtol=0, atol=0)


def test_needs_no_fairseq():
    """The README's example runs where fairseq cannot be imported."""
    page = (ROOT / "README.md").read_text()
    blocks = [part.partition("```")[0] for part in page.split("```python\n")[1:]]
    example = next(block for block in blocks if "relpos_fairseq.nn" in block)
    hidden = "import sys; sys.modules['fairseq'] = None\n"
    done = processes.run([sys.executable, "-c", hidden + example], cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]


# `sentence` counts tokens, which no module of this kind sees.
EVERY = [name for name in scheme_names() if name != "sentence"]
# Those that are not like others are exported and compiled by turns; with RELPOS_ONNX=full all are both.
TRACED = [name for name in EVERY if FULL or name not in LIKE_OTHERS]
EXPORTED, COMPILED = (TRACED, TRACED) if FULL else (TRACED[::2], TRACED[1::2])


def small(name: str) -> tuple[PositionAttention, torch.Tensor, torch.Tensor]:
    """A module, states (2, 9, E), and a mask whose first row has padding."""
    module = PositionAttention(WIDTH, HEADS, name, causal=name in ("cope", "fox"), max_positions=64).eval()
    randomize(module, 3)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[0, 7:] = True
    return module, states(2, 9, WIDTH).float(), mask


@pytest.mark.parametrize(
    ("name", "strict"),
    [
        *((name, False) for name in EXPORTED),
        *((name, True) for name in ("m4", "rope", "learned", "tupe")[: 4 if FULL else 2]),
    ],
)
def test_every_scheme_is_exported(name: str, strict: bool) -> None:
    """With a padding mask, by torch.export: batch and length are any afterwards, as at tracing neither is 1."""
    module, x, mask = small(name)
    sizes = {0: torch.export.Dim("B", min=2, max=64), 1: torch.export.Dim("T", min=2, max=64)}
    given = {"x": x, "key_padding_mask": mask}
    exported = torch.export.export(module, (), given, dynamic_shapes=dict.fromkeys(given, sizes), strict=strict)
    for batch, length in ((3, 13), (2, 5)):
        x, mask = states(batch, length, WIDTH).float(), torch.zeros(batch, length, dtype=torch.bool)
        mask[-1, 4:] = True
        found, wanted = exported.module()(x=x, key_padding_mask=mask), module(x, mask)
        assert torch.allclose(found[~mask], wanted[~mask], atol=1e-5)


@pytest.mark.parametrize("name", COMPILED)
def test_every_scheme_is_compiled_whole(name: str) -> None:
    """Into one graph, without a break."""
    module, x, mask = small(name)
    wanted = module(x, mask)
    torch.compiler.reset()
    found = torch.compile(module, backend="eager", fullgraph=True)(x, mask)
    assert torch.allclose(found[~mask], wanted[~mask], atol=1e-5)


@pytest.mark.parametrize("name", TRACED)
def test_every_scheme_under_torch_func(name: str) -> None:
    """By vmap over tasks, the gradients of each example, and a directional derivative, beside loops and autograd."""
    module, x, mask = small(name)
    module, rows = module.double(), torch.stack([x, x.flip(1), 2 * x]).double()
    many = vmap(module, in_dims=(0, None))(rows, mask)
    assert torch.allclose(many[:, ~mask], torch.stack([module(one, mask) for one in rows])[:, ~mask], atol=1e-9)

    def loss(weights: dict, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (functional_call(module, weights, (x[None], mask[None])).square() * ~mask[:, None]).sum()

    weights = dict(module.named_parameters())
    each = vmap(grad(loss), in_dims=(None, 0, 0))({name: one.detach() for name, one in weights.items()}, rows[0], mask)
    for row in range(2):
        alone = torch.autograd.grad(loss(weights, rows[0, row], mask[row]), weights.values(), materialize_grads=True)
        for found, wanted in zip((each[name][row] for name in weights), alone, strict=True):
            assert torch.allclose(found, wanted, atol=1e-7)
    _, along = jvp(lambda x: module(x, mask)[~mask].sum(), (rows[0],), (rows[1],))
    start = rows[0].clone().requires_grad_()
    (wanted,) = torch.autograd.grad(module(start, mask)[~mask].sum(), start)
    assert torch.allclose(along, (wanted * rows[1]).sum(), atol=1e-7)


@pytest.mark.parametrize("name", EVERY)
def test_every_scheme_in_every_type(name: str) -> None:
    """Also where the whole module is of it, and under autocast; near what fp64 gives."""
    module, x, mask = small(name)
    exact = copy.deepcopy(module).double()(x.double(), mask)
    for dtype, error in ((torch.float32, 1e-5), (torch.bfloat16, 0.1), (torch.float16, 0.02)):
        found = copy.deepcopy(module).to(dtype)(x.to(dtype), mask)
        assert found.dtype == dtype and found.isfinite().all()
        assert (found.double() - exact)[~mask].norm() < error * exact[~mask].norm()
    with torch.autocast("cpu", torch.bfloat16):
        found = module(x, mask)
    assert (found.double() - exact)[~mask].norm() < 0.1 * exact[~mask].norm()


def padded(read: int) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Padding left, right and inside of `read` tokens, and two inputs that differ there alone."""
    padding = torch.zeros(3, LENGTH, dtype=torch.bool)
    padding[0, :2] = padding[1, read - 2 : read] = padding[1, 2] = padding[2, 3:6] = True
    x = states(3, LENGTH, WIDTH)
    return padding, (x, torch.where(padding[..., None], 3 * x.flip(1) + 1, x))


def segments_of(case) -> torch.Tensor | None:
    return (torch.arange(LENGTH) > 3).long().expand(3, -1) if "segment_encoding" in case.flags else None


FORMS = CASES_HERE if FULL else told_apart(CASES_HERE)
DECODING = [case for case in FORMS if case.causal_only or "reset_cls" not in str(case.flags)]


@pytest.mark.parametrize(
    ("case", "causal"),
    [(case, False) for case in FORMS if not case.causal_only] + [(case, True) for case in DECODING],
    ids=str,
)
def test_what_stands_at_padding_changes_nothing(case, causal):
    """At real tokens, wherever padding stands, in every backend that serves the scheme; nor in gradients."""
    module, (padding, inputs), expected = build(case, causal), padded(LENGTH), None
    for backend in ("reference", "blocked", "native", "sdpa", "auto"):
        module.backend = backend
        for x in (given.clone().requires_grad_() for given in inputs):
            try:
                out = module(x, padding, segments=segments_of(case))[~padding]
            except ValueError as error:
                assert f"attention backend {backend} cannot evaluate" in str(error)
                break
            of_x, *grads = torch.autograd.grad(out.square().sum(), [x, *module.parameters()], allow_unused=True)
            found = [out, of_x[~padding], *grads]
            expected = expected or found
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-9)  # a gradient may be 1e5


@torch.no_grad()
@pytest.mark.parametrize("case", [case for case in DECODING if "scaling" not in str(case.flags)], ids=str)
def test_what_stands_at_padding_changes_no_step(case):
    """Prompts of different lengths, padded anywhere, and steps on their cache, are the rows of one pass."""
    module, (padding, inputs), segments = build(case, True), padded(LENGTH - 2), segments_of(case)
    whole = module(inputs[0], padding, segments=segments)
    for x in inputs:
        cache, rows = AttentionCache(), []
        for new in (slice(LENGTH - 2), slice(LENGTH - 2, LENGTH - 1), slice(LENGTH - 1, LENGTH)):
            mask = None if new.start else padding[:, new]
            part = None if segments is None else segments[:, : new.stop]
            rows.append(module(x[:, new], mask, cache=cache, segments=part))
        torch.testing.assert_close(torch.cat(rows, 1)[~padding], whole[~padding], rtol=0, atol=1e-9)
