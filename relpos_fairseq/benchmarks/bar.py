"""What is known to be possible: ratios to attention without positions that ours should meet.

CPU: two cores, fp32, batch 4, 12 heads of 64, clip 16; measured on a prototype, but for what is
unclipped, which is estimated.  GPU: bf16, training, estimated.
"""

from __future__ import annotations

from relpos_fairseq.benchmarks.settings import scheme_and_backend
from relpos_fairseq.schemes import scheme_names

SCALARS = ("t5", "rel_scalar", "alibi", "kerple", "m1", "m2")
GROUPS = {
    **dict.fromkeys(SCALARS, "scalars"),
    **dict.fromkeys(("m4", "deberta"), "two tables"),
    **dict.fromkeys(("tupe", "tupe_a", "abs_scalar"), "factors"),
}

# (train, forward) by group and length
CLIPPED = {
    "scalars": {512: (1.12, 1.2), 2048: (1.3, 1.35)},
    "shaw_keys": {512: (1.15, 1.2), 2048: (1.25, 1.25)},
    "shaw": {512: (1.3, 1.45), 2048: (1.4, 1.4)},
    "two tables": {512: (1.25, 1.4), 2048: (1.4, 1.4)},
    "factors": {512: (1.2, 1.3), 2048: (1.3, 1.4)},
    "transformer_xl": {512: (1.7, 1.8), 2048: (2.1, 2.1)},
    "m4m": {512: (1.6, 1.6), 2048: (1.7, 1.6)},
    "m3": {512: (2.1, 2.1), 2048: (2.0, 2.0)},
}
UNCLIPPED = {
    "scalars": {512: (1.15, 1.2), 2048: (1.3, 1.35)},
    "shaw_keys": {512: (1.7, 1.8), 2048: (2.2, 2.2)},
    "two tables": {512: (2.4, 2.4), 2048: (3.0, 3.0)},
}
LAYER = {"m3": (1.10, 1.15)}  # at 512; all others:
ANY_LAYER = (1.05, 1.10)
MODELS = {"train": 1.05, "generate": 1.0}  # of whole models, to fairseq's own
CUDA = {  # training, at 512, 2048 and 16384
    "scalars": (1.2, 1.1, 1.02),
    "shaw_keys": (1.4, 1.15, 1.03),
    "two tables": (1.5, 1.2, 1.05),
    "m4m": (1.6, 1.25, 1.1),
    "m3": (2.5, 1.5, 1.1),
    "transformer_xl": (2.2, 2.2, 2.2),
    "factors": (1.15, 1.15, 1.15),
}
DECODE, DECODE_HARD = 1.1, 1.2  # a step's; of transformer_xl and m4m
MEMORY, MEMORY_LENGTH = 1.5, 8192  # beside the tables and their gradients
SHORT = 128  # up to here: not slower than the formula


def target(row: dict, rows: dict[tuple, dict]) -> float | None:
    """The ratio that a row should not exceed, or None where none is known.

    Args:
        row: of results.
        rows: all rows of the table by (name, length, mode).
    """
    name, length, mode = row["name"], row["length"], row["mode"]
    group = GROUPS.get(name, name)
    if name not in GROUPS and name not in CLIPPED:
        return None
    if mode == "memory":
        return MEMORY if length == MEMORY_LENGTH and row["device"] == "cpu" else None
    if mode == "decode":
        return DECODE_HARD if name in ("transformer_xl", "m4m") else DECODE
    if row["device"] == "cuda":
        return _of_gpu(group, length) if mode == "train" and row["view"] == "attention" else None
    column = ("train", "forward").index(mode)
    if row["view"] == "layer":
        return LAYER.get(name, ANY_LAYER)[column] if length == 512 and row["clip"] else None
    if length <= SHORT:
        naive = rows.get((f"{name}, naive", length, mode))
        return naive["least_ratio"] if naive else None
    table = CLIPPED if row["clip"] or group not in ("shaw_keys", "two tables") else UNCLIPPED
    if not row["clip"] and group in ("shaw", "m4m", "m3"):
        return None
    pair = table.get(group, {}).get(length)
    return None if pair is None else pair[column]


def _of_gpu(group: str, length: int) -> float | None:
    lengths = (512, 2048, 16384)
    found = CUDA.get(group)
    return found[lengths.index(length)] if found and length in lengths else None


def model_target(part: str, label: str, column: str, clip: int) -> float | None:
    """The ratio that a whole model or layer should not exceed, or None where none is known.

    Args:
        part: `translation` or `layers`.
        label: of a row; those of other libraries have no target.
        column: mode, then the length where there is one.
        clip: clip distance, 0: unclipped.
    """
    scheme, _ = scheme_and_backend(label)
    if label == "none" or not set(scheme.split("+")) <= set(scheme_names()):
        return None
    mode, *length = column.split()
    if part == "translation":
        return MODELS.get(mode)
    modes = ("train", "forward")
    if length != ["512"] or not clip or mode not in modes:
        return None
    return LAYER.get(scheme, ANY_LAYER)[modes.index(mode)]


def reached(row: dict, rows: dict[tuple, dict]) -> float:
    """What is held against the target: the minima's ratio, or memory beside the tables."""
    if row["mode"] != "memory":
        return row["least_ratio"]
    base = next(r for (_, n, m), r in rows.items() if (n, m) == (row["length"], "memory"))
    return (row["MiB"] - 2 * row["tables_MiB"]) / base["MiB"]
