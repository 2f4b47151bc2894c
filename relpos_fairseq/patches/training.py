"""Patch what fairseq gets wrong in data, tasks and training."""

from __future__ import annotations

import argparse
import logging
import os
import types
from typing import Any

import fairseq.distributed.utils as distributed
import fairseq.models.distributed_fairseq_model as wrapper
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from fairseq import utils
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.data import data_utils
from fairseq.tasks import masked_lm
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.trainer import Trainer

from relpos_fairseq.patches.table import replaces
from relpos_fairseq.text.assets import word_starts

# ---- fairseq's activation `swish` is a class, not a function: a layer's output would be a module.


def make_swish_a_function() -> None:
    """Let `swish` be the function."""

    @replaces(utils, "get_activation_fn")
    def get_activation_fn(original, activation: str):
        return F.silu if activation == "swish" else original(activation)


# ---- Language modelling by sentences and hub generation read np.compat.long, which numpy 2 removed.


def restore_numpy_names() -> None:
    """Give numpy the name back."""
    if not hasattr(np, "compat"):
        np.compat = types.SimpleNamespace(long=int)


# ---- fairseq leaves out the last batch, in evaluation too, if its size is no multiple of 8.


def keep_last_batch() -> None:
    """Add the batch that is missing."""

    @replaces(data_utils, "batch_by_size")
    def batch_by_size(original, indices, *args, **kwargs):
        if not isinstance(indices, np.ndarray):
            indices = np.fromiter(indices, dtype=np.int64, count=-1)
        if len(indices) == 0:
            return []
        batches = original(indices, *args, **kwargs)
        kept = sum(len(batch) for batch in batches)
        return batches if kept == len(indices) else [*batches, indices[kept:]]


# ---- fairseq refuses or leaves out samples for their length, and does not say what lets them in.


logger = logging.getLogger(__name__)
# What tasks call the length of their samples.
LENGTHS = ("max_source_positions", "max_target_positions", "tokens_per_sample", "max_positions")


def explain_filtered_lengths() -> None:
    """Name the flags that raise the limit."""

    @replaces(FairseqTask, "filter_indices_by_size")
    def filter_indices_by_size(original, self, indices, dataset, max_positions=None, *args, **more):
        try:
            kept = original(self, indices, dataset, max_positions, *args, **more)
        except Exception as error:
            if "since max_positions=" not in str(error):
                raise
            raise ValueError(f"{error}; {_way_out(self, max_positions)}") from None
        dropped = len(indices) - len(kept)
        if dropped:
            logger.warning(
                "%d of %d samples left out, longer than %s: %s",
                dropped,
                len(indices),
                max_positions,
                _way_out(self, max_positions),
            )
        return kept


def _way_out(task: FairseqTask, limit: object) -> str:
    """Say what raises a length limit: the task's, a batch's, or that of a scheme's table."""
    known = [name for name in LENGTHS if getattr(task.cfg, name, None) is not None]
    flags = " and ".join(f"--{name.replace('_', '-')}" for name in known or LENGTHS)
    sides = limit if isinstance(limit, tuple) else (limit,)
    tables = [f"{n.scheme} has a table of {n} positions" for n in sides if hasattr(n, "scheme")]
    if tables:
        return (
            f"position scheme {' and '.join(dict.fromkeys(tables))}: train with larger {flags}, or "
            f"choose a relative scheme, which takes any length"
        )
    if limit == task.max_positions():
        return f"raise {flags}"
    return f"--max-tokens raises this limit, else {flags}"


# ---- `masked_lm --mask-whole-words` reads `task.args`, which the task has lost, and always fails.
# fairseq's own BPEs say which symbols begin a word; here the data say it (text/assets.py).


class _ConfigAsArgs:
    """`task.args` is `task.cfg`; a subclass that sets its own `args` keeps it."""

    def __get__(self, task: Any, owner: type | None = None) -> Any:
        return self if task is None else task.cfg


def mask_whole_words() -> None:
    """Give the task its options back, and ask the data which symbols begin a word."""
    if not hasattr(masked_lm.MaskedLMTask, "args"):
        masked_lm.MaskedLMTask.args = _ConfigAsArgs()

    @replaces(masked_lm, "get_whole_word_mask")
    def get_whole_word_mask(original, args, dictionary):
        if getattr(args, "bpe", None):  # a task that works as it is
            return original(args, dictionary)
        return word_starts(utils.split_paths(args.data)[0], dictionary)


# ---- adaptive_loss refuses torch's DDP, which is the default, where one process needs none.


def let_one_process_use_adaptive_loss() -> None:
    """Refuse `--ddp-backend` only where several processes train: a band without a token then."""
    refusing = AdaptiveLoss.build_criterion.__func__

    def build_criterion(cls, cfg, task):
        if not torch.distributed.is_initialized():
            return cls(task, cfg.sentence_avg)
        return refusing(cls, cfg, task)

    AdaptiveLoss.build_criterion = classmethod(build_criterion)


# ---- On CPUs `--bf16` makes fairseq look for a TPU, and `--fp16` dies for want of CUDA.


def keep_bf16_off_tpu(args: argparse.Namespace) -> None:
    """Take that back: fairseq calls this as a function of the architecture, which comes later."""
    if getattr(args, "bf16", False):
        args.tpu = False


def refuse_fp16_without_gpu() -> None:
    """Say that fairseq scales the loss on GPUs alone."""

    @replaces(Trainer, "_build_optimizer")
    def build_optimizer(original, self):
        common = self.cfg.common
        scaled = common.fp16 and not (common.memory_efficient_fp16 or common.fp16_no_flatten_grads)
        if scaled and not self.cuda:
            raise ValueError("--fp16 needs a GPU: on a CPU leave it out, or give --bf16")
        return original(self)


# ---- Several processes on CPUs: DDP and nccl fail, torchrun's ranks train alone, others not at all.


def run_ddp_on_cpu() -> None:
    """Give torch's wrapper no device on a CPU, take ranks as given, with gloo, and end gloo."""

    @replaces(wrapper, "DistributedDataParallel")
    def on_cpu(original, module, device_ids=None, output_device=None, **kwargs):
        if all(parameter.device.type == "cpu" for parameter in module.parameters()):
            device_ids = output_device = None
        return original(module=module, device_ids=device_ids, output_device=output_device, **kwargs)

    @replaces(distributed, "_infer_torch_distributed_launch_init")
    def from_torchrun(original, cfg, *args, **kwargs):
        if torch.cuda.is_available():
            return original(cfg, *args, **kwargs)
        cfg.distributed_init_method = "env://"
        cfg.distributed_world_size = int(os.environ["WORLD_SIZE"])
        cfg.distributed_rank = int(os.environ["RANK"])
        cfg.device_id = 0
        cfg.distributed_no_spawn = True

    @replaces(distributed, "call_main")
    def as_given(original, cfg, main, **kwargs):
        given = cfg.distributed_training
        if _without_gpu(cfg):
            if given.distributed_backend == "nccl":  # the default needs GPUs
                given.distributed_backend = "gloo"
            if given.distributed_init_method is not None:  # this process is one of them
                given.distributed_no_spawn = True
        return original(cfg, main, **kwargs)

    @replaces(distributed, "distributed_main")
    def together(original, i, main, cfg, kwargs):
        original(i, main, cfg, kwargs)  # ends at a barrier
        if _without_gpu(cfg) and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()  # its threads must not outlive Python


def _without_gpu(cfg: Any) -> bool:
    """Tell whether a command computes on CPUs: there is no GPU, or --cpu leaves it alone."""
    return cfg.common.cpu or not torch.cuda.is_available()
