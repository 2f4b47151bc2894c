"""Remember which calls the kernels computed rightly on this machine's GPU, before `auto` takes them.

Kernels are compiled anew for each GPU, driver and version of Triton, and a compiler's fault gives wrong numbers without
a word.  At the first call of a signature, `selftest` therefore runs in a process of its own, where a fault that kills
or hangs it harms nothing.  Its verdict is kept in the cache folder, under a hash of all that it depends on.  Of several
ranks one runs the test, and the others read the verdict.  RELPOS_TRITON decides instead: `on` takes the kernels
untested, `off` never takes them.
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
from contextlib import contextmanager, suppress
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
    """Return RELPOS_TRITON: "on", "off", or "" where verdicts decide.

    Raises:
        ValueError: it is something else.
    """
    said = os.environ.get("RELPOS_TRITON", "")
    if said not in ("", "on", "off"):
        raise ValueError(f"RELPOS_TRITON must be on (take the kernels unproved) or off (never), got {said!r}")
    return said


def problem(signature: CallSignature) -> str | None:
    """Return why kernels are not taken for calls of a signature, or None; tested once on a machine."""
    key = signature, signature.device
    if key not in _found:
        _found[key] = _from_cache(signature)
    return _found[key]


def verdicts() -> Iterator[tuple[Path, dict]]:
    """Yield all kept verdicts, of any GPU, with their files."""
    for folder in cache.folders():
        for path in sorted(folder.glob("verdict-*.json")):
            with suppress(OSError, ValueError):
                yield path, json.loads(path.read_text(encoding="utf-8"))


def _from_cache(signature: CallSignature) -> str | None:
    """Return why kernels are not taken, by the kept verdict or by a test."""
    facts = {**machine(signature.device), "call": repr(signature)}
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    path = cache.writable_folder() / f"verdict-{key}.json"
    with cache.locked(path):
        with suppress(OSError, ValueError, KeyError):
            return _in_words(json.loads(path.read_text(encoding="utf-8"))["erred"], path)
        erred, final = run(signature)
        if final:
            _write(path, {**facts, "erred": erred})
    return _in_words(erred, path if final else None)


def _in_words(erred: list[str], path: Path | None) -> str | None:
    """Return what erred as the reason of a refusal, or None."""
    if not erred:
        return None
    kept = f"; the verdict is kept in {path}" if path else ""
    return (
        f"this call surely: its kernels did not prove themselves on this device "
        f"({' | '.join(erred)}){kept}; RELPOS_TRITON=on takes them nevertheless"
    )


def run(signature: CallSignature, seconds: float = SECONDS) -> tuple[list[str], bool]:
    """Test calls of a signature in a process of its own.

    Args:
        signature: of the calls.
        seconds: after which the process is ended.

    Returns:
        What erred, and whether that is a verdict: where a device has no room for a second process, nothing was tested.
    """
    given = filter(None, os.environ.get("PYTHONPATH", "").split(":"))
    paths = [str(ROOT), *map(os.path.abspath, given)]
    with _started([sys.executable, "-m", MODULE], ":".join(paths)) as process:
        try:
            said, errors = process.communicate(pickle.dumps(signature), timeout=seconds)
        except subprocess.TimeoutExpired:
            return [f"no answer within {seconds:g} s"], True
    lines = said.decode(errors="replace").splitlines()
    if process.returncode in (0, NO_ROOM) and lines:
        return json.loads(lines[-1]), process.returncode == 0
    last = errors.decode(errors="replace").strip().splitlines()[-1:]
    return [f"ended with status {process.returncode}: {' '.join(last)[:300]}"], True


@contextmanager
def _started(command: list[str], paths: str) -> Iterator[subprocess.Popen]:
    """Start a process whose children, compilers among them, end with it."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    # Nothing is imported from the folder that a user stands in.
    where = {"cwd": ROOT, "env": {**os.environ, "PYTHONPATH": paths}}
    process = subprocess.Popen(command, **pipes, **where, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def machine(device: str) -> dict[str, str]:
    """Return what a verdict depends on beside the call: GPU, driver, versions, the kernels' sources."""
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
    """Write a verdict, whole or not at all; where it cannot be written, the next process tests again."""
    with suppress(OSError):
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".partial-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(facts, file, indent=1)
        os.replace(partial, path)
