"""No test's random numbers hang on what ran before it in the same process."""

import numpy as np
import pytest
import torch

SEEN = set()


def drawn() -> tuple[float, float]:
    """The next number of each generator."""
    return float(np.random.rand()), float(torch.rand(()))


@pytest.fixture(scope="module", params=[0, 1])
def made(request):
    """What a fixture of a module draws, set up between tests that draw."""
    return drawn()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_draws_hang_on_nothing_before(made, count):
    """Each test takes another number of draws, and begins where all begin."""
    first = [drawn() for _ in range(count)][0]
    SEEN.update((made, first))
    assert len(SEEN) == 1
