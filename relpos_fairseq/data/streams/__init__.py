"""Contiguous streams of text: how they are cut, read, and what is remembered of them."""

import fairseq  # noqa: F401  (the plugin registers first)
