"""Tasks of this package, and the segments that fairseq's own tasks supply to its models."""

import fairseq  # noqa: F401  (the plugin registers first)
