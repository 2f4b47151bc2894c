"""Contiguous streams of text: how they are cut and read."""

import fairseq  # noqa: F401  (the plugin registers first)
