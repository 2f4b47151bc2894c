"""What runs a checkpoint.  fairseq comes first, so that the plugin has registered."""

import fairseq  # noqa: F401
