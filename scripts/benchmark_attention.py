#!/usr/bin/env python
"""How much slower is attention with positions than attention without?

    python scripts/benchmark_attention.py --lengths 128,512
    python scripts/benchmark_attention.py --device cuda --dtype bfloat16 --lengths 512,2048,8192

First every scheme is held against the eager formula in fp64, values and gradients; then all
candidates are timed in one process, in turns, each only once the machine is idle otherwise, and a
table of medians, minima and spreads is printed, relative to torch's scaled_dot_product_attention
without positions.  Needs torch and relpos_fairseq's positions, schemes and attention: no fairseq.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from _benchmark.report import machine, write_csv, write_section  # noqa: E402
from _benchmark.timing import peak_mebibytes, time_in_turns  # noqa: E402

from relpos_fairseq.attention import AttentionInputs, attend  # noqa: E402
from relpos_fairseq.attention.step import tail_products  # noqa: E402
from relpos_fairseq.config import PositionConfig, resolve  # noqa: E402
from relpos_fairseq.positions import Positions  # noqa: E402
from relpos_fairseq.registry import parse_hybrid, scheme_names  # noqa: E402
from relpos_fairseq.scheme import AttentionShape  # noqa: E402
from relpos_fairseq.stack import StackPositions  # noqa: E402

MODES = ("train", "forward", "decode", "memory")
BASELINE = "sdpa"
NAIVE_LIMIT = 1 << 28  # elements of the naive formula's largest tensor that are still timed
INPUT_SCHEMES = {"none", "sinusoidal", "learned", "sentence"}  # nothing of them is in attention


@dataclass(frozen=True)
class Setting:
    """What is measured: shape, type, device, masks."""

    batch: int
    heads: int
    length: int
    head_dim: int
    clip: int
    causal: bool
    dtype: torch.dtype
    device: torch.device


class Candidate:
    """One way to attend, over queries, keys and values of a setting.

    Args:
        name: scheme, or `sdpa` for attention without positions.
        setting: what is measured.
        backend: how; `reference` is the naive formula.
    """

    def __init__(self, name: str, setting: Setting, backend: str = "auto") -> None:
        """Build the scheme with its own initial values."""
        self.name, self.setting, self.backend = name, setting, backend
        self.stack = self.layer = None
        if name != BASELINE:
            shape = AttentionShape(
                setting.heads * setting.head_dim,
                setting.heads,
                max(setting.length, 2),
                causal=setting.causal,
                seed_name="benchmark",
            )
            self.stack = StackPositions(resolve(flags_of(name, setting), shape, "translation"))
            self.layer = self.stack.layer_schemes(0).to(setting.device, setting.dtype)
            self.stack.to(setting.device, setting.dtype)

    @property
    def label(self) -> str:
        """The row's name."""
        return f"{self.name}, naive" if self.backend == "reference" else self.name

    def parameters(self) -> list[Tensor]:
        """The scheme's parameters."""
        return [] if self.stack is None else [*self.stack.parameters(), *self.layer.parameters()]

    def inputs(self, q: Tensor, k: Tensor, v: Tensor) -> AttentionInputs:
        """The call; queries stand on the last keys."""
        start = k.size(2) - q.size(2)
        positions = Positions(q.size(2), k.size(2), start, device=q.device)
        context = self.stack.context(positions)
        terms = context.shared + self.layer.terms(self.layer.prepare(positions), positions)
        content_q = content_k = None
        if context.rotation is not None:
            scheme, prepared = context.rotation
            content_q = scheme.transform_query(q, prepared, start)
            content_k = scheme.transform_key(k, prepared, 0)
            if not any(term.meets_vectors for term in terms):
                q, k, content_q, content_k = content_q, content_k, None, None
        return AttentionInputs(
            q, k, v, terms, positions, self.stack.plan.scale, self.setting.causal,
            content_q=content_q, content_k=content_k,
        )  # fmt: skip

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, T, D)."""
        if self.stack is None:
            causal = self.setting.causal and q.size(2) == k.size(2)
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return attend(self.inputs(q, k, v), self.backend)[0]

    def decoder(self, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        """One decoding step, with what earlier steps have left in the cache."""
        with torch.no_grad():
            if self.stack is None:
                scaled = q * q.size(-1) ** -0.5
                return lambda: (scaled @ k.transpose(-1, -2)).softmax(-1) @ v
            inputs = self.inputs(q, k, v)
            inputs = replace(inputs, causal=True, key_tails=tail_products(inputs.terms, inputs.k))
            return lambda: attend(inputs, self.backend)[0]


def flags_of(name: str, setting: Setting) -> PositionConfig:
    """The scheme's flags: the setting's clip distance where it takes one."""
    flags = {"position_scheme": name}
    if any("clip_distance" in member.takes for member in parse_hybrid(name)):
        flags["position_clip_distance"] = str(setting.clip)
    return PositionConfig(**flags)


def draw(setting: Setting, queries: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of a setting, the same in every run."""
    generator = torch.Generator().manual_seed(1)
    lengths = (queries or setting.length, setting.length, setting.length)
    shapes = [(setting.batch, setting.heads, length, setting.head_dim) for length in lengths]
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    q, k, v = (part.to(setting.device, setting.dtype) for part in drawn)
    return q, k, v


# --- is it right? --------------------------------------------------------------------------------


def check(name: str, setting: Setting) -> float:
    """Hold a scheme against the eager formula in fp64.

    Returns:
        The largest error of values and gradients, in units of what the eager formula of the same
        precision errs (with its rounding).

    Raises:
        ValueError: It is worse than twice that.
    """
    small = replace(setting, batch=2, heads=min(setting.heads, 3), length=130)
    exact = _results(name, replace(small, dtype=torch.float64), "reference")
    eager, fast = (_results(name, small, backend) for backend in ("reference", "auto"))
    worst = 0.0
    for truth, one, other in zip(exact, eager, fast, strict=True):
        size = float(truth.abs().max())
        rounding = torch.finfo(small.dtype).eps * size + 1e-30
        allowed = float((one.double() - truth).abs().max()) + 4 * rounding
        worst = max(worst, float((other.double() - truth).abs().max()) / allowed)
    if worst > 2:
        raise ValueError(f"{name}: {worst:.1f} times the error of the eager formula in fp64's eyes")
    return worst


def _results(name: str, setting: Setting, backend: str) -> list[Tensor]:
    torch.manual_seed(0)
    candidate = Candidate(name, replace(setting, dtype=torch.float32), backend)
    candidate.stack.to(setting.dtype), candidate.layer.to(setting.dtype)
    leaves = [part.requires_grad_() for part in draw(replace(setting, dtype=torch.float32))]
    leaves = [leaf.detach().to(setting.dtype).requires_grad_() for leaf in leaves]
    out = candidate.attend(*leaves)
    weight = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype)
    wanted = [*leaves, *(part for part in candidate.parameters() if part.requires_grad)]
    found = torch.autograd.grad((out * weight).sum(), wanted, allow_unused=True)
    return [part.detach() for part in (out, *found) if part is not None]


# --- how fast is it? -----------------------------------------------------------------------------


def runner(candidate: Candidate, mode: str) -> Callable[[], object]:
    """What is timed: a step of training, a forward pass, or a step of decoding."""
    if mode == "decode":
        step = candidate.decoder(*draw(candidate.setting, queries=1))
        return torch.no_grad()(step)
    q, k, v = draw(candidate.setting)
    if mode == "forward":
        return torch.no_grad()(lambda: candidate.attend(q, k, v))
    upstream = torch.ones_like(q)

    def train() -> None:
        leaves = [part.detach().requires_grad_() for part in (q, k, v)]
        out = candidate.attend(*leaves)
        wanted = [*leaves, *(p for p in candidate.parameters() if p.requires_grad)]
        torch.autograd.grad(out, wanted, upstream, allow_unused=True)

    return train


# --- the report ----------------------------------------------------------------------------------


def measure(args: argparse.Namespace, setting: Setting) -> Iterator[dict]:
    """One row per scheme and mode at one length."""
    for mode in args.modes:
        candidates = [Candidate(BASELINE, setting)]
        candidates += [Candidate(name, setting) for name in args.schemes]
        if args.naive and mode != "decode":
            for name in args.schemes:
                if name not in INPUT_SCHEMES and _naive_elements(name, setting) <= NAIVE_LIMIT:
                    candidates.append(Candidate(name, setting, "reference"))
        if mode == "memory":
            for candidate in candidates:
                peak = peak_mebibytes(runner(candidate, "train"), setting.device)
                yield {"length": setting.length, "mode": mode, "name": candidate.label, "MiB": peak}
            continue
        runs = {candidate.label: runner(candidate, mode) for candidate in candidates}
        times, noisy = time_in_turns(runs, setting.device, args.rounds, args.seconds)
        base = times[BASELINE]
        for name, found in times.items():
            yield {
                "length": setting.length,
                "mode": mode,
                "name": name,
                "ms": found.median,
                "ratio": found.median / base.median,
                "least": found.least / base.least,
                "spread": found.spread,
                "samples": len(found.samples),
                "noisy": noisy,
            }
        print(
            f"T {setting.length} {mode}: {len(base.samples)} rounds, {noisy} of "
            f"{len(base.samples) * len(times)} samples on a machine that was not idle",
            flush=True,
        )


def _naive_elements(name: str, setting: Setting) -> int:
    pairs = setting.batch * setting.heads * setting.length**2
    return pairs * (setting.head_dim if "m3" in name else 1)


def tables(rows: list[dict], lengths: list[int], modes: list[str]) -> str:
    """A markdown table: a row a scheme, a column a length and mode."""
    cells = {(row["name"], row["length"], row["mode"]): row for row in rows}
    names = list(dict.fromkeys(row["name"] for row in rows))
    heads = [f"{mode} {length}" for length in lengths for mode in modes]
    lines = ["| scheme | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for name in names:
        parts = [_cell(cells.get((name, length, mode))) for length in lengths for mode in modes]
        lines.append(f"| `{name}` | " + " | ".join(parts) + " |")
    return "\n".join(lines)


def _cell(row: dict | None) -> str:
    if row is None:
        return "-"
    if "MiB" in row:
        return f"{row['MiB']:.0f} MiB"
    if row["name"] == BASELINE:
        return f"{row['ms']:.2f} ms ±{row['spread']:.0%}"
    return f"{row['ratio']:.2f} ({row['least']:.2f}) ±{row['spread']:.0%}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line.

    Raises:
        SystemExit: a wrong flag.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--lengths", default="128,512", help="T = S, separated by commas")
    parser.add_argument("--tokens", type=int, default=2048, help="batch = tokens / length, >= 1")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--clip", type=int, default=16, help="clip distance; 0: unclipped")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--schemes", default="all", help="names separated by commas, or all")
    parser.add_argument("--modes", default="train,forward", help=f"of {', '.join(MODES)}")
    parser.add_argument("--naive", action="store_true", help="time the eager formula too")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=120.0, help="of a table's column, about")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--csv", type=Path, help="write all rows to this file")
    parser.add_argument("--write", type=Path, help="put the table into this markdown file")
    args = parser.parse_args(argv)
    try:
        args.lengths = [int(part) for part in args.lengths.split(",")]
    except ValueError:
        parser.error(f"--lengths must be whole numbers separated by commas, got {args.lengths}")
    args.modes = args.modes.split(",")
    names = [n for n in scheme_names() if n not in INPUT_SCHEMES - {"none"}]
    args.schemes = names if args.schemes == "all" else args.schemes.split(",")
    unknown = [mode for mode in args.modes if mode not in MODES]
    if unknown:
        parser.error(f"--modes must be of {', '.join(MODES)}, got {unknown[0]}")
    for name in ("tokens", "heads", "head_dim", "rounds", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be >= 1, got {getattr(args, name)}")
    if min(args.lengths) < 1 or args.clip < 0:
        parser.error(f"lengths must be >= 1 and clip >= 0, got {args.lengths} and {args.clip}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device; use --device cpu")
    try:
        for name in args.schemes:
            parse_hybrid(name)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: list[str] | None = None) -> int:
    """Check, time, print."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    settings = [
        Setting(
            max(args.tokens // n, 1), args.heads, n, args.head_dim, args.clip, args.causal, dtype,
            device,
        )
        for n in args.lengths
    ]  # fmt: skip
    head = machine(device, args.threads)
    print(f"{head}; process {os.getpid()}", flush=True)
    errors = {name: check(name, settings[0]) for name in args.schemes}
    worst = max(errors, key=errors.get)
    print(
        f"{len(errors)} schemes right against fp64, values and gradients; largest error "
        f"{errors[worst]:.2f} of what the eager formula in {args.dtype} may err ({worst})",
        flush=True,
    )
    rows = [row for setting in settings for row in measure(args, setting)]
    shape = (
        f"{args.tokens} tokens a batch, {args.heads} heads of {args.head_dim}, {args.dtype}, "
        f"clip {args.clip}, {'causal' if args.causal else 'not causal'}"
    )
    text = (
        f"{head}; {shape}. Median relative to `{BASELINE}`'s (in brackets: minimum to minimum) "
        f"± half the quartile distance.\n\n{tables(rows, args.lengths, args.modes)}"
    )
    print(f"\n{text}")
    if args.csv:
        write_csv(args.csv, rows)
    if args.write:
        kind = "causal" if args.causal else "both directions"
        write_section(args.write, f"{args.device} {args.dtype} {kind} clip {args.clip}", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
