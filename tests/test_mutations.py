"""The tests see the bugs that position code is known to have."""

from __future__ import annotations

import os
import subprocess
import sys

import mutate
import pytest

LIMIT = 2400  # seconds; some 150 for all on two idle cores, twice that beside another worker


def test_every_planted_bug_still_fits_the_code() -> None:
    """Each row of tests/planted_bugs.yaml names text that occurs once in its file."""
    rows = mutate.mutations(mutate.TABLE.read_text())
    assert len(rows) >= 25
    assert len({row.bug for row in rows}) == len(rows)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT + 60)
def test_every_planted_bug_is_caught() -> None:
    """Plant each and run the one test that must fail; RELPOS_MUTATIONS=all: those too that were caught before."""
    command, rows = [sys.executable, mutate.__file__], mutate.mutations(mutate.TABLE.read_text())
    if os.environ.get("RELPOS_MUTATIONS") != "all":
        command.append("--new")
        if {row.digest for row in rows} <= mutate.recorded():
            pytest.skip(f"{len(rows)} planted bugs were caught as they stand; RELPOS_MUTATIONS=all plants them")
    whole = {**os.environ, "CI": "true"}  # where pytest writes whole differences
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=whole)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"not done in {LIMIT} s: {(error.stderr or b'').decode()[-8000:]}")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-12000:]
