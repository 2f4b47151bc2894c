"""What tests of several folders share."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
USER_DIR = ROOT / "relpos_fairseq"
