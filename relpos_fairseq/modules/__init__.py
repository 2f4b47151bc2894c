"""Modules that fairseq's layers are built from."""

import fairseq  # noqa: F401  (the plugin registers first)
