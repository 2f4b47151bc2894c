"""Benchmarks of the tests do not wait until the machine is idle."""

from __future__ import annotations

import pytest

from relpos_fairseq.lab.benchmarks import measurement


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "wait_until_idle", lambda *_: False)
