"""DeBERTa's attention on an H200 as others have published it, beside ours.

One DeBERTa-base layer, bf16, 16k tokens a batch.  Ours is the whole layer (projections,
feed-forward and norms too), on whatever GPU this runs.
"""

from __future__ import annotations

import argparse

from relpos_fairseq.benchmarks.candidates import BASELINE
from relpos_fairseq.benchmarks.settings import EVERY_LENGTH

LENGTH = 8192
SHAPE = {
    "dtype": "bfloat16", "tokens": 16384, "batch": None, "heads": 12, "head_dim": 64, "clip": 512,
    "causal": False, "layer": True, "naive": True, "flex": False,
}  # fmt: skip
# name: milliseconds forward, forward and backward; GiB
TABLE = {
    "eager": (47.4, 119.3, 20.1),
    "FlashDeBERTa 0.0.7": (12.5, 659.0, 0.97),
    "DisentangledFlash 1.0": (8.6, 88.9, 1.36),
}


def set_shape(args: argparse.Namespace) -> None:
    """Put the published shape into a command line's options.

    Raises:
        ValueError: the device is no GPU.
    """
    if args.device != "cuda":
        raise ValueError("--published compares with times of a GPU: add --device cuda")
    for name, value in SHAPE.items():
        setattr(args, name, value)
    args.lengths = [length for length in EVERY_LENGTH if length >= 128]
    args.schemes, args.modes = ["deberta"], ["train", "forward", "memory"]


def published_table(rows: list[dict], machine: str) -> str:
    """A markdown table at the published length: theirs, then what `rows` say of ours."""
    lines = [
        f"| one DeBERTa-base layer, length {LENGTH}, 16k tokens, bf16 | forward, ms "
        "| forward + backward, ms | GiB |",
        "|---|---|---|---|",
    ]
    for name, numbers in TABLE.items():
        cells = " | ".join(f"{number:g}" for number in numbers)
        lines.append(f"| {name}: published, on an H200; not measured here | {cells} |")
    found = {
        (row["name"], row["mode"]): row
        for row in rows
        if row["length"] == LENGTH and row["view"] == "layer" and row["device"] == "cuda"
    }
    for name in ("deberta", "deberta, naive", BASELINE):
        forward, train, memory = (
            found.get((name, mode), {}) for mode in ("forward", "train", "memory")
        )
        gibibytes = memory["MiB"] / 1024 if "MiB" in memory else None
        cells = " | ".join(
            "-" if number is None else f"{number:.3g}"
            for number in (forward.get("ms"), train.get("ms"), gibibytes)
        )
        lines.append(f"| {name}: measured here, on {machine} | {cells} |")
    return "\n".join(lines)
