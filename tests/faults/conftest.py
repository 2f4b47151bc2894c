"""What the campaigns share."""

import pytest

from helpers.fault_jobs import Inputs, write_inputs


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """What the jobs of this process read, and leave as it is."""
    return write_inputs(tmp_path_factory.mktemp("inputs"))
