"""Test the kernels on a device: values and all gradients against the formula in fp64 on the CPU.

    python -m relpos_fairseq.attention.triton.selftest < signature     # `selftest_cache` runs it

A call of a given signature is tested at lengths around the edges of tiles and at the call's own length, under a budget
of `error_budget.py`.  The formula gets the kernels' dropout mask, which follows from a published generator.  Each
length runs twice and must give the same bits.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from relpos_fairseq.attention.error_budget import error_budget
from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.reference import attention_of
from relpos_fairseq.attention.relative_shift import ShiftedProducts
from relpos_fairseq.attention.triton.call_signature import CallSignature, TermSignature
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.relations import Segments
from relpos_fairseq.core.terms import Decay, PositionTerms, Reset

LENGTHS = (1, 63, 64, 65, 127, 192)
ROWS = 256  # queries that the formula is evaluated for at a time
SEED = 9
FULL_PRECISION_FACTOR = 4  # of fp32, which is summed in parts; its roundings are small beside any fault
TF32 = 2.0**-10
Attend = Callable[[AttentionInputs], Tensor]


class RandomCall:
    """A call of a signature, drawn in fp64 on the CPU from numbers that the signature's type holds exactly.

    Args:
        signature: of the call.
        length: T, slot of the first query, and number of keys after the last query.
        batch: rows.
    """

    def __init__(self, signature: CallSignature, length: tuple[int, int, int], batch: int) -> None:
        self.signature, self.batch = signature, batch
        self.tgt_len, self.start, after = length
        self.src_len = self.start + self.tgt_len + after
        self.generator = torch.Generator().manual_seed(self.tgt_len)
        self.leaves: dict[str, Tensor] = {}

    def inputs(self) -> AttentionInputs:
        """Draw the call; tensors that want gradients are put into `leaves` by name."""
        signature = self.signature
        lengths = {"q": self.tgt_len, "k": self.src_len, "v": self.src_len}
        content = {
            name: self._content(name, lengths[name], signature.dim[name == "v"], learns)
            for name, learns in zip("qkv", signature.grads, strict=True)
        }
        if signature.rotated:
            content["content_q"] = self._content("content_q", self.tgt_len, signature.rotated, signature.grads[0])
            content["content_k"] = self._content("content_k", self.src_len, signature.rotated, signature.grads[1])
        causal, padded, documents, window = signature.masks
        slots = torch.arange(self.src_len)
        padding = None
        if padded:  # at the end, at the beginning, everywhere
            ends = (self.src_len - self.src_len // 4, self.src_len // 5, 0)
            hidden = (slots >= ends[0], slots < ends[1], slots >= 0)
            padding = torch.stack(hidden)[: self.batch]
        terms = tuple(self._term(number, form) for number, form in enumerate(signature.terms))
        segments = None
        if any(isinstance(form.relation, Segments) for form in signature.terms):
            segments = (slots > self.src_len // 3).long().expand(self.batch, -1)
        positions = Positions(self.tgt_len, self.src_len, self.start, segments=segments)
        return AttentionInputs(
            **content,
            terms=terms,
            positions=positions,
            scale=signature.scale,
            causal=causal,
            key_padding=padding,
            window=window or None,
            documents=(slots // 13).expand(self.batch, -1) if documents else None,
        )

    def _leaf(self, name: str, value: Tensor, learns: bool) -> Tensor:
        value = value.to(self.signature.dtype).double()
        if learns:
            self.leaves[name] = value = value.requires_grad_()
        return value

    def normal(self, *size: int) -> Tensor:
        """Draw unit normal numbers."""
        return torch.randn(size, generator=self.generator, dtype=torch.float64)

    def _content(self, name: str, length: int, dim: int, learns: bool) -> Tensor:
        drawn = self.normal(length, self.batch, self.signature.heads, dim)
        return self._leaf(name, drawn.permute(1, 2, 0, 3), learns)  # as fairseq lays it out

    def _term(self, number: int, form: TermSignature) -> PositionTerms:
        given: dict = {"relation": form.relation, "product": form.product}
        for name, heads, channels, learns in form.tables:
            rows = () if name.endswith("_offset") else (form.relation.size,)
            drawn = self.normal(heads, *rows, *((channels,) if channels else ()))
            if form.product and name in ("query_vectors", "key_vectors"):
                drawn *= self.signature.dim[0] ** -0.5
            elif name in ("gate", "trilinear"):
                drawn = 1 + 0.3 * drawn
            given[name] = self._leaf(f"{number}.{name}", drawn, learns)
        if form.factors is not None:
            (q_rows, q_heads, k_rows, k_heads), rank, learns = form.factors
            sizes = ((q_rows, q_heads, self.tgt_len), (k_rows, k_heads, self.src_len))
            given["static_factors"] = tuple(
                self._leaf(f"{number}.factors of {side}", drawn * rank**-0.25, learns)
                for side, drawn in (
                    (side, self.normal(*self._many(rows, heads), length, rank))
                    for side, (rows, heads, length) in zip("qk", sizes, strict=True)
                )
            )
        if form.reset is not None:
            by_head, by_row, learns = form.reset
            row, column = (
                self._leaf(f"{number}.{name}", self.normal(self._many(False, by_head)[1]), learns)
                for name in ("row", "column")
            )
            first = torch.arange(self.batch if by_row else 1) % self.src_len
            given["reset"] = Reset(row, column, first)
        if form.decay is not None:
            by_head, learns = form.decay
            gates = self.normal(self.batch, self._many(False, by_head)[1], self.src_len)
            sums = torch.nn.functional.logsigmoid(gates + 2).cumsum(-1).float().double()
            if learns:  # as gates' sums have it, single precision whatever the signature's type
                self.leaves[f"{number}.decay"] = sums = sums.requires_grad_()
            given["decay"] = Decay(sums)
        return PositionTerms(**given)

    def _many(self, rows: bool, heads: bool) -> tuple[int, int]:
        return self.batch if rows else 1, self.signature.heads if heads else 1


def problems(signature: CallSignature, lengths: tuple[int, ...] = LENGTHS, by: Attend | None = None) -> list[str]:
    """Return what erred at the shortest length at which the kernels err, at most four lines; [] if nothing does.

    Args:
        signature: of the calls.
        lengths: T of the calls that come before the signature's own length.
        by: evaluates a call in place of Triton's kernels; without dropout only.
    """
    torch.backends.cuda.matmul.allow_tf32 = signature.tf32
    tgt_len, start, after = signature.length
    short = [(length, min(start, 40), min(after, 24)) for length in lengths]
    batch = 3 if signature.masks[1] else 2
    for length, rows in (*((length, batch) for length in short), ((tgt_len, start, after), 1)):
        try:
            found = list(_at_length(signature, length, rows, by))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler or a driver raises is a verdict
            lines = str(error).strip().splitlines() or [""]
            found = [f"{type(error).__name__}: {lines[0][:300]}"]
        if found:
            return [f"{length[0]} queries: {line}" for line in found[:4]]
    return []


def _at_length(signature: CallSignature, length: tuple[int, int, int], batch: int, by: Attend | None) -> Iterator[str]:
    """Yield what errs at one length."""
    draw = RandomCall(signature, length, batch)
    inputs = draw.inputs()
    upstream = draw.normal(batch, signature.heads, length[0], signature.dim[1]).to(signature.dtype)
    names = list(draw.leaves)
    by_kernel = [_by_kernel(signature, inputs, draw.leaves, upstream, by) for _ in range(2)]
    for name, one, other in zip(("output", *names), *by_kernel, strict=True):
        if not torch.equal(one.nan_to_num(), other.nan_to_num()):
            yield f"{name} differs from run to run"
    kept = _kept(inputs, signature.dropout) if signature.dropout else None
    exact = _by_formula(inputs, draw.leaves, upstream.double(), kept)
    low, leaves = _moved(inputs, draw.leaves, "cpu", signature.dtype)
    eager = _by_formula(low, leaves, upstream, kept)
    epsilon = torch.finfo(signature.dtype).eps
    if signature.dtype in (torch.float32, torch.float64):
        epsilon = TF32 if signature.tf32 else epsilon * FULL_PRECISION_FACTOR
    got, of_eager, right = (dict(zip(("output", *names), part, strict=True)) for part in (by_kernel[0], eager, exact))
    compared = error_budget(got, of_eager, right, "on a device", epsilon, cancelled=upstream)
    yield from (str(one) for one in compared if one.exceeds)


def _moved(
    inputs: AttentionInputs, leaves: dict[str, Tensor], device: str, dtype: torch.dtype
) -> tuple[AttentionInputs, dict[str, Tensor]]:
    """Return a call on another device and in another type, and its leaves by the same names."""
    names = {id(leaf): name for name, leaf in leaves.items()}
    decays = (term.decay for term in inputs.terms if term.decay is not None)
    sums, exact = {id(decay.past) for decay in decays}, torch.promote_types(dtype, torch.float32)
    moved: dict[str, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        changed = tensor.detach().to(device, exact if id(tensor) in sums else dtype)
        if id(tensor) in names:
            moved[names[id(tensor)]] = changed.requires_grad_()
        return changed

    positions = replace(inputs.positions, device=torch.device(device))
    if positions.segments is not None:
        positions = replace(positions, segments=positions.segments.to(device))
    masks = inputs.changed(("key_padding", "documents"), lambda mask: mask.to(device))
    call = replace(inputs.mapped(move), positions=positions, **masks)
    terms = tuple(
        term if term.reset is None else replace(term, reset=replace(term.reset, first=term.reset.first.to(device)))
        for term in call.terms
    )
    return replace(call, terms=terms), moved


def _by_kernel(
    signature: CallSignature, inputs: AttentionInputs, leaves: dict[str, Tensor], upstream: Tensor, by: Attend | None
) -> list[Tensor]:
    """Return output and gradients by the kernels, on the CPU."""
    if by is None:
        from relpos_fairseq.attention.triton.fused_attention import fused_attention as by

    call, moved = _moved(inputs, leaves, signature.device, signature.dtype)
    torch.manual_seed(SEED)
    with torch.set_grad_enabled(bool(leaves)):
        out = by(replace(call, dropout=signature.dropout))
    found = [out.detach().cpu()]
    if leaves:
        ordered = [moved[name] for name in leaves]
        grads = torch.autograd.grad(out, ordered, upstream.to(out.device), allow_unused=True)
        found += _filled(grads, ordered)
    return found


def _filled(grads: tuple[Tensor | None, ...], leaves: list[Tensor]) -> list[Tensor]:
    """Return gradients on the CPU, zeros for leaves that have none."""
    pairs = zip(grads, leaves, strict=True)
    return [(torch.zeros_like(leaf) if grad is None else grad).cpu() for grad, leaf in pairs]


def _by_formula(
    inputs: AttentionInputs, leaves: dict[str, Tensor], upstream: Tensor, kept: Tensor | None
) -> list[Tensor]:
    """Return output and gradients by the formula, ROWS queries at a time; `kept` multiplies probabilities."""
    outputs, ordered = [], list(leaves.values())
    totals = [torch.zeros_like(leaf) for leaf in ordered]
    for start in range(0, inputs.positions.tgt_len, ROWS):
        stop = min(start + ROWS, inputs.positions.tgt_len)
        by = 1.0 if kept is None else kept[:, :, start:stop].to(inputs.exact)
        with torch.set_grad_enabled(bool(leaves)):
            part = inputs.rows(start, stop).mapped(lambda tensor: tensor.to(inputs.exact))
            out, _ = attention_of(ShiftedProducts(part), lambda probs, by=by: probs * by)
            out = out.to(inputs.v.dtype)
        outputs.append(out.detach())
        if leaves:
            grads = torch.autograd.grad(out, ordered, upstream[:, :, start:stop], allow_unused=True)
            for total, grad in zip(totals, _filled(grads, ordered), strict=True):
                total += grad
    return [torch.cat(outputs, dim=2), *totals]


def _kept(inputs: AttentionInputs, dropout: float) -> Tensor:
    """Return what dropout multiplies probabilities by (B, H, T, S), the generator seeded with SEED."""
    torch.manual_seed(SEED)
    seed = int(torch.randint(1 << 40, 1 << 62, (), dtype=torch.long))
    batch, heads, tgt_len, _ = inputs.q.shape
    src_len, drops = inputs.k.size(2), round(dropout * 65536)
    key = torch.arange(src_len)
    words = philox(seed, key // 8, torch.arange(tgt_len)[:, None], torch.arange(batch * heads)[:, None, None])
    cell = (key % 8).expand(batch * heads, tgt_len, src_len)
    word = torch.stack(words)
    word = word.gather(0, (cell // 4 + 2 * (cell // 2 % 2))[None])[0]
    half = torch.where(cell % 2 == 1, word >> 16, word & 0xFFFF)
    kept = (half >= drops).double() * (65536 / (65536 - drops))
    return kept.view(batch, heads, tgt_len, src_len)


def philox(seed: int, *counter: Tensor, rounds: int = 7) -> list[Tensor]:
    """Return the four words of 32 bits that Philox-4x32 (Salmon et al. 2011) makes of counters (c0, c1, c2, 0)."""
    low = 0xFFFFFFFF
    words = list(torch.broadcast_tensors(*counter, torch.zeros((), dtype=torch.long)))
    keys = [seed & low, seed >> 32]
    for _ in range(rounds):
        # A product of 64 bits wraps to a negative number, whose bits are the right ones.
        one, two = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [(two >> 32 & low) ^ words[1] ^ keys[0], two & low, (one >> 32 & low) ^ words[3] ^ keys[1], one & low]
        keys = [(keys[0] + 0x9E3779B9) & low, (keys[1] + 0xBB67AE85) & low]
    return words


def main() -> int:
    """Read a pickled signature and print what erred; return 0, or 3 where the device has no room."""
    signature = pickle.load(sys.stdin.buffer)
    try:
        torch.zeros(1, device=signature.device)  # a GPU may be another process's alone
        found = problems(signature)
    except Exception as error:
        print(json.dumps([f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"]))
        return 3
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
