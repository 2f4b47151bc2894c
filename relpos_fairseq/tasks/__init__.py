"""Tasks of fairseq, and what its own tasks give our models."""

import fairseq  # noqa: F401  (the plugin registers first)
