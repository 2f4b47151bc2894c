"""Patch what fairseq gets wrong in saving and loading checkpoints."""

import argparse
import collections
import logging
import os
import shutil
import typing

import numpy as np
import torch
from fairseq import checkpoint_utils
from fairseq.distributed.utils import _TensorPlaceholder
from fairseq.file_io import PathManager
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.trainer import Trainer
from omegaconf import DictConfig, ListConfig, open_dict
from omegaconf.base import ContainerMetadata, Metadata
from omegaconf.nodes import AnyNode

from relpos_fairseq.io.errors import unreadable
from relpos_fairseq.patches.table import replaces
from relpos_fairseq.scheme import PositionMismatchError

# ---- torch.load(weights_only=True), torch's default, refuses types that fairseq's checkpoints hold.


try:
    from numpy._core.multiarray import _reconstruct, scalar
except ImportError:  # numpy 1
    from numpy.core.multiarray import _reconstruct, scalar

PLAIN = (argparse.Namespace, int, dict, list, collections.defaultdict, _TensorPlaceholder)
CONFIG = (DictConfig, ListConfig, ContainerMetadata, Metadata, AnyNode, typing.Any)
NUMBERS = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?")
NUMPY = (np.ndarray, np.dtype, *(type(np.dtype(code)) for code in NUMBERS))
MAKERS = (_reconstruct, scalar)  # numpy 1 and 2 save them under different paths


def allow_checkpoint_types() -> None:
    """Name these types as safe, so that loading stays safe."""
    paths = ("numpy._core.multiarray", "numpy.core.multiarray")
    named = [(maker, f"{path}.{maker.__name__}") for maker in MAKERS for path in paths]
    torch.serialization.add_safe_globals([*PLAIN, *CONFIG, *NUMPY, *MAKERS, *named])


# ---- A broken checkpoint ends in an error that does not name it, a malicious one in bad advice.


def explain_broken_checkpoints() -> None:
    """Say in one line which file it is, and what to do."""

    @replaces(checkpoint_utils, "load_checkpoint_to_cpu")
    def load_checkpoint_to_cpu(original, path, *args, **kwargs):
        try:
            return original(path, *args, **kwargs)
        except (FileNotFoundError, ValueError, MemoryError):
            raise
        except Exception as error:
            raise ValueError(unreadable(path, error)) from None


# ---- fairseq's trainer hides why a checkpoint does not fit: "ensure that the architectures match".


def name_position_mismatch() -> None:
    """Let the trainer say which positions disagree."""

    @replaces(Trainer, "load_checkpoint")
    def load_checkpoint(original, self, filename, *args, **kwargs):
        try:
            return original(self, filename, *args, **kwargs)
        except Exception as error:
            if isinstance(error.__context__, PositionMismatchError):
                raise PositionMismatchError(f"{filename}: {error.__context__}") from None
            raise


# ---- --model-overrides leaves out an option that came after the checkpoint, and says nothing.


logger = logging.getLogger(__name__)


def override_later_options() -> None:
    """Set it, in a model of ours, and say so."""

    @replaces(checkpoint_utils, "overwrite_args_by_name")
    def overwrite_args_by_name(original, cfg, overrides):
        original(cfg, overrides)
        model = cfg.get("model")
        name = model.get("_name") if isinstance(model, DictConfig) else None
        if not (name or "").startswith("relpos_"):
            return
        known = MODEL_DATACLASS_REGISTRY[ARCH_MODEL_NAME_REGISTRY.get(name, name)]
        parts = [part for part in cfg.values() if isinstance(part, DictConfig)]
        with open_dict(model):
            for field, value in overrides.items():
                if field in known.__dataclass_fields__ and not any(field in p for p in parts):
                    logger.warning("the checkpoint is older than %s: set to %r", field, value)
                    model[field] = value


# ---- fairseq asks rank 0 alone for a task's state, where other ranks' state would be lost.


def gather_task_state() -> None:
    """Let a task with `gather_checkpoint_state` collect every rank's state before a save."""

    @replaces(checkpoint_utils, "save_checkpoint")
    def save_checkpoint(original, cfg, trainer, epoch_itr, val_loss):
        if hasattr(trainer.task, "gather_checkpoint_state") and not cfg.no_save:
            world_size = trainer.data_parallel_world_size
            group = trainer.data_parallel_process_group if world_size > 1 else None
            trainer.task.gather_checkpoint_state(group, trainer.data_parallel_rank, world_size)
        return original(cfg, trainer, epoch_itr, val_loss)


# ---- checkpoint_last.pt is a copy in place: a kill in between leaves half of it, and no resume.


def copy_checkpoints_whole() -> None:
    """Copy under another name, and rename when whole."""

    @replaces(PathManager, "copy")
    def copy(original, src_path: str, dst_path: str, overwrite: bool = False):
        if PathManager.path_requires_pathmanager(dst_path):
            return original(src_path, dst_path, overwrite=overwrite)
        part = f"{dst_path}.tmp"
        shutil.copyfile(src_path, part)
        os.replace(part, dst_path)
        return dst_path
