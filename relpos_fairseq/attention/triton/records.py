"""The records that the kernels take and hand on: an operand is named once, wherever it goes.

Triton takes named tuples apart when it compiles, and nothing is left of them in a kernel.  An
operand that a call does not have stands as `q`, and the flag that says so leaves it unread.
"""

from __future__ import annotations

from collections import namedtuple

import triton.language as tl

from relpos_fairseq.attention.triton.refusal import interpreted

# The operands, as `operands.Operands` has them, and masks; in a kernel, pointers.
Given = namedtuple(
    "Given",
    [
        "q",
        "right_q",
        "wide_q",  # (B, H, T, D)
        "k",
        "wide_k",
        "v",  # (B, H, S, D)
        "query_products",
        "query_multipliers",
        "content_band",  # (B, H, T, width)
        "key_products",
        "key_multipliers",  # (B, H, S, width)
        "query_vectors",
        "key_vectors",  # (H|1, wide_width, D) from distance wide_low on
        "static",
        "gate",  # (H|1, scalar_width) from distance scalar_low on
        "query_factors",  # (B|1, H|1, T, RANK)
        "key_factors",  # (B|1, H|1, S, RANK)
        "reset",  # (H|1, 2)
        "first",  # (B|1,)
        "padding",
        "documents",  # (B, S)
    ],
)

# What the backward pass begins with; in a kernel, pointers.
Saved = namedtuple(
    "Saved",
    [
        "dout",  # (B, H, T, D)
        "top",
        "mass",
        "delta",  # (B, H, T) largest logit, log2 of sum exp(logit - top), mean gradient
        "dprobs",  # (B, H, T, width) of the band's probabilities, of their sums in the tails
    ],
)

# Of batch, heads, rows; 0 where a tensor is broadcast.  qp and kp: products and multipliers, qf and
# kf: factors, qv and kv: vectors, of queries and of keys; out: the output and its gradient.
_WHOLE = ("q", "k", "v", "out", "qp", "kp", "qf", "kf")
_BY_HEAD = ("static", "gate", "reset", "qv", "kv")
Strides = namedtuple(
    "Strides",
    [*(f"{tensor}_{axis}" for tensor in _WHOLE for axis in "bht"), *(f"{tensor}_h" for tensor in _BY_HEAD), "first_b"],
)

# Sizes, the first query's slot, windows of distances, and dropout's seed.
Sizes = namedtuple(
    "Sizes",
    [
        "heads",
        "tgt_len",
        "src_len",
        "start",
        "low",
        "high",  # at and outside of which nothing changes with distance
        "vector_low",
        "width",
        "scalar_low",
        "scalar_width",
        "wide_low",
        "wide_width",
        "seed",
    ],
)
# Those change from call to call, and no kernel is compiled anew for them: that needs arguments of
# their own, from which a kernel makes its record.
VARYING = [name for name in Sizes._fields if name != "heads"]

# What a kernel is compiled for.
Flags = namedtuple(
    "Flags",
    [
        "D",
        "DP",
        "RANK",
        "RP",  # channels and factors, as they are and padded to a power of two
        "ROWS",
        "KEYS",
        "ACC",
        "PRECISION",
        "SCALE",  # a tile; types of sums and of products in fp32
        "CAUSAL",
        "PADDING",
        "WINDOW",
        "DOCUMENTS",  # masks
        "DROP",  # dropout, of 65536
        # which operands there are; bits 1, 2, 4 of RESET: it replaces vectors, scalars, factors
        "ADD_Q",
        "ADD_K",
        "PRODUCT",
        "REPLACED",
        "VALUES",
        "STATIC",
        "GATE",
        "FACTORS",
        "RESET",
        "WIDE_Q",
        "WIDE_K",
        # which tails are among visible distances: of vectors, of all tables
        "LEFT",
        "RIGHT",
        "FAR_LEFT",
        "FAR_RIGHT",
    ],
)

# A head's reset: the first token's slot, the logits of its row and of its column.
Reset = namedtuple("Reset", ["first", "row", "column"])

# A tile's queries, or its keys; a block that a call does not have is the content's.
Side = namedtuple(
    "Side",
    [
        "first",
        "index",
        "inside",  # (n,)
        "content",
        "right",
        "wide",  # (n, DP): for the content, for its right tail, for wide tables
        "factors",  # (n, RP)
    ],
)

# Where a tile's cells stand: i, inside (rows, 1), j, there (1, keys), distances d (rows, keys); or,
# where keys own gradients, (1, rows), (keys, 1), (keys, rows).
Cells = namedtuple("Cells", ["i", "j", "d", "inside", "there"])

# A tile's logits, its content, and what multiplies it: 1 where a call does not have it.
Logits = namedtuple("Logits", ["s", "content", "gate", "by_query", "by_key"])

# What the backward pass begins with, of a tile's rows: (rows, DP), and (rows,) each.
Known = namedtuple("Known", ["dout", "top", "mass", "delta"])


def flags_of(values: dict) -> Flags:
    """Return a kernel's flags: constants to the compiler, plain where it is interpreted."""
    chosen = (values[name] for name in Flags._fields)
    return Flags(*chosen) if interpreted() else Flags(*map(tl.constexpr, chosen))
