"""Patches of what fairseq gets wrong in saving and loading checkpoints; `table.py` says what each replaces.

A patch is given the original function first, and then its arguments.
"""

import argparse
import collections
import contextvars
import logging
import os
import re
import shutil
import typing

import numpy as np
import torch
from fairseq.distributed.utils import _TensorPlaceholder
from fairseq.file_io import PathManager
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY
from omegaconf import DictConfig, ListConfig, open_dict
from omegaconf.base import ContainerMetadata, Metadata
from omegaconf.nodes import AnyNode

from relpos_fairseq.io.errors import unreadable
from relpos_fairseq.saved_options import saved_options, tell_replaced
from relpos_fairseq.scheme import PositionMismatchError

try:
    from numpy._core.multiarray import _reconstruct, scalar
except ImportError:  # numpy 1
    from numpy.core.multiarray import _reconstruct, scalar

logger = logging.getLogger(__name__)
PLAIN = (argparse.Namespace, int, dict, list, collections.defaultdict, _TensorPlaceholder)
CONFIG = (DictConfig, ListConfig, ContainerMetadata, Metadata, AnyNode, typing.Any)
NUMBERS = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?")
NUMPY = (np.ndarray, np.dtype, *(type(np.dtype(code)) for code in NUMBERS))
OTHER_ROWS = re.compile(  # of embeddings of one width
    r"size mismatch for (\S*embed_tokens\.weight): copying a param with shape torch\.Size\(\[(\d+), (?P<width>\d+)\]\) "
    r"from checkpoint, the shape in current model is torch\.Size\(\[(\d+), (?P=width)\]\)"
)
# What is known of the training of the checkpoint that a trainer reads; None outside of such calls.
_trained: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar("_trained", default=None)
LAST = "checkpoint_last.pt"  # of --restore-file by default
MAKERS = (_reconstruct, scalar)  # numpy 1 and 2 save them under different paths


def allow_checkpoint_types() -> None:
    """Declare the types in fairseq's checkpoints safe: torch.load(weights_only=True) refuses them otherwise."""
    paths = ("numpy._core.multiarray", "numpy.core.multiarray")
    named = [(maker, f"{path}.{maker.__name__}") for maker in MAKERS for path in paths]
    torch.serialization.add_safe_globals([*PLAIN, *CONFIG, *NUMPY, *MAKERS, *named])


def load_checkpoint_to_cpu(original, path, *args, **kwargs):
    """Name a broken or malicious checkpoint in one line, where torch advises to run its code."""
    try:
        state = original(path, *args, **kwargs)
        if (told := _trained.get()) is not None:
            told |= training_of(state.get("cfg"))
        return state
    except (FileNotFoundError, ValueError, MemoryError):
        raise
    except Exception as error:
        raise ValueError(unreadable(path, error)) from None


def restore(original, cfg, trainer, **kwargs):
    """Refuse a `--restore-file` that is not there: fairseq would train from scratch, and say so in a line of its log.

    A file of the name that training gives its last checkpoint may be absent: such a training begins or goes on.
    """
    name = cfg.restore_file
    if os.path.basename(name) != LAST:
        path = name.replace(".pt", f"{trainer.checkpoint_suffix or ''}.pt")
        if not PathManager.exists(path):
            raise ValueError(
                f"--restore-file {name} does not exist: name a checkpoint, or leave the option out to begin anew"
            )
    return original(cfg, trainer, **kwargs)


def load_checkpoint(original, self, filename, reset_optimizer=False, *args, **kwargs):
    """Say what disagrees: positions, the dictionary, or the optimizer, whose state fairseq may take and fail later."""
    told: dict[str, str] = {}
    token, refusal = _trained.set(told), None
    try:
        loaded = original(self, filename, reset_optimizer, *args, **kwargs)
    except AssertionError as error:
        if "please reset the optimizer" not in str(error):
            raise
        refusal = error
    except Exception as error:
        if isinstance(error.__context__, PositionMismatchError):
            raise PositionMismatchError(f"{filename}: {error.__context__}") from None
        if found := OTHER_ROWS.search(str(error.__context__)):
            name, theirs, _, ours = found.groups()
            raise ValueError(
                f"{filename} has {theirs} rows in {name}, and the dictionary of the data {ours}: binarise the data "
                f"with the checkpoint's dictionary (fairseq-preprocess --srcdict --tgtdict, relpos prepare ... --dict)"
            ) from None
        raise
    finally:
        _trained.reset(token)
    if told and not reset_optimizer:
        here = training_of(self.cfg)
        others = [name for name in told if told[name] != here.get(name)]
        if refusal or "optimizer" in others:
            theirs, ours = (", ".join(side[name] for name in others or told) for side in (told, here))
            raise ValueError(
                f"{filename} was trained with {theirs}, and this training has {ours}: give the former, or "
                f"--reset-optimizer, which begins with its parameters alone"
            )
    if refusal:
        raise refusal
    return loaded


def training_of(cfg) -> dict[str, str]:
    """Return how a config trains, as flags say it, by what an optimizer's state depends on; ours resume fairseq's."""
    parts = {name: cfg.get(name) or {} for name in ("optimizer", "criterion", "common")} if cfg else {}
    parts = {name: vars(part) if isinstance(part, argparse.Namespace) else part for name, part in parts.items()}
    kinds = {name: parts[name].get("_name") for name in ("optimizer", "criterion") if name in parts}
    told = {name: f"--{name} {kind.removeprefix('relpos_')}" for name, kind in kinds.items() if kind}
    if told:
        told["precision"] = next((f"--{kind}" for kind in ("fp16", "bf16") if parts["common"].get(kind)), "fp32")
    return told


def overwrite_args_by_name(original, cfg, overrides):
    """Say which option of the model is replaced; set one that came after the checkpoint, which fairseq leaves out.

    Models of fairseq's own are not affected.
    """
    model = cfg.get("model")
    name = model.get("_name") if isinstance(model, DictConfig) else None
    if not (name or "").startswith("relpos_"):
        original(cfg, overrides)
        return
    saved = saved_options({"cfg": cfg})  # the task's options were told where the command line was read
    tell_replaced({one: value for one, value in saved.model.items() if one not in saved.task}, overrides)
    original(cfg, overrides)
    known = MODEL_DATACLASS_REGISTRY[ARCH_MODEL_NAME_REGISTRY.get(name, name)]
    parts = [part for part in cfg.values() if isinstance(part, DictConfig)]
    with open_dict(model):
        for field, value in overrides.items():
            if field in known.__dataclass_fields__ and not any(field in p for p in parts):
                logger.warning("the checkpoint is older than %s: set to %r", field, value)
                model[field] = value


def save_checkpoint(original, cfg, trainer, epoch_itr, val_loss):
    """Collect every rank's state of a task with `gather_checkpoint_state`: fairseq saves that of rank 0 alone."""
    if hasattr(trainer.task, "gather_checkpoint_state") and not cfg.no_save:
        world_size = trainer.data_parallel_world_size
        group = trainer.data_parallel_process_group if world_size > 1 else None
        trainer.task.gather_checkpoint_state(group, trainer.data_parallel_rank, world_size)
    return original(cfg, trainer, epoch_itr, val_loss)


def copy(original, src_path: str, dst_path: str, overwrite: bool = False):
    """Copy a checkpoint under another name and rename it when it is whole: a kill leaves no half of it."""
    if PathManager.path_requires_pathmanager(dst_path):
        return original(src_path, dst_path, overwrite=overwrite)
    part = f"{dst_path}.tmp"
    shutil.copyfile(src_path, part)
    os.replace(part, dst_path)
    return dst_path
