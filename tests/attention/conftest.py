"""The native kernel's formula; and Triton's interpreter, quicker: it would patch at each call, and type each value."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from helpers.native_formula import Libraries, use_formula


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


def _types_once() -> None:
    """Make what a value's type says once a type."""
    try:
        from triton.language import core
        from triton.runtime import interpreter
    except ImportError:
        return
    numpy_of, block, value = interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__
    types: dict[str, np.dtype] = {}
    blocks: dict[tuple, dict] = {}
    shapes: dict[tuple, tuple] = {}

    def known_numpy(of: core.dtype) -> np.dtype:
        element = of.element_ty if type(of) is core.block_type else of
        if element.name not in types:
            types[element.name] = numpy_of(element)
        return types[element.name]

    def known_block(self: core.block_type, element: core.dtype, shape: tuple | list) -> None:
        key = (type(element), element.name, *[getattr(size, "value", size) for size in shape])
        if key not in blocks:
            block(self, element, shape)
            blocks[key] = vars(self)
        else:
            vars(self).update(blocks[key], element_ty=element)

    def known_value(self: core.tensor, handle: object, of: core.dtype) -> None:
        shape = of.shape if of.is_block() else ()
        if shape not in shapes:
            value(self, handle, of)
            shapes[shape] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, of, of.scalar
        self.shape, self.numel = shapes[shape]

    interpreter._get_np_dtype, core.block_type.__init__ = known_numpy, known_block
    core.tensor.__init__ = known_value


@pytest.fixture
def formula(monkeypatch: pytest.MonkeyPatch) -> Libraries:
    """The native kernel's formula, evaluated by torch, in place of its compiled libraries."""
    return use_formula(monkeypatch)


if os.environ.get("TRITON_INTERPRET") == "1":
    _patch_once()
    _types_once()
