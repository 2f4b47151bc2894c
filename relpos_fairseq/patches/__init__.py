"""Patches of fairseq's faults: `table.py` lists what is replaced by what, README.md why."""

import fairseq  # noqa: F401  (the plugin registers first)
