"""What is known to be possible: ratios to attention without positions, by kind of term.

CPU: two cores, fp32, batch 4, 12 heads of 64, clip 16; measured on a prototype, but for what is
unclipped, which is estimated.  GPU: bf16, training, estimated.
"""

from __future__ import annotations

from functools import lru_cache

from relpos_fairseq.benchmarks.workload import PLAIN, scheme_and_backend
from relpos_fairseq.scheme_table import small_call
from relpos_fairseq.schemes import scheme_names

# The fields of `PositionTerms` that decide how much there is to compute, dearest first.
KINDS = {
    "trilinear": "trilinear",
    "product": "product",
    "content_offset": "offsets",
    "value_vectors": "values",
    "key_vectors": "two tables",
    "query_vectors": "one table",
    "static_factors": "factors",
    "static": "scalars",
    "gate": "scalars",
}
# (train, forward), at 512 tokens and at 2048 alike
CPU = {
    "scalars": (1.0, 1.05),
    "one table": (1.05, 1.1),
    "values": (1.1, 1.15),
    "two tables": (1.1, 1.15),
    "product": (1.15, 1.15),
    "factors": (1.1, 1.2),
    "trilinear": (1.35, 1.35),
    "offsets": (1.5, 1.5),
}
UNCLIPPED = {  # of the others none is known
    "scalars": (1.0, 1.05),
    "one table": (1.7, 1.8),
    "two tables": (2.0, 1.8),
    "factors": (1.1, 1.2),
    "offsets": (1.5, 1.5),
}
CUDA = {  # training
    "scalars": {512: 1.2, 2048: 1.1, 16384: 1.02},
    "one table": {512: 1.4, 2048: 1.15, 16384: 1.03},
    "two tables": {512: 1.5, 2048: 1.2, 16384: 1.05},
    "product": {512: 1.6, 2048: 1.25, 16384: 1.1},
    "trilinear": {512: 2.5, 2048: 1.5, 16384: 1.1},
    "offsets": {512: 2.2, 2048: 2.2, 16384: 2.2},
    "factors": {512: 1.15, 2048: 1.15, 16384: 1.15},
}
LAYER = (1.05, 1.10)  # at 512
MODELS = {"train": 1.05, "generate": 1.0}  # of whole models, to fairseq's own
DECODE = {"offsets": 1.2, "product": 1.2}  # a step; all others:
ANY_DECODE = 1.1
MEMORY, MEMORY_LENGTH = 1.5, 8192  # beside the tables and their gradients
SHORT = 128  # up to here: not slower than the formula
LONG = (512, 2048)
MODES = ("train", "forward")


@lru_cache
def kind_of(scheme: str) -> str | None:
    """Return the kind of a scheme's dearest term; None of a hybrid, or where it has no terms."""
    if scheme not in scheme_names():
        return None
    present = {field for term in small_call(scheme).terms for field in term.present}
    return next((kind for field, kind in KINDS.items() if field in present), None)


def target(row: dict, rows: dict[tuple, dict]) -> float | None:
    """Return the ratio that a row should not exceed, or None where none is known.

    `rows` are all rows of the table by (name, length, mode).
    """
    name, length, mode = row["name"], row["length"], row["mode"]
    kind, on_cpu = kind_of(name), row["device"] == "cpu"
    if kind is None:
        return None
    if mode == "memory":
        return MEMORY if length == MEMORY_LENGTH and on_cpu else None
    if mode == "decode":
        return DECODE.get(kind, ANY_DECODE)
    if not on_cpu:
        in_table = mode == "train" and row["view"] == "attention"
        return CUDA.get(kind, {}).get(length) if in_table else None
    if row["view"] == "layer":
        return _of_layer(mode, length, row["clip"])
    if length <= SHORT:
        naive = rows.get((f"{name}, naive", length, mode))
        return naive["least_ratio"] if naive else None
    pair = (CPU if row["clip"] else UNCLIPPED).get(kind)
    return None if pair is None or length not in LONG else pair[MODES.index(mode)]


def _of_layer(mode: str, length: int, clip: int) -> float | None:
    if length != 512 or not clip or mode not in MODES:
        return None
    return LAYER[MODES.index(mode)]


def model_target(part: str, label: str, column: str, clip: int) -> float | None:
    """Return the ratio that a whole model or layer should not exceed, or None where none is known.

    `column` is a mode, then the length where there is one; rows of other libraries have no target.
    """
    scheme, _ = scheme_and_backend(label)
    if scheme == PLAIN or not set(scheme.split("+")) <= set(scheme_names()):
        return None
    mode, *length = column.split()
    if part == "translation":
        return MODELS.get(mode)
    return _of_layer(mode, int(length[0]), clip)


def reached(row: dict, rows: dict[tuple, dict]) -> float:
    """Return what is held against the target: the minima's ratio, or memory beside the tables."""
    if row["mode"] != "memory":
        return row["least_ratio"]
    base = next(r for (_, n, m), r in rows.items() if (n, m) == (row["length"], "memory"))
    return (row["MiB"] - 2 * row["tables_MiB"]) / base["MiB"]
