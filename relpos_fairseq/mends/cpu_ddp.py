"""Several processes on CPUs: DDP and nccl fail, torchrun's ranks train alone, others not at all."""

import os

import fairseq.distributed.utils as distributed
import fairseq.models.distributed_fairseq_model as wrapper
import torch

from relpos_fairseq.mends.replacing import replaces


def run_ddp_on_cpu() -> None:
    """Give torch's wrapper no device on a CPU, take ranks as given, with gloo, and end gloo."""
    if torch.cuda.is_available():
        return

    @replaces(wrapper, "DistributedDataParallel")
    def on_cpu(original, module, device_ids=None, output_device=None, **kwargs):
        if all(parameter.device.type == "cpu" for parameter in module.parameters()):
            device_ids = output_device = None
        return original(module=module, device_ids=device_ids, output_device=output_device, **kwargs)

    @replaces(distributed, "_infer_torch_distributed_launch_init")
    def from_torchrun(original, cfg, *args, **kwargs):
        cfg.distributed_init_method = "env://"
        cfg.distributed_world_size = int(os.environ["WORLD_SIZE"])
        cfg.distributed_rank = int(os.environ["RANK"])
        cfg.device_id = 0
        cfg.distributed_no_spawn = True

    @replaces(distributed, "call_main")
    def as_given(original, cfg, main, **kwargs):
        given = cfg.distributed_training
        if given.distributed_init_method is not None:  # one process for each GPU would be none
            given.distributed_no_spawn = True
        return original(cfg, main, **kwargs)

    @replaces(distributed, "distributed_main")
    def together(original, i, main, cfg, kwargs):
        if cfg.distributed_training.distributed_backend == "nccl":  # the default needs GPUs
            cfg.distributed_training.distributed_backend = "gloo"
        original(i, main, cfg, kwargs)  # ends at a barrier
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()  # its threads must not outlive Python
