"""Let an interrupted training save where it is; README.md says what each patch replaces.

After SIGINT (Ctrl-C) or SIGTERM (a cluster's scheduler) fairseq-train ends its update, saves, and says how to go on. A
second signal ends it at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from fairseq import checkpoint_utils
from torch import distributed

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_received: list[int] = []


def train(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Train an epoch, in which a signal is kept until an update is done."""
    with _kept():
        return original(*args, **kwargs)


def validate_and_save(original: Callable, cfg: Any, trainer: Any, task: Any, epoch_itr: Any, *args: Any) -> Any:
    """Save after an update, and end, if a process of the training has been interrupted."""
    signum = _interrupted(trainer)
    if not signum:
        return original(cfg, trainer, task, epoch_itr, *args)
    saved = checkpoint_utils.save_checkpoint(cfg.checkpoint, trainer, epoch_itr, None)
    if trainer.is_data_parallel_master:
        updates = f"after {trainer.get_num_updates():,} updates"
        kept = f"{saved} is saved; run the same command again to continue" if saved else "nothing is saved (--no-save)"
        print(f"interrupted {updates}; {kept}", file=sys.stderr, flush=True)
    raise SystemExit(128 + signum)


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """Keep the first signal that comes in the `with` block and is not ignored; those after it act as before."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    before = {signum: handler for signum, handler in before.items() if handler is not signal.SIG_IGN}

    def restore() -> None:
        for signum, handler in before.items():
            signal.signal(signum, handler)

    owner = os.getpid()

    def keep(signum: int, frame: object) -> None:
        restore()
        if os.getpid() == owner:
            _received.append(signum)
        else:  # a worker that was just forked: one that outlives its signal is waited for without end
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)

    _received.clear()
    for signum in before:
        signal.signal(signum, keep)
    try:
        yield
    finally:
        restore()


def _interrupted(trainer: Any) -> int:
    """Return the signal that a process of the training has received, or 0: all of them end after the same update."""
    signum = max(_received, default=0)
    if trainer.data_parallel_world_size > 1:
        told = torch.tensor([signum], device=trainer.device)
        distributed.all_reduce(told, distributed.ReduceOp.MAX, group=trainer.data_parallel_process_group)
        signum = int(told)
    return signum
