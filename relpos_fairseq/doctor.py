"""One screen about an installation: versions, what serves attention here, what is wrong."""

from __future__ import annotations

import importlib
import logging
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

from relpos_fairseq import plugin
from relpos_fairseq.attention import api, cache, native, triton
from relpos_fairseq.attention.native import build
from relpos_fairseq.attention.triton import call_signature, selftest, selftest_cache
from relpos_fairseq.core.calls import small_call
from relpos_fairseq.io import packages, processor
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.schemes import schemes_for
from relpos_fairseq.version import __version__

SETS = ("sse4_2", "avx2", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve")
LENGTHS = (1, 65)  # of the self-check, before CHECKED
CHECKED, HEADS, DIM = 130, 2, 16
SHOWN = (32, 512)  # tokens for which backends are named
Line = tuple[str, str, bool]  # heading, what is said, whether it is wrong


def examine(quick: bool = False) -> int:
    """Print the screen, wrong lines marked; returns 1 where there are any, else 0."""
    logging.disable(logging.WARNING)  # what `auto` would warn of is said here
    wrong = 0
    try:
        for heading, said, is_wrong in lines(quick):
            print(f"{heading:12} {'WRONG: ' * is_wrong}{said}", flush=True)
            wrong += is_wrong
    finally:
        logging.disable(logging.NOTSET)
    print(f"{wrong} of these lines must be mended" if wrong else "nothing is wrong")
    return int(wrong > 0)


def lines(quick: bool) -> Iterator[Line]:
    """What there is to say, in order."""
    python = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    yield "python", python, sys.version_info < (3, 10)
    yield "relpos", f"{__version__}, {Path(__file__).resolve().parent}", False
    yield "torch", f"{torch.__version__}, {torch.get_num_threads()} threads", False
    yield (found := _fairseq())
    if not found[2]:
        yield _replaced()
    yield _optional()
    yield _processor()
    yield _kernel()
    if not quick and build.problem() is None:
        yield _self_check()
    yield from _gpus()
    yield from _cache()
    for tokens in SHOWN:
        yield f"{tokens} tokens", _chosen(tokens, "cpu"), False


def _fairseq() -> Line:
    if find_spec("fairseq") is None:
        return "fairseq", f"not installed beside this Python: {packages.remedy('fairseq')}", True
    try:
        fairseq = importlib.import_module("fairseq")
    except UserError as error:  # of the plugin, which registers
        return "fairseq", str(error), True
    except Exception as error:  # an old release fails in many ways
        said = f"does not import: {type(error).__name__}: {error}; {packages.remedy('fairseq')}"
        return "fairseq", said, True
    return "fairseq", f"{fairseq.__version__}, {Path(fairseq.__file__).parent}", False


def _replaced() -> Line:
    """Count what the plugin replaces in fairseq, by kind."""
    counts = Counter(row.kind for row in plugin.chosen())
    asked = os.environ.get(plugin.SWITCH) or "all"
    said = ", ".join(f"{counts[kind]} {kind}" for kind in plugin.ON["all"])
    return "patches", f"{said} ({plugin.SWITCH}={asked}; {plugin.PAGE})", False


def _optional() -> Line:
    """Name the extras of which a package is not installed."""
    found = [f"{extra} ({', '.join(those)})" for extra, those in packages.absent().items()]
    known = "all are installed" if packages.extras() else "this copy was not installed: what it may use is unknown"
    return "packages", f"not installed, by extra: {'; '.join(found)}" if found else known, False


def _processor() -> Line:
    abilities = processor.abilities()
    has = [each for each in SETS if each in abilities]
    said = f"{processor.name()}, {os.cpu_count()} CPUs, {' '.join(has)}"
    asked = os.environ.get("RELPOS_ISA")
    return "processor", said + (f"; RELPOS_ISA={asked}" if asked else ""), False


def _kernel() -> Line:
    for dtype in build.DEFINED:
        problem = build.problem(dtype)
        if problem is not None:
            return "native", f"cannot evaluate {problem}", True
    command = build.find_compiler()
    version = build._version(command).splitlines()[0]
    return "native", f"compiled for fp32 and fp64 by {' '.join(command)} ({version})", False


def _self_check() -> Line:
    """Compare the kernel in C with fp64, in values and all gradients of every scheme."""
    erred, count = [], 0
    for number, name in enumerate(schemes_for(attention=True)):
        inputs = small_call(name, number % 2 == 1, CHECKED, HEADS, DIM)
        untried = any(term.decay is not None for term in inputs.terms)  # a trial has no gates
        if untried or native.refusal_anywhere(inputs) is not None:
            continue
        count += 1
        form = call_signature.signature_of(inputs, (), False)
        erred += [f"{name}: {said}" for said in selftest.problems(form, LENGTHS, native.attend)[:1]]
    if erred:
        return "self-check", "native errs: " + " | ".join(erred), True
    return "self-check", f"native agrees with fp64: {count} schemes, values and gradients", False


def _gpus() -> Iterator[Line]:
    driver, count = selftest_cache.driver(), torch.cuda.device_count()
    if count == 0:
        blind = bool(driver) and torch.version.cuda is None
        yield "gpu", f"{driver}, but this torch is for CPUs" if blind else "none", blind
    for number in range(count):
        facts = selftest_cache.machine(f"cuda:{number}") if find_spec("triton") else {"gpu": "?"}
        yield "gpu", f"{facts['gpu']}; {driver}", False
    call = small_call(schemes_for(attention=True)[-1], False, SHOWN[-1], HEADS, DIM, "cuda" if count else "cpu")
    reasons = triton.reasons(call)
    said = f"serves nothing here: {'; '.join(reasons)}" if reasons else "its kernels serve the GPU"
    yield "triton", said + f" (RELPOS_TRITON={selftest_cache.switch() or 'unset'})", bool(reasons and count)
    for path, verdict in selftest_cache.verdicts():
        if verdict["erred"]:
            erred = " | ".join(verdict["erred"])
            yield "verdict", f"{verdict['gpu']}: {erred}: {verdict['call']} ({path})", True
    proved = sum(not verdict["erred"] for _, verdict in selftest_cache.verdicts())
    if proved:
        yield "verdicts", f"{proved} forms of calls have proved themselves on GPUs", False


def _cache() -> Iterator[Line]:
    folder = cache.writable_folder()
    kept = folder in list(cache.folders())
    files = list(folder.glob("*.so"))
    size = sum(path.stat().st_size for path in files) / 1e6
    said = f"{folder}: {len(files)} compiled kernels, {size:.1f} MB"
    remedy = "no folder takes files: name one in RELPOS_CACHE, or kernels are compiled each time"
    yield "cache", said if kept else remedy, not kept


def _chosen(tokens: int, device: str) -> str:
    """Return a line that names the backend which `auto` chooses for each scheme."""
    by_backend: dict[str, list[str]] = {}
    for name in schemes_for(attention=True):
        by_backend.setdefault(api.choose(small_call(name, False, tokens, HEADS, DIM, device)), []).append(name)
    parts = (f"{backend}: {', '.join(names)}" for backend, names in by_backend.items())
    return "auto takes " + "; ".join(parts)
