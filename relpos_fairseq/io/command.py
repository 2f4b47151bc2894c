"""End a command with an exit status and, after an error, one line on stderr."""

import ctypes
import errno
import functools
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from relpos_fairseq.io.errors import ToolError
from relpos_fairseq.io.files import existing_folder
from relpos_fairseq.io.packages import describe_missing

FULL = (errno.ENOSPC, errno.EDQUOT)
ENOUGH = 100  # free megabytes with which it may not be the disk that is full
CONTINUE = "interrupted; run the same command again to continue"
AGAIN = "interrupted; nothing is kept: the same command starts over"
OF_RUST = re.compile(r"\(os error \d+\)")  # how safetensors and tokenizers report an error of the file system
EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit): .*")


class Terminated(KeyboardInterrupt):
    """SIGTERM, as an exception, so that temporary files are removed on the way out."""


def run_command(main: Callable[[Sequence[str] | None], object], argv=None, interrupted: str = CONTINUE) -> int:
    """Run a command's main function and turn what it raises into a line and an exit status.

    Args:
        main: takes the arguments (None: those of the process); may return an exit status.
        argv: the arguments.
        interrupted: the line after Ctrl-C and SIGTERM.

    Returns:
        What `main` returns (None: 0); after a line `error: ...` 1 (a program that it started
        failed) or 2 (bad input, a missing file or package, a full disk); 130 (Ctrl-C), 143 (SIGTERM), or
        141 (standard output was closed).
        Any other exception is a bug and passes with its traceback.
    """
    _occupy_streams()
    if sys.stdout is None:
        return fail("standard output is closed: send it to a file, or to /dev/null")
    try:
        with terminated_by_exception():
            status = main(argv)
            sys.stdout.flush()  # what cannot be written is known here, and not when Python ends
    except ToolError as error:
        return fail(str(error), 1)
    except UnicodeEncodeError as error:
        return fail(describe_encoding(error))
    except ValueError as error:
        return fail(str(error))
    except KeyboardInterrupt as error:
        print(interrupted, file=sys.stderr, flush=True)
        return 128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)
    except BrokenPipeError:  # `... | head`: nobody reads on; Python must not flush at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ModuleNotFoundError, OSError) as error:
        message = describe_os_error(error) if isinstance(error, OSError) else describe_missing(error)
        if message is None:
            raise
        return fail(message)
    except Exception as error:
        if not OF_RUST.search(str(error)):
            raise
        return fail(f"{error}; make room or free the way, and run the same command again")
    return status if isinstance(status, int) else 0


def _occupy_streams() -> None:
    """Open the null device where standard streams are closed: a file would take their numbers, and what is printed."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")


def fail(message: str, status: int = 2) -> int:
    """Print an error's line; returns the exit status."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    return status


def error_line(lines: Iterable[str]) -> str:
    """Return why a program failed: the last exception in its output, else its last line, else ""."""
    last = error = ""
    for line in lines:
        last = line.strip() or last
        if EXCEPTION.match(line):
            error = line.strip()
    return error or last


def describe_encoding(error: UnicodeEncodeError) -> str:
    """Describe a text that standard output does not take."""
    character = error.object[error.start]
    return (
        f"standard output is {error.encoding}, which has no {character.encode('unicode_escape').decode()}: write to a "
        f"file by --out where the command has it, or set PYTHONUTF8=1"
    )


def describe_os_error(error: OSError) -> str | None:
    """Describe an error of the file system in words; None where it names no file."""
    if error.errno in FULL:
        if not error.filename:
            return "no space left where standard output goes: make room and run the same command again"
        where = Path(error.filename)
        folder = existing_folder(where)
        free = shutil.disk_usage(folder).free / 1e6
        or_there = ", or where standard output goes," * (free > ENOUGH)
        return (
            f"no space left on the disk of {folder} ({free:,.1f} MB free){or_there} while writing {where}; "
            "make room and run the same command again"
        )
    if error.errno == errno.EFBIG:
        return f"{error.filename or 'a file'} is larger than this shell lets a file be: raise ulimit -f"
    return f"{error.filename}: {error.strerror}" if error.filename else None


@contextmanager
def terminated_by_exception() -> Iterator[None]:
    """Let SIGTERM raise `Terminated` in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    owner = os.getpid()

    def raise_terminated(signum: int, frame: object) -> None:
        if os.getpid() != owner:  # a forked child between fork and its own settings
            os._exit(128 + signum)
        raise Terminated

    before = signal.signal(signal.SIGTERM, raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def wait_passively() -> None:
    """Let OpenMP's threads sleep while they wait, in this process, if torch is not loaded yet, and in its children.

    Where threads outnumber cores, threads that spin take the cores from those that work.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@functools.cache
def keep_freed_memory() -> None:
    """Let this process keep what it frees for what it needs next, as far as glibc's allocator is there.

    By itself it gives pages back at every step of a search and takes new ones, which the system has to clear: a fifth
    of the time of a small model.
    """
    trim, mmap = -1, -3  # mallopt's M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
    with suppress(OSError, AttributeError):
        adjust = ctypes.CDLL(None).mallopt
        adjust(mmap, 32 << 20)
        adjust(trim, 512 << 20)
