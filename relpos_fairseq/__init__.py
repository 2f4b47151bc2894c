"""relpos_fairseq: every published position scheme for fairseq's transformers.

Importing this package imports neither torch nor fairseq.  Once fairseq is imported, before or after
this package, the plugin registers with it (`plugin.py`).
"""

import logging
import sys
from contextlib import contextmanager
from importlib import abc, util

from relpos_fairseq.version import __version__

__all__ = ["__version__"]


class _RegisterOnImport(abc.MetaPathFinder, abc.Loader):
    """Finds and loads fairseq as Python does, and then registers the plugin."""

    searching = False

    def find_spec(self, name, path=None, target=None):
        if name != "fairseq" or self.searching:
            return None
        self.searching = True  # so that the finders after this one are asked
        try:
            spec = util.find_spec(name)
        finally:
            self.searching = False
        if spec is not None and spec.loader is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__loader__ = module.__spec__.loader = self.loader
        with _logging_kept():
            self.loader.exec_module(module)
        _register()


@contextmanager
def _logging_kept():
    """Undo what fairseq's import does to the root logger: tasks for speech set it to DEBUG and ask for tensorboardX."""
    root, before = logging.getLogger(), logging.root.manager.disable
    level, handlers = root.level, list(root.handlers)
    logging.disable(max(before, logging.INFO))
    try:
        yield
    finally:
        logging.disable(before)
        root.setLevel(level)
        for handler in set(root.handlers).difference(handlers):
            root.removeHandler(handler)


def _register() -> None:
    from relpos_fairseq import plugin

    plugin.register()


if sys.modules.get("fairseq") is not None:
    _register()
else:
    sys.meta_path.insert(0, _RegisterOnImport())
