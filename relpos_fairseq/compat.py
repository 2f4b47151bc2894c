"""What fairseq needs to work on today's Python, torch and numpy, and to lose no data.

Each function below removes one trap; `apply` runs them all, once a process.  They change fairseq's
behaviour only where it is wrong or fails.
"""

from __future__ import annotations

import argparse
import collections
import functools
import os
import types
import typing
import warnings

import numpy as np
import torch

_APPLIED = "_relpos_fairseq"


def apply() -> None:
    """Remove every trap."""
    for remove in (
        quiet_warnings,
        restore_numpy_names,
        allow_checkpoint_types,
        keep_last_batch,
        explain_filtered_lengths,
        explain_broken_checkpoints,
        name_position_mismatch,
        run_ddp_on_cpu,
        gather_task_state,
    ):
        remove()


def not_replaced(owner: object, name: str) -> bool:
    """Whether `owner.name` has not been replaced by us yet."""
    return not hasattr(getattr(owner, name), _APPLIED)


def replace(owner: object, name: str, function: typing.Callable) -> None:
    """Put `function` in the place of `owner.name`, marked as ours."""
    setattr(function, _APPLIED, True)
    setattr(owner, name, function)


def quiet_warnings() -> None:
    """Silence warnings about fairseq's own use of hydra and torch, which no user can act upon."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"hydra(\..*)?$")
    for text in (
        r"\s*'config' is validated against ConfigStore schema",
        r"In 'config': Usage of deprecated keyword in package header",
        r"'pin_memory' argument is set as true but no accelerator",
        r"Support for mismatched key_padding_mask and attn_mask",
        r"The given NumPy array is not writable",
    ):
        warnings.filterwarnings("ignore", message=text)
    warnings.filterwarnings("ignore", message=r"`torch\.cuda\.amp\.", category=FutureWarning)


def restore_numpy_names() -> None:
    """Numpy 2 removed np.compat.long, which language modelling and hub generation read."""
    if not hasattr(np, "compat"):
        np.compat = types.SimpleNamespace(long=int)


def allow_checkpoint_types() -> None:
    """Let torch.load(weights_only=True) read what fairseq writes, so that safe loading stays on."""
    from fairseq.distributed.utils import _TensorPlaceholder
    from omegaconf import DictConfig, ListConfig
    from omegaconf.base import ContainerMetadata, Metadata
    from omegaconf.nodes import AnyNode

    try:
        from numpy._core.multiarray import _reconstruct, scalar
    except ImportError:  # numpy 1
        from numpy.core.multiarray import _reconstruct, scalar

    numpy_types = [np.ndarray, np.dtype, _reconstruct, scalar]
    for path in ("numpy._core.multiarray", "numpy.core.multiarray"):
        numpy_types += [(_reconstruct, f"{path}._reconstruct"), (scalar, f"{path}.scalar")]
    codes = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?")
    numpy_types += [type(np.dtype(code)) for code in codes]
    config_types = [DictConfig, ListConfig, ContainerMetadata, Metadata, AnyNode, typing.Any]
    plain_types = [int, dict, list, collections.defaultdict, _TensorPlaceholder]
    torch.serialization.add_safe_globals(
        [argparse.Namespace, *numpy_types, *config_types, *plain_types]
    )


def keep_last_batch() -> None:
    """Fairseq drops the last batch if its size is no multiple of 8, in evaluation too."""
    from fairseq.data import data_utils

    original = data_utils.batch_by_size
    if not not_replaced(data_utils, "batch_by_size"):
        return

    @functools.wraps(original)
    def batch_by_size(indices, *args, **kwargs):
        if not isinstance(indices, np.ndarray):
            indices = np.fromiter(indices, dtype=np.int64, count=-1)
        if len(indices) == 0:
            return []
        batches = original(indices, *args, **kwargs)
        kept = sum(len(batch) for batch in batches)
        return batches if kept == len(indices) else [*batches, indices[kept:]]

    replace(data_utils, "batch_by_size", batch_by_size)


def explain_filtered_lengths() -> None:
    """Say what lets in the samples that fairseq refuses or leaves out for their length."""
    import logging

    from fairseq.tasks.fairseq_task import FairseqTask

    original = FairseqTask.filter_indices_by_size
    if not not_replaced(FairseqTask, "filter_indices_by_size"):
        return

    @functools.wraps(original)
    def filter_indices_by_size(self, indices, dataset, max_positions=None, *args, **kwargs):
        try:
            kept = original(self, indices, dataset, max_positions, *args, **kwargs)
        except Exception as error:
            if "since max_positions=" not in str(error):
                raise
            raise ValueError(f"{error}; {_way_out(self, max_positions)}") from None
        dropped = len(indices) - len(kept)
        if dropped:
            logging.getLogger(__name__).warning(
                "%d of %d samples left out, longer than %s: %s",
                dropped,
                len(indices),
                max_positions,
                _way_out(self, max_positions),
            )
        return kept

    replace(FairseqTask, "filter_indices_by_size", filter_indices_by_size)


# What tasks call the length of their samples.
_LENGTH_FIELDS = (
    "max_source_positions",
    "max_target_positions",
    "tokens_per_sample",
    "max_positions",
)


def _way_out(task: object, limit: object) -> str:
    """What raises a length limit: the task's, a batch's, or that of a scheme's table."""
    known = [name for name in _LENGTH_FIELDS if getattr(task.cfg, name, None) is not None]
    flags = " and ".join(f"--{name.replace('_', '-')}" for name in known or _LENGTH_FIELDS)
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


def explain_broken_checkpoints() -> None:
    """One clear error for a truncated or foreign checkpoint file."""
    from fairseq import checkpoint_utils

    original = checkpoint_utils.load_checkpoint_to_cpu
    if not not_replaced(checkpoint_utils, "load_checkpoint_to_cpu"):
        return

    @functools.wraps(original)
    def load_checkpoint_to_cpu(path, *args, **kwargs):
        try:
            return original(path, *args, **kwargs)
        except (FileNotFoundError, ValueError, MemoryError):
            raise
        except Exception as error:
            size = os.path.getsize(path) if os.path.isfile(path) else 0
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise ValueError(
                f"checkpoint {path} ({size:,} bytes) is truncated, or not a fairseq checkpoint: "
                f"copy it again or give another ({type(error).__name__}: {reason})"
            ) from error

    replace(checkpoint_utils, "load_checkpoint_to_cpu", load_checkpoint_to_cpu)


def name_position_mismatch() -> None:
    """Let the trainer say what disagrees, instead of that architectures do not match."""
    from fairseq.trainer import Trainer

    from relpos_fairseq.placement import PositionMismatchError

    original = Trainer.load_checkpoint
    if not not_replaced(Trainer, "load_checkpoint"):
        return

    @functools.wraps(original)
    def load_checkpoint(self, filename, *args, **kwargs):
        try:
            return original(self, filename, *args, **kwargs)
        except Exception as error:
            if isinstance(error.__context__, PositionMismatchError):
                raise PositionMismatchError(f"{filename}: {error.__context__}") from None
            raise

    replace(Trainer, "load_checkpoint", load_checkpoint)


def run_ddp_on_cpu() -> None:
    """Let plain torchrun train on CPUs with fairseq's default backend."""
    if torch.cuda.is_available():
        return
    import fairseq.distributed.utils as distributed
    import fairseq.models.distributed_fairseq_model as wrapper

    original = wrapper.DistributedDataParallel
    if not not_replaced(wrapper, "DistributedDataParallel"):
        return

    def on_cpu(module, device_ids=None, output_device=None, **kwargs):
        if all(parameter.device.type == "cpu" for parameter in module.parameters()):
            device_ids = output_device = None
        return original(module=module, device_ids=device_ids, output_device=output_device, **kwargs)

    def from_torchrun(cfg, *args, **kwargs):
        cfg.distributed_init_method = "env://"
        cfg.distributed_world_size = int(os.environ["WORLD_SIZE"])
        cfg.distributed_rank = int(os.environ["RANK"])
        cfg.device_id = 0
        cfg.distributed_no_spawn = True

    replace(wrapper, "DistributedDataParallel", on_cpu)
    replace(distributed, "_infer_torch_distributed_launch_init", from_torchrun)


def gather_task_state() -> None:
    """Let a task collect every rank's state before rank 0 alone writes a checkpoint."""
    from fairseq import checkpoint_utils

    original = checkpoint_utils.save_checkpoint
    if not not_replaced(checkpoint_utils, "save_checkpoint"):
        return

    @functools.wraps(original)
    def save_checkpoint(cfg, trainer, epoch_itr, val_loss):
        if hasattr(trainer.task, "gather_checkpoint_state") and not cfg.no_save:
            world_size = trainer.data_parallel_world_size
            group = trainer.data_parallel_process_group if world_size > 1 else None
            trainer.task.gather_checkpoint_state(group, trainer.data_parallel_rank, world_size)
        return original(cfg, trainer, epoch_itr, val_loss)

    replace(checkpoint_utils, "save_checkpoint", save_checkpoint)


def keep_bf16_off_tpu(args: argparse.Namespace) -> None:
    """`--bf16` makes fairseq believe in a TPU; it runs after that, as an architecture function."""
    if getattr(args, "bf16", False):
        args.tpu = False
