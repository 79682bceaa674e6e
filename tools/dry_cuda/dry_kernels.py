"""Launches of Triton kernels: their arguments are checked, and what a GPU would compile for them is counted."""

from __future__ import annotations

import inspect
import threading
from types import ModuleType
from typing import Any

import torch
from dry_report import VARIANTS, count
from dry_tensor import DryTensor, current_tape

from tools.quick_interpreter import make_quick

_COMPUTED = frozenset({"_decode_inputs", "_hold", "_propose", "_verify"})
"""Kernels that run: a driver hears how many tokens rows have, and others read what they write."""
_UNSPECIALIZED: dict[str, frozenset[str]] = {}
_UNALIGNED: dict[str, frozenset[str]] = {}
_LOCK = threading.RLock()  # the interpreter is one for all threads


def install(interpreter: ModuleType) -> None:
    """Change Triton's interpreter."""
    make_quick(interpreter)
    executor = interpreter.GridExecutor
    execute = executor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        _count_variant(self, args, kwargs)
        inner = [_unwrap(self.fn, arg) for arg in args]
        inner_kwargs = {name: _unwrap(self.fn, arg) for name, arg in kwargs.items()}
        known = {name: arg for name, arg in inner_kwargs.items() if name in self.arg_names}
        given = inspect.getcallargs(self.fn, *inner, **known)  # else the arguments are wrong

        def run() -> None:
            with _LOCK:
                if self.fn.__name__ == "_propose":
                    _propose(given)
                else:
                    execute(self, *inner, **inner_kwargs)

        if self.fn.__name__ not in _COMPUTED or not all(self.grid):  # Triton launches nothing for an empty grid
            return
        run()
        tape = current_tape()
        if tape is not None:
            tape.calls.append(run)

    make = interpreter.InterpretedFunction.__init__

    def init(self: Any, fn: Any, **kwargs: Any) -> None:
        _UNSPECIALIZED[fn.__name__] = frozenset(kwargs.get("do_not_specialize") or ())
        _UNALIGNED[fn.__name__] = frozenset(kwargs.get("do_not_specialize_on_alignment") or ())
        make(self, fn, **kwargs)

    interpreter.InterpretedFunction.__init__ = init
    executor.__call__ = launch


def install_launch(module: ModuleType) -> None:
    """Kernels of an interpreter do not overlap."""
    module.gdc_wait = module.gdc_launch_dependents = lambda *args, **kwargs: None  # type: ignore[attr-defined]


def _propose(given: dict[str, Any]) -> None:
    """Leave what the kernel of this name does; in the interpreter that is half of the time of a run with drafts."""
    from raypp.ops.ngram import propose_ngrams_by_row

    rows, lengths = given["rows"], given["lengths"].clamp(min=1)  # of rows that are padding, too
    sizes = {"window": given["window"], "min_n": given["MIN_N"], "max_n": given["MAX_N"], "num_drafts": given["K"]}
    found = propose_ngrams_by_row(given["tokens"], rows, lengths, **sizes)
    for left, made in zip((given["drafts"], given["num_proposed"]), found, strict=True):
        left[: len(rows)].copy_(made)


def _unwrap(fn: Any, arg: Any) -> Any:
    if isinstance(arg, DryTensor):
        return arg.inner
    if isinstance(arg, torch.Tensor):
        raise ValueError(f"Pointer argument of {fn.__name__} cannot be accessed from Triton (cpu tensor?)")
    if isinstance(arg, tuple):
        return type(arg)(_unwrap(fn, item) for item in arg)
    return arg


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
