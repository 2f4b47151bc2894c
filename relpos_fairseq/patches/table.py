"""How a mend takes the place of a function of fairseq."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def replaces(owner: Any, name: str) -> Callable[[Callable], Callable]:
    """Decorate what takes the place of `owner.name`; its first argument is the original."""
    original = getattr(owner, name)

    def put(function: Callable) -> Callable:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(owner, name, replacement)
        return replacement

    return put
