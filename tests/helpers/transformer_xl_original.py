"""Transformer-XL's released code, as far as its files and its formula go, written anew.

The classes stand in a module that exists only while a model is saved: whoever reads the file has
no such code.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

EXACT = torch.float64
WIDTH, HEADS, LAYERS, INNER = 8, 2, 2, 12
CODE = "mem_transformer"


class Part(nn.Module):
    """A module with the given parameters, modules and attributes."""

    def __init__(self, **parts: object) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class MemTransformerLM(Part):
    """The whole model: its names and attributes are the released ones."""


class Vocab:
    """Its vocabulary."""


class Corpus:
    """Its data."""


for _own in (Part, MemTransformerLM, Vocab, Corpus):
    _own.__module__ = CODE


def parameter(*size: int) -> nn.Parameter:
    """Draw one."""
    return nn.Parameter(torch.randn(*size, dtype=EXACT) * 0.4)


def linear(rows: int, columns: int, bias: bool = False) -> nn.Module:
    """A linear map, as a module with its own parameters."""
    more = {"bias": parameter(rows)} if bias else {}
    return Part(weight=parameter(rows, columns), **more)


def model(
    types: int,
    attn_type: int = 0,
    *,
    cutoffs: tuple[int, ...] = (),
    div_val: int = 1,
    embed: int = WIDTH,
    tied: bool = True,
    segment: int = 5,
    **options: object,
) -> MemTransformerLM:
    """A model with random parameters; options: mem_len, clamp_len, same_length, pre_lnorm."""
    torch.manual_seed(3)
    options = {"mem_len": 4, "clamp_len": -1, "same_length": False, "pre_lnorm": False} | options
    size, far = WIDTH // HEADS, segment + int(options["mem_len"])
    layers = nn.ModuleList()
    for _ in range(LAYERS):
        absolute = {"q_net": linear(WIDTH, WIDTH), "kv_net": linear(2 * WIDTH, WIDTH)}
        attention = Part(
            **(absolute if attn_type > 1 else {"qkv_net": linear(3 * WIDTH, WIDTH)}),
            o_net=linear(WIDTH, WIDTH),
            layer_norm=linear(WIDTH, 1, bias=True),
            dropatt=nn.Dropout(0.05),
            pre_lnorm=options["pre_lnorm"],
        )
        attention.layer_norm.weight = parameter(WIDTH)
        if attn_type == 0:
            attention.r_net = linear(WIDTH, WIDTH)
        core = nn.Sequential(
            linear(INNER, WIDTH, True), nn.ReLU(), nn.Dropout(0.1), linear(WIDTH, INNER, True), nn.Dropout(0.1)
        )
        forward = Part(CoreNet=core, layer_norm=Part(weight=parameter(WIDTH)))
        forward.layer_norm.bias = parameter(WIDTH)
        layers.append(Part(dec_attn=attention, pos_ff=forward))
    ends = [0, *cutoffs, types]
    several = bool(cutoffs) and div_val > 1
    sizes = [end - start for start, end in zip(ends, ends[1:], strict=False)]
    dims = [embed // div_val**number for number in range(len(sizes))]
    inner = nn.ModuleList(linear(n, d) for n, d in (zip(sizes, dims, strict=True) if several else [(types, embed)]))
    outer = nn.ModuleList(linear(*one.weight.shape, bias=True) for one in inner)
    if tied:
        for one, other in zip(outer, inner, strict=True):
            one.weight = other.weight
    projected = several or embed != WIDTH
    spread = [parameter(WIDTH, one.weight.size(1)) for one in inner] if projected else []
    crit = Part(out_layers=outer, cutoffs=[*cutoffs, types], div_val=div_val)
    crit.out_projs = nn.ParameterList(
        [parameter(WIDTH, dims[number if several else 0]) for number in range(len(sizes))] if projected else []
    )
    if cutoffs:
        crit.cluster_weight = parameter(len(cutoffs), embed)
        crit.cluster_bias = parameter(len(cutoffs))
    whole = MemTransformerLM(
        word_emb=Part(emb_layers=inner, emb_projs=nn.ParameterList(spread)),
        drop=nn.Dropout(0.1),
        layers=layers,
        crit=crit,
        n_head=HEADS,
        attn_type=attn_type,
        tgt_len=segment,
        **{name: value for name, value in options.items() if name != "pre_lnorm"},
    )
    if attn_type == 0:
        whole.r_w_bias, whole.r_r_bias = parameter(HEADS, size), parameter(HEADS, size)
    elif attn_type != 2:
        whole.r_emb = parameter(LAYERS, far, HEADS, size)
    if attn_type == 1:
        whole.r_w_bias, whole.r_bias = parameter(LAYERS, HEADS, size), parameter(LAYERS, far, HEADS)
    return whole


def save(value: object, path: Path, **options: object) -> Path:
    """Save it as the released code does, whose module is there only meanwhile."""
    code = ModuleType(CODE)
    for own in (Part, MemTransformerLM, Vocab, Corpus):
        setattr(code, own.__name__, own)
    sys.modules[CODE] = code
    try:
        torch.save(value, path, **options)
    finally:
        del sys.modules[CODE]
    return path


def corpus(symbols: list[str]) -> Corpus:
    """The data that the released code keeps in cache.pt."""
    made = Corpus()
    made.vocab = Vocab()
    made.vocab.idx2sym, made.train = symbols, torch.arange(3)
    return made


def norm(x: Tensor, part: nn.Module) -> Tensor:
    """Layer norm."""
    apart = x - x.mean()
    return apart / ((apart**2).mean() + 1e-5).sqrt() * part.weight + part.bias


def sinusoid(p: int) -> Tensor:
    """Its PositionalEmbedding at p."""
    angles = [p / 10000 ** (2 * m / WIDTH) for m in range(WIDTH // 2)]
    return torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=EXACT)


def placed(own: MemTransformerLM, number: int, memory: list[Tensor], row: list[Tensor]) -> list:
    """Memory and the segment with their absolute positions, as `_forward` adds them in place."""
    qlen, mlen = len(row), len(memory)
    if own.attn_type == 2 and number == 0:
        pos_seq = range(mlen + qlen - 1, -1, -1)
        pos_emb = [sinusoid(min(p, own.clamp_len) if own.clamp_len > 0 else p) for p in pos_seq]
        row = [x + p for x, p in zip(row, pos_emb[-qlen:], strict=True)]
        memory = [x + p for x, p in zip(memory, pos_emb[:mlen], strict=True)]
    if own.attn_type == 3:
        table = own.r_emb[number].reshape(-1, WIDTH)
        cur_emb = list(table[:-qlen])
        cur_emb = [*[cur_emb[0]] * (mlen - len(cur_emb)), *cur_emb] if cur_emb else []
        row = [x + p for x, p in zip(row, table[-qlen:], strict=True)]
        memory = [x + p for x, p in zip(memory, cur_emb[len(cur_emb) - mlen :], strict=True)]
    return [*memory, *row]


def attention(own: MemTransformerLM, number: int, row: list[Tensor], seen: list[Tensor]) -> list:
    """What attention adds to every token of the segment, one pair of tokens at a time."""
    part, size = own.layers[number].dec_attn, WIDTH // HEADS
    if part.pre_lnorm:
        seen = [norm(x, part.layer_norm) for x in seen]
    three = [getattr(part, name).weight for name in ("qkv_net", "q_net", "kv_net") if hasattr(part, name)]
    maps = torch.cat(three).view(3, HEADS, size, WIDTH)
    out = []
    for t in range(len(row)):
        i, heads = len(seen) - len(row) + t, []
        for h in range(HEADS):
            q = maps[0, h] @ seen[i]
            weights = {}
            for j in range(i + 1):
                if own.same_length and i - j >= own.mem_len:
                    continue
                k = maps[1, h] @ seen[j]
                if own.attn_type == 0:
                    p = min(i - j, own.clamp_len) if own.clamp_len > 0 else i - j
                    r = part.r_net.weight.view(HEADS, size, WIDTH)[h] @ sinusoid(p)
                    logit = (q + own.r_w_bias[h]) @ k + (q + own.r_r_bias[h]) @ r
                elif own.attn_type > 1:
                    logit = q @ k
                else:
                    rows = own.r_emb.size(1)
                    known = min(rows, own.clamp_len) if own.clamp_len > 0 else rows
                    place = rows - 1 - min(i - j, known - 1)
                    logit = (q + own.r_w_bias[number, h]) @ k + q @ own.r_emb[number, place, h]
                    logit = logit + own.r_bias[number, place, h]
                weights[j] = torch.exp(logit / math.sqrt(size))
            total = sum(weights.values())
            heads.append(sum(w / total * (maps[2, h] @ seen[j]) for j, w in weights.items()))
        out.append(part.o_net.weight @ torch.cat(heads))
    return out


def outputs(own: MemTransformerLM, x: Tensor) -> Tensor:
    """Log-probabilities of all types, a band's within its cluster's."""
    crit, ends = own.crit, [0, *own.crit.cutoffs]
    found: list[Tensor] = []
    for band, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
        one = len(crit.out_layers) == 1
        layer = crit.out_layers[0 if one else band]
        take = slice(start, end) if one else slice(None)
        weight, bias = layer.weight[take], layer.bias[take]
        if band == 0 and len(ends) > 2:
            weight = torch.cat([weight, crit.cluster_weight])
            bias = torch.cat([bias, crit.cluster_bias])
        inner = crit.out_projs[band].t() @ x if len(crit.out_projs) else x
        logits = (weight @ inner + bias).log_softmax(0)
        found.append(logits if band == 0 else logits + found[0][-band])
    return torch.cat([found[0][: ends[1]], *found[1:]])


@torch.no_grad()
def run(own: MemTransformerLM, segments: list[list[int]]) -> list[Tensor]:
    """Log-probabilities (T, types) of one row's segments, memory going along."""
    memory: list[list[Tensor]] = [[] for _ in own.layers]
    found = []
    bands = list(own.word_emb.emb_layers)
    wide = [band.weight for band in bands]
    if len(own.word_emb.emb_projs):
        pairs = zip(wide, own.word_emb.emb_projs, strict=True)
        wide = [weight @ projection.t() for weight, projection in pairs]
    table = torch.cat(wide)
    for segment in segments:
        row = [table[one] * math.sqrt(WIDTH) for one in segment]
        for number, layer in enumerate(own.layers):
            seen = placed(own, number, memory[number], row)
            row = seen[len(memory[number]) :]
            added = attention(own, number, row, seen)
            memory[number] = seen[len(seen) - min(own.mem_len, len(seen)) :]
            row = [x + more for x, more in zip(row, added, strict=True)]
            first, last = layer.dec_attn, layer.pos_ff
            core = last.CoreNet
            for t, x in enumerate(row):
                x = x if first.pre_lnorm else norm(x, first.layer_norm)
                y = norm(x, last.layer_norm) if first.pre_lnorm else x
                y = (core[0].weight @ y + core[0].bias).relu()
                x = x + core[3].weight @ y + core[3].bias
                row[t] = x if first.pre_lnorm else norm(x, last.layer_norm)
        found.append(torch.stack([outputs(own, x) for x in row]))
    return found
