"""What all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import Phase
from hypothesis import settings as hypothesis_settings

ROOT = Path(__file__).resolve().parent.parent
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # must stand before anything imports triton
# The suite draws the same examples every time; `--hypothesis-profile default` draws new ones.
# A planted bug is to be seen, not understood: shrinking its example can take minutes.
hypothesis_settings.register_profile("repeatable", derandomize=True)
hypothesis_settings.register_profile(
    "planted", derandomize=True, database=None, phases=(Phase.explicit, Phase.generate)
)
hypothesis_settings.load_profile("repeatable")
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture
def shared_data() -> Path:
    """The folder of real text that may lie beside the checkout."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real text: {folder} is absent")
    return folder
