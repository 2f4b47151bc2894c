"""Patches of fairseq's faults: README.md lists what is replaced by what, and why."""

import fairseq  # noqa: F401  (the plugin registers first)
