"""Several processes, one result: chunks in, results out in the same order."""

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TypeVar

from relpos_fairseq.engine.errors import PreparationError

Chunk = TypeVar("Chunk")
Result = TypeVar("Result")
AHEAD = 2  # chunks per worker that are read ahead, so that no worker waits
HELD = (signal.SIGINT, signal.SIGTERM)
WATCH = 0.5  # seconds between two looks at the parent

_function: Callable | None = None  # a worker's function: sent once, not with every chunk


def ordered_map(function: Callable[[Chunk], Result], chunks: Iterable[Chunk], workers: int) -> Iterator[Result]:
    """Yield `function(chunk)` of every chunk, in order, whatever the number of workers.

    At most `2 * workers` chunks and results exist at a time. Ctrl-C, an exception in a worker and a
    caller that stops early end the workers at once; they also end when this process is killed.

    Args:
        function: Called in the workers; may be a closure (workers are forked), must not depend on
            earlier chunks.
        chunks: Read as the work proceeds; what is in them and in the results can be pickled.
        workers: How many processes; 1 is this process.

    Raises:
        PreparationError: `workers` is below 1, or a worker was killed.
    """
    if workers < 1:
        raise PreparationError(f"workers must be >= 1, got {workers}")
    if workers == 1:
        yield from map(function, chunks)
        return
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("fork"),
        initializer=_start_worker,
        initargs=(function, os.getpid()),
    )
    done = False
    try:
        with _signals_held():
            executor.submit(_nothing)  # forks all workers
        yield from _stream(executor, chunks, AHEAD * workers)
        done = True
    except BrokenProcessPool as error:
        raise PreparationError(
            "a worker process was killed, perhaps for want of memory: use fewer --workers"
        ) from error
    finally:
        if not done:
            _end(set(multiprocessing.active_children()) - others)
        executor.shutdown(wait=True, cancel_futures=True)


def _stream(executor: ProcessPoolExecutor, chunks: Iterable, ahead: int) -> Iterator:
    """Submit chunks a few ahead of the result that is yielded."""
    pending: deque = deque()
    for chunk in chunks:
        pending.append(executor.submit(_call, chunk))
        if len(pending) >= ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


@contextmanager
def _signals_held() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait: in the middle of a fork Python would print and forget them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _nothing() -> None:
    """Do nothing, in a worker."""


def _end(workers: Iterable) -> None:
    """End worker processes that are in the middle of something."""
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.join()


def _start_worker(function: Callable, parent: int) -> None:
    """Prepare a worker: Ctrl-C is the parent's to handle, and the parent's end is the worker's."""
    global _function
    _function = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
    end_with(parent)


def end_with(parent: int) -> None:
    """End this process when its parent has ended, however it did."""
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    """End this worker once its parent is gone (killed with SIGKILL, say)."""
    while os.getppid() == parent:
        time.sleep(WATCH)
    os._exit(1)


def _call(chunk: object) -> object:
    return _function(chunk)
