"""Triton's interpreter, quicker: it would patch its language anew at each call inside a kernel."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache


def _patch_once() -> None:
    """Let Triton's interpreter patch its language once a launch, not again at each call inside a kernel."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    patch_lang, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore
    languages, patched = (interpreter.tl, interpreter.tl.core), set()

    @cache
    def named(fn: Callable) -> frozenset[int]:
        return frozenset(n for n, part in enumerate(languages) if any(part is v for v in fn.__globals__.values()))

    def patch(fn: Callable) -> interpreter._LangPatchScope:
        if named(fn) and named(fn) <= patched:
            return interpreter._LangPatchScope()
        patched.update(named(fn))
        return patch_lang(fn)

    def restore_all(scope: interpreter._LangPatchScope) -> None:
        patched.clear()
        restore(scope)

    interpreter._patch_lang, interpreter._LangPatchScope.restore = patch, restore_all


if os.environ.get("TRITON_INTERPRET") == "1":
    _patch_once()
