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

Papers: Huang 2020 (Huang2020), Dai 2019 (Dai2019), Multiplicative Position-aware Transformer Models
(M4M), Chen 2021 (Chen2021); Vaswani 2017 (arXiv 1706.03762), Shaw 2018 (1803.02155),
Raffel 2019 (1910.10683), Ke 2020 (2006.15595), He 2020 (2006.03654),
Su 2021 (2104.09864), Liu 2022 (2111.09883), Press 2022 (2108.12409), Lee 2022 (2210.11870), Chi 2022 (2205.09921),
Chi 2023 (2212.10356), Lin 2025 (2503.02130), Golovneva 2024 (2405.18719), Veisi 2025
(2503.08067).
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
    tokens: int = 0  # real tokens in the row
    inputs: Sequence[Vector] = ()  # the layer's input (E,) at each slot
    slots: tuple[int, int] = (0, 0)  # query's and key's, whatever positions stand in for them
    seen: dict[int, Vector] | None = None  # the keys that the query sees, by their slots
    factor: float = 1.0  # 1 / sqrt(C D)
    numbers: tuple[int, int] = (0, 0)  # as index_i and index_j, whatever positions stand in for them

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
    """Row r + k for r = clip(distance, -k, k), of a table of 2k + 1 rows (Huang2020 eq. 8-9)."""
    if len(table) % 2 == 0:
        raise ValueError(f"a clipped table has 2k + 1 rows, got {len(table)}")
    k = len(table) // 2
    r = max(-k, min(k, distance))
    return table[r + k]


def by_index(table: Sequence[Any], index: int) -> Any:
    """Row `index`; a padding token before the first real one (index < 0) reads row 0."""
    return table[max(0, index)]


def softmax_row(logits: Vector) -> list[float]:
    """exp(e_j) / sum_j exp(e_j) (Huang2020 eq. 4); a row that excludes every key gives zeros."""
    top = max(logits, default=-math.inf)
    if top == -math.inf:
        return [0.0] * len(logits)
    weights = [math.exp(e - top) for e in logits]
    total = sum(weights)
    return [w / total for w in weights]


# ------------------------------------------------------------------------------ input embeddings


def sinusoid_vaswani(pos: float, dim: int) -> list[float]:
    """Vaswani 2017, section 3.5; Huang2020 eq. 1-2: the paper's interleaved layout.

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
    """none, sinusoidal, learned, sentence: nothing in attention (Huang2020 eq. 5-6).

    e_ij = q_i.k_j / sqrt(d)
    """
    return Parts()


# -------------------------------------------------------- Shaw 2018, Dai 2019, Raffel 2019


def shaw_keys(pair: Pair, p: Params, o: Options) -> Parts:
    """Shaw 2018 without its values (Huang2020 eq. 7, M4M eq. 3).

    e_ij = q_i.(k_j + aK_r) / sqrt(d)
    """
    a = clipped(of_head(p["key_table"], pair.head), pair.distance)
    return Parts(scaled=dot(pair.q, a))


def shaw(pair: Pair, p: Params, o: Options) -> Parts:
    """Shaw 2018, eq. 3-4.

    e_ij = q_i.(k_j + aK_r) / sqrt(d),  z_i = sum_j alpha_ij (v_j + aV_r)
    """
    value = clipped(of_head(p["value_table"], pair.head), pair.distance)
    keys = 0.0 if o["keys"] == "off" else shaw_keys(pair, p, o).scaled
    return Parts(scaled=keys, value=value)


@cache
def sinusoid_xl(pos: int, dim: int) -> list[float]:
    """R_pos in the released code's layout: all sines, then all cosines, of pos 10000^(-2m/dim)."""
    if dim % 2:
        raise ValueError(f"embed_dim must be even for sines and cosines, got {dim}")
    angles = [pos * 10000.0 ** (-2 * m / dim) for m in range(dim // 2)]
    return [math.sin(x) for x in angles] + [math.cos(x) for x in angles]


def transformer_xl(pair: Pair, p: Params, o: Options) -> Parts:
    """Transformer-XL: Dai 2019, section 3.3 ; Huang2020 eq. 10.

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
    # Huang2020 eq. 10 (Chen2021, section 2.2.2): W^K, which makes keys of the content, instead of W_R
    matrix = p["content_keys"] if o["projections"] == "content" else p["projection"]
    shared = len(matrix) == dim  # one projection, u and v for all heads
    head = 0 if shared else pair.head
    r = [dot(matrix[head * dim + c], sinusoid) for c in range(dim)]
    u = p["content_bias"][head] if "content_bias" in p else [0.0] * dim
    v = p["position_bias"][head] if "position_bias" in p else [0.0] * dim
    return Parts(content_bias=dot(u, pair.k), scaled=dot(pair.q, r) + dot(v, r))


def transformer_xl_learned(pair: Pair, p: Params, o: Options) -> Parts:
    """The released code's attn_type 1: e_ij = (q.k + q.a_r + u.k + s_r) / sqrt(d)."""
    a = clipped(of_head(p["key_table"], pair.head), pair.distance)
    s = clipped(of_head(p["bias_table"], pair.head), pair.distance)
    u = of_head(p["content_bias"], pair.head)
    return Parts(content_bias=dot(u, pair.k), scaled=dot(pair.q, a) + s)


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
    """T5: Raffel 2019, section 2.1; divided as in M4M eq. 4 (T5's own code has no division).

    e_ij = (q.k + s_bucket(j-i)) / sqrt(d)      s: what is stored times a gain
    """
    if not o["buckets"]:  # M4M eq. 4 as written: a scalar a distance
        return Parts(scaled=clipped(of_head(p["bias_table"], pair.head), pair.distance))
    bucket = t5_bucket(pair.distance, o["buckets"], o["max_distance"], o["bidirectional"])
    return Parts(scaled=of_head(p["bias_table"], pair.head)[bucket] * o["scalar_gain"])


# -------------------------------------------------------------------- Huang 2020: M1 to M4; M4M


def m1(pair: Pair, p: Params, o: Options) -> Parts:
    """Method 1: Huang2020 eq. 11-12, unclipped (beyond the table its last entry).

    e_ij = q.k w_|j-i| / sqrt(d)
    """
    gates = of_head(p["gate_table"], pair.head)
    return Parts(gate=gates[min(abs(pair.distance), len(gates) - 1)])


def m2(pair: Pair, p: Params, o: Options) -> Parts:
    """Method 2: Huang2020 eq. 13 with eq. 12; M4M eq. 5.

    e_ij = q.k w_r / sqrt(d)
    """
    return Parts(gate=clipped(of_head(p["gate_table"], pair.head), pair.distance))


def m3(pair: Pair, p: Params, o: Options) -> Parts:
    """Method 3: Huang2020 eq. 14-15.

    e_ij = sum_c q_c k_c w_rc / sqrt(d)
    """
    return Parts(trilinear=clipped(of_head(p["trilinear_table"], pair.head), pair.distance))


def m4(pair: Pair, p: Params, o: Options) -> Parts:
    """Method 4: Huang2020 eq. 16; M4M eq. 6.

    e_ij = (q.k + q.a_r + k.a_r) / sqrt(d)
    """
    a = clipped(of_head(p["table"], pair.head), pair.distance)
    return Parts(scaled=dot(pair.q, a) + dot(pair.k, a))


def m4m(pair: Pair, p: Params, o: Options) -> Parts:
    """M4 multiplicative: M4M eq. 11.

    e_ij = (q.k) (q.a_r) (k.a_r) / sqrt(d)
    """
    a = clipped(of_head(p["table"], pair.head), pair.distance)
    return Parts(gate=dot(pair.q, a) * dot(pair.k, a))


# -------------------------------------------------------------------- He 2020, Ke 2020, Chen 2021


def deberta(pair: Pair, p: Params, o: Options) -> Parts:
    """DeBERTa: He 2020 as M4M eq. 7 writes it.

    e_ij = (q.k + q.(a_r W^R) + k.(a_r W^T)) / sqrt(3 d)

    `p2c_index` "mirrored" is the position-to-content index of He's text: k.(a_{-r} W^T).
    """
    table = of_head(p["table"], pair.head)
    p2c_index = o.get("p2c_index", "same")
    if p2c_index not in ("same", "mirrored"):
        raise ValueError(f"p2c_index must be same or mirrored, got {p2c_index}")
    p2c_distance = pair.distance if p2c_index == "same" else -pair.distance
    a_c2p = clipped(table, pair.distance)
    a_p2c = clipped(table, p2c_distance)
    names = ("query_projection", "key_projection")
    if o["projections"] == "one":  # M4M's Table 5 counts one: W^R = W^T
        names = ("projection", "projection")
    w_r, w_t = (of_head(p[name], pair.head) for name in names)
    c2p = dot(pair.q, row_times(a_c2p, w_r))
    p2c = dot(pair.k, row_times(a_p2c, w_t))
    return Parts(scaled=c2p + p2c)


def log_bucket(offset: int, buckets: int, farthest: int) -> int:
    """DeBERTa's make_log_bucket_position of i - j, in exact integers; `buckets` of a direction.

    With M = buckets // 2, |offset| <= M is its own bucket; beyond it, the sign times
    M + ceil(log(n / M) / log((farthest - 1) / M) (M - 1)).
    """
    n, middle = abs(offset), buckets // 2
    if n <= middle:
        return offset
    t = 0
    while n ** (middle - 1) * middle**t > (farthest - 1) ** t * middle ** (middle - 1):
        t += 1
    return (middle + t) * (1 if offset > 0 else -1)


def deberta_released(pair: Pair, p: Params, o: Options) -> Parts:
    """DeBERTa's released code: modeling_deberta and modeling_deberta_v2 of transformers 4.44.2.

    e_ij = (q.k + q.(W_K a_r) + k.(W_Q a_r + b)) / sqrt(C d), C = 1 + number of terms, with
    r = clamp(i - j + K, 0, 2K - 1); our table runs over j - i.  W_K's bias adds the same to every
    key of a query: left out.
    """
    table, dim = p["table"][0], len(pair.q)
    half = len(table) // 2
    offset = pair.i - pair.j
    if o["log_buckets"]:
        offset = log_bucket(offset, o["log_buckets"], o["clip_distance"])
    row = max(0, min(2 * half - 1, offset + half))
    a = table[2 * half - 1 - row]
    if o["norm"] == "on":
        mean = sum(a) / len(a)
        root = math.sqrt(sum((x - mean) ** 2 for x in a) / len(a) + 1e-7)
        a = [(x - mean) / root * w + b for x, w, b in zip(a, p["norm_weight"], p["norm_bias"], strict=True)]
    names = ("query_projection", "key_projection", "key_bias")
    if o["projections"] == "content":
        names = ("content_keys", "content_queries", "content_queries_bias")
    rows = range(pair.head * dim, (pair.head + 1) * dim)
    total = 0.0
    if o["terms"] != "p2c":
        total += dot(pair.q, [dot(p[names[0]][c], a) for c in rows])
    if o["terms"] != "c2p":
        total += dot(pair.k, [dot(p[names[1]][c], a) + p[names[2]][c] for c in rows])
    return Parts(scaled=total)


def tupe_a(pair: Pair, p: Params, o: Options) -> Parts:
    """TUPE-A: Ke 2020; M4M eq. 8-10 without a_ij. p_i by index; reset_theta is in `attention`.

    e_ij = q.k / sqrt(2d) + reset_theta((p_i U^Q).(p_j U^K) / sqrt(2d))
    """
    table = of_head(p["position_table"], pair.head)
    p_i = by_index(table, pair.index_i)
    p_j = by_index(table, pair.index_j)
    names = ("query_projection", "key_projection")
    if o["projections"] == "one":  # M4M's Table 5 counts one: U^Q = U^K
        names = ("projection", "projection")
    query = row_times(p_i, of_head(p[names[0]], pair.head))
    key = row_times(p_j, of_head(p[names[1]], pair.head))
    return Parts(scaled=dot(query, key))


def tupe(pair: Pair, p: Params, o: Options) -> Parts:
    """TUPE-R: Ke 2020; M4M eq. 8-10, s by clipped distance in logit units.

    e_ij = q.k / sqrt(2d) + reset_theta((p_i U^Q).(p_j U^K) / sqrt(2d) + s_r)
    """
    s = clipped(of_head(p["bias_table"], pair.head), pair.distance)
    product = tupe_a(pair, p, o).scaled
    if o["scalars"] == "inside":  # Chen2021 eq. 5, which its eq. 2 divides whole
        return Parts(scaled=product + s)
    return Parts(scaled=product, static=s)


def tupe_released(pair: Pair, p: Params, o: Options) -> Parts:
    """TUPE's released code: p of the model's width under a layer norm, biases, T5's 32 buckets.

    e_ij = q.k / sqrt(2d) + reset_theta((W_Q n(p_i) + b_Q).(W_K n(p_j) + b_K) / sqrt(2d) + s_bucket)
    """
    dim = len(pair.q)
    rows = range(pair.head * dim, (pair.head + 1) * dim)
    parts = []
    for index, name in ((pair.index_i, "query"), (pair.index_j, "key")):
        x = by_index(p["position_table"], index)
        mean = sum(x) / len(x)
        root = math.sqrt(sum((value - mean) ** 2 for value in x) / len(x) + 1e-5)
        x = [(value - mean) / root * w + b for value, w, b in zip(x, p["norm_weight"], p["norm_bias"], strict=True)]
        parts.append([dot(p[f"{name}_projection"][c], x) + p[f"{name}_bias"][c] for c in rows])
    bucket = t5_bucket(pair.distance, 32, 128, o["bidirectional"])
    return Parts(scaled=dot(*parts), static=p["bias_table"][pair.head][bucket])


def abs_scalar(pair: Pair, p: Params, o: Options) -> Parts:
    """ABS-SCALAR: Chen2021 eq. 7. P_i by index; S is `segment_bias`.

    e_ij = q.k / sqrt(d) + P_i.P_j + S_ij
    """
    table = of_head(p["position_table"], pair.head)
    return Parts(static=dot(by_index(table, pair.index_i), by_index(table, pair.index_j)))


def rel_scalar(pair: Pair, p: Params, o: Options) -> Parts:
    """REL-SCALAR: Chen2021 eq. 8 and 11. S is `segment_bias`.

    e_ij = q.k / sqrt(d) + s_r + S_ij           s: what is stored times a gain
    """
    stored = clipped(of_head(p["bias_table"], pair.head), pair.distance)
    return Parts(static=stored * o["scalar_gain"])


def segment_bias(table: Sequence[Vector], head: int, seg_i: int, seg_j: int) -> float:
    """Chen2021 eq. 9: S_ij = Seg[segment(i), segment(j)], n segments as n * n entries."""
    flat = of_head(table, head)
    n = math.isqrt(len(flat))
    if n * n != len(flat) or not (0 <= seg_i < n and 0 <= seg_j < n):
        raise ValueError(f"segments {seg_i}, {seg_j} do not fit a table of {len(flat)} entries")
    return flat[seg_i * n + seg_j]


# --------------------------------------------------------------- Su 2021, Press 2022, Chi 2022


def yarn_ramp(c: int, pairs: int, base: float, length: int, fast: float, slow: float) -> float:
    """Peng 2023, eq. 21-22, with pair numbers rounded outwards as in the released code.

    A pair c turns length theta_c / (2 pi) times over the trained length; 0 from the fast turns, 1 from the slow.
    """
    bounds = []
    for turns in (fast, slow):
        # theta_c = base^(-c / pairs), solved for c
        bounds.append(pairs * math.log(length / (2 * math.pi * turns)) / math.log(base))
    low, high = max(0, math.floor(bounds[0])), min(2 * pairs - 1, math.ceil(bounds[1]))
    if low == high:
        return 1.0 if c > low else 0.0
    return min(1.0, max(0.0, (c - low) / (high - low)))


def rope_angle(c: int, pairs: int, tokens: int, o: Options) -> tuple[float, float]:
    """theta_c of an input of `tokens` tokens, and what q and k are multiplied by.

    Chen 2023 (2306.15595), bloc97 and emozilla 2023 (NTK-aware, dynamic), Peng 2023 (2309.00071), Llama 3.1's
    released code, Ding 2024 (2402.13753).
    """
    base, scaling, length = o.get("rope_base", 10000.0), o.get("rope_scaling"), o.get("trained")
    if scaling in (None, "none"):
        return base ** (-c / pairs), 1.0
    s, times = o["rope_factor"], max(1.0, tokens / length)
    if scaling == "dynamic":
        s = (s or 1.0) * times - ((s or 1.0) - 1.0)
    elif s is None:
        s = times
    if scaling in ("ntk", "dynamic"):
        if pairs > 1:
            base *= s ** (pairs / (pairs - 1))
        return base ** (-c / pairs), 1.0
    theta = base ** (-c / pairs)
    if scaling == "linear":
        return theta / s, 1.0
    attention = o.get("rope_attention_factor")
    if scaling == "longrope":
        slower = o["rope_long_factor" if tokens > length else "rope_short_factor"][c]
        return theta / slower, attention or math.sqrt(1 + math.log(o["rope_factor"]) / math.log(length))
    slow = o.get("rope_slow_turns") or 1.0
    fast = o.get("rope_fast_turns") or (4.0 if scaling == "llama3" else 32.0)
    if scaling == "llama3":
        # The released code, by wave lengths: long ones slowed, short ones kept, in between smoothly.
        wave = 2 * math.pi / theta
        if wave > length / slow:
            return theta / s, 1.0
        if wave < length / fast:
            return theta, 1.0
        smooth = (length / wave - slow) / (fast - slow)
        return (1 - smooth) * theta / s + smooth * theta, 1.0
    r = yarn_ramp(c, pairs, base, length, fast, slow)
    return r * theta / s + (1 - r) * theta, attention or 0.1 * math.log(s) + 1.0


def rotate(x: Vector, pos: int, tokens: int, o: Options) -> list[float]:
    """Su 2021, eq. 34: pair (x_2m, x_2m+1), or (x_m, x_m+d/2), turned by pos theta_m."""
    pairs = int(len(x) * o.get("rope_share", 1.0)) // 2
    turned = list(x)
    for m in range(pairs):
        theta, size = rope_angle(m, pairs, tokens, o)
        one, other = (m, m + pairs) if o.get("rope_pairs") == "halves" else (2 * m, 2 * m + 1)
        a, b, angle = x[one], x[other], pos * theta
        turned[one] = size * (a * math.cos(angle) - b * math.sin(angle))
        turned[other] = size * (a * math.sin(angle) + b * math.cos(angle))
    return turned


def rope(pair: Pair, p: Params, o: Options) -> Parts:
    """RoPE: Su 2021, eq. 14-16 and 34; log-n of Su 2021 (spaces.ac.cn/archives/8823).

    e_ij = (rotation_i q).(rotation_j k) / sqrt(d), times max(1, log n_i / log L)
    """
    q, k = (rotate(x, i, pair.tokens, o) for x, i in ((pair.q, pair.i), (pair.k, pair.j)))
    if o.get("rope_log_n") == "on":
        seen = pair.tokens if o["bidirectional"] else pair.index_i + 1
        q = [x * max(1.0, math.log(max(seen, 1)) / math.log(o["trained"])) for x in q]
    return Parts(q=q, k=k)


def xpos(pair: Pair, p: Params, o: Options) -> Parts:
    """xPos: Sun 2022 (2212.10554), section 3.

    e_ij = sum_c zeta_c^((i - j) / s) (rotation_i q)_c.(rotation_j k)_c / sqrt(d)
    """
    q, k = list(rope(pair, p, o).q), list(rope(pair, p, o).k)
    pairs = len(q) // 2
    for c in range(pairs if o["xpos_base"] else 0):
        zeta = (2 * c / (2 * pairs) + 0.4) / (1 + 0.4)
        decay = zeta ** ((pair.i - pair.j) / o["xpos_base"])
        for place in (c, c + pairs) if o.get("rope_pairs") == "halves" else (2 * c, 2 * c + 1):
            q[place] *= decay
    return Parts(q=q, k=k)


def pope(pair: Pair, p: Params, o: Options) -> Parts:
    """PoPE: Gopalakrishnan 2025 (2509.10534); delta kept in [-2 pi, 0].

    e_ij = sum_c softplus(q_c) softplus(k_c) cos((j - i) theta_c + delta_c) / sqrt(d)
    """
    dim = len(pair.q)
    length_q, length_k = ([math.log1p(math.exp(x)) for x in y] for y in (pair.q, pair.k))
    for c in range(dim):
        delta = min(0.0, max(-2 * math.pi, p["phase"][pair.head][c]))
        theta = o.get("rope_base", 10000.0) ** (-c / dim)
        length_q[c] *= math.cos(pair.distance * theta + delta)
    return Parts(q=length_q, k=length_k)


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


def alibi_learned(pair: Pair, p: Params, o: Options) -> Parts:
    """Learned slopes (Press 2022, section 3), exp of what is stored; LittleBird's form: Lee 2022 (2210.11870).

    e_ij = q.k / sqrt(d) - D_ij,  D_ij = 0 if i = j; a if i = 0 or j = 0; b (i - j) if i > j; c (j - i) if i < j
    """
    if not o["bidirectional"] or o["alibi_form"] == "symmetric":
        return Parts(static=-math.exp(of_head(p["log_slope"], pair.head)) * abs(pair.distance))
    a, b, c = (math.exp(of_head(p[f"log_{name}"], pair.head)) for name in ("first", "past", "future"))
    if pair.i == pair.j:
        return Parts()
    if 0 in pair.numbers:
        return Parts(static=-a)
    return Parts(static=b * pair.distance if pair.distance < 0 else -c * pair.distance)


def sandwich(pair: Pair, p: Params, o: Options) -> Parts:
    """Sandwich: Chi 2023 (2212.10356), appendix E: p_i.p_j of sinusoids, over 8h/H for h = 1..H.

    e_ij = q.k / sqrt(d) + sum_c (sin a sin b + cos a cos b) / (8 h / H), a = i f_c, b = j f_c, f_c = 10000^(-2c/D)
    """
    waves = [10000.0 ** (-2 * c / o["sandwich_dim"]) for c in range(o["sandwich_dim"] // 2)]
    total = sum(
        math.sin(pair.i * f) * math.sin(pair.j * f) + math.cos(pair.i * f) * math.cos(pair.j * f) for f in waves
    )
    return Parts(static=total / (8 * (pair.head + 1) / pair.num_heads))


def kerple(pair: Pair, p: Params, o: Options) -> Parts:
    """KERPLE, logarithmic: Chi 2022. r1, r2 > 0: the released code holds both at 0.01 or more.

    e_ij = q.k / sqrt(d) - r1 log(1 + r2 |j - i|)
    """
    r1 = max(0.01, of_head(p["amplitude"], pair.head))
    r2 = max(0.01, of_head(p["rate"], pair.head))
    return Parts(static=-r1 * math.log(1.0 + r2 * abs(pair.distance)))


def fire(pair: Pair, p: Params, o: Options) -> Parts:
    """FIRE: Li 2024 (2310.04418), eq. 7, and its released code, which adds 1e-6 below the line.

    e_ij = q.k / sqrt(d) + f(psi(|j - i|) / psi(max(L, i))), psi(x) = log(|c x| + 1)

    f(x) = sum_m w2_hm max(0, w1_m x + b1_m). In an encoder i is the longest distance of the query.
    """
    (c,), (stretch,) = p["rate"], p["stretch"]
    longest = pair.index_i
    if o["bidirectional"]:
        longest = max(longest, pair.tokens - 1 - pair.index_i)
    far = max(abs(stretch * o["fire_threshold"]), longest)
    x = math.log(abs(c * pair.distance) + 1) / (math.log(abs(c * far) + 1) + 1e-6)
    hidden = zip(p["hidden_weight"], p["hidden_bias"], strict=True)
    units = [max(0.0, w * x + b) for w, b in hidden]
    return Parts(static=dot(of_head(p["output_weight"], pair.head), units))


def log_cpb(pair: Pair, p: Params, o: Options) -> Parts:
    """Log-spaced continuous position bias: Liu 2022 (2111.09883), section 3.3, and Swin's or x-transformers' code.

    e_ij = q.k / sqrt(d) + g(sum_m w2_hm act(w1_m x + b1_m)), x = sign(j - i) log(1 + |j - i|)

    swin: act(y) = max(0, y), g(y) = 16 / (1 + e^-y), less its value at 0; dynamic: act(y) = y / (1 + e^-y), g(y) = y
    """
    x = math.copysign(math.log(1 + abs(pair.distance)), pair.distance)
    hidden = [w * x + b for w, b in zip(p["hidden_weight"], p["hidden_bias"], strict=True)]
    last = of_head(p["output_weight"], pair.head)
    if o["cpb_form"] == "dynamic":
        return Parts(static=dot(last, [y / (1 + math.exp(-y)) for y in hidden]))
    return Parts(static=16 / (1 + math.exp(-dot(last, [max(0.0, y) for y in hidden]))) - 8)


# ---------------------------------------------------------------------------------- since 2025


def fox(pair: Pair, p: Params, o: Options) -> Parts:
    """FoX: Lin 2025, eq. 6-8; after the query as x-transformers (tril and triu of two sums).

    e_ij = q.k / sqrt(d) + sum_{l=j+1..i} log f_l,  f_l = 1 / (1 + exp(-(w.x_l + b)))
    e_ij = q.k / sqrt(d) + sum_{l=i+1..j} log g_l where j > i
    """
    i, j = pair.slots
    side = 1 if j > i else 0
    weight, bias = p["gate_weight"][pair.head], p["gate_bias"][pair.head]
    total = 0.0
    for slot in range(min(i, j) + 1, max(i, j) + 1):
        gate = dot(weight[side], pair.inputs[slot]) + bias[side]
        total -= math.log1p(math.exp(-gate))
    return Parts(static=total)


def cable(pair: Pair, p: Params, o: Options) -> Parts:
    """CABLE: Veisi 2025, eq. 2-7, with the sign and the biases of the released code; -|S_i - S_j| after the query.

    e_ij = q.k / sqrt(d) - g_i |S_i - S_j|,  S_i = sum_{l<=i} max(0, w.x_l + b),  g_i = log(1 + exp(u.x_i + c))
    """
    i, j = pair.slots

    def number(name: str, slot: int) -> float:
        (weight,), (bias,) = p[f"{name}_weight"][pair.head], p[f"{name}_bias"][pair.head]
        return dot(weight, pair.inputs[slot]) + bias

    until_i, until_j = (sum(max(0.0, number("gate", slot)) for slot in range(end + 1)) for end in (i, j))
    return Parts(static=-math.log1p(math.exp(number("slope", i))) * abs(until_i - until_j))


def dape(pair: Pair, p: Params, o: Options) -> Parts:
    """DAPE: Zheng 2024; `attention` adds f, which reads the logits of all heads (`mixed`)."""
    return Parts()


def mixed(head: int, contents: Vector, biases: Vector, p: Params) -> float:
    """f(a, b) of one head: W2 leaky_relu(W1 (a, b) + c1) + c2."""
    both = [*contents, *biases]
    hidden = [dot(row, both) + bias for row, bias in zip(p["hidden_weight"], p["hidden_bias"], strict=True)]
    units = [x if x > 0 else 0.01 * x for x in hidden]
    return dot(p["output_weight"][head], units) + p["output_bias"][head]


def cope(pair: Pair, p: Params, o: Options) -> Parts:
    """CoPE: Golovneva 2024, eq. 3-5, of the keys that the query sees; e between its rows is linear.

    g_ij = sigmoid(q.k_j / sqrt(d)),  p_ij = sum_{l=j..i} g_il,  e_ij = q.k / sqrt(d) + q.e[p_ij] (the listing),
    or the released code's (q.k + q.e[p_ij]) / sqrt(d)
    """
    table = of_head(p["table"], pair.head)
    place = 0.0
    for slot, key in pair.seen.items():
        if slot >= pair.slots[1]:
            place += 1.0 / (1.0 + math.exp(-dot(pair.q, key) * pair.factor))
    place = min(place, len(table) - 1)
    low, high = math.floor(place), math.ceil(place)
    between = place - low
    e = [(1 - between) * a + between * b for a, b in zip(table[low], table[high], strict=True)]
    return Parts(scaled=dot(pair.q, e) * (1.0 if o["contexts_scaled"] == "on" else math.sqrt(len(pair.q))))


# ------------------------------------------------------------------------ putting it together

INPUT_SCHEMES = ("none", "sinusoidal", "learned", "sentence")
# The oracle of a scheme is the function above that has its name.
SCHEMES: dict[str, Callable[[Pair, Params, Options], Parts]] = dict.fromkeys(INPUT_SCHEMES, nothing) | {
    name: function
    for name, function in globals().items()
    if getattr(function, "__annotations__", {}).get("return") == "Parts"
}
OWN_SCALE_FACTOR: dict[str, float | Callable[[Options], float]] = {
    "deberta": 3.0,
    "deberta_released": lambda options: 3.0 if options["terms"] == "both" else 2.0,  # 1 + the number of terms
    "tupe": 2.0,
    "tupe_a": 2.0,
    "tupe_released": 2.0,
}  # every other scheme: 1


def scale(members: Sequence[tuple[str, Params, Options]], head_dim: int, scale_factor: float | None) -> float:
    """1 / sqrt(C D); a hybrid's members must agree on C unless it is given (M4M App. C)."""
    if scale_factor is None:
        found = [(OWN_SCALE_FACTOR.get(name, 1.0), o) for name, _, o in members if name not in INPUT_SCHEMES]
        factors = {factor(o) if callable(factor) else factor for factor, o in found}
        if len(factors) > 1:
            raise ValueError(f"{'+'.join(name for name, _, _ in members)} disagree on the scale: {sorted(factors)}")
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
    pair: Pair, members: Sequence[tuple[str, Params, Options]], parts: Sequence[Parts], factor: float
) -> float:
    """All position terms, under reset_theta (M4M eq. 10) if a member asks for it.

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
    places: Sequence[int] | None = None,
    inputs: torch.Tensor | None = None,
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
        inputs: (S, B, E) the layer's input, for schemes that read it.
        places: rising positions that schemes read in place of 0, 1, ... (Ruoss 2023); None: those.

    Returns:
        logits (B, H, T, S), -inf where excluded; probs (B, H, T, S); out (B, H, T, D); all fp64.
        A row without any key has probs 0 and out 0.

    Raises:
        ValueError: unknown scheme, or a hybrid with two scales, rotations or trilinear products.
    """
    for name, _, _ in members:
        if name not in SCHEMES:
            raise ValueError(
                f"no oracle of {name}: write a function `{name}` in tests/naive.py that returns Parts (there are "
                f"{', '.join(sorted(SCHEMES))})"
            )
    if (segments is None) != (segment_table is None):
        raise ValueError("segments and segment_table go together, got one of them")
    (batch, heads, tgt_len, dim), src_len = q.shape, k.shape[2]
    queries, keys, values = (x.double().tolist() for x in (q, k, v))
    listed = [(n, {key: x.double().tolist() for key, x in p.items()}, o) for n, p, o in members]
    is_real = [[True] * src_len] * batch if real is None else real.tolist()
    slots = list(range(max(src_len, query_start + tgt_len)))
    places = slots if places is None else places
    layer_input = None if inputs is None else inputs.transpose(0, 1).double().tolist()
    indices = [slots] * batch if index is None else index.tolist()
    seg = None if segments is None else segments.tolist()
    seg_table = None if segment_table is None else segment_table.double().tolist()
    factor = scale(members, dim, scale_factor)

    def logit(b: int, h: int, t: int, j: int, visible: list[int]) -> tuple[float, float, list[Parts]]:
        """Content, and what the schemes add to it, of one pair in one head."""
        i = query_start + t
        at = (places[n] for n in (i, j, indices[b][i], indices[b][j]))
        x = () if layer_input is None else layer_input[b]
        more = (sum(is_real[b]), x, (i, j), {s: keys[b][h][s] for s in visible}, factor)
        more += ((indices[b][i], indices[b][j]),)
        pair = Pair(queries[b][h][t], keys[b][h][j], h, heads, *at, *more)
        parts = [SCHEMES[name](pair, p, o) for name, p, o in listed]
        added = sum(part.content_bias for part in parts) * factor + position(pair, listed, parts, factor)
        return content(pair, parts) * factor, added, parts

    logits = torch.zeros(batch, heads, tgt_len, src_len, dtype=torch.float64)
    probs = torch.zeros(batch, heads, tgt_len, src_len, dtype=torch.float64)
    out = torch.zeros(batch, heads, tgt_len, dim, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for t in range(tgt_len):
                i = query_start + t
                row = [-math.inf] * src_len
                value_rows = [list(x) for x in values[b][h]]
                visible = [j for j in range(src_len) if is_real[b][j] and not (causal and j > i)]
                for j in visible:
                    own, added, parts = logit(b, h, t, j, visible)
                    row[j] = own + added
                    for _, p, _ in (member for member in listed if member[0] == "dape"):
                        every = [logit(b, other, t, j, visible) for other in range(heads)]
                        row[j] += mixed(h, [one[0] for one in every], [one[1] for one in every], p)
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
