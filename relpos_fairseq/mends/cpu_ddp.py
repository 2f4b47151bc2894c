"""Several processes on CPUs: DDP and nccl fail, torchrun's ranks train alone, others not at all."""

import os
from typing import Any

import fairseq.distributed.utils as distributed
import fairseq.models.distributed_fairseq_model as wrapper
import torch

from relpos_fairseq.mends.replacing import replaces


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
