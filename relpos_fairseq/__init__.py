"""relpos_fairseq: published position schemes for fairseq's transformers.

Importing this package imports neither torch nor fairseq.  Once fairseq is imported, before or after
this package, the plugin registers with it (`plugin.py`).
"""

import logging
import sys
from contextlib import contextmanager
from importlib import abc, import_module, util

from relpos_fairseq.version import __version__

# What this package is used by from Python, and where that is defined: loaded where it is first asked for, and by no
# file of the package.
PUBLIC = {
    "PositionAttention": "nn",
    "PositionEncoderLayer": "nn",
    "PositionDecoderLayer": "nn",
    "AttentionCache": "nn",
    "RelPosTransformerModel": "models.relpos_transformer",
    "RelPosTransformerLanguageModel": "models.relpos_transformer_lm",
    "RelPosTransformerXLModel": "models.relpos_transformer_xl",
    "RelPosRobertaModel": "models.relpos_roberta",
    "load_tokenizer": "text",
    "train_tokenizer": "text",
    "convert": "conversion",
    "UserError": "io.errors",
}
__all__ = ["__version__", *PUBLIC]


def __getattr__(name: str) -> object:
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{PUBLIC[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})


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
