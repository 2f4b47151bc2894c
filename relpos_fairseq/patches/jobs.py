"""Let each training begin as if it were its process's first, and each job of a hydra sweep write to its own folder.

hydra's basic launcher runs the jobs of `fairseq-hydra-train -m common.seed=1,2` in one process, with one
`checkpoint.save_dir`: the second would go on from the first one's checkpoint.  A recipe cannot say this for another, so
it is done where a training begins, for every recipe and launcher.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import multiprocessing
import os
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed
from fairseq.logging import progress_bar
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from relpos_fairseq.patches.processes import end_readers, running

logger = logging.getLogger(__name__)
LONGEST = 200  # bytes of a job's name: a file system takes 255, and what writes a file adds to them
SAVE_DIR = "checkpoint.save_dir"
OF_A_JOB = re.compile(r"\$\{hydra[:.](?:job\.(?:num|id|override_dirname)|runtime\.output_dir)\}")  # in a recipe
READABLE = "+=[]"  # in a folder's name beside letters, digits and _.-~; all else is written as / is, %2F


def begin(original: Any, cfg: DictConfig) -> None:
    """Forget the training before this one in the process, and give a job of a sweep its folder."""
    original(cfg)
    forget()
    if name := name_of(swept(cfg)):
        set_apart(cfg, name)


def forget() -> None:
    """Reset what fairseq keeps of a training outside its objects; `metrics` it resets itself.

    Its threads that read ahead end, and its readers go: a worker that is forked beside them would take them apart.
    """
    end_readers()
    gc.collect()
    train = running("fairseq_cli.train")
    keepers = [checkpoint_utils.save_checkpoint, getattr(train, "should_stop_early", None)]
    for keeper in filter(None, [*keepers, distributed.get_global_group]):
        for name in ("best", "num_runs", "_global_group"):
            vars(keeper).pop(name, None)
    for one in (progress_bar.logger, *([train.logger] if train else [])):
        for handler in [handler for handler in one.handlers if isinstance(handler, logging.FileHandler)]:
            one.removeHandler(handler)  # of common.log_file
            handler.close()
    writers = getattr(progress_bar, "_tensorboard_writers", {})
    while writers:
        writers.popitem()[1].close()
    if progress_bar.get_aim_run is not None:
        progress_bar.get_aim_run.cache_clear()


def swept(cfg: DictConfig) -> list[str]:
    """Return the overrides of this job that another in its save_dir may not have; none outside of a sweep.

    What the save_dir itself is made of, as in `ckpt/${model.position_scheme}`, keeps jobs apart already.

    Raises:
        ValueError: The sweep has two equal jobs, or this process cannot tell whose job it runs.
    """
    hydra = _hydra_of(cfg)
    if hydra is None or OmegaConf.is_missing(hydra.job, "num"):
        return []
    made = Path(hydra.runtime.output_dir)
    sweep = next((path for at in (made, *made.parents) if (path := at / "multirun.yaml").is_file()), None)
    if sweep is None:
        return list(hydra.overrides.task)
    recipe: Any = OmegaConf.to_container(OmegaConf.load(sweep), resolve=False)
    asked = OverridesParser.create().parse_overrides(recipe["hydra"]["overrides"]["task"])
    for one in asked:
        values = list(one.sweep_string_iterator()) if one.is_discrete_sweep() else []
        if len(set(values)) < len(values):
            raise ValueError(f"{one.input_line} has two jobs of one folder: give each value once")
    fixed = [one for one in asked if not one.is_sweep_override()]
    said = {f"{one.get_key_element()}={one.get_value_element_as_str()}" for one in fixed}
    folders = [one.input_line for one in asked if one.key_or_group == SAVE_DIR]
    folder = folders[-1] if folders else str(recipe.get("checkpoint", {}).get("save_dir"))
    within = Path(cfg.checkpoint.save_dir).absolute().is_relative_to(made.absolute())  # hydra.job.chdir is one way
    if OF_A_JOB.search(folder) or (within and OF_A_JOB.search(str(recipe["hydra"].get("sweep")))):
        return []
    names = ((one, one.partition("=")[0].lstrip("+")) for one in hydra.overrides.task if one not in said)
    return [one for one, name in names if name != SAVE_DIR and f"${{{name}}}" not in folder]


def _hydra_of(cfg: DictConfig) -> DictConfig | None:
    """Return hydra's own config; in a process that fairseq started for a GPU, the copy beside the job's log."""
    if HydraConfig.initialized():
        return HydraConfig.get()
    if multiprocessing.parent_process() is None or "fairseq_cli.hydra_train" not in sys.modules:
        return None
    for handler in (cfg.get("job_logging_cfg") or {}).get("handlers", {}).values():
        path = Path(handler.get("filename", "")).parent / ".hydra" / "hydra.yaml"
        if path.is_file():
            return OmegaConf.load(path).hydra
    if {"-m", "--multirun"}.intersection(sys.argv) or "SUBMITIT_EXECUTOR" in os.environ:
        raise ValueError(
            f"checkpoint.save_dir {cfg.checkpoint.save_dir} would be that of all jobs of the sweep, which this process "
            "cannot tell apart: leave hydra.output_subdir, hydra/job_logging and common.reset_logging as they are, or "
            "give distributed_training.distributed_world_size=1"
        )
    return None


def name_of(overrides: list[str]) -> str:
    """Return overrides as the name of a folder, another one for others."""
    name = ",".join(quote(one, safe=READABLE) for one in sorted(overrides))
    if len(name) > LONGEST:
        name = f"{name[: LONGEST - 17]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    return name


def set_apart(cfg: DictConfig, name: str) -> None:
    """Let a training write below the folders that its config names: checkpoints, TensorBoard's files and the log."""
    shared, board, log = cfg.checkpoint.save_dir, cfg.common.tensorboard_logdir, cfg.common.log_file
    if os.path.basename(shared) == name:  # by `begin` of the process that started this one, or called before
        return
    own = os.path.join(shared, name)

    def below(folder: str) -> str:
        within = os.path.relpath(folder, shared)
        outside = within.split(os.sep)[0] == os.pardir
        return os.path.join(folder, name) if outside else os.path.normpath(os.path.join(own, within))

    if board:
        cfg.common.tensorboard_logdir = below(board)
    if log:
        folder, file = os.path.split(log)
        os.makedirs(below(folder or os.curdir), exist_ok=True)
        cfg.common.log_file = os.path.join(below(folder or os.curdir), file)
    if getattr(progress_bar.wandb, "run", None) is not None:  # of the job before; a program's own outside of a sweep
        progress_bar.wandb.finish()
    cfg.checkpoint.save_dir = own
    logger.info("this job of the sweep writes to %s", own)
