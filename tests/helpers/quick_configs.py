"""fairseq's configs, quicker: what hydra and omegaconf find out anew for each of some 300 values of a command.

Commands in processes of their own have both as they are.
"""

from __future__ import annotations

import copy
import inspect
import sys
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import SimpleNamespace
from typing import Any

from hydra._internal import utils as hydra_utils
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, _utils, omegaconf
from omegaconf.base import Metadata
from omegaconf.errors import OmegaConfBaseException

_READER = OverridesParser.create()


def install() -> None:
    """Let hydra read a value by its grammar once, and omegaconf ask a type once what it is."""
    read = cache(OverridesParser.parse_rule)
    OverridesParser.parse_rule = lambda self, text, rule: copy.copy(read(_READER, text, rule))
    ConfigStore.__deepcopy__ = lambda self, memo: self  # it hands out copies anyway
    hydra_utils.inspect = SimpleNamespace(**vars(inspect) | {"stack": _frames})
    Metadata.__deepcopy__ = _copied
    for name in ("is_dataclass", "is_attr_class"):
        asked = _once_a_type(getattr(_utils, name))
        setattr(_utils, name, asked)
        setattr(omegaconf, name, asked)


def _frames() -> list[inspect.FrameInfo]:
    """Of `inspect.stack` what hydra asks for: it finds each frame's source besides, among all modules."""
    walked = traceback.walk_stack(inspect.currentframe().f_back)
    return [
        inspect.FrameInfo(frame, frame.f_code.co_filename, line, frame.f_code.co_name, None, None)
        for frame, line in walked
    ]


def _copied(self: Metadata, memo: dict[int, Any]) -> Metadata:
    """A copy of what a node is, whose parts are types and names but for two dictionaries."""
    made = object.__new__(type(self))
    vars(made).update(vars(self), flags=dict(self.flags), resolver_cache=copy.deepcopy(self.resolver_cache, memo))
    return made


def _once_a_type(asked: Callable[[Any], bool]) -> Callable[[Any], bool]:
    known: dict[type, bool] = {}

    def answer(value: Any) -> bool:
        kind = value if isinstance(value, type) else type(value)
        if kind not in known:
            known[kind] = asked(value)
        return known[kind]

    return answer


def compose_by_differences() -> None:
    """Of a command line that differs from an earlier one in values alone, let hydra set these alone.

    Nothing to do until fairseq is there.
    """
    utils = sys.modules.get("fairseq.dataclass.utils")
    if utils is None or hasattr(utils.compose, "before"):
        return
    whole, before = utils.compose, deque(maxlen=16)

    def compose(name: str, overrides: list[str], **more: bool) -> DictConfig:
        given = dict(one.partition("=")[::2] for one in overrides)
        for known, composed in before:
            changed = [one for one in given if known.get(one) != given[one]]
            if known.keys() != given.keys() or not all("." in one for one in changed):
                continue
            with suppress(OmegaConfBaseException, HydraException):  # which the whole is to raise
                found = copy.deepcopy(composed)
                for one in changed:
                    OmegaConf.update(found, one, _READER.parse_override(f"{one}={given[one]}").value())
                return found
        found = whole(name, overrides=overrides, **more)
        before.appendleft((given, copy.deepcopy(found)))
        return found

    compose.before = before
    utils.compose = compose
