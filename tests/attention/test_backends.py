"""Every backend equals the reference, in values and in every gradient; none falls back silently."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from cases import BEYOND, CASES, INPUT, Case, build, terms_of
from helpers import FULL
from helpers.forms import in_turn, told_apart
from helpers.scheme_calls import call, hold_case
from relpos_fairseq.attention import AttentionInputs, api, attend, blocked, native, step, triton
from relpos_fairseq.attention.lowering import factors_of
from relpos_fairseq.attention.reference import decay_logits
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.relations import Clipped
from relpos_fairseq.core.terms import Decay, PositionTerms

IN_ATTENTION = [*(case for case in CASES if case.scheme not in INPUT), *BEYOND]
FIVE = Clipped(2, 2)  # distances
KINDS = ("square", "causal", "causal_memory", "pad_left", "block", "step_padded")


@pytest.mark.parametrize(("case", "kind"), in_turn(told_apart(IN_ATTENTION), KINDS), ids=str)
def test_blocked_gradients(case: Case, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of two rows, the last one shorter, give the reference's values and gradients."""
    monkeypatch.setattr(blocked, "slice_rows", lambda _: 2)
    hold_case("blocked", case, kind)


FIRE_BEYOND = next(case for case in BEYOND if case.scheme == "fire")
SERVED_BY_SDPA = [
    *map(Case, ("none", "rope", "alibi", "rel_scalar", "t5", "kerple", "abs_scalar", "tupe", "rope+rel_scalar")),
    *map(Case, ("fox", "cable", "xpos", "pope")),
    Case("rel_scalar", {"segment_encoding": "head"}),
    FIRE_BEYOND,
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", SERVED_BY_SDPA, ids=str)
def test_sdpa_gradients(case: Case, kind: str) -> None:
    """SDPA serves content alone and constant biases, exactly."""
    hold_case("sdpa", case, kind)


@pytest.mark.parametrize(
    ("scheme", "backend", "need_weights", "message"),
    [
        ("shaw", "sdpa", False, "backend sdpa cannot evaluate .*query_vectors"),
        ("m4", "sdpa", False, "backend sdpa cannot evaluate .*key_vectors"),
        ("m2", "sdpa", False, "backend sdpa cannot evaluate .*gate"),
        ("m3", "sdpa", False, "backend sdpa cannot evaluate .*trilinear"),
        ("m4m", "sdpa", False, "backend sdpa cannot evaluate .*product"),
        ("transformer_xl", "sdpa", False, "backend sdpa cannot evaluate .*content_offset"),
        ("none", "sdpa", True, "backend sdpa .*need_weights"),
        ("none", "flash", False, "unknown attention backend 'flash'"),
    ],
)
def test_refusals_name_backend_and_reason(scheme: str, backend: str, need_weights: bool, message: str) -> None:
    """A backend that cannot evaluate a term says which, and names itself."""
    inputs, *_ = call(Case(scheme), "square")
    with pytest.raises(ValueError, match=message):
        attend(inputs, backend, need_weights=need_weights)


def test_vectors_over_segments_are_refused() -> None:
    inputs, *_ = call(Case("rel_scalar", {"segment_encoding": "head"}), "square")
    relation = inputs.terms[-1].relation
    vectors = PositionTerms(relation, query_vectors=torch.zeros(1, relation.size, 4).double())
    with pytest.raises(ValueError, match="backend blocked .*query_vectors over Segments"):
        attend(replace(inputs, terms=(vectors,)), "blocked")


@pytest.mark.parametrize("case", told_apart(IN_ATTENTION), ids=str)
def test_auto_follows_fixed_rules(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for a few tokens native; without a compiler blocked, or SDPA where nothing is added."""
    monkeypatch.setattr(api, "crossover_length", lambda _: 1)
    monkeypatch.setattr(blocked, "slice_rows", lambda _: 1)
    inputs, *_ = call(case, "causal" if case.gated else "square")
    # What no kernel evaluates.
    refused = any(term.dense_bias is not None for term in inputs.terms)
    refused |= "pope+" in case.scheme
    evaluated = any(term.present for term in inputs.terms)
    served = "blocked" if case.without_kernel else "native"
    for problem, kernel in ((None, served), ("anything without a compiler", "blocked")):
        monkeypatch.setattr(native, "problem", lambda _, problem=problem: problem)
        kernel = "blocked" if refused else kernel
        assert api.choose(inputs) == (kernel if evaluated or problem is None else "sdpa")
        assert api.choose(replace(inputs, dropout=0.1)) == kernel
        assert api.choose(inputs, need_weights=True) == "blocked"


@torch.no_grad()
def test_each_rule_decides_for_some_call_and_none_for_one_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU with a compiler and without, and on a GPU, for which tensors without values stand."""
    monkeypatch.setattr(api, "on_gpu", lambda inputs: inputs.q.device.type == "meta")
    monkeypatch.setattr(triton, "refusal", lambda inputs: None if inputs.q.device.type == "meta" else "tensors")
    monkeypatch.setattr(triton, "unproved", lambda _: None)
    monkeypatch.setitem(api.CROSSOVER_STEP_KEYS, "blocked", 32)
    calls = [call(case, kind)[0] for case, kind in in_turn(told_apart(IN_ATTENTION), KINDS)]
    calls += [call(Case("none"), "step", batch=batch)[0] for batch in (2, 3)]  # 28 and 42 keys
    calls += [replace(one, **{name: getattr(one, name).to("meta") for name in ("q", "k", "v")}) for one in calls]
    deciding = set()
    for problem, short in ((None, 1), ("anything", 1), ("anything", 300)):
        monkeypatch.setattr(native, "problem", lambda _, problem=problem: problem)
        monkeypatch.setattr(api, "crossover_length", lambda _, short=short: short)
        for inputs, need_weights in ((one, wanted) for one in calls for wanted in (False, True)):
            asked = api._Call(inputs, api._has_terms(inputs), need_weights)
            deciding.add(next(row for row, (_, fits) in enumerate(api.RULES) if fits(asked)))
            backend = api.choose(inputs, need_weights)
            served = backend == "native" and native.serves_step(inputs)
            assert served or api._MODULES[backend].refusal(inputs) is None
            assert not (need_weights and backend in api.WITHOUT_PROBABILITIES)
    assert deciding == set(range(1, len(api.RULES))), "the first row is for what is exported or transformed"


def test_auto_without_a_kernel_slices_what_one_slice_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to there the reference holds no more, and forms nothing twice; m3 it would never end."""
    monkeypatch.setattr(native, "problem", lambda _: "anything without a compiler")
    for scheme, within in (("shaw", "reference"), ("t5", "reference"), ("m3", "blocked")):
        terms = call(Case(scheme), "square")[0].terms
        for batch, heads, longest in ((2, 8, 362), (16, 8, 128)):
            for length, expected in ((longest, within), (longest + 1, "blocked")):
                q = torch.empty(1, 1, 1, 4).expand(batch, heads, length, 4)
                one = AttentionInputs(q, q, q, terms, Positions(length, length), 1.0)
                assert api.choose(one) == expected
                assert api.choose(one, need_weights=True) == expected


def test_auto_gathers_for_a_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never channel by channel, and not where a step of decoding has its own way."""
    monkeypatch.setattr(native, "problem", lambda _: None)
    cases = [Case(name) for name in ("tupe", "m2", "shaw", "m3", "none")]
    chosen = [api.choose(call(case, "square")[0]) for case in cases]
    assert chosen == ["reference", "reference", "native", "native", "sdpa"]
    q, k, v = (torch.randn(1, 1, length, 4) for length in (1, 9, 9))
    (gate,) = call(cases[1], "square")[0].terms
    one = AttentionInputs(q, k, v, (gate,), Positions(1, 9, 8), 1.0, causal=True)
    assert api.choose(one) == "blocked"
    assert api.choose(replace(one, terms=())) == "sdpa"
    mixed = replace(one, terms=call(Case("dape"), "square")[0].terms)  # which no step of its own serves
    assert api.choose(mixed) == "reference"


@pytest.mark.parametrize(
    ("scheme", "how", "short"),
    [
        ("shaw", {}, 2),
        ("shaw", {"causal": True}, 2),
        ("m2", {}, 128),
        ("m2", {"causal": True}, 64),
        ("m2", {"dropout": 0.1}, 64),
        ("tupe", {}, 256),
        ("fox", {}, 2),
        ("fox", {"causal": True}, 96),
        ("none", {}, 128),
        ("none", {"dropout": 0.1}, 48),
    ],
)
def test_auto_knows_a_few_tokens_by_their_number(
    scheme: str, how: dict, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a fixed number of queries on, or twice as many keys, the kernel is the faster way."""
    monkeypatch.setattr(native, "problem", lambda _: None)
    terms = call(Case(scheme), "square")[0].terms
    few = "sdpa" if not terms and not how else "reference"
    for tgt, src, expected in (
        (short - 1, short, few),
        (short, short, "native"),
        (1, 2 * short - 1, few),
        (1, 2 * short, "native"),
    ):
        q, k, v = (torch.randn(1, 1, length, 4) for length in (tgt, src, src))
        one = AttentionInputs(q, k, v, terms, Positions(tgt, src), 1.0, **how)
        assert api.choose(one) == expected


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_lose_nothing_of_a_long_decay(dtype: torch.dtype, weighted: bool) -> None:
    """Sums of thousands, whose differences matter: as exact as in single precision."""
    sums = -torch.rand(1, 2, 4000, generator=torch.Generator().manual_seed(1)).cumsum(-1)
    positions = Positions(10, 4000, 3990)
    q = torch.zeros(1, 2, 10, 4, dtype=dtype)
    inputs = AttentionInputs(q, q, q, (), positions, 1.0, causal=True)
    weight = torch.linspace(0.5, 1, 4000).to(dtype).float().expand(1, 2, -1) if weighted else None
    term = PositionTerms(decay=Decay(sums.requires_grad_(), weight=weight))
    ((of_query, of_key),) = factors_of(term, inputs, dtype)
    found = of_query.float() @ of_key.float().transpose(-1, -2)
    wanted = decay_logits(term.decay, positions)
    seen = (positions.distance() <= 0).expand_as(wanted)
    torch.testing.assert_close(found[seen], wanted[seen], rtol=0, atol=3e-4)
    found[0, 0, 0, 7].backward()
    slope = 1 if weight is None else weight[0, 0, 3990]
    assert sums.grad[0, 0, 3990] == slope and sums.grad[0, 0, 7] == -slope


def test_products_do_not_overflow_fp16() -> None:
    """M4M's product of three passes 65504 in fp16; logits are fp32, so probabilities stand."""
    inputs, stack, layer, _ = call(Case("m4m"), "square", dim=8)
    layer.half()
    terms = layer.evaluate(inputs.positions).terms
    big = {name: (getattr(inputs, name) * 40).half() for name in ("q", "k", "v")}
    big["k"][:] = big["q"]
    loud = replace(inputs, terms=terms, **big)
    product = (loud.q.double() @ loud.k.double().transpose(-1, -2)).abs().max()
    factor = (loud.q.double() @ layer[0].table[0].double().t()).abs().max()
    assert product * factor > 65504
    for backend in ("reference", "blocked"):
        assert attend(loud, backend)[0].isfinite().all()


def test_dropout_falls_before_the_value_vectors() -> None:
    """Shaw's value term meets dropped probabilities, as values do."""
    inputs, *_ = call(Case("shaw"), "square")
    torch.manual_seed(1)
    out, probs = attend(replace(inputs, dropout=0.5), "blocked", need_weights=True)
    vectors = inputs.terms[-1].value_vectors[:, inputs.terms[-1].relation.ids(inputs.positions)[0]]
    expected = probs @ inputs.v + torch.einsum("bhij,hijd->bhid", probs, vectors.expand(2, -1, -1, -1))
    assert (probs == 0).any()
    torch.testing.assert_close(out, expected)


class Largest(TorchDispatchMode):
    """Remembers how many elements the largest tensor has that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(item, Tensor):
                self.elements = max(self.elements, item.untyped_storage().nbytes() // item.element_size())
        return out


@pytest.mark.parametrize("scheme", ["shaw", "m4", "rel_scalar", "transformer_xl", "tupe", "m3"])
def test_memory_is_linear_in_length(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of a training step has T^2 elements beyond one slice's budget."""
    monkeypatch.setitem(blocked.SLICE_ELEMENTS, "cpu", 1 << 12)
    found = []
    for length in (256, 512):
        stack, layer = build(Case(scheme), heads=1, dim=8, longest=length)
        positions = Positions(length, length)
        q, k, v = torch.randn(3, 1, 1, length, 8, dtype=torch.float64, requires_grad=True)
        with Largest() as largest:
            inputs = AttentionInputs(q, k, v, terms_of(stack, layer, positions), positions, stack.plan.scale)
            attend(inputs, "blocked")[0].sum().backward()
        found.append(largest.elements)
    assert found[1] <= 2.1 * max(found[0], 1 << 14)


def test_slices_follow_shape_alone() -> None:
    """Slices are fixed by shape: few rows for long keys, all rows for short ones."""
    short, long = (
        AttentionInputs(*[torch.empty(*size, device="meta")] * 3, (), Positions(size[2], size[2]), 1.0)
        for size in ((2, 4, 20, 4), (4, 12, 4096, 64))
    )
    assert blocked.slice_rows(short) >= 20 and blocked.slice_rows(long) == blocked.LEAST_ROWS


def test_decoding_recomputes_nothing_for_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's cost per key is that of q.k: far keys meet no vector of their own."""
    for scheme in ("shaw", "m4", "m4m", "m3", "m2", "rel_scalar"):
        stack, layer = build(Case(scheme), causal=True, heads=1, dim=8)
        length = 300
        positions = Positions(1, length, length - 1)
        q = torch.randn(1, 1, 1, 8).double()
        k, v = (torch.randn(1, 1, length, 8).double() for _ in range(2))
        terms = layer.evaluate(positions).terms
        tails = step.form_clipped_key_products(terms, k)
        inputs = AttentionInputs(q, k, v, terms, positions, 0.3, causal=True, clipped_key_products=tails)
        expected, _ = attend(inputs, "reference")
        with FlopCounterMode(display=False) as plain:
            attend(replace(inputs, terms=()), "blocked")
        with FlopCounterMode(display=False) as counted:
            got, _ = attend(inputs, "blocked")
        torch.testing.assert_close(got, expected)
        assert counted.get_total_flops() <= 1.15 * plain.get_total_flops(), scheme


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"relation": FIVE, "query_vectors": torch.zeros(1, 4, 8)}, r"query_vectors must be \(heads, 5, head_dim\)"),
        ({"gate": torch.zeros(1, 4)}, "gate needs a relation"),
        ({"relation": FIVE, "query_vectors": torch.zeros(1, 5, 8), "product": True}, "product term needs both"),
    ],
)
def test_terms_check_their_shapes(given: dict, message: str) -> None:
    """A table that does not fit its relation is refused where it is made."""
    with pytest.raises(ValueError, match=message):
        PositionTerms(**given)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("case", IN_ATTENTION, ids=str)
def test_blocked_on_cuda(case: Case) -> None:
    """The same numbers on a GPU."""
    inputs, stack, layer, _ = call(case, "causal")
    expected, _ = attend(inputs, "reference")
    stack.cuda(), layer.cuda()
    positions = replace(inputs.positions, device=torch.device("cuda"))
    terms = terms_of(stack, layer, positions)
    moved = {n: getattr(inputs, n).cuda() for n in ("q", "k", "v")}
    if inputs.rotated:
        moved |= {n: getattr(inputs, n).cuda() for n in ("content_q", "content_k")}
    got, _ = attend(replace(inputs, positions=positions, terms=terms, **moved), "blocked")
    torch.testing.assert_close(got.cpu(), expected)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["blocked", *(["native"] if FULL else [])])  # as in models/test_fullgraph.py
def test_compiled_models(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile, which makes operations pure, changes no value and no gradient."""
    monkeypatch.setattr(blocked, "slice_rows", lambda _: 50)
    if backend == "native" and native.build.problem() is not None:
        pytest.skip("no C compiler")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 128, 8, generator=generator) for _ in range(3))
    table = torch.randn(1, 8, 8, generator=generator).requires_grad_()
    term = PositionTerms(Clipped(4, 3), query_vectors=table, key_vectors=table)
    positions = Positions(128, 128)

    def run(q: torch.Tensor, chosen: str) -> torch.Tensor:
        return attend(AttentionInputs(q, k, v, (term,), positions, 0.3), chosen)[0]

    compiled = torch.compile(lambda q: run(q, backend), backend="aot_eager")
    for factor in (1, 2):
        found, expected = compiled(q * factor), run(q * factor, "reference")
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        one, other = (torch.autograd.grad(x.square().sum(), table)[0] for x in (found, expected))
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_kernels_refuse_new_terms_by_name(backend: str) -> None:
    """Logits by row, and content that is wider than the vectors beside it."""
    width = "content of 8 channels" if backend == "native" else "values of another width .4. than"
    for case, named in ((FIRE_BEYOND, r"\(dense_bias\)"), (Case("pope+m4"), width)):
        inputs, *_ = call(case, "square")
        assert re.search(named, api._MODULES[backend].refusal_anywhere(inputs) or "")
    inputs, *_ = call(Case("pope"), "square")
    assert (native.refusal_anywhere(inputs) is None) and triton.refusal_anywhere(inputs)
