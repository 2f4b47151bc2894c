"""Models of other libraries as ours, and ours as theirs: one file a library."""

import fairseq  # noqa: F401  (the plugin registers first)
