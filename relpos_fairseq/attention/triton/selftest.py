"""The trial of the kernels on a device: values and all gradients against fp64 on the CPU.

    python -m relpos_fairseq.attention.triton.selftest < trial     # `proof` runs it

A form of a call is held at lengths around the edges of tiles and at the call's own, against the
formula in fp64, under the error budget of `tests/attention/test_error_budget.py`: a few times the
error of eager attention in the same precision, and the rounding of a result.  Dropout's mask
follows from the published generator.  Each length runs twice, and must give the same bits.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs, probabilities
from relpos_fairseq.attention.reference import logits
from relpos_fairseq.attention.relative_shift import ShiftedProducts
from relpos_fairseq.attention.triton.call_signature import CallSignature, RandomCall

LENGTHS = (1, 63, 64, 65, 127, 192)
ROWS = 256  # queries that the formula takes at a time
SEED = 9
# Times eager attention's error, and roundings of one result: of all of a tensor, of its worst.
# Kernels round products, probabilities and gradients on their way.
BUDGET = {"typical": (3.0, 4.0), "worst": (4.0, 8.0)}
MORE_IN_FULL_PRECISION = 4  # sums of fp32 by parts; its roundings are small beside any fault
TF32 = 2.0**-10
Attend = Callable[[AttentionInputs], Tensor]
VANISHES = 1e-10  # a gradient that is 0 but for fp64's rounding


def problems(trial: CallSignature, lengths: tuple[int, ...] = LENGTHS, by: Attend | None = None) -> list[str]:
    """Hold kernels against fp64; returns what erred, the shortest length first.

    Args:
        trial: the form of the calls.
        lengths: T, before the form's own.
        by: the kernels, without dropout; None: Triton's.
    """
    torch.backends.cuda.matmul.allow_tf32 = trial.tf32
    tgt_len, start, after = trial.length
    short = [(length, min(start, 40), min(after, 24)) for length in lengths]
    batch = 3 if trial.masks[1] else 2
    for length, rows in (*((length, batch) for length in short), ((tgt_len, start, after), 1)):
        try:
            found = list(_at_length(trial, length, rows, by))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler or a driver raises is a verdict
            lines = str(error).strip().splitlines() or [""]
            found = [f"{type(error).__name__}: {lines[0][:300]}"]
        if found:
            return [f"{length[0]} queries: {line}" for line in found[:4]]
    return []


def _at_length(trial: CallSignature, length: tuple[int, int, int], batch: int, by: Attend | None) -> Iterator[str]:
    draw = RandomCall(trial, length, batch)
    inputs = draw.inputs()
    upstream = draw.normal(batch, trial.heads, length[0], trial.dim[1]).to(trial.dtype)
    names = list(draw.leaves)
    of_kernel = [_by_kernel(trial, inputs, draw.leaves, upstream, by) for _ in range(2)]
    for name, one, other in zip(("output", *names), *of_kernel, strict=True):
        if not torch.equal(one.nan_to_num(), other.nan_to_num()):
            yield f"{name} differs from run to run"
    kept = _kept(inputs, trial.dropout) if trial.dropout else None
    exact = _by_formula(inputs, draw.leaves, upstream.double(), kept)
    low, leaves = _moved(inputs, draw.leaves, "cpu", trial.dtype)
    eager = _by_formula(low, leaves, upstream, kept)
    epsilon = torch.finfo(trial.dtype).eps
    if trial.dtype in (torch.float32, torch.float64):
        epsilon = TF32 if trial.tf32 else epsilon * MORE_IN_FULL_PRECISION
    for name, got, of_eager, right in zip(("output", *names), of_kernel[0], eager, exact, strict=True):
        size = _sizes(right)
        if size["worst"] < VANISHES:  # softmax does not see it: what cancels has q's size
            size = _sizes(upstream.double())
        found, allowed = (_sizes(part.double() - right) for part in (got, of_eager))
        for kind, (times, roundings) in BUDGET.items():
            most = times * allowed[kind] + roundings * epsilon * size[kind]
            if not found[kind] <= most:  # NaN is not
                yield f"{name}: {kind} error {found[kind]:.1e} exceeds {most:.1e}"
                break


def _sizes(error: Tensor) -> dict[str, float]:
    return {"typical": float(error.square().mean().sqrt()), "worst": float(error.abs().max())}


def _moved(
    inputs: AttentionInputs, leaves: dict[str, Tensor], device: str, dtype: torch.dtype
) -> tuple[AttentionInputs, dict[str, Tensor]]:
    """The same call elsewhere and in another type; its leaves by the same names."""
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
    masks = {
        name: getattr(inputs, name).to(device)
        for name in ("key_padding", "documents")
        if getattr(inputs, name) is not None
    }
    call = replace(inputs.mapped(move), positions=positions, **masks)
    terms = tuple(
        term if term.reset is None else replace(term, reset=replace(term.reset, first=term.reset.first.to(device)))
        for term in call.terms
    )
    return replace(call, terms=terms), moved


def _by_kernel(
    trial: CallSignature, inputs: AttentionInputs, leaves: dict[str, Tensor], upstream: Tensor, by: Attend | None
) -> list[Tensor]:
    """Output and gradients of the kernels, on the CPU."""
    if by is None:
        from relpos_fairseq.attention.triton.fused_attention import attend as by

    call, moved = _moved(inputs, leaves, trial.device, trial.dtype)
    torch.manual_seed(SEED)
    with torch.set_grad_enabled(bool(leaves)):
        out = by(replace(call, dropout=trial.dropout))
    found = [out.detach().cpu()]
    if leaves:
        ordered = [moved[name] for name in leaves]
        grads = torch.autograd.grad(out, ordered, upstream.to(out.device), allow_unused=True)
        found += _filled(grads, ordered)
    return found


def _filled(grads: tuple[Tensor | None, ...], leaves: list[Tensor]) -> list[Tensor]:
    pairs = zip(grads, leaves, strict=True)
    return [(torch.zeros_like(leaf) if grad is None else grad).cpu() for grad, leaf in pairs]


def _by_formula(
    inputs: AttentionInputs, leaves: dict[str, Tensor], upstream: Tensor, kept: Tensor | None
) -> list[Tensor]:
    """Output and gradients of the formula, some rows at a time."""
    outputs, ordered = [], list(leaves.values())
    totals = [torch.zeros_like(leaf) for leaf in ordered]
    for start in range(0, inputs.positions.tgt_len, ROWS):
        stop = min(start + ROWS, inputs.positions.tgt_len)
        with torch.set_grad_enabled(bool(leaves)):
            out = _rows(inputs.rows(start, stop), None if kept is None else kept[:, :, start:stop])
        outputs.append(out.detach())
        if leaves:
            grads = torch.autograd.grad(out, ordered, upstream[:, :, start:stop], allow_unused=True)
            for total, grad in zip(totals, _filled(grads, ordered), strict=True):
                total += grad
    return [torch.cat(outputs, dim=2), *totals]


def _rows(inputs: AttentionInputs, kept: Tensor | None) -> Tensor:
    """The formula's output (B, H, n, D), probabilities multiplied with `kept`."""
    exact = inputs.mapped(lambda tensor: tensor.to(inputs.exact))
    products = ShiftedProducts(exact)
    probs = probabilities(logits(products), exact.excluded(), exact.key_padding is not None)
    if kept is not None:
        probs = probs * kept.to(probs.dtype)
    out = probs @ exact.v
    for term in exact.terms:
        if term.value_vectors is not None:
            out = out + products.values(probs, term)
    return out.to(inputs.v.dtype)


def _kept(inputs: AttentionInputs, dropout: float) -> Tensor:
    """What dropout multiplies probabilities (B, H, T, S) by, after `SEED`."""
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
    """Philox-4x32 (Salmon et al. 2011) of counters (c0, c1, c2, 0): four words of 32 bits each."""
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
    """Read a pickled trial and print what erred; status 0, or 3 where the device gives no room."""
    trial = pickle.load(sys.stdin.buffer)
    try:
        torch.zeros(1, device=trial.device)  # a GPU may be another process's alone
        found = problems(trial)
    except Exception as error:
        print(json.dumps([f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"]))
        return 3
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
