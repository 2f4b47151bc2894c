"""Measure how fast a language model continues a prompt: `relpos sample`, and transformers' model of the same shape.

A checkpoint without memory stands beside transformers' GPT-2, one with memory beside its Transformer-XL, both
untrained: speed depends on shapes alone.  Int8 is `--quantization int8` here, torch's `quantize_dynamic` there (which
its Transformer-XL does not stand).  All read the same random prompt and then take the likeliest symbol as often as is
asked, each in a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from relpos_fairseq.inference.checkpoints.causal_lm import Choice, Continuation, open_model, sample
from relpos_fairseq.io.packages import require
from relpos_fairseq.io.processes import mebibytes
from relpos_fairseq.io.progress import table
from relpos_fairseq.lab.benchmarks.serving import run_apart
from relpos_fairseq.text.dictionary import SPECIAL


@dataclass(frozen=True)
class Sampled:
    """A prompt, continued once.

    Args:
        start: seconds until the model is ready.
        prompt: seconds until the first symbol.
        rest: seconds of all later symbols.
        memory: peak of the process, in MiB.
    """

    start: float
    prompt: float
    rest: float
    memory: float


@dataclass(frozen=True)
class Workload:
    """What is asked of each model: a prompt of so many symbols, so many new ones, in so many rows."""

    prompt: int
    symbols: int
    rows: int

    def ids(self, words: int) -> list[int]:
        """Return the prompt's ids, for a dictionary of so many words."""
        return torch.randint(len(SPECIAL), words, (self.prompt,), generator=torch.Generator().manual_seed(1)).tolist()


def benchmark(checkpoint: Path, data: Path | None, workload: Workload, rounds: int) -> str:
    """Return a table of speed and memory; models take turns, and a row is the median of its rounds."""
    runs: dict[str, Callable[[], Sampled]] = {}
    for kind in ("fp32", "int8"):
        int8 = kind if kind == "int8" else None
        runs[f"relpos sample {kind}"] = partial(run_apart, _ours, checkpoint, data, workload, int8)
        if not (int8 and run_apart(_remembers, checkpoint, data)):
            runs[f"transformers {kind}"] = partial(run_apart, _theirs, checkpoint, data, workload, int8)
    found: dict[str, list[Sampled]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(run())
    rows = []
    for name, each in found.items():
        prompt, rest, memory, start = (
            median(getattr(one, part) for one in each) for part in ("prompt", "rest", "memory", "start")
        )
        speeds = [workload.rows * (workload.symbols - 1) / rest, workload.rows * workload.symbols / (prompt + rest)]
        rows.append([name, f"{1000 * prompt:.1f}", *(f"{one:.1f}" for one in speeds), f"{memory:.0f}", f"{start:.1f}"])
    return table(rows, ["model", "prompt, ms", "symbols/s after it", "symbols/s in all", "MiB", "start, s"])


def _ours(checkpoint: Path, data: Path | None, workload: Workload, quantization: str | None) -> Sampled:
    """Continue the prompt by the checkpoint, as `relpos sample` does."""
    entered = time.perf_counter()
    trained = open_model(checkpoint, data, True, quantization)
    ids = workload.ids(len(trained.task.source_dictionary))

    def run(symbols: int) -> None:
        for _ in sample(Continuation(trained, workload.rows), ids, symbols, Choice(temperature=0)):
            pass

    return _timed(run, workload, entered)


def _remembers(checkpoint: Path, data: Path | None) -> bool:
    """Return whether a checkpoint's model has memory."""
    return hasattr(open_model(checkpoint, data, True).model, "mem_len")


def _theirs(checkpoint: Path, data: Path | None, workload: Workload, quantization: str | None) -> Sampled:
    """Continue the prompt by transformers' model of the checkpoint's shape."""
    entered = time.perf_counter()
    trained = open_model(checkpoint, data, True)
    words = len(trained.task.source_dictionary)
    make = _transformer_xl if hasattr(trained.model, "mem_len") else _gpt2
    model = make(trained.model, words, workload).eval()
    if quantization:
        model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    prompt = torch.tensor([workload.ids(words)] * workload.rows)

    @torch.inference_mode()
    def run(symbols: int) -> None:
        mask = torch.ones_like(prompt)
        more = {} if make is _transformer_xl else {"attention_mask": mask}
        model.generate(prompt, min_new_tokens=symbols, max_new_tokens=symbols, do_sample=False, **more)

    return _timed(run, workload, entered)


def _timed(run: Callable[[int], None], workload: Workload, entered: float) -> Sampled:
    """Run once to warm up, then for one symbol, then for all."""
    start = time.perf_counter() - entered
    run(2)
    seconds = []
    for symbols in (1, workload.symbols):
        began = time.perf_counter()
        run(symbols)
        seconds.append(time.perf_counter() - began)
    return Sampled(start, seconds[0], seconds[1] - seconds[0], mebibytes("VmHWM"))


def _gpt2(model: Any, words: int, workload: Workload) -> nn.Module:
    """Return transformers' GPT-2 of a language model's shape."""
    transformers, decoder = require("transformers"), model.decoder
    layer = decoder.layers[0]
    config = transformers.GPT2Config(
        vocab_size=words,
        n_positions=workload.prompt + workload.symbols,
        n_embd=decoder.embed_dim,
        n_layer=decoder.num_layers,
        n_head=layer.self_attn.num_heads,
        n_inner=layer.fc1.out_features,
        eos_token_id=None,
        pad_token_id=1,
    )
    return transformers.GPT2LMHeadModel(config)


def _transformer_xl(model: Any, words: int, workload: Workload) -> nn.Module:
    """Return transformers' Transformer-XL of a language model's shape and memory, which release 5 no longer has."""
    transformers, decoder = require("transformers"), model.decoder
    layer = decoder.layers[0]
    as_type = torch.Tensor.type_as  # 4.46 calls it with a type alone
    torch.Tensor.type_as = lambda x, like=None, dtype=None: x.to(dtype) if like is None else as_type(x, like)
    config = transformers.TransfoXLConfig(
        vocab_size=words,
        cutoffs=[words // 4, words // 2],
        div_val=1,
        d_model=decoder.embed_dim,
        d_embed=decoder.embed_dim,
        n_head=layer.self_attn.num_heads,
        d_head=decoder.embed_dim // layer.self_attn.num_heads,
        d_inner=layer.fc1.out_features,
        n_layer=decoder.num_layers,
        mem_len=model.mem_len,
        eos_token_id=None,
        pad_token_id=1,
    )
    return transformers.TransfoXLLMHeadModel(config)
