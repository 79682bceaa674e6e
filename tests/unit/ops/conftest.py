"""Kernels run in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from quick_interpreter import make_quick
    from triton.runtime import interpreter

    make_quick(interpreter)
