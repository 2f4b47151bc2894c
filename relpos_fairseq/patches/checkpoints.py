"""Patches of what fairseq gets wrong in saving and loading checkpoints; README.md says what each is for.

A patch is given the original function first, and then its arguments.
"""

import argparse
import collections
import logging
import os
import re
import shutil
import zipfile
from contextlib import nullcontext
from copy import copy as shallow
from numbers import Real
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from fairseq import checkpoint_utils
from fairseq.distributed.utils import _TensorPlaceholder
from fairseq.file_io import PathManager
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.base import ContainerMetadata, Metadata
from omegaconf.nodes import AnyNode

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.reading import reading
from relpos_fairseq.io.tensor_files import building, check_checkpoint, check_finite, load, loading
from relpos_fairseq.patches.processes import running
from relpos_fairseq.patches.sharding import parts_of
from relpos_fairseq.saved.identity import saved_options, tell_replaced

try:
    from numpy._core.multiarray import _reconstruct, scalar
except ImportError:  # numpy 1
    from numpy.core.multiarray import _reconstruct, scalar  # type: ignore[no-redef]

logger = logging.getLogger(__name__)
PLAIN = (argparse.Namespace, int, dict, list, collections.defaultdict, _TensorPlaceholder)
CONFIG = (DictConfig, ListConfig, ContainerMetadata, Metadata, AnyNode, Any)
NUMBERS = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?")
NUMPY = (np.ndarray, np.dtype, *(type(np.dtype(code)) for code in NUMBERS))
OTHER_ROWS = re.compile(  # of embeddings of one width
    r"size mismatch for (\S*embed_tokens\.weight): copying a param with shape torch\.Size\(\[(\d+), (?P<width>\d+)\]\) "
    r"from checkpoint, the shape in current model is torch\.Size\(\[(\d+), (?P=width)\]\)"
)
_criterion: list = []  # that of the checkpoint that was loaded last, and its path
SCHEDULER = "lr_scheduler"
PRECISIONS = ("memory_efficient_fp16", "memory_efficient_bf16", "fp16", "bf16")
OF_TRAINING = ("common", "dataset", "optimization", "checkpoint", "distributed_training")  # parts of a config
SHOWN = 4  # options of a model that differ
LAST = "checkpoint_last.pt"  # of --restore-file by default
MAKERS = (_reconstruct, scalar)  # numpy 1 and 2 save them under different paths


def allow_checkpoint_types() -> None:
    """Declare the types in fairseq's checkpoints safe: torch.load(weights_only=True) refuses them otherwise."""
    paths = ("numpy._core.multiarray", "numpy.core.multiarray")
    named = [(maker, f"{path}.{maker.__name__}") for maker in MAKERS for path in paths]
    torch.serialization.add_safe_globals([*PLAIN, *CONFIG, *NUMPY, *MAKERS, *named])


def read_whole(original, path, *args, mapped=False, **kwargs):
    """Name a broken or malicious checkpoint in one line, where torch advises to run its code.

    A `mapped` one's tensors stay where they lie: twice the model's size may be an optimizer's.
    """
    with loading(path):
        try:
            state = _map(path) if mapped and zipfile.is_zipfile(path) else original(path, *args, **kwargs)
        except (OSError, MemoryError, UserError):
            raise
        except Exception:  # perhaps of an object that is no checkpoint, read as one
            check_checkpoint(load(path), path)
            raise
        check_checkpoint(state, path)
        saved = saved_options(state)
        if saved is not None and (saved.model_name or "").startswith("relpos_"):
            check_finite(state["model"], path)
    return state


def _map(path) -> dict[str, Any]:
    """Return a checkpoint as fairseq's `load_checkpoint_to_cpu`, with tensors mapped: an open file's cannot be."""
    state = load(path, mapped=True)
    if state.get("cfg") is not None:
        state["cfg"] = OmegaConf.create(state["cfg"], flags={"allow_objects": True})
    return checkpoint_utils._upgrade_state_dict(state)


def load_each(original, filenames, arg_overrides, task, *args):
    """Name the checkpoint whose options make no model or task, or whose tensors are another model's."""
    models, cfg = [], None
    for path in filenames:
        with building(path) if os.path.exists(path) else nullcontext():  # of shards, or absent
            made, cfg, task = original([path], arg_overrides, task, *args)
        models += made
        _criterion[:] = [(cfg.get("criterion"), path)]
    return models, cfg, task


def upgrade_state_dict_named(original, self, state_dict, name):
    """Leave a decoder with an adaptive softmax without the projection that fairseq makes of a shared embedding."""
    state_dict = original(self, state_dict, name)
    if self.adaptive_softmax is not None:
        state_dict.pop(f"{name}.output_projection.weight", None)
    return state_dict


def build_criterion(original, self, cfg, *args, **kwargs):
    """Name the checkpoint whose criterion cannot be made, where fairseq-validate takes it from there."""
    path = next((path for known, path in _criterion if known is cfg and cfg is not None), None)
    with nullcontext() if path is None else building(path):
        return original(self, cfg, *args, **kwargs)


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise a ValueError for a state that the next update cannot go on from, of Adam and what is like it."""
    usual = optimizer.defaults
    for group in optimizer.param_groups:
        wrong = next((name for name in usual if name in group and not _is_like(group[name], usual[name])), None)
        if wrong is not None:
            raise ValueError(f"its optimizer has {wrong} {group[wrong]!r}")
    states = {parameter: state for parameter, state in optimizer.state.items() if state}
    known = {name for state in states.values() for name in state}
    known |= {"max_exp_avg_sq"} if any(group.get("amsgrad") for group in optimizer.param_groups) else set()
    is_adam = {"exp_avg", "exp_avg_sq"} <= known and "exp_avg_sq_row" not in known
    for parameter, state in states.items() if is_adam else ():
        for name in known:
            value, moment = state.get(name), "exp_avg" in name
            right = isinstance(value, torch.Tensor if moment else (Real, torch.Tensor))
            if not right or (moment and value.shape != parameter.shape):
                raise ValueError(f"its optimizer's {name} is not that of a parameter {tuple(parameter.shape)}")


def _is_like(value, usual) -> bool:
    """Tell whether an optimizer's setting has the type of its default."""
    if isinstance(usual, bool):
        return value is None or isinstance(value, bool)
    if isinstance(usual, (tuple, list)):
        right = isinstance(value, (tuple, list)) and len(value) == len(usual)
        return right and all(map(_is_like, value, usual))
    return not isinstance(usual, Real) or isinstance(value, (Real, torch.Tensor))


def restore(original, cfg, trainer, **kwargs):
    """Refuse a `--restore-file` that is not there: fairseq would train from scratch, and say so in a line of its log.

    A file of the name that training gives its last checkpoint may be absent: such a training begins or goes on, with
    the count of `--patience` that `save_patience` kept; a checkpoint of before it has its best loss.
    """
    name = cfg.restore_file
    if os.path.basename(name) != LAST:
        path = name.replace(".pt", f"{trainer.checkpoint_suffix or ''}.pt")
        if not PathManager.exists(path):
            raise ValueError(
                f"--restore-file {name} does not exist: name a checkpoint, or leave the option out to begin anew"
            )
    extra, epoch_itr = original(cfg, trainer, **kwargs)
    best = getattr(checkpoint_utils.save_checkpoint, "best", None)  # None where it begins anew, or --reset-meters
    if extra and best is not None and cfg.patience > 0:
        _patience().update(best=extra.get("patience_best", best), num_runs=extra.get("patience_runs", 0))
    return extra, epoch_itr


def save_patience(original, self, filename, extra_state):
    """Save how many validations brought no better loss than which: fairseq counts them anew after each restart."""
    counted = _patience()
    names = {"patience_best": "best", "patience_runs": "num_runs"}
    kept = {name: counted[theirs] for name, theirs in names.items() if theirs in counted}
    return original(self, filename, extra_state | kept)


def _patience() -> dict:
    """Return what fairseq-train counts for `--patience`: its function's attributes."""
    return vars(getattr(running("fairseq_cli.train"), "should_stop_early", SimpleNamespace()))


def load_or_explain(original, read, trainer, filename, reset_optimizer, *args, **kwargs):
    """Say what disagrees: positions, the dictionary, the model's sizes, or the optimizer and its schedule."""
    refusal = None
    try:
        loaded = original(trainer, filename, reset_optimizer, *args, **kwargs)
    except Exception as error:
        refusal = error
    cfg = read[-1][0]["cfg"] if read else None  # of the checkpoint, if this process has read it
    told, here = (training_of(cfg), training_of(trainer.cfg)) if read else ({}, {})
    others = [name for name in told if _plain(told[name]) != _plain(here.get(name))]
    if told and isinstance(refusal, AssertionError) and "please reset the optimizer" in str(refusal):
        raise _disagreement(filename, told, here, others or list(told), "--reset-optimizer") from None
    if isinstance(refusal, KeyError) and SCHEDULER in others:
        raise _disagreement(filename, told, here, [SCHEDULER], "--reset-lr-scheduler") from None
    if refusal is not None:
        with reading(filename, "a checkpoint of such a training", "give its flags, or another checkpoint"):
            raise _explained(refusal, filename, cfg, trainer) from None
    if "optimizer" in others and not reset_optimizer:  # in bf16 fairseq takes its state, and fails at the first step
        raise _disagreement(filename, told, here, others, "--reset-optimizer")
    for inner in parts_of(trainer.optimizer) if read and not reset_optimizer else ():
        if isinstance(inner, torch.optim.Optimizer):
            with building(filename):
                _check_optimizer(inner)
    return loaded


def _explained(error: Exception, filename: str, cfg, trainer) -> Exception:
    """Return an error that says what fairseq's "ensure that the architectures match" hides, or the error itself."""
    hidden = error.__context__ if "ensure that the architectures match" in str(error) else None
    if isinstance(hidden, UserError):
        return hidden
    if found := OTHER_ROWS.search(str(hidden)):
        name, theirs, _, ours = found.groups()
        return ValueError(
            f"{filename} has {theirs} rows in {name}, and the dictionary of the data {ours}: binarise the data "
            f"with the checkpoint's dictionary (fairseq-preprocess --srcdict --tgtdict, relpos prepare ... --dict)"
        )
    if cfg and hidden is not None:
        theirs, ours = _sizes(cfg), _sizes(trainer.cfg)
        others = [name for name in theirs if name in ours and theirs[name] != ours[name]]
        if others:
            return _disagreement(filename, theirs, ours, others[:SHOWN], None)
    return hidden if isinstance(hidden, Exception) else error


def _disagreement(filename: str, theirs: dict, ours: dict, names: list[str], reset: str | None) -> ValueError:
    theirs_said, ours_said = (", ".join(str(side.get(name)) for name in names) for side in (theirs, ours))
    return ValueError(
        f"{filename} was trained with {theirs_said}, and this training has {ours_said}: give the former"
        f"{f', or {reset}' if reset else ''}"
    )


def _plain(flag: str | None) -> str | None:
    """Return a flag with the name of fairseq's own part, whose state ours take."""
    return None if flag is None else flag.replace(" relpos_", " ")


def _part(cfg, name: str) -> dict:
    part = cfg.get(name) or {}
    return vars(part) if isinstance(part, argparse.Namespace) else part


def _sizes(cfg) -> dict[str, str]:
    """Return the whole numbers and switches of a config's model, as flags say them; argparse puts all flags there."""
    others = {name for part in OF_TRAINING for name in _part(cfg, part)}
    model = dict(_part(cfg, "model"))
    values = {name: value for name, value in model.items() if isinstance(value, int) and name not in others}
    return {name: f"--{name.replace('_', '-')} {value}" for name, value in values.items()}


def training_of(cfg) -> dict[str, str]:
    """Return how a config trains, as flags say it, by what the state of an optimizer and its schedule depends on."""
    names = ("optimizer", "criterion", SCHEDULER) if cfg else ()
    kinds = {name: _part(cfg, name).get("_name") for name in names}
    told = {name: f"--{name.replace('_', '-')} {kind}" for name, kind in kinds.items() if isinstance(kind, str)}
    if told:
        common = _part(cfg, "common")
        kept = (f"--{kind.replace('_', '-')}" for kind in PRECISIONS if common.get(kind))
        told["precision"] = next(kept, "fp32")
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
    """Collect every rank's state of a task with `gather_checkpoint_state`: fairseq saves that of rank 0 alone.

    Write the checkpoint of `--save-interval-updates`, which fairseq leaves out where an epoch ends with the update.
    """
    if hasattr(trainer.task, "gather_checkpoint_state") and not cfg.no_save:
        world_size = trainer.data_parallel_world_size
        group = trainer.data_parallel_process_group if world_size > 1 else None
        trainer.task.gather_checkpoint_state(group, trainer.data_parallel_rank, world_size)
    saved = original(cfg, trainer, epoch_itr, val_loss)
    interval = 0 if cfg.no_save else cfg.save_interval_updates
    if epoch_itr.end_of_epoch() and interval > 0 and trainer.get_num_updates() % interval == 0:
        within = SimpleNamespace(epoch=epoch_itr.epoch, state_dict=epoch_itr.state_dict, end_of_epoch=lambda: False)
        rest = shallow(cfg)
        rest.no_last_checkpoints = True
        also = original(rest, trainer, within, val_loss)
        saved = saved or also
    return saved


def copy(original, src_path: str, dst_path: str, overwrite: bool = False):
    """Copy a checkpoint under another name and rename it when it is whole: a kill leaves no half of it."""
    if PathManager.path_requires_pathmanager(dst_path):
        return original(src_path, dst_path, overwrite=overwrite)
    part = f"{dst_path}.tmp"
    shutil.copyfile(src_path, part)
    os.replace(part, dst_path)
    return dst_path
