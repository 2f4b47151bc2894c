"""fairseq's faults, one file each; README.md lists them.

A mend changes fairseq where it fails or loses data, and no number of any other model.
"""

import fairseq  # noqa: F401  (the plugin registers first)
