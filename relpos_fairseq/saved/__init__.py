"""What training or `relpos convert` saved, opened by every command in one way."""

import fairseq  # noqa: F401  (the plugin registers first)
