"""Describe what is measured: shapes, types, device, instruction set; and check the command line that gives them."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from relpos_fairseq.attention import BACKENDS
from relpos_fairseq.attention.native.build import X86
from relpos_fairseq.core.options import CLIP_DISTANCE
from relpos_fairseq.io import processor
from relpos_fairseq.io.child import command_of
from relpos_fairseq.schemes import in_attention, parse_hybrid, schemes_for

EVERY_LENGTH = tuple(64 << step for step in range(9))  # 64 .. 16384
PLAIN = "none"  # attention without positions, evaluated by this package
Setting = TypeVar("Setting")
Options = Any  # a command of `cli.benchmark`: its fields are the options

# ---------------------------------------------------------------------------------------------------------------------
# Schemes and the names of rows.


def label_of(scheme: str, backend: str) -> str:
    """Return a row's name: `m4`, or `m4, blocked` where it is not `auto` that chooses the backend."""
    return scheme if backend == "auto" else f"{scheme}, {backend}"


def scheme_and_backend(label: str) -> tuple[str, str]:
    """Return the scheme and the backend of a row's name."""
    scheme, _, backend = label.partition(", ")
    return scheme, backend or "auto"


def has_formula(name: str) -> bool:
    """Return whether attention with a scheme is more than torch's own."""
    return in_attention(name) and name != PLAIN


def clip_text(args: Options) -> str:
    """Return the clip distance of a command in words."""
    return f"clip {args.position_clip_distance}" if args.position_clip_distance else "unclipped"


def takes_clip(name: str) -> bool:
    """Return whether a scheme has a clip distance."""
    return any(CLIP_DISTANCE in member.takes for member in parse_hybrid(name))


# ---------------------------------------------------------------------------------------------------------------------
# One call of attention.


@dataclass(frozen=True)
class AttentionSetting:
    """The call of attention that is measured."""

    batch: int  # B
    heads: int  # H
    length: int  # T = S; of a decoding step, S
    head_dim: int  # D
    clip: int  # clip distance of tables that take one; 0: as long as the input
    causal: bool  # keys in a query's future are excluded
    dtype: torch.dtype  # of queries, keys, values and parameters
    device: torch.device  # where

    @property
    def embed_dim(self) -> int:
        """Return the width E of the model."""
        return self.heads * self.head_dim

    def columns(self) -> dict:
        """Return the setting as columns of a row of results."""
        return {
            "device": self.device.type,
            "dtype": str(self.dtype).removeprefix("torch."),
            "causal": self.causal,
            "clip": self.clip,
            "batch": self.batch,
            "heads": self.heads,
            "head_dim": self.head_dim,
            "length": self.length,
        }


@lru_cache(maxsize=8)
def draw(setting: AttentionSetting, *shape: int, seed: int = 1) -> Tensor:
    """Draw unit normal numbers in the setting's type and on its device; the same in every run."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator)
    return drawn.to(setting.device, setting.dtype)


def draw_heads(setting: AttentionSetting, queries: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Draw queries (B, H, T, D), keys and values (B, H, S, D)."""
    lengths = (queries or setting.length, setting.length, setting.length)
    q, k, v = (
        draw(setting, setting.batch, setting.heads, length, setting.head_dim, seed=seed)
        for seed, length in enumerate(lengths, 1)
    )
    return q, k, v


# ---------------------------------------------------------------------------------------------------------------------
# What the command lines of benchmarks have in common.


def setting_of(kind: type[Setting], args: Options, **own: object) -> Setting:
    """Return a setting whose fields are the options of the same names, but for those given here."""
    own |= {"dtype": getattr(torch, args.dtype), "device": torch.device(args.device)}
    names = [one.name for one in fields(kind) if one.name not in own]
    return kind(**own, **{name: getattr(args, name) for name in names})


def chosen_of(flag: str, text: str, known: Sequence[str]) -> list[str]:
    """Return words separated by commas; an unknown one is refused."""
    for word in text.split(","):
        if word not in known:
            raise ValueError(f"--{flag} must be of {', '.join(known)}, got {word}")
    return text.split(",")


def lengths_of(text: str, more: str = "", flag: str = "lengths") -> list[int]:
    """Return an option's lengths, separated by commas; `more` is what else they may be, for the message."""
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--{flag} must be whole numbers separated by commas{more}, got {text}") from None
    if min(lengths) < 1:
        raise ValueError(f"--{flag} must be >= 1, got {text}")
    return lengths


def schemes_of(text: str, every: Sequence[str]) -> list[str]:
    """Return schemes separated by commas, or `every` for `all`; an unknown one is refused."""
    names = list(every) if text == "all" else text.split(",")
    for name in names:
        parse_hybrid(name)
    return names


def set_labels(args: Options) -> None:
    """Make lists of the options `schemes` and `backends`, and set `labels`, the rows that they have together."""
    args.schemes = schemes_of(args.schemes, schemes_for())
    args.backends = chosen_of("backends", args.backends, BACKENDS)
    args.labels = [label_of(name, backend) for name in args.schemes for backend in args.backends]


def prepare_run(args: Options) -> torch.device:
    """Check device, threads and the file to continue; return the device."""
    if args.resume and args.csv is None:
        raise ValueError("--resume continues a file: add --csv FILE")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device; use --device cpu")
    args.threads = args.threads or torch.get_num_threads()
    torch.set_num_threads(args.threads)
    return torch.device(args.device)


# ---------------------------------------------------------------------------------------------------------------------
# A smaller instruction set than the machine's own, for the kernel in C and for torch alike.  Torch chooses its set when
# its first operation runs, MKL and oneDNN at their first product.  A command therefore runs again, in a process whose
# environment names the set.

VARIABLES = ("RELPOS_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
# Values of VARIABLES, then the names in /proc/cpuinfo of the abilities that each set needs.
SETS = {
    "native": ((None,) * len(VARIABLES), ()),
    "avx2": (("x86-64-v3", "avx2", "AVX2", "AVX2"), ("avx2", "fma", "bmi2")),
    "sse2": (("x86-64-v2", "default", "SSE4_2", "SSE41"), ("sse4_2",)),
}


def of_environment(name: str) -> dict[str, str | None]:
    """Return the environment's variables for a set; None: not there."""
    return dict(zip(VARIABLES, SETS[name][0], strict=True))


def run_under_instruction_set(name: str | None, command: str, argv: Sequence[str]) -> int | None:
    """Run a command of `relpos` again under a set of SETS, unless this process runs under it already.

    Returns:
        The status of the other process, or None where this one is to go on.
    """
    wanted = {} if name is None else of_environment(name)
    if all(os.environ.get(variable) == value for variable, value in wanted.items()):
        return None
    check_instruction_set(name)
    environment = {**os.environ, **wanted}
    environment = {key: value for key, value in environment.items() if value is not None}
    words = [*command_of("relpos_fairseq.cli"), *command.split(), *argv]
    status = subprocess.run(words, env=environment, check=False).returncode
    return status if status >= 0 else 128 - status  # ended by a signal


def check_instruction_set(name: str) -> None:
    """Raise an error for a set that this processor lacks: its first instruction would end the process."""
    needed = SETS[name][1]
    if needed and platform.machine().lower() not in X86:
        raise ValueError(f"--isa {name} is a set of x86 processors, this is {platform.machine()}")
    lacking = [ability for ability in needed if ability not in processor.abilities()]
    if lacking:
        raise ValueError(
            f"--isa {name} needs {', '.join(lacking)}, which this processor has not: use --isa "
            f"{'sse2' if name == 'avx2' else 'native'}"
        )


def instruction_sets_in_use() -> str:
    """Return which sets this process computes with, in words."""
    kernel = os.environ.get("RELPOS_ISA") or "native"
    return f"kernel for {kernel} and torch for {torch.backends.cpu.get_cpu_capability()}"
