"""Triton kernels in its interpreter: arguments are checked, variants that a GPU would compile are counted."""

from __future__ import annotations

import inspect
import os
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from dry_report import VARIANTS, count
from dry_tensor import SKIPS, DryTensor, current_tape
from dry_twins import CHEAP, TWINS

_USES_TWINS = os.environ.get("DRY_KERNELS", "twin") == "twin"
_UNSPECIALIZED: dict[str, frozenset[str]] = {}
_UNALIGNED: dict[str, frozenset[str]] = {}
_LOCK = threading.RLock()  # the interpreter is one for all threads


def install(interpreter: ModuleType) -> None:
    """Change Triton's interpreter."""
    executor = interpreter.GridExecutor
    execute = executor.__call__
    products = interpreter.InterpreterBuilder.create_dot

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        _count_variant(self, args, kwargs)
        inner = [_unwrap(self.fn, arg) for arg in args]
        inner_kwargs = {name: _unwrap(self.fn, arg) for name, arg in kwargs.items()}
        known = {name: arg for name, arg in inner_kwargs.items() if name in self.arg_names}
        bound = inspect.getcallargs(self.fn, *inner, **known)
        is_cheap = self.fn.__name__ in CHEAP
        twin = TWINS.get(self.fn.__name__) if _USES_TWINS or (SKIPS and is_cheap) else None

        def run() -> None:
            if twin is not None:
                with torch.inference_mode():
                    twin(SimpleNamespace(**bound))
                return
            with _LOCK:
                execute(self, *inner, **inner_kwargs)

        if (SKIPS and not is_cheap) or not all(self.grid):  # Triton launches nothing for an empty grid
            return
        run()
        tape = current_tape()
        if tape is not None:
            tape.calls.append(run)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return products(self, _widened(interpreter, a), _widened(interpreter, b), d, *rest)

    make = interpreter.InterpretedFunction.__init__

    def init(self: Any, fn: Any, **kwargs: Any) -> None:
        _UNSPECIALIZED[fn.__name__] = frozenset(kwargs.get("do_not_specialize") or ())
        _UNALIGNED[fn.__name__] = frozenset(kwargs.get("do_not_specialize_on_alignment") or ())
        make(self, fn, **kwargs)

    interpreter.InterpretedFunction.__init__ = init
    executor.__call__ = launch
    interpreter.InterpreterBuilder.create_dot = create_dot


def install_launch(module: ModuleType) -> None:
    """Kernels of an interpreter do not overlap."""
    module.gdc_wait = module.gdc_launch_dependents = lambda *args, **kwargs: None  # type: ignore[attr-defined]


def _unwrap(fn: Any, arg: Any) -> Any:
    if isinstance(arg, DryTensor):
        return arg.inner
    if isinstance(arg, torch.Tensor):
        raise ValueError(f"Pointer argument of {fn.__name__} cannot be accessed from Triton (cpu tensor?)")
    if isinstance(arg, tuple):
        return type(arg)(_unwrap(fn, item) for item in arg)
    return arg


def _widened(interpreter: ModuleType, handle: Any) -> Any:
    tl = interpreter.tl
    if handle.get_element_ty() != tl.bfloat16:
        return handle
    data = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(data, tl.float32)


def _count_variant(self: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    names = dict(zip(self.arg_names, args, strict=False)) | kwargs
    kernel, parts = self.fn.__name__, []
    for name, value in names.items():
        if name in _UNSPECIALIZED.get(kernel, ()):
            parts.append(f"{name}:any")
        elif isinstance(value, torch.Tensor):
            is_told = name not in _UNALIGNED.get(kernel, ())
            aligned = "!" if is_told and value.data_ptr() % 16 else ""
            parts.append(f"{name}:{str(value.dtype)[6:]}{aligned}")
        elif isinstance(value, bool) or value is None or name in self.constexprs or name not in self.arg_names:
            parts.append(f"{name}={value}")
        elif isinstance(value, int):
            kind = "1" if value == 1 else "i64" if abs(value) >= 1 << 31 else "i32"
            parts.append(f"{name}:{kind}{'/16' if value % 16 == 0 else ''}")
        else:
            parts.append(f"{name}:{type(value).__name__}")
    count(VARIANTS, (kernel, " ".join(parts)))
