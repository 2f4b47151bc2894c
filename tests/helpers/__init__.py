"""What tests of several folders share."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
USER_DIR = ROOT / "relpos_fairseq"
# Graphs of all hybrids, all kernels for GPUs, all releases of transformers and all schemes in all calls, not one of a
# kind, processes of torchrun, not forks, and of benchmarks, not this one.
FULL = os.environ.get("RELPOS_ONNX") == "full"
