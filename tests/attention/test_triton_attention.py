"""The fused kernels equal the reference: values and every gradient, in fp64 under the interpreter.

Blocks are 16 to 32 wide, so that a few dozen tokens make several tiles of each kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cases import CASES, INPUT, Case, build, kinds_without
from helpers.forms import told_apart
from helpers.scheme_calls import call, gradients, remaker

pytest.importorskip("triton", reason="triton is not installed")
from relpos_fairseq.attention import AttentionInputs, api, attend
from relpos_fairseq.attention import triton as backend
from relpos_fairseq.attention.triton import kernel_args
from relpos_fairseq.core.positions import Positions, index_of_tokens
from relpos_fairseq.core.relations import Segments
from relpos_fairseq.core.terms import PositionTerms

pytestmark = pytest.mark.skipif(not backend.interpreted(), reason="fp64 is for the interpreter (TRITON_INTERPRET=1)")
EXACT = {"rtol": 1e-9, "atol": 1e-9}
# pope's queries have more channels than its values, which these kernels refuse.
LEFT_OUT = (*INPUT, "pope")
IN_ATTENTION = [c for c in CASES if c.scheme not in LEFT_OUT and not c.without_kernel]
KINDS = ("square", "causal", "causal_memory", "pad_left", "block", "step_padded")
# One for each kind of term: to the kernels alibi and kerple are rel_scalar with other numbers.
SCHEMES = ("none", "shaw", "t5", "m2", "m3", "m4", "m4m", "transformer_xl", "tupe", "abs_scalar", "rel_scalar")
HYBRIDS = ("rope+m2+rel_scalar", "m3+rel_scalar+shaw", "m2+m4m+shaw")
GATED = ("fox", "fox+t5+m4m", "cable")
CLIPPED = {"shaw", "m2", "m3", "m4", "m4m", "deberta", "tupe", "rel_scalar"}


def small_launch(kernel: str, work: kernel_args.Work) -> kernel_args.Launch:
    """Tiles of 16 and 32: other shapes for each kernel, square ones for sums along diagonals."""
    rows, keys = {"forward": (32, 16), "rows": (16, 32), "keys": (32, 16)}[kernel]
    return kernel_args.Launch(rows, 16 if work.scalars and kernel == "rows" else keys, 4, 1)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_args, "launch_of", small_launch)


def make_call(
    case: Case, tgt_len: int, memory: int = 0, causal: bool = False, mask: str = "none", dim: int = 4, batch: int = 2
):
    """A call in fp64, its parameters, and what remakes it from other q, k, v."""
    src_len = tgt_len + memory
    flags = dict(case.flags)
    if CLIPPED & set(case.scheme.split("+")):
        flags = {"position_clip_distance": "5"} | flags
    stack, layer = build(Case(case.scheme, flags), causal=causal, heads=2, dim=dim, longest=src_len)
    generator = torch.Generator().manual_seed(src_len)

    def draw(length: int) -> Tensor:
        size = (batch, length, 2, dim)
        drawn = torch.randn(size, generator=generator, dtype=torch.float64)
        return drawn.transpose(1, 2)  # rows of a head are not next to one another, as in fairseq

    padding, chosen = None, {}
    if mask in ("left", "right", "dead"):
        padding = torch.zeros(2, src_len, dtype=torch.bool)
        empty = {"left": slice(0, 18), "right": slice(src_len - 18, None), "dead": slice(None)}
        padding[1, empty[mask]] = True
        chosen["key_padding"] = padding
    elif mask == "window":
        chosen["window"] = 19
    elif mask == "documents":
        chosen["documents"] = torch.arange(src_len).expand(2, -1) // 13
    segments = None
    if flags.get("segment_encoding"):
        segments = (torch.arange(src_len) > src_len // 3).long().expand(2, -1)
    positions = Positions(tgt_len, src_len, memory, token_index=index_of_tokens(padding), segments=segments)
    q, k, v = draw(tgt_len), draw(src_len), draw(src_len)
    inputs = AttentionInputs(q, k, v, (), positions, stack.plan.scale, causal=causal, **chosen)
    remake = remaker(inputs, stack, layer)
    return remake(q, k, v), [*stack.parameters(), *layer.parameters()], remake


def compare(inputs: AttentionInputs, parameters: list, remake) -> None:
    """Values and all gradients of the kernels and of the reference."""
    expected, wanted = gradients(inputs, "reference", parameters, remake)
    got, found = gradients(inputs, "triton", parameters, remake)
    torch.testing.assert_close(got, expected, **EXACT)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("case", told_apart(IN_ATTENTION), ids=str)
def test_every_case(case: Case) -> None:
    """Every scheme and form of terms, each under one of the kinds of calls in turn."""
    kind = "causal_memory" if case.gated else KINDS[IN_ATTENTION.index(case) % len(KINDS)]
    inputs, stack, layer, _ = call(case, kind)
    compare(inputs, [*stack.parameters(), *layer.parameters()], remaker(inputs, stack, layer))


@pytest.mark.parametrize("scheme", (*SCHEMES, *HYBRIDS))
def test_several_tiles(scheme: str) -> None:
    """Tails, bands and edges of tiles, both directions visible."""
    compare(*make_call(Case(scheme), 50, batch=1))


@pytest.mark.parametrize("scheme", (*SCHEMES, *GATED))
def test_causal_with_memory(scheme: str) -> None:
    """Queries that stand on the last keys, and see none behind themselves."""
    memory = 0 if set(scheme.split("+")) & {"tupe", "abs_scalar"} else 23
    compare(*make_call(Case(scheme), 37, memory, causal=True, batch=1))


def test_every_kind_of_term_is_read_over_several_tiles() -> None:
    """The schemes above have every kind of term that the kernels serve."""
    served = {case.scheme for case in IN_ATTENTION if "+" not in case.scheme}
    assert not kinds_without(served, (*SCHEMES, *HYBRIDS, *GATED))


MASKS = ("left", "right", "dead", "window", "documents")


def masked() -> Iterator[tuple[str, str]]:
    """Vectors under every mask; each other kind of term under two of them."""
    yield from (("shaw", mask) for mask in MASKS)
    for place, scheme in enumerate(("m4m", "m3", "rel_scalar", "tupe", "fox")):
        yield from ((scheme, MASKS[(place + turn) % 5]) for turn in (0, 3))


@pytest.mark.parametrize(("scheme", "mask"), list(masked()))
def test_every_mask(scheme: str, mask: str) -> None:
    """Padding on either side, a row without any key, a window, documents."""
    causal = mask in ("window", "documents") or scheme == "fox"
    compare(*make_call(Case(scheme), 40, causal=causal, mask=mask))


@pytest.mark.parametrize("dim", [16, 20])
@pytest.mark.parametrize("scheme", ["shaw", "m3", "tupe"])
def test_widths(scheme: str, dim: int) -> None:
    """A head of a block's own width, and one that is padded to the next."""
    compare(*make_call(Case(scheme), 20, dim=dim))


@pytest.mark.parametrize(
    "case",
    [
        Case("m4", {"position_reset_cls": "on", "position_share": "none"}),
        Case("deberta+tupe", {"position_scale": "3"}),
        Case("rel_scalar", {"segment_encoding": "head"}),
        Case("abs_scalar", {"segment_encoding": "head"}),
        Case("m2", {"position_clip_distance": "0"}),
        Case("shaw", {"position_clip_distance": "0"}),
    ],
    ids=str,
)
def test_options(case: Case) -> None:
    """Resets of some terms and not of others, segments beside factors, unclipped tables."""
    compare(*make_call(case, 40))


@pytest.mark.parametrize("scheme", ["shaw", "m2", "m4m", "m3", "tupe"])
def test_same_inputs_same_bits(scheme: str) -> None:
    """No sum depends on an order that a run may change; fp32."""
    inputs, parameters, remake = make_call(Case(scheme), 40, causal=scheme == "m3", batch=1)
    inputs = replace(inputs, **{n: getattr(inputs, n).float() for n in ("q", "k", "v")})
    (one, first), (other, second) = (gradients(inputs, "triton", parameters, remake) for _ in range(2))
    assert torch.equal(one, other)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_without_gradients() -> None:
    """Inference forms no graph and gives the same output."""
    inputs, *_ = make_call(Case("shaw"), 40)
    with torch.no_grad():
        got, _ = attend(inputs, "triton")
        expected, _ = attend(inputs, "reference")
    torch.testing.assert_close(got, expected, **EXACT)


def test_memory_of_a_call() -> None:
    """What a call keeps for its backward pass is linear in length for clipped tables."""
    sizes = []
    for length in (32, 64):
        kept = []

        def pack(tensor: Tensor, kept=kept) -> Tensor:
            kept.append(tensor.untyped_storage())
            return tensor

        inputs, _, remake = make_call(Case("m4+rel_scalar"), length)
        leaves = [x.detach().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            attend(remake(*leaves), "triton")
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


def refused(inputs: AttentionInputs, match: str) -> None:
    with pytest.raises(ValueError, match=f"backend triton cannot evaluate .*{match}"):
        attend(inputs, "triton")


def test_refusals() -> None:
    """What is not served is said by name, with a way out."""
    inputs, *_ = make_call(Case("m4"), 20)
    wide = {n: torch.randn(1, 1, 20, 160) for n in ("q", "k", "v")}
    refused(replace(inputs, terms=(), **wide), "head_dim 160 .*use --attention-backend auto")
    refused(replace(inputs, v=inputs.v.float()), "q, k, v of types")
    refused(replace(inputs, v=inputs.v[..., :2]), "values of another width")
    with pytest.raises(ValueError, match="backend triton .*need_weights"):
        attend(inputs, "triton", need_weights=True)
    segments = PositionTerms(Segments(2), query_vectors=torch.zeros(1, 4, 4).double())
    refused(replace(inputs, terms=(segments,)), "query_vectors over Segments")
    product, *_ = make_call(Case("m4m"), 20)
    refused(replace(product, terms=product.terms * 2), "2 product terms")
    rank = torch.zeros(1, 1, 20, 130).double()
    factors = PositionTerms(static_factors=(rank, rank))
    refused(replace(inputs, terms=(factors,)), "static_factors of rank 130")
    mixed, *_ = make_call(Case("tupe"), 20)
    another = replace(mixed.terms[0].reset, first=torch.tensor([3]))
    twice = (*mixed.terms, replace(mixed.terms[0], reset=another))
    refused(replace(mixed, terms=twice), "resets of several first tokens")
    many, *_ = make_call(Case("m3", {"position_clip_distance": "0"}), 600)
    refused(many, "vectors of 1201 distances")


def test_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the kernels are for tests: a user is told so, and `auto` never takes them."""
    inputs, *_ = make_call(Case("m4"), 7)
    monkeypatch.setattr(api.native, "problem", lambda _: None)
    assert api.choose(inputs) == "native"
    assert api.choose(make_call(Case("t5"), 7)[0]) == "reference"  # few tokens
    monkeypatch.delenv("TRITON_INTERPRET")
    refused(inputs, "tensors on cpu .its kernels run on CUDA")


def test_auto_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There `auto` takes the kernels for what they serve, and the blocks for the rest."""
    inputs, *_ = make_call(Case("m4"), 20)
    on_gpu = {n: torch.empty(1, 2, 20, 4, device="meta") for n in ("q", "k", "v")}
    inputs = replace(inputs, **on_gpu)
    monkeypatch.setattr(api, "on_gpu", lambda inputs: True)
    monkeypatch.setattr(api.triton, "refusal", lambda inputs: None)
    monkeypatch.setattr(api.triton, "unproved", lambda inputs: None)
    assert api.choose(inputs) == "triton"
    assert api.choose(inputs, need_weights=True) == "blocked"
    assert api.choose(replace(inputs, terms=())) == "sdpa"
    monkeypatch.setattr(api.triton, "refusal", lambda inputs: "this")
    assert api.choose(inputs) == "blocked"
