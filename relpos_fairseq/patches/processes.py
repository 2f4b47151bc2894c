"""Patch how fairseq's commands train and evaluate on several processes; README.md says what each patch replaces.

Every command but fairseq-generate passes `call_main`, which asks `_set_rendezvous` for the rendezvous of its processes.
fairseq-hydra-train loads the plugin after that, and passes `add_defaults` before it trains.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import sys
import time
import weakref
from multiprocessing.util import get_temp_dir
from types import ModuleType
from typing import Any

import fairseq.distributed.utils as distributed
import torch
from fairseq import utils
from fairseq.modules import LayerDropModuleList
from fairseq.tasks import TASK_REGISTRY

from relpos_fairseq.patches.sharding import refuse_unshardable

logger = logging.getLogger(__name__)
READ_AHEAD = 10  # seconds that an ending process waits for a batch that is being read
_readers: weakref.WeakSet[Any] = weakref.WeakSet()  # fairseq's threads
OWNERS = ("fairseq.", f"{__name__.partition('.')[0]}.")
# Which tasks train which of our models; the others of fairseq train models of their own.
_LM = ("language_modeling", "multilingual_language_modeling", "segment_language_modeling")
TASKS = {
    "relpos_transformer": (
        "translation",
        "translation_multi_simple_epoch",
        "translation_from_pretrained_bart",
        "online_backtranslation",
        "denoising",
        "multilingual_denoising",
        "span_masked_lm",
    ),
    "relpos_transformer_lm": _LM,
    "relpos_transformer_xl": _LM,
    "relpos_roberta": (
        "masked_lm",
        "multilingual_masked_lm",
        "sentence_prediction",
        "sentence_ranking",
        "question_answering",
    ),
}


def wrap(original, module, device_ids=None, output_device=None, **kwargs):
    """Give torch's DDP no device where parameters are on a CPU; let it look for layers that LayerDrop left out."""
    if all(parameter.device.type == "cpu" for parameter in module.parameters()):
        device_ids = output_device = None
    if any(isinstance(part, LayerDropModuleList) and part.p > 0 for part in module.modules()):  # no gradient for them
        kwargs["find_unused_parameters"] = True
    return original(module=module, device_ids=device_ids, output_device=output_device, **kwargs)


def train_step(original, self, *args, **kwargs):
    """Name fairseq's flag where torch's DistributedDataParallel names its own argument."""
    try:
        return original(self, *args, **kwargs)
    except RuntimeError as error:
        if "find_unused_parameters=True" not in str(error):
            raise
    raise ValueError(
        "several processes need a gradient of every parameter, and a step used only some of this model's: "
        "give --find-unused-parameters (hydra: distributed_training.find_unused_parameters=true)"
    )


def call_main(original, cfg, main, **kwargs):
    """On CPUs use gloo, and train with the processes that torchrun or --distributed-init-method joins to this one."""
    _refuse_misfits(cfg)
    if _without_gpu(cfg):
        tell_of_waiting_threads()
    _set_rendezvous(cfg)
    refuse_unshardable(cfg)
    return original(cfg, main, **kwargs)


def add_defaults(original, cfg):
    """Let this process meet torchrun's others, where the plugin was loaded too late for `call_main`: hydra-train.

    Its `memory_efficient_bf16` alone means bf16, as the flag does, whose parser sets both.
    """
    original(cfg)
    for kind in ("fp16", "bf16"):
        if cfg.common[f"memory_efficient_{kind}"]:
            cfg.common[kind] = True
    if torch.distributed.is_initialized():
        return
    _refuse_misfits(cfg)
    _set_rendezvous(cfg)
    refuse_unshardable(cfg)
    given = cfg.distributed_training
    if given.distributed_init_method is not None:
        if not _without_gpu(cfg):
            torch.cuda.set_device(given.device_id)
        distributed.distributed_init(cfg)
        atexit.register(_leave)


def distributed_main(original, i, main, cfg, kwargs):
    """End gloo's group of processes after a command on CPUs: its threads must not outlive Python."""
    original(i, main, cfg, kwargs)  # ends at a barrier
    if _without_gpu(cfg):
        _leave()


def _leave() -> None:
    """End this process's group, if it is in one."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def of_torchrun() -> int:
    """Return the number of processes that torchrun started with this one; 1 where it did not start it."""
    told = all(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"))
    return int(os.environ["WORLD_SIZE"]) if told else 1


def _set_rendezvous(cfg: Any) -> None:
    """Set the rendezvous with torchrun's processes, which fairseq looks for if it sees two GPUs, and gloo on CPUs."""
    given, on_cpus = cfg.distributed_training, _without_gpu(cfg)
    overlooked = given.distributed_init_method is None and (on_cpus or given.distributed_world_size == 1)
    if overlooked and of_torchrun() > 1:
        given.distributed_init_method, given.distributed_no_spawn = "env://", True
        given.distributed_world_size, given.distributed_rank = of_torchrun(), int(os.environ["RANK"])
        given.device_id = 0 if on_cpus else given.distributed_rank % torch.cuda.device_count()
    if on_cpus:
        if given.distributed_backend == "nccl":  # the default needs GPUs
            given.distributed_backend = "gloo"
        if given.distributed_init_method is not None:  # this process is one of them
            given.distributed_no_spawn = True


def running(name: str) -> ModuleType | None:
    """Return a module by its name, or `__main__` where its file is the program (python -m, torchrun); None: neither."""
    main = sys.modules["__main__"]
    is_program = str(getattr(main, "__file__", None)).endswith(f"{os.sep}{name.replace('.', os.sep)}.py")
    return main if is_program else sys.modules.get(name)


def create_consumer(original, self):
    """Read batches ahead in a thread that ends before Python does, which aborts the process where torch has it.

    The workers that share batches with it use this process's temporary folder, which goes with it; their own stay.
    """
    if getattr(self._iterable, "num_workers", 0) > 0:
        get_temp_dir()
    if not _readers:
        atexit.unregister(end_readers)
        atexit.register(end_readers)
    original(self)
    _readers.add(self._consumer)


def end_readers() -> None:
    """Let each thread end after the batch that it reads, for which its queue must have room."""
    until = time.monotonic() + READ_AHEAD
    for reader in list(_readers):
        reader._max_len = 0
        while reader.is_alive() and time.monotonic() < until:
            with contextlib.suppress(queue.Empty):
                reader._queue.get(timeout=0.01)


def all_gather_list(original, data, group=None, max_size=16384):
    """Gather by the group's own backend on CPUs, where fairseq copies through a GPU."""
    group = distributed.get_global_group() if group is None else group
    if distributed.use_xla() or torch.distributed.get_backend(group) == "nccl":
        return original(data, group, max_size)
    gathered: list[Any] = [None] * distributed.get_world_size(group)
    torch.distributed.all_gather_object(gathered, utils.move_to_cpu(data), group=group)
    return gathered


def count_samples_once(task):
    """Let the task of an evaluation count every sample once, on however many processes.

    fairseq-validate evaluates the empty batches that make its shares equal, and fairseq-eval-lm prints the first
    process's share as if it were all: here each process reads all, and the first one prints.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        valid_step, loader = task.valid_step, getattr(task, "eval_lm_dataloader", None)
        task.valid_step = lambda sample, *more: valid_step(sample, *more) if sample else (0, 0, {})
        task.eval_lm_dataloader = lambda **options: loader(**options | {"num_shards": 1, "shard_id": 0})


def refuse_copies(args: Any) -> None:
    """Raise a ValueError for a command that several processes would each do whole: fairseq-generate, -interactive.

    --num-shards and --shard-id, which fairseq-generate ignores, set which part of the data set it translates.
    """
    if not hasattr(args, "beam"):
        return
    if of_torchrun() > 1:
        raise ValueError(
            f"each of torchrun's {of_torchrun()} processes would write all translations: start one without torchrun "
            "(in a job of torchrun: with WORLD_SIZE unset); fairseq-generate --num-shards N --shard-id I writes a part"
        )
    if getattr(args, "num_shards", 1) > 1:
        if hasattr(args, "buffer_size"):
            raise ValueError("fairseq-interactive reads all lines: give it a part of them in place of --num-shards")
        if not 0 <= args.shard_id < args.num_shards:
            raise ValueError(f"--shard-id {args.shard_id}: give 0 to {args.num_shards - 1} (--num-shards)")
        args.distributed_world_size, args.distributed_rank = args.num_shards, args.shard_id


def refuse_task(task: str | None, arch: str | None) -> None:
    """Raise a ValueError for a task of fairseq's or ours that does not train the model of ours that is named."""
    kind = TASK_REGISTRY.get(task)
    model = max((name for name in TASKS if str(arch).startswith(name)), key=len, default=None)
    if model and kind and kind.__module__.startswith(OWNERS) and task not in TASKS[model]:
        instead = [other for other, names in TASKS.items() if task in names] or ["models of fairseq's own"]
        raise ValueError(
            f"--task {task} trains {' and '.join(instead)}, not {model}, which is trained by {', '.join(TASKS[model])}"
        )


def tell_of_waiting_threads() -> None:
    """Log how to keep OpenMP's threads from spinning while they wait, where other processes need the cores too."""
    passive = os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"
    cores = os.cpu_count() or 1
    if passive or torch.get_num_threads() == 1 or os.getloadavg()[0] + torch.get_num_threads() < cores + 0.5:
        return
    logger.info(
        "%d threads beside a load of %.1f on %d cores: OMP_WAIT_POLICY=passive in the environment keeps waiting "
        "threads from taking cores that other processes need (up to five times faster)",
        *(torch.get_num_threads(), os.getloadavg()[0], cores),
    )


def _refuse_misfits(cfg: Any) -> None:
    """Raise an error for a task that trains no model of ours, and for a context that is as long as a block."""
    refuse_task(*(getattr(cfg.get(part), "_name", None) for part in ("task", "model")))
    block = getattr(cfg.get("task"), "tokens_per_sample", None)
    context = getattr(cfg.get("eval_lm"), "context_window", 0)  # only eval-lm reads it
    if block and context >= block:
        raise ValueError(
            f"--context-window {context} leaves nothing to score of --tokens-per-sample {block}: give less context"
        )


def _without_gpu(cfg: Any) -> bool:
    """Tell whether a command computes on CPUs: there is no GPU, or --cpu is given."""
    return cfg.common.cpu or not torch.cuda.is_available()
