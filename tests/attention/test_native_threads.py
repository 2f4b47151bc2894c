"""The compiled kernel in programs of several threads."""

from __future__ import annotations

import os
import shutil
import sys
import threading

import pytest
import torch

from helpers import ROOT, processes
from relpos_fairseq.attention import AttentionInputs, attend
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.relations import Clipped
from relpos_fairseq.core.terms import PositionTerms

pytestmark = pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc").split()[0]) is None, reason="no C compiler")


def make_call() -> AttentionInputs:
    """Two rows of three heads."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).requires_grad_()

    q, k, v = (draw(2, 3, 130, 16) for _ in range(3))
    vectors = draw(1, 33, 16)
    term = PositionTerms(Clipped(16, 16), query_vectors=vectors, value_vectors=vectors)
    return AttentionInputs(q, k, v, (term,), Positions(130, 130), 0.25)


def run(inputs: AttentionInputs) -> list[torch.Tensor]:
    """Output and gradients."""
    out, _ = attend(inputs, "native")
    leaves = [inputs.q, inputs.k, inputs.v, inputs.terms[0].query_vectors]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def test_calls_at_once() -> None:
    """Python's threads do not disturb one another; any number of OpenMP's gives the same bits."""
    inputs, before = make_call(), torch.get_num_threads()
    found = []
    try:
        torch.set_num_threads(1)
        expected = run(inputs)
        for count in (2, 5):  # fewer than heads; with parts of heads
            torch.set_num_threads(count)
            found.append(run(inputs))
        torch.set_num_threads(1)
        threads = [threading.Thread(target=lambda: found.append(run(inputs))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=300)
    finally:
        torch.set_num_threads(before)
    assert len(found) == 6
    for one in found:
        torch.testing.assert_close(one, expected, rtol=0, atol=0)


def test_threads_that_end_leave_nothing() -> None:
    """A server makes a thread a request, and each has buffers of its own."""
    code = (
        "import sys, threading\n"
        "sys.modules['fairseq'] = None\n"
        f"sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "import torch\n"
        "from attention.test_native_threads import make_call, run\n"
        "def held():\n"
        "    return int(open('/proc/self/statm').read().split()[1]) * 4096 >> 20\n"
        "def serve(count):\n"
        "    for _ in range(count):\n"
        "        thread = threading.Thread(target=run, args=(make_call(),))\n"
        "        thread.start()\n"
        "        thread.join()\n"
        "    return held()\n"
        "print(serve(4), serve(60))\n"
    )
    calm = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}  # waiting threads take no time from others
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **calm}
    done = processes.run([sys.executable, "-c", code], env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    before, after = map(int, done.stdout.split())
    assert after - before < 60  # MB; 2 a thread of OpenMP's, were they kept
