"""`relpos_transformer_xl`: memory is one longer sequence, exactly; and nothing more than that."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad

import naive_xl
from helpers.lm_models import CARRYING, randomized, small_xl, stream
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.relations import sinusoid_of_distance
from relpos_fairseq.models.relpos_transformer_xl import RelPosTransformerXLModel
from relpos_fairseq.modules.memory import Memory, MemoryCarrier
from relpos_fairseq.schemes import transformer_xl

EXACT = {"rtol": 0, "atol": 1e-11}
PAD = 1
# One scheme of each way to evaluate attention: SDPA, vectors, products, scalars, rotation.
KINDS = ("none", "transformer_xl", "m4m", "m3", "t5", "shaw", "rope+m4")


def chunked(
    model: RelPosTransformerXLModel,
    tokens: Tensor,
    cuts: list[int],
    memory: Memory | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Memory]:
    """Logits of all tokens read in segments, and the memory after them."""
    outputs = []
    for begin, end in zip([0, *cuts], [*cuts, tokens.size(1)], strict=True):
        part = None if starts is None else starts[:, begin:end]
        out, extra = model(tokens[:, begin:end], memory=memory, document_starts=part)
        memory = extra["memory"]
        outputs.append(out)
    return torch.cat(outputs, dim=1), memory


def decoded(
    model: RelPosTransformerXLModel,
    tokens: Tensor,
    memory: Memory | None = None,
    starts: Tensor | None = None,
    first: int = 1,
) -> Tensor:
    """Logits token by token, after a first step of `first` tokens."""
    state: dict = {}
    steps = []
    for t in range(first, tokens.size(1) + 1):
        part = None if starts is None else starts[:, :t]
        out, _ = model(tokens[:, :t], memory=memory, document_starts=part, incremental_state=state)
        steps.append(out)
    return torch.cat(steps, dim=1)


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize(
    ("flags", "rules"),
    [
        ({}, {}),
        ({"same_length": True}, {"same_length": True}),
        ({"clamp_len": "3"}, {"clamp_len": 3}),
        ({"position_query_bias": "shared"}, {}),
    ],
)
def test_equals_the_paper(pre_norm: bool, flags: dict, rules: dict) -> None:
    """Three segments through two layers, with boundaries, beside scalar loops."""
    model = randomized(small_xl(mem_len=4, decoder_normalize_before=pre_norm, no_decoder_final_norm=True, **flags))
    decoder, tokens = model.decoder, stream(2, 9)
    starts = torch.zeros(2, 9, dtype=torch.bool)
    starts[1, 4] = True
    layers = []
    for one in decoder.layers:
        names = (name for name, _ in one.named_parameters())
        state = {n.removeprefix("self_attn.").removeprefix("position.0."): n for n in names}
        parameters = dict(one.named_parameters())
        layers.append({short: parameters[name].tolist() for short, name in state.items()})
    wanted = naive_xl.Rules(mem_len=4, pre_norm=pre_norm, **rules)
    memory = None
    expected_memory: list = [[[], []], [[], []]]
    for begin in (0, 3, 6):
        part = tokens[:, begin : begin + 3]
        got, extra = model.extract_features(part, memory=memory, document_starts=starts[:, begin : begin + 3])
        memory = extra["memory"]
        for row in range(2):
            embedded = (decoder.embed_scale * decoder.embed_tokens(part[row])).tolist()
            out, expected_memory[row] = naive_xl.segment(
                embedded, expected_memory[row], layers, 2, wanted, starts[row, begin : begin + 3].tolist()
            )
            torch.testing.assert_close(got[row], torch.tensor(out, dtype=torch.float64), rtol=0, atol=1e-10)
            kept = [state[memory.valid[row], row] for state in memory.states]
            for one, other in zip(kept, expected_memory[row], strict=True):
                torch.testing.assert_close(one, torch.tensor(other, dtype=torch.float64), **EXACT)


@pytest.mark.parametrize("adaptive", [{}, {"tie_adaptive_weights": True, "tie_adaptive_proj": True}, None])
def test_outputs_have_biases(adaptive: dict | None) -> None:
    """They move scores by themselves, those of a tied adaptive softmax within each band."""
    bands = {f"adaptive_{side}_cutoff": "8" for side in ("input", "softmax")}
    flags = {} if adaptive is None else bands | {"adaptive_input": True} | adaptive
    plain, biased = (small_xl(output_bias=on, **flags).double() for on in (False, True))
    biased.load_state_dict(
        biased.state_dict() | {name.replace(".head.", ".head.0."): value for name, value in plain.state_dict().items()}
    )
    shift = torch.randn(24, dtype=torch.float64)
    tokens = stream()
    probs = [model.get_normalized_probs(model(tokens), True) for model in (plain, biased)]
    torch.testing.assert_close(probs[0], probs[1])
    with torch.no_grad():
        softmax = biased.decoder.adaptive_softmax
        if softmax is None:
            biased.decoder.output_projection.bias.copy_(shift)
            wanted = (plain(tokens)[0] + shift).log_softmax(-1)
        else:
            softmax.tail[0][-1].bias.copy_(shift[8:])
            tail = (probs[0][..., 8:] + shift[8:]).log_softmax(-1)
            wanted = torch.cat([probs[0][..., :8], tail + probs[0][..., 8:].logsumexp(-1, True)], -1)
    found = biased.get_normalized_probs(biased(tokens), True)
    torch.testing.assert_close(found, wanted.to(found), rtol=0, atol=1e-5)


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("scheme", CARRYING)
def test_memory_is_one_longer_sequence(scheme: str, pre_norm: bool) -> None:
    """Memory that covers the stream: any cuts give the logits of one pass, in every layer."""
    model = randomized(small_xl(position_scheme=scheme, mem_len=20, decoder_normalize_before=pre_norm))
    tokens = stream()
    whole = model(tokens)[0]
    for cuts in ([5], [1, 2, 7], [11]):
        torch.testing.assert_close(chunked(model, tokens, cuts)[0], whole, **EXACT)


@pytest.mark.parametrize("scheme", [name for name in CARRYING if "/" not in name])
def test_one_layer_needs_no_more_memory_than_it_sees(scheme: str) -> None:
    """One layer and a memory of the segment's length: the pass over both segments."""
    model = randomized(small_xl(position_scheme=scheme, mem_len=4, decoder_layers=1))
    tokens = stream(2, 12)
    got = chunked(model, tokens, [4, 8])[0]
    for begin in (0, 4):
        both = model(tokens[:, begin : begin + 8])[0]
        torch.testing.assert_close(got[:, begin + 4 : begin + 8], both[:, 4:], **EXACT)


@pytest.mark.parametrize("scheme", KINDS)
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_receptive_field(scheme: str, layers: int) -> None:
    """With memory of one segment, k layers see the k segments before, and not one more."""
    model = randomized(small_xl(position_scheme=scheme, mem_len=3, decoder_layers=layers))
    tokens = stream(2, 15)
    cuts = [3, 6, 9, 12]
    last = chunked(model, tokens, cuts)[0][:, 12:]
    begin = 12 - 3 * layers
    recent = chunked(model, tokens[:, begin:], cuts[:layers])[0][:, -3:]
    torch.testing.assert_close(recent, last, **EXACT)
    if scheme != "none":  # whose softmax over equal tokens may hide a change
        changed = tokens.clone()
        changed[:, begin] = (tokens[:, begin] - 3) % 20 + 4
        other = chunked(model, changed[:, begin:], cuts[:layers])[0][:, -3:]
        assert (other - last).abs().max() > 1e-9


@pytest.mark.parametrize("scheme", KINDS)
def test_same_length(scheme: str) -> None:
    """Every token sees mem_len tokens, itself included, however the stream is cut."""
    model = randomized(small_xl(position_scheme=scheme, mem_len=4, same_length=True))
    tokens = stream(2, 12)
    whole = model(tokens)[0]
    for cuts in ([4, 8], [1, 2, 3, 10], [6]):
        torch.testing.assert_close(chunked(model, tokens, cuts)[0], whole, **EXACT)
    torch.testing.assert_close(decoded(model, tokens), whole, **EXACT)
    one = randomized(small_xl(position_scheme=scheme, mem_len=4, same_length=True, decoder_layers=1))
    before = one(tokens)[0]
    for place, seen in ((7, False), (8, True)):
        changed = tokens.clone()
        changed[:, place] = (tokens[:, place] - 3) % 20 + 4
        difference = (one(changed)[0] - before)[:, 11].abs().max()
        assert (difference > 1e-9) == seen


@pytest.mark.parametrize("scheme", KINDS)
def test_no_gradient_crosses_a_segment(scheme: str) -> None:
    """Words that occur before the segment only have no gradient; the projections have one."""
    model = small_xl(position_scheme=scheme).double()
    before, segment = torch.tensor([[4, 5, 6]]), torch.tensor([[7, 8, 9]])
    memory = model(before)[1]["memory"]
    model(segment, memory=memory)[0].square().sum().backward()
    embedding = model.decoder.embed_tokens.weight.grad
    assert (embedding[4:7] == 0).all()
    assert (embedding[7:10] != 0).any(dim=1).all()
    assert (model.decoder.layers[0].self_attn.k_proj.weight.grad != 0).any()


@pytest.mark.parametrize("scheme", CARRYING)
@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_documents_are_apart(scheme: str, backend: str) -> None:
    """Boundaries in memory and inside a segment: each document is as if it stood alone."""
    model = randomized(small_xl(position_scheme=scheme, mem_len=20, attention_backend=backend))
    tokens = stream(2, 12)
    starts = torch.zeros(2, 12, dtype=torch.bool)
    starts[0, [2, 7, 8]] = True
    starts[1, [0, 5]] = True
    expected = torch.zeros_like(model(tokens)[0])
    for row in range(2):
        cuts = [0, *starts[row].nonzero()[:, 0].tolist(), 12]
        for begin, end in zip(cuts, cuts[1:], strict=False):
            if begin < end:
                expected[row, begin:end] = model(tokens[row : row + 1, begin:end])[0][0]
    got, memory = chunked(model, tokens, [4, 5, 10], starts=starts)
    torch.testing.assert_close(got, expected, **EXACT)
    assert memory.valid.sum(dim=1).tolist() == [4, 7]
    torch.testing.assert_close(decoded(model, tokens, starts=starts), expected, **EXACT)


@pytest.mark.parametrize("scheme", CARRYING)
@pytest.mark.parametrize("side", ["left", "right", "between"])
def test_rows_of_different_lengths(scheme: str, side: str) -> None:
    """A row with padding, alone or in a batch, segment after segment: the same logits."""
    model = randomized(small_xl(position_scheme=scheme, mem_len=5))
    row, other = stream(1, 12)[0], stream(1, 18, seed=3)[0]
    alone, kept = chunked(model, row[None], [3, 7])
    memory, found = None, []
    for (begin, end), (first, last) in zip(((0, 3), (3, 7), (7, 12)), ((0, 5), (5, 11), (11, 18)), strict=True):
        width = last - first
        pad = torch.full((width - (end - begin),), PAD)
        place = {"left": 0, "right": end - begin, "between": 1}[side]
        padded = torch.cat([row[begin : begin + place], pad, row[begin + place : end]])
        if side == "left":
            padded = torch.cat([pad, row[begin:end]])
        out, extra = model(torch.stack([other[first:last], padded]), memory=memory)
        memory = extra["memory"]
        found.append(out[1][padded != PAD])
    torch.testing.assert_close(torch.cat(found), alone[0], **EXACT)
    torch.testing.assert_close(memory.states[1][memory.valid[1], 1], kept.states[1][kept.valid[0], 0], **EXACT)
    finished = model(torch.full((2, 3), PAD), memory=memory)[1]["memory"]
    assert [int(n) for n in finished.valid.sum(dim=1)] == [5, 5]  # padding pushes nothing out


@pytest.mark.parametrize("scheme", CARRYING)
def test_decoding_with_memory(scheme: str) -> None:
    """Token by token after memory, past mem_len and with beams reordered: the full pass."""
    model = randomized(small_xl(position_scheme=scheme, mem_len=4))
    prompt, tokens, order = stream(3, 6), stream(3, 9, seed=2), torch.tensor([1, 0, 0])
    prompt[1, :2] = prompt[2, 4:] = PAD  # prompts of different lengths
    memory = model(prompt)[1]["memory"]
    full = model(tokens, memory=memory)[0]
    for first in (1, 5):
        torch.testing.assert_close(decoded(model, tokens, memory, first=first), full, **EXACT)
    state: dict = {}
    steps = [model(tokens[:, :t], memory=memory, incremental_state=state)[0][order] for t in (1, 2, 3)]
    model.decoder.reorder_incremental_state_scripting(state, order)
    mixed = torch.cat([tokens[order, :3], tokens[:, 3:]], dim=1)
    for t in range(4, 10):
        out, extra = model(mixed[:, :t], memory=memory, incremental_state=state)
        assert extra["memory"] is None
        steps.append(out)
    expected = model(mixed, memory=memory.reorder(order))[0]
    torch.testing.assert_close(torch.cat(steps, dim=1), expected, **EXACT)


@pytest.mark.parametrize(
    ("scheme", "flags"),
    [("fire", {"position_fire_threshold": "2"}), ("rope", {"position_rope_log_n": "on", "position_rope_length": "2"})],
)
def test_tokens_are_counted_by_document(scheme: str, flags: dict, monkeypatch) -> None:
    """Beyond the trained length a row's tokens count from its document's first, memory included."""
    monkeypatch.setitem(globals(), "small_xl", partial(small_xl, **flags))
    test_memory_is_one_longer_sequence(scheme, True)
    test_documents_are_apart(scheme, "blocked")
    test_decoding_with_memory(scheme)


@pytest.mark.parametrize("scheme", KINDS)
def test_backends_agree(scheme: str) -> None:
    """Blocked equals the reference with memory, windows and documents, in gradients too."""
    starts = torch.zeros(2, 5, dtype=torch.bool)
    starts[1, 2] = True
    found = []
    for backend in ("reference", "blocked"):
        model = randomized(small_xl(position_scheme=scheme, mem_len=4, same_length=True, attention_backend=backend))
        memory = model(stream(2, 6))[1]["memory"].reset_rows(torch.tensor([True, False]))
        out = model(stream(2, 5, seed=1), memory=memory, document_starts=starts)[0]
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        found.append([out, *(p.grad for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scheme", KINDS)
@pytest.mark.parametrize("window", [40, 600])
def test_long_segments(scheme: str, window: int) -> None:
    """More rows than a block has, the last one alone, in a window that masks or does not."""
    tokens, earlier = stream(2, 129), stream(2, 40, seed=4)
    tokens[1, 100:] = PAD
    starts = torch.zeros(2, 129, dtype=torch.bool)
    starts[0, 70] = window == 40
    found = []
    for backend in ("reference", "auto"):
        model = randomized(
            small_xl(
                position_scheme=scheme, mem_len=window, same_length=True, attention_backend=backend, decoder_layers=1
            )
        )
        memory = model(earlier)[1]["memory"]
        plain = model(tokens[:1], memory=memory.reorder(torch.tensor([0])))[0]
        masked = model(tokens, memory=memory, document_starts=starts)[0]
        (plain.square().mean() + masked[tokens != PAD].square().mean()).backward()
        found.append([plain, masked[tokens != PAD], *(p.grad for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_sinusoid_is_formed_once_a_pass(checkpointed: bool, monkeypatch) -> None:
    """For all layers, and for their recomputation; values are those of layers on their own."""
    formed = []

    def counted(offset: Tensor, dim: int) -> Tensor:
        formed.append(len(offset))
        return sinusoid_of_distance(offset, dim)

    model = small_xl(decoder_layers=3, checkpoint_activations=checkpointed).train()
    tokens, memory = stream(2, 5), model(stream(2, 4, seed=1))[1]["memory"]
    found = []
    for alone in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(transformer_xl, "sinusoid_of_distance", counted)
            if alone:
                patch.setattr(Positions, "once", lambda self, key, form: form())
            formed.clear()
            out = model(tokens, memory=memory)[0]
            model.zero_grad()
            out.square().sum().backward()
        assert formed == [9] * ((6 if checkpointed else 3) if alone else 1)
        found.append([out, *(p.grad.clone() for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_layer_drop_keeps_layers_and_memory_together() -> None:
    """A dropped layer passes its input on, and remembers it."""
    model = small_xl(decoder_layers=3, decoder_layerdrop=0.5).double()
    memory = None
    model.train()
    torch.manual_seed(2)
    for seed in range(5):
        out, extra = model(stream(2, 4, seed=seed), memory=memory)
        memory = extra["memory"]
        assert out.isfinite().all()
        assert memory.num_layers == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", KINDS)
def test_low_precision(scheme: str, dtype: torch.dtype) -> None:
    """Memory is in the model's type, and a fp32 one is taken too."""
    exact = small_xl(position_scheme=scheme)
    model = small_xl(position_scheme=scheme).to(dtype)
    tokens = stream()
    expected, memory = chunked(exact, tokens, [6])
    got, kept = chunked(model, tokens, [6])
    assert {state.dtype for state in kept.states} == {dtype}
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), expected, rtol=0.1, atol=0.1)
    assert model(tokens, memory=memory)[1]["memory"].states[0].dtype == dtype


def test_a_carrier_comes_back_with_the_next_memory() -> None:
    model = small_xl(mem_len=5)
    carrier = MemoryCarrier()
    first = model(stream(2, 4), memory=carrier)[1]["memory"]
    assert carrier.memory is first
    assert first.valid.shape == (2, 4)
    model(stream(2, 4), memory=carrier)
    assert carrier.memory.valid.shape == (2, 5)
    with_value = model(stream(2, 4), memory=first)[1]["memory"]
    assert all(torch.equal(a, b) for a, b in zip(with_value.states, carrier.memory.states, strict=True))
    model(stream(2, 1), memory=carrier, incremental_state={})
    assert len(carrier.memory) == 5  # decoding leaves it alone


def test_a_carrier_belongs_to_one_model() -> None:
    """The second model of an ensemble would read what the first remembers of the same segment."""
    carrier = MemoryCarrier()
    small_xl()(stream(2, 4), memory=carrier)
    with pytest.raises(ValueError, match="ensemble cannot share one memory: .* one checkpoint at"):
        small_xl()(stream(2, 4), memory=carrier)


def test_lengths_of_memory() -> None:
    """Training and evaluation have their own; setting one sets both."""
    model = small_xl(mem_len=3, eval_mem_len=6)
    assert (model.train().mem_len, model.eval().mem_len) == (3, 6)
    assert len(model(stream(2, 9))[1]["memory"]) == 6
    model.mem_len = 2
    assert (model.train().mem_len, model.eval().mem_len) == (2, 2)
    assert len(model(stream(2, 9))[1]["memory"]) == 2
    model.mem_len = 0
    assert len(model(stream(2, 9))[1]["memory"]) == 0
    longer = small_xl(mem_len=9)(stream(2, 9))[1]["memory"]
    torch.testing.assert_close(model(stream(2, 4), memory=longer)[0], model(stream(2, 4))[0])
    with pytest.raises(ValueError, match="mem_len must be >= 0, got -1"):
        model.mem_len = -1
    windowed = small_xl(mem_len=3, same_length=True)
    windowed.mem_len = 0  # no memory, hence no window of its length
    torch.testing.assert_close(windowed(stream())[0], small_xl()(stream())[0])


@pytest.mark.parametrize("scheme", ["sinusoidal", "learned", "sinusoidal+m4"])
def test_absolute_positions_carry_memory_where_asked(scheme: str) -> None:
    """Dai 2019, section 3.3: each segment counts from its start, so repeated tokens look alike."""
    model = small_xl(position_scheme=scheme, absolute_memory=True)
    tokens = stream(2, 4)
    _, first = model(tokens)
    logits, second = model(tokens, memory=first["memory"])
    entered = second["memory"].states[0]  # (M, B, E): the inputs of the first layer
    assert torch.equal(entered[:4], entered[4:]) and not torch.equal(entered[0], entered[1])
    decoder = model.decoder
    plain = decoder.embed_scale * decoder.embed_tokens(tokens)
    added = decoder.positions.embed(Positions(4, 4))
    torch.testing.assert_close(entered[4:], (plain + added).transpose(0, 1))
    state: dict = {}
    for step in range(1, 5):
        one = model(tokens[:, :step], memory=first["memory"], incremental_state=state)[0]
        torch.testing.assert_close(one[:, -1], logits[:, step - 1], rtol=1e-4, atol=1e-5)


def test_projections_without_biases() -> None:
    """As the released code's."""
    model = small_xl(no_attention_bias=True)
    names = [name for name, _ in model.named_parameters() if "self_attn." in name]
    assert not [name for name in names if name.endswith("proj.bias")]
    model(stream())[0].sum().backward()


def test_dropout_of_r_is_one_draw_for_all_layers() -> None:
    """As the released code's `drop(pos_emb)`: in training alone, and alike in every layer."""
    model = small_xl(position_r_dropout="0.5", dropout=0.0, attention_dropout=0.0)
    plain = small_xl(dropout=0.0, attention_dropout=0.0)
    assert torch.equal(model(stream())[0], plain(stream())[0])
    model.train()
    positions = Positions(6, 6)
    first, second = (layer.self_attn.position[0] for layer in model.decoder.layers[:2])
    torch.nn.init.eye_(first.projection), torch.nn.init.eye_(second.projection)
    vectors = [scheme.prepare(positions)[1] for scheme in (first, second)]
    assert torch.equal(*vectors) and (vectors[0] == 0).sum() > 10
    assert not torch.equal(vectors[0], first.prepare(Positions(6, 6))[1])


def test_wrong_memory() -> None:
    """Another batch, another model, boundaries of another shape, nothing new, parted prompts."""
    model = small_xl()
    memory = model(stream(2, 4))[1]["memory"]
    with pytest.raises(ValueError, match="memory has 2 rows and the input 3"):
        model(stream(3, 4), memory=memory)
    for other in (small_xl(decoder_layers=3), small_xl(decoder_embed_dim=8)):
        with pytest.raises(ValueError, match="it belongs to another model"):
            other(stream(2, 4), memory=memory)
    with pytest.raises(ValueError, match=r"document_starts must be \(B, T\) = \(2, 4\)"):
        model(stream(2, 4), document_starts=torch.zeros(2, 3, dtype=torch.bool))
    state: dict = {}
    model(stream(2, 4), incremental_state=state)
    with pytest.raises(ValueError, match="holds 4 tokens and prev_output_tokens has 4"):
        model(stream(2, 4), incremental_state=state)
    prompts = stream(2, 4)
    prompts[0, :2] = PAD
    with pytest.raises(ValueError, match="padding before the tokens .*read the prompts as a segment"):
        model(prompts, memory=memory, incremental_state={})
    with pytest.raises(ValueError, match="padding after the tokens"):
        model(prompts.flip(1), incremental_state={})
    model(prompts, memory=memory.reset_rows(torch.tensor([True, False])), incremental_state={})


def test_positions_cost_linear_time() -> None:
    """W_R meets each distance of memory and segment once, not each pair of tokens."""
    model = small_xl(mem_len=30)
    memory = model(stream(1, 30))[1]["memory"]
    seen = []
    scheme = model.decoder.layers[0].self_attn.position[0]
    prepare = scheme.prepare
    scheme.prepare = lambda positions: seen.append(prepare(positions)) or seen[-1]
    model(stream(1, 10), memory=memory)
    ((relation, vectors),) = seen
    assert relation.size == vectors.size(1) == 30 + 2 * 10 - 1


def test_unclipped_tables_cover_memory_and_segment() -> None:
    """Every distance that training meets has a row of its own."""
    scheme = small_xl(position_scheme="m1", mem_len=30).decoder.layers[0].self_attn.position[0]
    assert scheme.gate_table.size(1) == 30 + 64
    clipped = small_xl(position_scheme="m4", position_clip_distance="0", mem_len=30)
    assert clipped.decoder.layers[0].self_attn.position[0].table.size(1) == 2 * 93 + 1


def test_sharing_of_u_and_v() -> None:
    """Each layer has its own u and v, or all have one; W_R is each layer's own."""
    for sharing, count in (("on", 2), ("shared", 1), ("off", 0)):
        model = small_xl(position_query_bias=sharing)
        names = [name for name, _ in model.named_parameters()]
        assert sum(name.endswith("content_bias") for name in names) == count
        assert sum(name.endswith("position_bias") for name in names) == count
        assert sum(name.endswith("position.0.projection") for name in names) == 2
    shared = small_xl(position_query_bias="shared")
    with torch.no_grad():
        shared.decoder.layers[1].self_attn.position[0].content_bias.fill_(3.0)
    copy = small_xl(position_query_bias="shared")
    copy.load_state_dict(shared.state_dict())
    assert (copy.double().decoder.layers[0].self_attn.position[0].content_bias == 3).all()


def test_the_released_initial_values() -> None:
    """N(0, 0.02), norms around 1, projections N(0, 0.01); schemes keep what is theirs."""
    model = small_xl(
        words=400,
        decoder_embed_dim=64,
        decoder_ffn_embed_dim=128,
        adaptive_input=True,
        adaptive_input_cutoff="100,200",
        adaptive_softmax_cutoff="100,200",
        tie_adaptive_weights=True,
        tie_adaptive_proj=True,
        position_scheme="m4m",
    ).decoder
    for weight in (model.layers[0].fc1.weight, model.layers[1].self_attn.v_proj.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.1)
    first = model.embed_tokens.embeddings[0]
    assert first[0].weight[2:].std().item() == pytest.approx(0.02, rel=0.1)
    assert (first[0].weight[PAD] == 0).all()
    assert first[1].weight.std().item() == pytest.approx(0.01, rel=0.1)
    norms = torch.cat([one.final_layer_norm.weight for one in model.layers])
    assert norms.mean().item() == pytest.approx(1.0, abs=0.01)
    assert norms.std().item() == pytest.approx(0.02, rel=0.4)
    attention = model.layers[0].self_attn
    assert (attention.v_proj.bias == 0).all()
    assert (attention.q_proj.bias != 0).any()  # M4M's neutral start


@pytest.mark.parametrize("scheme", ["transformer_xl", "m4", "rope"])
def test_memory_under_torch_func_is_what_it_was(scheme: str) -> None:
    """Gradients of three segments, the last padded, whose memory is not full: sizes and values are known there."""
    model = randomized(small_xl(position_scheme=scheme, mem_len=20)).double().eval()
    first, second, last = (stream(length=length, seed=length) for length in (8, 6, 5))
    last[0, 4:] = model.decoder.padding_idx
    weights = dict(model.named_parameters())

    def loss(weights: dict) -> Tensor:
        _, extra = functional_call(model, weights, (first,))
        _, extra = functional_call(model, weights, (second,), {"memory": extra["memory"]})
        logits, _ = functional_call(model, weights, (last,), {"memory": extra["memory"]})
        return logits[last.ne(model.decoder.padding_idx)].square().sum()

    wanted = torch.autograd.grad(loss(weights), weights.values(), materialize_grads=True)
    found = grad(loss)({name: one.detach() for name, one in weights.items()})
    for name, one in zip(weights, wanted, strict=True):
        torch.testing.assert_close(found[name], one, rtol=1e-9, atol=1e-9)


def test_a_model_takes_memory_by_place_or_name() -> None:
    """As it always did: tokens, lengths, memory, starts of documents, state of decoding."""
    model, tokens = small_xl(position_scheme="t5"), stream()
    memory = model(tokens, None)[1]["memory"]
    assert torch.equal(model(tokens, None, memory, None, None)[0], model(tokens, src_lengths=None, memory=memory)[0])
