"""relpos_fairseq: every published position scheme for fairseq's transformers.

Importing this package imports neither torch nor fairseq.  Once fairseq is imported, before or after
this package, the plugin registers with it (`plugin.py`).
"""

from typing import Any

import wrapt

from relpos_fairseq.version import __version__

__all__ = ["__version__"]


@wrapt.when_imported("fairseq")
def _register(fairseq: Any) -> None:
    from relpos_fairseq import plugin

    plugin.register()
