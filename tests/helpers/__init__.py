"""What tests of several folders share."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
USER_DIR = ROOT / "relpos_fairseq"
# Graphs of all hybrids, all kernels for GPUs and all releases of transformers, not one of a kind.
FULL = os.environ.get("RELPOS_ONNX") == "full"
