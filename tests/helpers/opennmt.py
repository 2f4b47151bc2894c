"""OpenNMT-py's transformer with relative positions, written from its paper and its tensors' names.

It imports nothing of the package.  Names of modules are those of version 3's checkpoints.
"""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path

import torch
from torch import nn

SPECIAL = ["<unk>", "<blank>", "<s>", "</s>"]
DEFAULTS = {"encoder_type": "transformer", "decoder_type": "transformer", "transforms": [], "norm_eps": 1e-6}
DEFAULTS |= {"hidden_size": 16, "heads": 2, "transformer_ff": 24, "enc_layers": 2, "dec_layers": 2}
DEFAULTS |= {"max_relative_positions": 3, "position_encoding": False, "add_qkvbias": False}
DEFAULTS |= {"dropout": [0.1], "attention_dropout": [0.2]}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, reach: int, bias: bool) -> None:
        super().__init__()
        self.heads, self.reach, dim = heads, reach, width // heads
        for name in ("linear_keys", "linear_values", "linear_query", "final_linear"):
            self.add_module(name, nn.Linear(width, width, bias=bias))
        if reach:
            self.relative_positions_embeddings = nn.Embedding(2 * reach + 1, dim)

    def forward(self, query, memory, excluded):
        """One row, one head and one pair of tokens at a time."""
        split = [
            one.unflatten(-1, (self.heads, -1))
            for one in (self.linear_query(query), self.linear_keys(memory), self.linear_values(memory))
        ]
        rows = []
        for row in range(query.size(0)):
            heads = []
            for head in range(self.heads):
                q, k, v = (one[row, :, head] for one in split)
                out = []
                for i in range(len(q)):
                    seen = [j for j in range(len(k)) if not excluded(row, i, j)]
                    scores = torch.stack([q[i] @ self._near(k, i, j) for j in seen])
                    probs = (scores / math.sqrt(q.size(1))).softmax(0)
                    out.append(sum(p * self._near(v, i, j) for p, j in zip(probs, seen, strict=True)))
                heads.append(torch.stack(out))
            rows.append(torch.cat(heads, dim=-1))
        return self.final_linear(torch.stack(rows))

    def _near(self, vectors, i: int, j: int):
        if not self.reach:
            return vectors[j]
        clipped = max(-self.reach, min(self.reach, j - i))
        return vectors[j] + self.relative_positions_embeddings.weight[clipped + self.reach]


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(width, inner), nn.Linear(inner, width)
        self.layer_norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, x):
        return x + self.w_2(self.w_1(self.layer_norm(x)).relu())


class Layer(nn.Module):
    def __init__(self, opt: Namespace, decoder: bool) -> None:
        super().__init__()
        width, shape = opt.hidden_size, (opt.hidden_size, opt.heads)
        self.self_attn = Attention(*shape, opt.max_relative_positions, opt.add_qkvbias)
        self.feed_forward = FeedForward(width, opt.transformer_ff)
        if decoder:
            self.context_attn = Attention(*shape, 0, opt.add_qkvbias)
            self.layer_norm_1 = nn.LayerNorm(width, eps=1e-6)
            self.layer_norm_2 = nn.LayerNorm(width, eps=1e-6)
        else:
            self.layer_norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, x, excluded, memory=None, unseen=None):
        first = self.layer_norm if memory is None else self.layer_norm_1
        normed = first(x)
        x = x + self.self_attn(normed, normed, excluded)
        if memory is not None:
            x = x + self.context_attn(self.layer_norm_2(x), memory, unseen)
        return self.feed_forward(x)


class Embeddings(nn.Module):
    def __init__(self, rows: int, opt: Namespace) -> None:
        super().__init__()
        self.make_embedding = nn.Sequential()
        lookup = nn.Embedding(rows, opt.hidden_size, padding_idx=1)
        self.make_embedding.add_module("emb_luts", nn.ModuleList([lookup]))
        self.waves = opt.position_encoding

    def forward(self, tokens):
        x = self.make_embedding.emb_luts[0](tokens)
        if not self.waves:
            return x
        width = x.size(-1)
        x = x * math.sqrt(width)
        for place in range(tokens.size(1)):
            for channel in range(width):
                angle = place / 10000 ** (channel // 2 * 2 / width)
                x[:, place, channel] += math.cos(angle) if channel % 2 else math.sin(angle)
        return x


class Encoder(nn.Module):
    def __init__(self, rows: int, opt: Namespace) -> None:
        super().__init__()
        self.embeddings = Embeddings(rows, opt)
        self.transformer = nn.ModuleList(Layer(opt, False) for _ in range(opt.enc_layers))
        self.layer_norm = nn.LayerNorm(opt.hidden_size, eps=1e-6)

    def forward(self, tokens):
        x = self.embeddings(tokens)
        for layer in self.transformer:
            x = layer(x, lambda row, i, j: tokens[row, j] == 1)
        return self.layer_norm(x)


class Decoder(nn.Module):
    def __init__(self, rows: int, opt: Namespace) -> None:
        super().__init__()
        self.embeddings = Embeddings(rows, opt)
        self.transformer_layers = nn.ModuleList(Layer(opt, True) for _ in range(opt.dec_layers))
        self.layer_norm = nn.LayerNorm(opt.hidden_size, eps=1e-6)

    def forward(self, tokens, memory, source):
        x = self.embeddings(tokens)
        for layer in self.transformer_layers:
            x = layer(x, lambda row, i, j: j > i, memory, lambda row, i, j: source[row, j] == 1)
        return self.layer_norm(x)


class OpenNMT(nn.Module):
    """A model.

    Args:
        source: symbols of the source.
        target: symbols of the target.
        options: that differ from the defaults here.
    """

    def __init__(self, source: list[str], target: list[str], **options) -> None:
        super().__init__()
        self.opt = Namespace(**DEFAULTS | options)
        self.symbols = source, target
        self.encoder = Encoder(len(source), self.opt)
        self.decoder = Decoder(len(target), self.opt)
        self.generator = nn.Linear(self.opt.hidden_size, len(target))

    def forward(self, source, target):
        """Logits (B, T, V) of numbers (B, S), padded with 1 on the right, and (B, T)."""
        return self.generator(self.decoder(target, self.encoder(source), source))

    def greedy(self, source, longest: int) -> list[list[int]]:
        """The best symbols one after another, one at least, up to </s>."""
        tokens = torch.full((len(source), 1), self.symbols[1].index("<s>"))
        end = self.symbols[1].index("</s>")
        for step in range(longest):
            logits = self(source, tokens)[:, -1]
            logits[:, [1, end] if step == 0 else [1]] = -math.inf
            tokens = torch.cat([tokens, logits.argmax(-1)[:, None]], dim=1)
        rows = [row[1:].tolist() for row in tokens]
        return [row[: row.index(end)] if end in row else row for row in rows]

    def save(self, path: Path) -> None:
        """Write a checkpoint as version 3 does."""
        state = self.state_dict()
        vocabulary = dict(zip(("src", "tgt"), self.symbols, strict=True))
        vocabulary |= {"data_task": "seq2seq", "decoder_start_token": "<s>"}
        checkpoint = {"model": {n: v for n, v in state.items() if "generator" not in n}, "vocab": vocabulary}
        torch.save(checkpoint | {"generator": self.generator.state_dict(), "opt": self.opt, "optim": {}}, path)
