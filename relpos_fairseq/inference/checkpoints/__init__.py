"""Run checkpoints.  fairseq is imported first, so that the plugin has registered."""

import fairseq  # noqa: F401
