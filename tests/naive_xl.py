"""A Transformer-XL layer and its recurrence as scalar loops; imports nothing of the package.

Dai et al. 2019 (Dai2019), section 3.3, "Complete Transformer-XL procedure", with several heads and the
scale 1/sqrt(d) of the released code:

    h~ = [SG(m) ; h]
    q, k, v = h W_q, h~ W_k,E, h~ W_v
    A_ij = q_i k_j + q_i W_k,R R_i-j + u k_j + v W_k,R R_i-j
    a = Masked-Softmax(A / sqrt(d)) v
    o = LayerNorm(Linear(a) + h),   h' = LayerNorm(FF(o) + o)

and, where `pre_norm` (the released code's pre_lnorm): o = Linear(a(LayerNorm(h~))) + h, h' =
FF(LayerNorm(o)) + o.  A row of memory is a list: what is not remembered is not in it, so the token
at i of the segment stands i + len(memory) after the oldest remembered one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Vector = list[float]
Matrix = list[Vector]


@dataclass(frozen=True)
class Rules:
    """What a segment's tokens see.

    Attributes:
        mem_len: most tokens that a layer remembers.
        same_length: each token sees mem_len tokens, itself included.
        clamp_len: distances beyond it read the same sinusoid; 0: none.
        pre_norm: layer norm before the blocks.
    """

    mem_len: int
    same_length: bool = False
    clamp_len: int = 0
    pre_norm: bool = False


def linear(x: Vector, weight: Matrix, bias: Vector | None = None) -> Vector:
    """W x + b."""
    out = [sum(w * c for w, c in zip(row, x, strict=True)) for row in weight]
    return out if bias is None else [a + b for a, b in zip(out, bias, strict=True)]


def layer_norm(x: Vector, weight: Vector, bias: Vector) -> Vector:
    """(x - mean) / sqrt(variance + 1e-5), scaled and shifted."""
    mean = sum(x) / len(x)
    variance = sum((c - mean) ** 2 for c in x) / len(x)
    spread = math.sqrt(variance + 1e-5)
    return [(c - mean) / spread * w + b for c, w, b in zip(x, weight, bias, strict=True)]


def add(x: Vector, y: Vector) -> Vector:
    """The sum of x and y."""
    return [a + b for a, b in zip(x, y, strict=True)]


def wave(offset: int, dim: int) -> Vector:
    """R_offset in the released code's layout."""
    angles = [offset * 10000.0 ** (-2 * m / dim) for m in range(dim // 2)]
    return [math.sin(x) for x in angles] + [math.cos(x) for x in angles]


def attend(
    h: Sequence[Vector], memory: Sequence[Vector], p: dict, heads: int, rules: Rules, starts: list
) -> list[Vector]:
    """Linear(a) of every token of the segment."""
    joined = [*memory, *h]
    document = [0] * len(memory)
    for start in starts:
        document.append((document[-1] if document else 0) + bool(start))
    k = [linear(x, p["k_proj.weight"], p["k_proj.bias"]) for x in joined]
    v = [linear(x, p["v_proj.weight"], p["v_proj.bias"]) for x in joined]
    size = len(h[0]) // heads
    out = []
    for t, x in enumerate(h):
        i = len(memory) + t
        q = linear(x, p["q_proj.weight"], p["q_proj.bias"])
        result: Vector = []
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            u, bias_v = p["content_bias"][head], p["position_bias"][head]
            weights = {}
            for j in range(i + 1):
                if document[j] != document[i] or (rules.same_length and i - j >= rules.mem_len):
                    continue
                offset = min(i - j, rules.clamp_len) if rules.clamp_len else i - j
                r = linear(wave(offset, len(x)), p["projection"])[part]
                logit = sum(
                    (qc + uc) * kc + (qc + vc) * rc
                    for qc, uc, kc, vc, rc in zip(q[part], u, k[j][part], bias_v, r, strict=True)
                )
                weights[j] = math.exp(logit / math.sqrt(size))
            total = sum(weights.values())
            for c in range(head * size, (head + 1) * size):
                result.append(sum(w / total * v[j][c] for j, w in weights.items()))
        out.append(linear(result, p["out_proj.weight"], p["out_proj.bias"]))
    return out


def layer(
    h: Sequence[Vector], memory: Sequence[Vector], p: dict, heads: int, rules: Rules, starts: list
) -> list[Vector]:
    """What the layer makes of every token of the segment."""
    first = (p["self_attn_layer_norm.weight"], p["self_attn_layer_norm.bias"])
    second = (p["final_layer_norm.weight"], p["final_layer_norm.bias"])

    def feed_forward(x: Vector) -> Vector:
        inner = [max(0.0, c) for c in linear(x, p["fc1.weight"], p["fc1.bias"])]
        return linear(inner, p["fc2.weight"], p["fc2.bias"])

    if rules.pre_norm:
        seen = [layer_norm(x, *first) for x in h], [layer_norm(x, *first) for x in memory]
        o = [add(x, a) for x, a in zip(h, attend(*seen, p, heads, rules, starts), strict=True)]
        return [add(x, feed_forward(layer_norm(x, *second))) for x in o]
    attended = attend(h, memory, p, heads, rules, starts)
    o = [layer_norm(add(x, a), *first) for x, a in zip(h, attended, strict=True)]
    return [layer_norm(add(x, feed_forward(x)), *second) for x in o]


def segment(
    h: list[Vector],
    memories: list[list[Vector]],
    layers: list[dict],
    heads: int,
    rules: Rules,
    starts: list[bool] | None = None,
) -> tuple[list[Vector], list[list[Vector]]]:
    """Outputs of a segment of one row, and what each layer remembers after it.

    Args:
        h: embeddings of the tokens.
        memories: one list of states a layer, oldest first.
        layers: parameters under fairseq's names, and the scheme's.
        heads: number of heads.
        rules: who sees whom.
        starts: True at tokens that begin a document: nothing before is seen or remembered.
    """
    starts = starts or [False] * len(h)
    last = max((t for t, start in enumerate(starts) if start), default=None)
    after = []
    for memory, p in zip(memories, layers, strict=True):
        remembered = [*memory, *h] if last is None else h[last:]
        after.append(remembered[len(remembered) - min(rules.mem_len, len(remembered)) :])
        h = layer(h, memory, p, heads, rules, starts)
    return h, after
