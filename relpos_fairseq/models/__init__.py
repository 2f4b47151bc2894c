"""Models that fairseq registers: each `relpos_*.py` registers its named sizes."""

import fairseq  # noqa: F401  (the plugin registers first)
