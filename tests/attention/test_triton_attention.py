"""The fused kernels equal the reference: values and every gradient, in fp64 under the interpreter.

Blocks are 16 to 32 wide, so that a few dozen tokens make several tiles of each kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from cases import CASES, INPUT, Case, kinds_without
from helpers.forms import told_apart
from helpers.scheme_calls import as_leaves, hold_case
from helpers.shaped_calls import Shape, compare, make_inputs, results

pytest.importorskip("triton", reason="triton is not installed")
from relpos_fairseq.attention import AttentionInputs, api, attend
from relpos_fairseq.attention import triton as backend
from relpos_fairseq.attention.triton import kernel_args
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.relations import Segments
from relpos_fairseq.core.terms import PositionTerms

pytestmark = pytest.mark.skipif(not backend.interpreted(), reason="fp64 is for the interpreter (TRITON_INTERPRET=1)")
# pope's queries have more channels than its values, which these kernels refuse.
LEFT_OUT = (*INPUT, "pope")
IN_ATTENTION = [c for c in CASES if c.scheme not in LEFT_OUT and not c.without_kernel]
KINDS = ("square", "causal", "causal_memory", "pad_left", "block", "step_padded")
# One for each kind of term: to the kernels alibi and kerple are rel_scalar with other numbers.
SCHEMES = ("none", "shaw", "t5", "m2", "m3", "m4", "m4m", "transformer_xl", "tupe", "abs_scalar", "rel_scalar")
HYBRIDS = ("rope+m2+rel_scalar", "m3+rel_scalar+shaw", "m2+m4m+shaw")
GATED = ("fox", "fox+t5+m4m", "cable")
by_kernel, shape = partial(compare, backend="triton"), partial(Shape, clip=5)


def small_launch(kernel: str, work: kernel_args.Work) -> kernel_args.Launch:
    """Tiles of 16 and 32: other shapes for each kernel, square ones for sums along diagonals."""
    rows, keys = {"forward": (32, 16), "rows": (16, 32), "keys": (32, 16)}[kernel]
    return kernel_args.Launch(rows, 16 if work.scalars and kernel == "rows" else keys, 4, 1)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_args, "launch_of", small_launch)


@pytest.mark.parametrize("case", told_apart(IN_ATTENTION), ids=str)
def test_every_case(case: Case) -> None:
    """Every scheme and form of terms, each under one of the kinds of calls in turn."""
    kind = "causal_memory" if case.gated else KINDS[IN_ATTENTION.index(case) % len(KINDS)]
    hold_case("triton", case, kind)


@pytest.mark.parametrize("scheme", (*SCHEMES, *HYBRIDS))
def test_several_tiles(scheme: str) -> None:
    """Tails, bands and edges of tiles, both directions visible."""
    by_kernel(make_inputs(scheme, shape(50, batch=1)))


@pytest.mark.parametrize("scheme", (*SCHEMES, *GATED))
def test_causal_with_memory(scheme: str) -> None:
    """Queries that stand on the last keys, and see none behind themselves."""
    by_kernel(make_inputs(scheme, shape(37, before=23, causal=True, batch=1)))


def test_every_kind_of_term_is_read_over_several_tiles() -> None:
    """The schemes above have every kind of term that the kernels serve."""
    served = {case.scheme for case in IN_ATTENTION if "+" not in case.scheme}
    assert not kinds_without(served, (*SCHEMES, *HYBRIDS, *GATED))


MASKS = {name: {"masks": (name,)} for name in ("left", "right", "dead", "documents")} | {"window": {"window": 19}}


def masked() -> Iterator[tuple[str, str]]:
    """Vectors under every mask; each other kind of term under two of them."""
    masks = ("left", "right", "dead", "window", "documents")
    yield from (("shaw", mask) for mask in masks)
    for place, scheme in enumerate(("m4m", "m3", "rel_scalar", "tupe", "fox")):
        yield from ((scheme, masks[(place + turn) % 5]) for turn in (0, 3))


@pytest.mark.parametrize(("scheme", "mask"), list(masked()))
def test_every_mask(scheme: str, mask: str) -> None:
    """Padding on either side, a row without any key, a window, documents."""
    causal = mask in ("window", "documents") or scheme == "fox"
    by_kernel(make_inputs(scheme, shape(40, causal=causal, **MASKS[mask])))


@pytest.mark.parametrize("dim", [16, 20])
@pytest.mark.parametrize("scheme", ["shaw", "m3", "tupe"])
def test_widths(scheme: str, dim: int) -> None:
    """A head of a block's own width, and one that is padded to the next."""
    by_kernel(make_inputs(scheme, shape(20, dim=dim)))


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("m4", {"reset_cls": "on", "share": "none"}),
        ("deberta+tupe", {"scale": "3"}),
        ("rel_scalar", {"segment_encoding": "head"}),
        ("abs_scalar", {"segment_encoding": "head"}),
        ("m2", {"clip_distance": "0"}),
        ("shaw", {"clip_distance": "0"}),
    ],
)
def test_options(scheme: str, options: dict) -> None:
    """Resets of some terms and not of others, segments beside factors, unclipped tables."""
    by_kernel(make_inputs(scheme, shape(40), **options))


@pytest.mark.parametrize("scheme", ["shaw", "m2", "m4m", "m3", "tupe"])
def test_same_inputs_same_bits(scheme: str) -> None:
    """No sum depends on an order that a run may change; fp32."""
    call = as_leaves(make_inputs(scheme, shape(40, causal=scheme == "m3", batch=1)), torch.float32)
    one, other = (results(*call, "triton") for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


@torch.no_grad()
def test_without_gradients() -> None:
    """Inference forms no graph and gives the same output."""
    inputs = make_inputs("shaw", shape(40))
    found, expected = (attend(inputs, one)[0] for one in ("triton", "reference"))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_memory_of_a_call() -> None:
    """What a call keeps for its backward pass is linear in length for clipped tables."""
    sizes = []
    for length in (32, 64):
        kept = []

        def pack(tensor: Tensor, kept=kept) -> Tensor:
            kept.append(tensor.untyped_storage())
            return tensor

        inputs, _ = as_leaves(make_inputs("m4+rel_scalar", shape(length)), torch.float64)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            attend(inputs, "triton")
        sizes.append(sum({x.data_ptr(): x.nbytes() for x in kept}.values()))
    assert sizes[1] <= 2 * sizes[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 64, 128])
def test_launches(dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums along diagonals have square tiles; products and groups of dropout have 16 at least."""
    monkeypatch.undo()
    for rank, tables, scalars, gate in itertools.product((0, 16, 128), *[(False, True)] * 3):
        work = kernel_args.Work(dtype, dim, rank, tables, scalars=scalars or gate, gate=gate)
        for kernel in kernel_args.KERNELS:
            tile = kernel_args.launch_of(kernel, work)
            assert min(tile.rows, tile.keys) >= 16
            assert kernel != "rows" or not work.scalars or tile.rows == tile.keys


def philox(seed: int, counter: tuple[int, int, int, int], rounds: int = 7) -> list[int]:
    """Philox-4x32 (Salmon et al. 2011) on Python's integers."""
    words, key = list(counter), [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(rounds):
        low, high = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [(high >> 32) ^ words[1] ^ key[0], high & 0xFFFFFFFF, (low >> 32) ^ words[3] ^ key[1], low & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return words


def keeps(seed: int, n: int, row: int, key: int, probability: float) -> bool:
    """Whether a cell is kept: the counter's 16 bits of it."""
    words, cell = philox(seed, (key // 8, row, n, 0)), key % 8
    word = words[cell // 4 + 2 * (cell // 2 % 2)]
    return (word >> 16 if cell % 2 else word & 0xFFFF) >= round(probability * 65536)


def test_dropout_mask_by_hand() -> None:
    """Every cell follows the published generator, and its counter is the cell's own place."""
    torch.manual_seed(2)
    q, k = (torch.randn(1, 2, 20, 20, dtype=torch.float64) for _ in range(2))
    v = torch.eye(20, dtype=torch.float64).expand(1, 2, -1, -1)
    inputs = AttentionInputs(q, k, v, (), Positions(20, 20), 0.3, dropout=0.4)
    torch.manual_seed(9)
    seed = int(torch.randint(1 << 40, 1 << 62, (), dtype=torch.long))
    torch.manual_seed(9)
    kept = attend(inputs, "triton")[0][0] > 0
    for n in range(2):
        for row in (0, 7, 19):
            expected = [keeps(seed, n, row, key, 0.4) for key in range(20)]
            assert kept[n, row].tolist() == expected


def segments(table: Tensor) -> PositionTerms:
    return PositionTerms(Segments(2), query_vectors=table)


def factors(table: Tensor) -> PositionTerms:
    return PositionTerms(static_factors=(table, table))


def twice_reset(term: PositionTerms) -> tuple[PositionTerms, ...]:
    return term, replace(term, reset=replace(term.reset, first=torch.tensor([3])))


@pytest.mark.parametrize(
    ("scheme", "change", "message"),
    [
        ("none", lambda x: replace(x, q=torch.ones(1, 1, 20, 160)), "head_dim 160 .*use --attention-backend auto"),
        ("m4", lambda x: replace(x, v=x.v.float()), "q, k, v of types"),
        ("m4", lambda x: replace(x, v=x.v[..., :2]), "values of another width"),
        ("m4", lambda x: replace(x, terms=(segments(torch.zeros(1, 4, 4).double()),)), "query_vectors over Segments"),
        ("m4", lambda x: replace(x, terms=(factors(torch.zeros(1, 1, 20, 130).double()),)), "factors of rank 130"),
        ("m4m", lambda x: replace(x, terms=x.terms * 2), "2 product terms"),
        ("tupe", lambda x: replace(x, terms=twice_reset(x.terms[0])), "resets of several first tokens"),
        ("m3", lambda _: make_inputs("m3", Shape(600, clip=0)), "vectors of 1201 distances"),
    ],
)
def test_refusals(scheme: str, change: Callable[[AttentionInputs], AttentionInputs], message: str) -> None:
    """What is not served is said by name, with a way out."""
    with pytest.raises(ValueError, match=f"backend triton cannot evaluate .*{message}"):
        attend(change(make_inputs(scheme, Shape(20))), "triton")


def test_probabilities_are_refused() -> None:
    with pytest.raises(ValueError, match="backend triton .*need_weights"):
        attend(make_inputs("m4", Shape(20)), "triton", need_weights=True)


def test_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the kernels are for tests: a user is told so, and `auto` never takes them."""
    inputs = make_inputs("m4", Shape(7))
    monkeypatch.setattr(api.native, "problem", lambda _: None)
    assert api.choose(inputs) == "native"
    assert api.choose(make_inputs("t5", Shape(7))) == "reference"  # few tokens
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="backend triton cannot evaluate .*tensors on cpu .its kernels run on CUDA"):
        attend(inputs, "triton")


def test_auto_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There `auto` takes the kernels for what they serve, and the blocks for the rest."""
    inputs = replace(make_inputs("m4", Shape(20)), **dict.fromkeys("qkv", torch.empty(1, 2, 20, 4, device="meta")))
    monkeypatch.setattr(api, "on_gpu", lambda inputs: True)
    monkeypatch.setattr(api.triton, "refusal", lambda inputs: None)
    monkeypatch.setattr(api.triton, "unproved", lambda inputs: None)
    assert api.choose(inputs) == "triton"
    assert api.choose(inputs, need_weights=True) == "blocked"
    assert api.choose(replace(inputs, terms=())) == "sdpa"
    monkeypatch.setattr(api.triton, "refusal", lambda inputs: "this")
    assert api.choose(inputs) == "blocked"
