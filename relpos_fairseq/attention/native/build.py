"""Compile the kernel in C when it is first needed, once for a machine, and load it.

The library lies in a cache folder under a name that hashes all it depends on: sources, compiler,
flags (`RELPOS_ISA` chooses the instruction set) and processor.  Its file ends with a hash of the
bytes before, so that a truncated file is compiled again rather than loaded.  A library by gcc shares
torch's OpenMP runtime, which has the same name; one by clang brings its own, beside torch's.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from relpos_fairseq.attention import cache

SOURCES = Path(__file__).resolve().parent
KERNEL = "kernel.c"
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-std=gnu11", "-fopenmp", "-fno-math-errno", "-ffp-contract=fast", "-shared", "-fPIC")
DEFINED = {torch.float32: (), torch.float64: ("-DRELPOS_DOUBLE",)}
REMEDY = "install gcc, or name a compiler in CC"
X86 = ("x86_64", "amd64")
COMPILER_TIMEOUT = 600  # seconds
_HASH = hashlib.sha256().digest_size
logger = logging.getLogger(__name__)


class BuildError(RuntimeError):
    """The kernel could not be compiled or loaded; the message says why, and what to do."""


def library(dtype: torch.dtype) -> ctypes.CDLL:
    """Return the kernel's library for fp32 or fp64; compile it if no cache folder has it.

    Raises:
        BuildError: names the compiler, its command and its message.
    """
    found = _attempt(dtype)
    if isinstance(found, BuildError):
        raise found
    return found


@functools.cache
def entry(dtype: torch.dtype, name: str, *structs: type[ctypes.Structure]) -> Callable[..., int]:
    """Return a function of the library for fp32 or fp64 that takes the address of a struct.

    Args:
        dtype: of what it computes.
        name: the function's.
        structs: what it is given, and what that points to; the library's `NAME_size` tells the bytes of all.

    Raises:
        BuildError: there is no library, or its structs have another size.
    """
    found = library(dtype)
    function, told = getattr(found, name), getattr(found, f"{name}_size")
    told.restype = ctypes.c_int64
    if told() != sum(map(ctypes.sizeof, structs)):
        raise BuildError(f"{name}: the kernel and the package are of two versions; install the package anew")
    function.argtypes = [ctypes.POINTER(structs[0])]
    return function


def threads_for(work: int, of_a_thread: int) -> int:
    """Return how many threads share so much work, of which `of_a_thread` is worth a thread."""
    return max(1, min(torch.get_num_threads(), work // of_a_thread))


def problem(dtype: torch.dtype = torch.float32) -> str | None:
    """Return why this machine has no kernel for a type, or None if it has one; checked once in each process."""
    found = _attempt(dtype)
    return str(found) if isinstance(found, BuildError) else None


# torch.compile takes the answer for a constant.  torch.compiler.assume_constant_result declares the
# same, but imports dynamo, which takes seconds.
problem._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _attempt(dtype: torch.dtype) -> ctypes.CDLL | BuildError:
    try:
        return load(SOURCES, DEFINED[dtype])
    except BuildError as error:
        return error
    except OSError as error:  # a full disk, say
        return BuildError(
            f"anything here: its library cannot be kept ({error}); make room, or name a folder in RELPOS_CACHE"
        )


def load(sources: Path, defined: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Load the library for a folder of sources; compile it if no cache folder has it.

    Args:
        sources: folder with kernel.c and what it includes.
        defined: flags in addition to FLAGS.

    Raises:
        BuildError: as `library`.
    """
    if not sys.platform.startswith("linux"):
        raise BuildError(f"anything on {sys.platform} (its kernel is compiled on Linux alone)")
    compiler = find_compiler()
    flag_sets = [(*flags, *defined) for flags in _flag_sets()]
    name = f"relpos-{_key(sources, compiler, flag_sets)}.so"
    for folder in cache.folders():
        if _is_whole(folder / name):
            with contextlib.suppress(OSError):
                return ctypes.CDLL(str(folder / name))
    path = cache.writable_folder() / name
    with cache.locked(path):
        if not _is_whole(path):  # else another process has compiled it meanwhile
            compile_library(compiler, flag_sets, sources, path)
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            compile_library(compiler, flag_sets, sources, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(
            f"anything here: what {shlex.join(compiler)} compiled does not load ({error}); {REMEDY}"
        ) from error


def find_compiler() -> tuple[str, ...]:
    """Return the compiler's command: that in $CC, else the first of COMPILERS on PATH.

    Raises:
        BuildError: no compiler is on PATH.
    """
    try:
        asked = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise BuildError(f"anything here: CC={os.environ['CC']} is no command ({error})") from None
    names = asked[:1] or COMPILERS
    for name in names:
        path = shutil.which(name)
        if path is not None:
            return (path, *asked[1:])
    looked = f"{asked[0]}, which CC names," if asked else f"one of {', '.join(COMPILERS)}"
    raise BuildError(f"anything without a C compiler ({looked} is not on PATH); {REMEDY}")


def compile_library(compiler: tuple[str, ...], flag_sets: list[tuple[str, ...]], sources: Path, path: Path) -> None:
    """Compile kernel.c to a temporary file, append a hash of its bytes, and rename the file to `path`.

    Args:
        compiler: command of the compiler.
        flag_sets: sets of flags, best first; the first that the compiler accepts is used.
        sources: folder of kernel.c.
        path: where the library goes.

    Raises:
        BuildError: the compiler accepts none of the sets; quotes its message.
    """
    logger.info("compiling the attention kernel to %s, once for this machine", path)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".partial-", suffix=".so")
    os.close(handle)
    try:
        for flags in flag_sets:
            command = [*compiler, *flags, "-o", partial, str(sources / KERNEL), "-lm"]
            said = _run(command)
            if said is None:
                break
        else:
            other = "change RELPOS_ISA, or " if os.environ.get("RELPOS_ISA") else ""
            raise BuildError(
                f"anything here: its kernel does not compile: {shlex.join(command)} said: {said}; {other}{REMEDY}"
            )
        content = Path(partial).read_bytes()
        with open(partial, "ab") as file:  # what stands behind an ELF file's parts is not loaded
            file.write(hashlib.sha256(content).digest())
        os.chmod(partial, 0o755)
        os.replace(partial, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)


def _run(command: list[str]) -> str | None:
    """Run a command; return None if it succeeds, else the first lines of its output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMPILER_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    lines = (done.stderr + done.stdout).strip().splitlines()[:4]
    return " | ".join(lines) or f"nothing, and ended with status {done.returncode}"


def _flag_sets() -> list[tuple[str, ...]]:
    """Return sets of flags for this machine, best first: not every compiler accepts all of them.

    `RELPOS_ISA` may name another instruction set than this machine's own (`native`), as -march takes
    it: `x86-64-v3` has AVX2, `x86-64-v2` SSE4.  Then no flags without it are tried.
    """
    machine, asked = platform.machine().lower(), os.environ.get("RELPOS_ISA") or "native"
    if not re.fullmatch(r"[\w.+-]+", asked):
        raise BuildError(f"anything for RELPOS_ISA={asked!r}; give what -march takes, as x86-64-v3")
    is_arm = machine in ("aarch64", "arm64")
    chosen = "-mcpu=native" if is_arm and asked == "native" else f"-march={asked}"
    sets = flags_for(machine, chosen)
    return [*sets, FLAGS] if asked == "native" and machine not in X86 else sets


def flags_for(machine: str, chosen: str) -> list[tuple[str, ...]]:
    """Return sets of flags for a machine and the flag that chooses its instruction set, best first."""
    flags = (*FLAGS, chosen)
    if machine in X86:
        return [(*flags, "-mprefer-vector-width=512"), flags]
    # Without it, gcc moves the loads of matmul_block so far ahead that its sums leave the registers.
    return [(*flags, "-fno-schedule-insns"), flags]


def _key(sources: Path, compiler: tuple[str, ...], flag_sets: list[tuple[str, ...]]) -> str:
    """Return a hash of all that a compiled library depends on: sources, compiler, flags, processor."""
    digest = hashlib.sha256()
    for part in (*compiler, _version(compiler), repr(flag_sets), _processor()):
        digest.update(part.encode() + b"\0")
    for file in sorted((*sources.glob("*.c"), *sources.glob("*.h"))):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _version(compiler: tuple[str, ...]) -> str:
    command = [*compiler, "--version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"anything here: {shlex.join(command)} fails: {error}; {REMEDY}") from None
    if done.returncode:
        said = " | ".join((done.stderr + done.stdout).strip().splitlines()[:4])
        raise BuildError(
            f"anything here: {shlex.join(command)} ended with status {done.returncode}"
            f"{said and f', said: {said}'}; {REMEDY}"
        )
    return done.stdout


def _processor() -> str:
    """Return model and instruction sets of the first processor, for which a library is compiled."""
    with contextlib.suppress(OSError):
        first = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")[0]
        names = ("model name", "flags", "Features", "CPU implementer", "CPU part")
        lines = [line for line in first.splitlines() if line.startswith(names)]
        return "\n".join((platform.machine(), *lines))
    return f"{platform.machine()} {platform.processor()}"


def _is_whole(path: Path) -> bool:
    """Return whether a library exists, can be changed by this user and root alone, and ends with its bytes' hash."""
    try:
        if path.is_symlink() or not cache.is_private(path):
            return False  # somebody else may have put it there, and loading a file runs it
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_HASH]).digest() == content[-_HASH:]
