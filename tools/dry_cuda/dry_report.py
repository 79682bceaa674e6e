"""What a dry run noticed: where the host would have waited for the device, and which kernels would be compiled."""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path

WAITS: Counter[tuple[str, str]] = Counter()
"""By what waited, and where in the project."""
VARIANTS: Counter[tuple[str, str]] = Counter()
"""Launches by kernel and by what it is specialized for."""
_LOCK = threading.Lock()


def call_site() -> str:
    """Return the innermost place in the project that led here, and who called it."""
    frame, found = sys._getframe(2), []
    while frame is not None and len(found) < 2:
        name = frame.f_code.co_filename
        if "/dry_cuda/" not in name and any(part in name for part in ("/raypp/", "/tests/", "/benchmarks/", "/tools/")):
            found.append(f"{'/'.join(Path(name).parts[-2:])}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(found)


def count(counter: Counter[tuple[str, str]], key: tuple[str, str]) -> None:
    """Count one."""
    with _LOCK:
        counter[key] += 1


def _write() -> None:
    folder = os.environ.get("DRY_REPORT")
    if not folder or not (WAITS or VARIANTS):
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    found = {"argv": sys.argv, "waits": [[*k, n] for k, n in WAITS.items()]}
    found["variants"] = [[*k, n] for k, n in VARIANTS.items()]
    (Path(folder) / f"{os.getpid()}.json").write_text(json.dumps(found, indent=1))


atexit.register(_write)
