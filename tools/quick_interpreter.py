"""Triton's interpreter, a third as slow: it does once, or not at all, what it does for every operation.

Each call of a function within a kernel replaces the functions of triton.language by the interpreter's own, and leaves
them there. Each sum of integers is computed once more in 64 bits, for an assertion that is made in debug mode alone.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import ModuleType, SimpleNamespace


def make_quick(interpreter: ModuleType) -> None:
    """Change `triton.runtime.interpreter` (Triton 3.7)."""
    patch = interpreter._patch_lang

    @cache
    def patch_once() -> None:
        import triton.language as tl  # which imports the interpreter

        patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))

    def patch_lang(_: object) -> object:
        patch_once()
        return interpreter._LangPatchScope()

    of_type = interpreter._get_np_dtype
    of_number = cache(of_type)

    def numpy_type(dtype: object) -> object:
        return of_number(dtype) if type(dtype) is interpreter.tl.dtype else of_type(dtype)

    interpreter._patch_lang, interpreter._get_np_dtype = patch_lang, numpy_type
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
