"""fairseq's configs, quicker: what hydra and omegaconf find out anew for each of some 300 values of a command.

Commands in processes of their own have both as they are.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from contextlib import suppress

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

_READER = OverridesParser.create()


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
