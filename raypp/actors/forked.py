"""Keeps a forked child process from using the Ray connection that it has a copy of.

Ray's threads are the parent's. Its exit hook, its objects and its library wait for them when a process ends, or crash.
"""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Iterator

import ray
from ray.experimental import internal_kv

_LIBRARY = "ray._raylet"


def leave_ray_alone() -> None:
    """Have this process, a forked child, end without a word to Ray, with the exit code that it would have."""
    atexit.unregister(ray.shutdown)
    for held in _objects_of_the_library():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))  # never freed
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # not everywhere, but where Ray's library is
        libc.on_exit(libc._exit, None)  # once Python has ended, and before the library's own destructors


def _objects_of_the_library() -> Iterator[object]:
    worker = ray._private.worker
    for holder in (worker.global_worker, worker._global_node, ray._private.state.state, internal_kv):
        for held in getattr(holder, "__dict__", {}).values():
            if type(held).__module__.startswith(_LIBRARY):
                yield held
