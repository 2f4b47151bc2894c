"""Run the self-test of the Triton kernels once for each kind of call and GPU, and cache its result (the verdict).

Kernels are compiled anew for each GPU, driver and version of Triton, and a compiler's fault gives wrong numbers
silently.  At the first call of a signature, before `auto` uses the kernels, `selftest` therefore runs in a process of
its own, where a crash or a hang harms nothing.  Its verdict is kept in the cache folder, under a hash of all that it
depends on.  One of several ranks runs the test, and the others read the verdict.  RELPOS_TRITON overrides this: with
`on` the kernels are used untested, with `off` never.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from relpos_fairseq.attention import cache
from relpos_fairseq.attention.triton.call_signature import CallSignature

SECONDS = 600  # that a test may take, compiling its kernels
MODULE = "relpos_fairseq.attention.triton.selftest"
NO_ROOM = 3  # status of a test that found no room on its device
ROOT = Path(__file__).resolve().parents[3]  # of the package that a test imports
SOURCES = ("triton/*.py", "lowering.py")  # in attention/: the files that decide what a kernel computes
_found: dict[tuple[CallSignature, str], str | None] = {}


def switch() -> str:
    """Return the environment variable RELPOS_TRITON: "on", "off", or "" if self-tests decide.

    Raises:
        ValueError: it has another value.
    """
    said = os.environ.get("RELPOS_TRITON", "")
    if said not in ("", "on", "off"):
        raise ValueError(f"RELPOS_TRITON must be on (take the kernels unproved) or off (never), got {said!r}")
    return said


def problem(signature: CallSignature) -> str | None:
    """Return why the kernels failed the self-test for calls of a signature, or None if they passed it."""
    key = signature, signature.device
    if key not in _found:
        _found[key] = _from_cache(signature)
    return _found[key]


def verdicts() -> Iterator[tuple[Path, dict]]:
    """Yield the file and the contents of each cached verdict, of any GPU."""
    for folder in cache.folders():
        for path in sorted(folder.glob("verdict-*.json")):
            if (found := _read(path)) is not None:
                yield path, found


def _read(path: Path) -> dict | None:
    """Return a cached verdict, or None where there is none or a broken one: the test then runs again."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    is_whole = isinstance(found, dict) and found.keys() >= {"gpu", "call"} and isinstance(found.get("erred"), list)
    return found if is_whole and all(isinstance(one, str) for one in found["erred"]) else None


def _from_cache(signature: CallSignature) -> str | None:
    """Return `problem` of a signature from the cached verdict, or run the self-test and cache its verdict."""
    facts = {**machine(signature.device), "call": repr(signature)}
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    path = cache.writable_folder() / f"verdict-{key}.json"
    with cache.locked(path):
        if (known := _read(path)) is not None:
            return _in_words(known["erred"], path)
        erred, final = run(signature)
        if final:
            _write(path, {**facts, "erred": erred})
    return _in_words(erred, path if final else None)


def _in_words(erred: list[str], path: Path | None) -> str | None:
    """Return the errors that a self-test found as the text of a refusal, or None without errors."""
    if not erred:
        return None
    kept = f"; the verdict is kept in {path}" if path else ""
    return (
        f"this call surely: its kernels did not prove themselves on this device "
        f"({' | '.join(erred)}){kept}; RELPOS_TRITON=on takes them nevertheless"
    )


def run(signature: CallSignature, seconds: float = SECONDS) -> tuple[list[str], bool]:
    """Run the self-test for calls of a signature in a process of its own.

    Args:
        signature: the signature of the calls.
        seconds: time limit, after which the process is killed.

    Returns:
        The errors found, and whether they are final: False where the GPU has no memory for a second process, so that
        nothing was tested.
    """
    given = filter(None, os.environ.get("PYTHONPATH", "").split(":"))
    paths = [str(ROOT), *map(os.path.abspath, given)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    # Nothing is imported from the current folder of the user.
    where = {"cwd": ROOT, "env": {**os.environ, "PYTHONPATH": ":".join(paths)}}
    process = subprocess.Popen([sys.executable, "-m", MODULE], **pipes, **where, start_new_session=True)
    try:
        said, errors = process.communicate(pickle.dumps(signature), timeout=seconds)
    except subprocess.TimeoutExpired:
        return [f"no answer within {seconds:g} s"], True
    finally:
        if process.poll() is None:  # with its children, such as compilers
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    lines = said.decode(errors="replace").splitlines()
    if process.returncode in (0, NO_ROOM) and lines:
        return json.loads(lines[-1]), process.returncode == 0
    last = errors.decode(errors="replace").strip().splitlines()[-1:]
    return [f"ended with status {process.returncode}: {' '.join(last)[:300]}"], True


def machine(device: str) -> dict[str, str]:
    """Return what a verdict depends on besides the call: GPU, driver, versions, hash of the kernels' sources."""
    import triton

    gpu = device
    if device.startswith("cuda"):
        facts = torch.cuda.get_device_properties(device)
        gpu = f"{facts.name}, sm_{facts.major}{facts.minor}"
    return {
        "gpu": gpu,
        "driver": driver(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "kernels": sources(),
    }


@functools.cache
def driver() -> str:
    """Return the version of NVIDIA's driver, or ""."""
    with suppress(OSError, IndexError):
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
        return text.splitlines()[0]
    return ""


@functools.cache
def sources() -> str:
    """Return a hash of the files that decide what a kernel computes."""
    digest = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted((ROOT / "relpos_fairseq" / "attention").glob(pattern)):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _write(path: Path, facts: dict) -> None:
    """Write a verdict atomically; if it cannot be written, the next process tests again."""
    with suppress(OSError):
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".partial-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(facts, file, indent=1)
        os.replace(partial, path)
