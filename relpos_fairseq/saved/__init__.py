"""What training or `relpos convert` saved, opened by the commands that run a model in one way."""

import fairseq  # noqa: F401  (the plugin registers first)
