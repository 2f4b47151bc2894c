"""On CPUs `--bf16` makes fairseq look for a TPU, and `--fp16` dies for want of CUDA."""

import argparse

from fairseq.trainer import Trainer

from relpos_fairseq.mends.replacing import replaces


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
