"""The papers' equations as scalar loops: the independent oracle of the tests.

Nothing of the package is imported, and torch only carries numbers in and out: every equation is
worked out on Python floats, one (query, key) pair at a time. It is a specification, so it is
slow.

One function is one scheme. It gets a `Pair` (query row i meets key column j in one head) and
returns a `Parts`: what that scheme does to this one logit. `attention` puts the parts together:

    content  = gate (q'.k')              q', k' rotated by rope; m3: gate sum_c q'_c k'_c w_c
    position = scaled / sqrt(C D) + static          both replaced at the first token by reset
    logit    = (content + content_bias) / sqrt(C D) + position + segment
    out      = sum_j probs_ij (v_j + value_ij)

In a hybrid the members' gates multiply and everything else adds. Notation: i, j are slots (a
query row's slot is query_start + t), distance is j - i (negative = the past), r is
clip(j - i, -k, k), and a table of 2k + 1 rows keeps r in row r + k. `index` counts the real
tokens of a row from 0. A table's first dimension is its number of heads, or 1 where the heads
share it.

Papers: 000 Huang 2020, 002 Dai 2019, 003 Multiplicative Position-aware Transformer Models,
004 Chen 2021; Vaswani 2017 (arXiv 1706.03762), Shaw 2018
(1803.02155), Raffel 2019 (1910.10683), Ke 2020 (2006.15595), He 2020 (2006.03654),
Su 2021 (2104.09864), Press 2022 (2108.12409), Chi 2022 (2205.09921).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

Vector = Sequence[float]
Params = dict[str, Any]  # tables as nested lists of floats
Options = dict[str, Any]
Member = tuple[str, dict[str, torch.Tensor], Options]  # scheme name, params, options


@dataclass(frozen=True)
class Pair:
    """Query row i and key column j in one head."""

    q: Vector  # (D,)
    k: Vector  # (D,)
    head: int
    num_heads: int
    i: int  # the query's slot
    j: int  # the key's slot
    index_i: int  # the query's index among the real tokens of its row
    index_j: int  # the key's

    @property
    def distance(self) -> int:
        """The distance j - i: negative is the past, positive the future."""
        return self.j - self.i


@dataclass(frozen=True)
class Parts:
    """What one scheme does to one logit; the defaults do nothing."""

    q: Vector | None = None  # rotated, for the content product only
    k: Vector | None = None
    trilinear: Vector | None = None  # w in sum_c q_c k_c w_c, instead of q.k
    gate: float = 1.0  # multiplies the content product
    content_bias: float = 0.0  # divided by sqrt(C D); content, so reset leaves it
    scaled: float = 0.0  # position, divided by sqrt(C D)
    static: float = 0.0  # position, in logit units
    value: Vector | None = None  # added to v_j


# ---------------------------------------------------------------------------------- small tools


def dot(x: Vector, y: Vector) -> float:
    """sum_c x_c y_c."""
    return sum(a * b for a, b in zip(x, y, strict=True))


def row_times(row: Vector, matrix: Sequence[Vector]) -> list[float]:
    """Row vector times matrix: result_e = sum_c row_c matrix_ce."""
    width = len(matrix[0])
    return [sum(row[c] * matrix[c][e] for c in range(len(matrix))) for e in range(width)]


def of_head(table: Sequence[Any], head: int) -> Any:
    """A head's own entry, or entry 0 where all heads share it."""
    return table[0] if len(table) == 1 else table[head]


def clipped(table: Sequence[Any], distance: int) -> Any:
    """Row r + k for r = clip(distance, -k, k), of a table of 2k + 1 rows (000 eq. 8-9)."""
    if len(table) % 2 == 0:
        raise ValueError(f"a clipped table has 2k + 1 rows, got {len(table)}")
    k = len(table) // 2
    r = max(-k, min(k, distance))
    return table[r + k]


def by_index(table: Sequence[Any], index: int) -> Any:
    """Row `index`; a padding token before the first real one (index < 0) reads row 0."""
    return table[max(0, index)]


def softmax_row(logits: Vector) -> list[float]:
    """exp(e_j) / sum_j exp(e_j) (000 eq. 4); a row that excludes every key gives zeros."""
    top = max(logits, default=-math.inf)
    if top == -math.inf:
        return [0.0] * len(logits)
    weights = [math.exp(e - top) for e in logits]
    total = sum(weights)
    return [w / total for w in weights]


# ------------------------------------------------------------------------------ input embeddings


def sinusoid_vaswani(pos: float, dim: int) -> list[float]:
    """Vaswani 2017, section 3.5; 000 eq. 1-2: the paper's interleaved layout.

    PE[pos, 2m] = sin(pos / 10000^(2m/dim)), PE[pos, 2m+1] = cos(pos / 10000^(2m/dim)).
    """
    row = []
    for c in range(dim):
        angle = pos / 10000.0 ** (2 * (c // 2) / dim)
        row.append(math.sin(angle) if c % 2 == 0 else math.cos(angle))
    return row


def sinusoid_fairseq(pos: float, dim: int) -> list[float]:
    """The layout of fairseq (and tensor2tensor): all sines, then all cosines.

    An odd dim ends in 0. f_m = exp(-log(10000) m / (half - 1)), m = 0 .. half - 1, half = dim // 2:
    the last frequency is 1/10000 itself, where Vaswani's equation stops one step before it.
    """
    half = dim // 2
    if half < 2:
        raise ValueError(f"dim must be >= 4 for the frequency step to exist, got {dim}")
    freq = [math.exp(-math.log(10000.0) * m / (half - 1)) for m in range(half)]
    return [math.sin(pos * f) for f in freq] + [math.cos(pos * f) for f in freq] + [0.0] * (dim % 2)


def nothing(pair: Pair, p: Params, o: Options) -> Parts:
    """none, sinusoidal, learned, sentence: nothing in attention (000 eq. 5-6).

    e_ij = q_i.k_j / sqrt(d)
    """
    return Parts()


# -------------------------------------------------------- Shaw 2018, Dai 2019, Raffel 2019


def shaw_keys(pair: Pair, p: Params, o: Options) -> Parts:
    """Shaw 2018 without its values (000 eq. 7, 003 eq. 3).

    e_ij = q_i.(k_j + aK_r) / sqrt(d)
    """
    a = clipped(of_head(p["key_table"], pair.head), pair.distance)
    return Parts(scaled=dot(pair.q, a))


def shaw(pair: Pair, p: Params, o: Options) -> Parts:
    """Shaw 2018, eq. 3-4.

    e_ij = q_i.(k_j + aK_r) / sqrt(d),  z_i = sum_j alpha_ij (v_j + aV_r)
    """
    value = clipped(of_head(p["value_table"], pair.head), pair.distance)
    return Parts(scaled=shaw_keys(pair, p, o).scaled, value=value)


@cache
def sinusoid_xl(pos: int, dim: int) -> list[float]:
    """R_pos in the released code's layout: all sines, then all cosines, of pos 10000^(-2m/dim)."""
    if dim % 2:
        raise ValueError(f"embed_dim must be even for sines and cosines, got {dim}")
    angles = [pos * 10000.0 ** (-2 * m / dim) for m in range(dim // 2)]
    return [math.sin(x) for x in angles] + [math.cos(x) for x in angles]


def transformer_xl(pair: Pair, p: Params, o: Options) -> Parts:
    """Transformer-XL: Dai 2019, section 3.3 (002); 000 eq. 10.

    e_ij = (q.k + q.W_R R_{i-j} + u.k + v.W_R R_{i-j}) / sqrt(d)

    W_R acts on the whole embedding; head h reads entries h D .. (h+1) D - 1 of W_R R. The position
    is i - j, the past positive (and clamped on both sides if `clamp` is set). No u, v: zeros.
    """
    dim = len(pair.q)
    pos = pair.i - pair.j
    clamp = o.get("clamp", 0)
    if clamp > 0:
        pos = max(-clamp, min(clamp, pos))
    sinusoid = sinusoid_xl(pos, pair.num_heads * dim)
    shared = len(p["projection"]) == dim  # one projection, u and v for all heads
    head = 0 if shared else pair.head
    r = [dot(p["projection"][head * dim + c], sinusoid) for c in range(dim)]
    u = p["content_bias"][head] if "content_bias" in p else [0.0] * dim
    v = p["position_bias"][head] if "position_bias" in p else [0.0] * dim
    return Parts(content_bias=dot(u, pair.k), scaled=dot(pair.q, r) + dot(v, r))


def t5_bucket(distance: int, buckets: int, max_distance: int, bidirectional: bool) -> int:
    """Raffel 2019's relative_position_bucket, for distance = j - i, in exact integers.

    n = |distance| (bidirectional: the future has the upper half of the buckets; otherwise the
    future counts as n = 0). With N buckets for a side and E = N // 2, n < E is bucket n; else

        bucket = min(N - 1, E + floor(log(n / E) / log(max_distance / E) (N - E)))

    The floor is the largest t with (n / E)^(N-E) >= (max_distance / E)^t: no rounding.
    """
    first = 0
    if bidirectional:
        buckets = buckets // 2
        first = buckets if distance > 0 else 0
        n = abs(distance)
    else:
        n = max(0, -distance)
    exact = buckets // 2
    if not 0 < exact < max_distance:
        raise ValueError(f"need 0 < {exact} exact buckets < max_distance, got {max_distance}")
    if n < exact:
        return first + n
    steps = buckets - exact
    t = 0
    while t < steps and n**steps * exact ** (t + 1) >= max_distance ** (t + 1) * exact**steps:
        t += 1
    return first + min(buckets - 1, exact + t)


def t5(pair: Pair, p: Params, o: Options) -> Parts:
    """T5: Raffel 2019, section 2.1; divided as in 003 eq. 4 (T5's own code has no division).

    e_ij = (q.k + s_bucket(j-i)) / sqrt(d)
    """
    bucket = t5_bucket(pair.distance, o["buckets"], o["max_distance"], o["bidirectional"])
    return Parts(scaled=of_head(p["bias_table"], pair.head)[bucket])


# -------------------------------------------------------------------- Huang 2020: M1 to M4; M4M


def m1(pair: Pair, p: Params, o: Options) -> Parts:
    """Method 1: 000 eq. 11-12, unclipped (beyond the table its last entry).

    e_ij = q.k w_|j-i| / sqrt(d)
    """
    gates = of_head(p["gate_table"], pair.head)
    return Parts(gate=gates[min(abs(pair.distance), len(gates) - 1)])


def m2(pair: Pair, p: Params, o: Options) -> Parts:
    """Method 2: 000 eq. 13 with eq. 12; 003 eq. 5.

    e_ij = q.k w_r / sqrt(d)
    """
    return Parts(gate=clipped(of_head(p["gate_table"], pair.head), pair.distance))


def m3(pair: Pair, p: Params, o: Options) -> Parts:
    """Method 3: 000 eq. 14-15.

    e_ij = sum_c q_c k_c w_rc / sqrt(d)
    """
    return Parts(trilinear=clipped(of_head(p["trilinear_table"], pair.head), pair.distance))


def m4(pair: Pair, p: Params, o: Options) -> Parts:
    """Method 4: 000 eq. 16; 003 eq. 6.

    e_ij = (q.k + q.a_r + k.a_r) / sqrt(d)
    """
    a = clipped(of_head(p["table"], pair.head), pair.distance)
    return Parts(scaled=dot(pair.q, a) + dot(pair.k, a))


def m4m(pair: Pair, p: Params, o: Options) -> Parts:
    """M4 multiplicative: 003 eq. 11.

    e_ij = (q.k) (q.a_r) (k.a_r) / sqrt(d)
    """
    a = clipped(of_head(p["table"], pair.head), pair.distance)
    return Parts(gate=dot(pair.q, a) * dot(pair.k, a))


# -------------------------------------------------------------------- He 2020, Ke 2020, Chen 2021


def deberta(pair: Pair, p: Params, o: Options) -> Parts:
    """DeBERTa: He 2020 as 003 eq. 7 writes it.

    e_ij = (q.k + q.(a_r W^R) + k.(a_r W^T)) / sqrt(3 d)

    `p2c_index` "mirrored" is He's own position-to-content index: k.(a_{-r} W^T).
    """
    table = of_head(p["table"], pair.head)
    p2c_index = o.get("p2c_index", "paper")
    if p2c_index not in ("paper", "mirrored"):
        raise ValueError(f"p2c_index must be paper or mirrored, got {p2c_index}")
    p2c_distance = pair.distance if p2c_index == "paper" else -pair.distance
    a_c2p = clipped(table, pair.distance)
    a_p2c = clipped(table, p2c_distance)
    c2p = dot(pair.q, row_times(a_c2p, of_head(p["query_projection"], pair.head)))
    p2c = dot(pair.k, row_times(a_p2c, of_head(p["key_projection"], pair.head)))
    return Parts(scaled=c2p + p2c)


def tupe_a(pair: Pair, p: Params, o: Options) -> Parts:
    """TUPE-A: Ke 2020; 003 eq. 8-10 without a_ij. p_i by index; reset_theta is in `attention`.

    e_ij = q.k / sqrt(2d) + reset_theta((p_i U^Q).(p_j U^K) / sqrt(2d))
    """
    table = of_head(p["position_table"], pair.head)
    p_i = by_index(table, pair.index_i)
    p_j = by_index(table, pair.index_j)
    query = row_times(p_i, of_head(p["query_projection"], pair.head))
    key = row_times(p_j, of_head(p["key_projection"], pair.head))
    return Parts(scaled=dot(query, key))


def tupe(pair: Pair, p: Params, o: Options) -> Parts:
    """TUPE-R: Ke 2020; 003 eq. 8-10, s by clipped distance in logit units.

    e_ij = q.k / sqrt(2d) + reset_theta((p_i U^Q).(p_j U^K) / sqrt(2d) + s_r)
    """
    s = clipped(of_head(p["bias_table"], pair.head), pair.distance)
    return Parts(scaled=tupe_a(pair, p, o).scaled, static=s)


def abs_scalar(pair: Pair, p: Params, o: Options) -> Parts:
    """ABS-SCALAR: Chen 2021, 004 eq. 7. P_i by index; S is `segment_bias`.

    e_ij = q.k / sqrt(d) + P_i.P_j + S_ij
    """
    table = of_head(p["position_table"], pair.head)
    return Parts(static=dot(by_index(table, pair.index_i), by_index(table, pair.index_j)))


def rel_scalar(pair: Pair, p: Params, o: Options) -> Parts:
    """REL-SCALAR: Chen 2021, 004 eq. 8 and 11. S is `segment_bias`.

    e_ij = q.k / sqrt(d) + s_r + S_ij
    """
    return Parts(static=clipped(of_head(p["bias_table"], pair.head), pair.distance))


def segment_bias(table: Sequence[Vector], head: int, seg_i: int, seg_j: int) -> float:
    """Chen 2021, 004 eq. 9: S_ij = Seg[segment(i), segment(j)], n segments as n * n entries."""
    flat = of_head(table, head)
    n = math.isqrt(len(flat))
    if n * n != len(flat) or not (0 <= seg_i < n and 0 <= seg_j < n):
        raise ValueError(f"segments {seg_i}, {seg_j} do not fit a table of {len(flat)} entries")
    return flat[seg_i * n + seg_j]


# --------------------------------------------------------------- Su 2021, Press 2022, Chi 2022


def rotate(x: Vector, pos: int) -> list[float]:
    """Su 2021, eq. 34: pair (x_2m, x_2m+1) turned by pos 10000^(-2m/d); an odd last entry stays."""
    even = len(x) - len(x) % 2
    turned = list(x)
    for m in range(even // 2):
        angle = pos * 10000.0 ** (-2 * m / even)
        a, b = x[2 * m], x[2 * m + 1]
        turned[2 * m] = a * math.cos(angle) - b * math.sin(angle)
        turned[2 * m + 1] = a * math.sin(angle) + b * math.cos(angle)
    return turned


def rope(pair: Pair, p: Params, o: Options) -> Parts:
    """RoPE: Su 2021, eq. 14-16 and 34.

    e_ij = (rotation_i q).(rotation_j k) / sqrt(d)
    """
    return Parts(q=rotate(pair.q, pair.i), k=rotate(pair.k, pair.j))


def alibi_slopes(heads: int) -> list[float]:
    """Press 2022, section 3 and its released get_slopes.

    A power of two: 2^(-8 (h+1) / heads). Otherwise, with n the power of two below: the n slopes
    for n heads, then every other one of those for 2n heads, from the first.
    """
    if heads < 1:
        raise ValueError(f"heads must be >= 1, got {heads}")
    n = 2 ** (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (h + 1) / n) for h in range(n)]
    between = [2.0 ** (-8.0 * (h + 1) / (2 * n)) for h in range(0, 2 * n, 2)]
    return slopes + between[: heads - n]


def alibi(pair: Pair, p: Params, o: Options) -> Parts:
    """ALiBi: Press 2022, section 3; symmetric where the future is seen.

    e_ij = q.k / sqrt(d) - slope_h |j - i|
    """
    return Parts(static=-alibi_slopes(pair.num_heads)[pair.head] * abs(pair.distance))


def kerple(pair: Pair, p: Params, o: Options) -> Parts:
    """KERPLE, logarithmic: Chi 2022. r1, r2 > 0: the released code holds both at 0.01 or more.

    e_ij = q.k / sqrt(d) - r1 log(1 + r2 |j - i|)
    """
    r1 = max(0.01, of_head(p["amplitude"], pair.head))
    r2 = max(0.01, of_head(p["rate"], pair.head))
    return Parts(static=-r1 * math.log(1.0 + r2 * abs(pair.distance)))


# ------------------------------------------------------------------------ putting it together

INPUT_SCHEMES = ("none", "sinusoidal", "learned", "sentence")
SCHEMES: dict[str, Callable[[Pair, Params, Options], Parts]] = {
    **dict.fromkeys(INPUT_SCHEMES, nothing),
    "shaw": shaw,
    "shaw_keys": shaw_keys,
    "transformer_xl": transformer_xl,
    "t5": t5,
    "m1": m1,
    "m2": m2,
    "m3": m3,
    "m4": m4,
    "m4m": m4m,
    "deberta": deberta,
    "tupe": tupe,
    "tupe_a": tupe_a,
    "abs_scalar": abs_scalar,
    "rel_scalar": rel_scalar,
    "rope": rope,
    "alibi": alibi,
    "kerple": kerple,
}
OWN_SCALE_FACTOR = {"deberta": 3.0, "tupe": 2.0, "tupe_a": 2.0}  # every other scheme: 1


def scale(names: Sequence[str], head_dim: int, scale_factor: float | None) -> float:
    """1 / sqrt(C D); a hybrid's members must agree on C unless it is given (003 App. C)."""
    if scale_factor is None:
        factors = {OWN_SCALE_FACTOR.get(name, 1.0) for name in names if name not in INPUT_SCHEMES}
        if len(factors) > 1:
            raise ValueError(f"{'+'.join(names)} disagree on the scale: {sorted(factors)}")
        scale_factor = factors.pop() if factors else 1.0
    return 1.0 / math.sqrt(scale_factor * head_dim)


def only(vectors: Sequence[Vector | None], default: Vector | None, what: str) -> Vector | None:
    """The one vector that is given, or the default."""
    given = [vector for vector in vectors if vector is not None]
    if len(given) > 1:
        raise ValueError(f"one {what} at most, got {len(given)}")
    return given[0] if given else default


def content(pair: Pair, parts: Sequence[Parts]) -> float:
    """q'.k', or sum_c q'_c k'_c w_c, times every gate."""
    q = only([part.q for part in parts], pair.q, "rotation")
    k = only([part.k for part in parts], pair.k, "rotation")
    w = only([part.trilinear for part in parts], None, "trilinear")
    product = dot(q, k) if w is None else sum(a * b * c for a, b, c in zip(q, k, w, strict=True))
    return product * math.prod(part.gate for part in parts)


def position(
    pair: Pair,
    members: Sequence[tuple[str, Params, Options]],
    parts: Sequence[Parts],
    factor: float,
) -> float:
    """All position terms, under reset_theta (003 eq. 10) if a member asks for it.

    reset_theta(x_ij) = theta1 in the first token's row, theta2 in its column, x_ij elsewhere.
    Each member has its own thetas (they add); a member without them contributes 0 there.
    """
    if any(options.get("reset", False) for _, _, options in members):
        if pair.index_i == 0 or pair.index_j == 0:
            theta = "theta1" if pair.index_i == 0 else "theta2"
            return sum(of_head(p[theta], pair.head) for _, p, _ in members if theta in p)
    return sum(part.scaled * factor + part.static for part in parts)


def attention(
    members: Sequence[Member],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    query_start: int = 0,
    causal: bool = False,
    real: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
    segments: torch.Tensor | None = None,
    segment_table: torch.Tensor | None = None,
    scale_factor: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention with the given schemes, one pair at a time.

    Args:
        members: (name, params, options) of each scheme; several make a hybrid.
        q: queries (B, H, T, D); row t stands at slot query_start + t.
        k: keys (B, H, S, D); column s stands at slot s.
        v: values (B, H, S, D).
        query_start: the first query's slot.
        causal: exclude keys with j > i.
        real: (B, S), False = padding, an excluded key.
        index: (B, S), each token's index from its row's first real token; None: the slot. Read
            at slot query_start + t for a query. A padding query's row means nothing.
        segments: (B, S) segment numbers, with segment_table.
        segment_table: (H or 1, n * n), in logit units; reset does not touch it.
        scale_factor: C in 1 / sqrt(C D) instead of the scheme's own.

    Returns:
        logits (B, H, T, S), -inf where excluded; probs (B, H, T, S); out (B, H, T, D); all fp64.
        A row without any key has probs 0 and out 0.

    Raises:
        ValueError: unknown scheme, or a hybrid with two scales, rotations or trilinear products.
    """
    for name, _, _ in members:
        if name not in SCHEMES:
            raise ValueError(f"scheme must be one of {sorted(SCHEMES)}, got {name}")
    if (segments is None) != (segment_table is None):
        raise ValueError("segments and segment_table go together, got one of them")
    (batch, heads, tgt_len, dim), src_len = q.shape, k.shape[2]
    queries, keys, values = (x.double().tolist() for x in (q, k, v))
    listed = [(n, {key: x.double().tolist() for key, x in p.items()}, o) for n, p, o in members]
    is_real = [[True] * src_len] * batch if real is None else real.tolist()
    slots = list(range(max(src_len, query_start + tgt_len)))
    indices = [slots] * batch if index is None else index.tolist()
    seg = None if segments is None else segments.tolist()
    seg_table = None if segment_table is None else segment_table.double().tolist()
    factor = scale([name for name, _, _ in members], dim, scale_factor)

    logits = torch.zeros(batch, heads, tgt_len, src_len, dtype=torch.float64)
    probs = torch.zeros(batch, heads, tgt_len, src_len, dtype=torch.float64)
    out = torch.zeros(batch, heads, tgt_len, dim, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for t in range(tgt_len):
                i = query_start + t
                row = [-math.inf] * src_len
                value_rows = [list(x) for x in values[b][h]]
                for j in range(src_len):
                    if not is_real[b][j] or (causal and j > i):
                        continue
                    at = (i, j, indices[b][i], indices[b][j])
                    pair = Pair(queries[b][h][t], keys[b][h][j], h, heads, *at)
                    parts = [SCHEMES[name](pair, p, o) for name, p, o in listed]
                    row[j] = content(pair, parts) * factor
                    row[j] += sum(part.content_bias for part in parts) * factor
                    row[j] += position(pair, listed, parts, factor)
                    if seg is not None:
                        row[j] += segment_bias(seg_table, h, seg[b][i], seg[b][j])
                    for part in parts:
                        if part.value is not None:
                            for c in range(dim):
                                value_rows[j][c] += part.value[c]
                alpha = softmax_row(row)
                z = [sum(alpha[j] * value_rows[j][c] for j in range(src_len)) for c in range(dim)]
                logits[b, h, t] = torch.tensor(row, dtype=torch.float64)
                probs[b, h, t] = torch.tensor(alpha, dtype=torch.float64)
                out[b, h, t] = torch.tensor(z, dtype=torch.float64)
    return logits, probs, out
