"""Criterions of fairseq."""

import fairseq  # noqa: F401  (the plugin registers first)
