"""relpos_fairseq: published position schemes for fairseq's transformers.

Importing this package imports neither torch nor fairseq.  Once fairseq is imported, before or after
this package, the plugin registers with it (`plugin.py`).
"""

import gc
import logging
import sys
from contextlib import contextmanager
from importlib import abc, import_module, machinery, util
from types import ModuleType

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
is_command = False  # whether this process runs `relpos` alone, and what it has imported stays
METRICS = ("sklearn", "sklearn.metrics", "scipy.stats")  # whose functions tasks and criterions import


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
        with _uncollected(), _metrics_later():
            with _logging_kept():
                self.loader.exec_module(module)
            _register()


@contextmanager
def _uncollected():
    """Let no collection walk through what imports make, a sixth of their time; nor later ones, in a command."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_command:
            gc.freeze()
        if collects:
            gc.enable()


class _Later(ModuleType):
    """Stands for a module whose functions import it when they are called."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: getattr(import_module(self.__name__), name)(*args, **kwargs)


@contextmanager
def _metrics_later():
    """Let a command's import of fairseq leave out what computes metrics, a fifth of its time, until it is asked for.

    A host may import the same meanwhile: it gets the modules themselves.
    """
    absent = [name for name in METRICS if name not in sys.modules and util.find_spec(name.partition(".")[0])]
    later = {name: _Later(name) for name in absent * is_command}
    for name, module in later.items():
        module.__spec__ = machinery.ModuleSpec(name, None)
        package, _, last = name.rpartition(".")
        if package in later:
            setattr(later[package], last, module)
    sys.modules.update(later)
    try:
        yield
    finally:
        for name, module in later.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


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
