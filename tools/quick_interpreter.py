"""Triton's interpreter, several times as fast: it does once, or not at all, what it does for every operation.

Each call of a function within a kernel replaces the functions of triton.language by the interpreter's own, and leaves
them there. Each sum of integers is computed once more in 64 bits, for an assertion that is made in debug mode alone.
Each result has a type and a shape made anew of objects for each number, and checked, though few shapes are met.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any


def make_quick(interpreter: ModuleType) -> None:
    """Change `triton.runtime.interpreter` (Triton 3.7)."""
    patch = interpreter._patch_lang

    @cache
    def patch_once() -> None:
        import triton.language as tl  # which imports the interpreter

        _share_shapes(tl.core)
        _share_types(interpreter.interpreter_semantic)
        patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))

    def patch_lang(_: object) -> object:
        patch_once()
        return interpreter._LangPatchScope()

    def patch_attr(owner: Any, name: str, member: Any, builder: object, scope: Any) -> None:
        function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = patch_attr
    of_type = interpreter._get_np_dtype
    of_number = cache(of_type)

    def numpy_type(dtype: object) -> object:
        return of_number(dtype) if type(dtype) is interpreter.tl.dtype else of_type(dtype)

    interpreter._patch_lang, interpreter._get_np_dtype = patch_lang, numpy_type
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def _share_shapes(core: ModuleType) -> None:
    """Let types and tensors of one shape have the same objects for it; a type's name is written when it is asked."""

    @cache
    def of_type(sizes: tuple[int, ...]) -> tuple[Any, int]:
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        return core.tuple(sizes), core.validate_block_shape(sizes)

    @cache
    def of_tensor(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def init_type(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
        self.element_ty = element_ty
        self.sizes = tuple([each.value if isinstance(each, core.constexpr) else each for each in shape])
        self.shape, self.numel = of_type(self.sizes)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensor(type.sizes if type.is_block() else ())

    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")


def _share_types(semantic: Any) -> None:
    """Find the type of a result once; operands of one shape are not compared number by number."""
    broadcast = semantic.broadcast_impl_value

    def broadcast_values(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(lhs, rhs)

    semantic.broadcast_impl_value = broadcast_values
    semantic.computation_type_impl = cache(semantic.computation_type_impl)
