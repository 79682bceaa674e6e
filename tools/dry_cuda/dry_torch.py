"""torch.cuda of devices that are none."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dry_machine
import torch
from dry_tensor import (
    DryTensor,
    Tape,
    current_tape,
    is_pinned,
    note_pinned,
    on_device,
    page_lock,
    page_unlock,
    run,
    set_sync_debug_mode,
    set_tape,
    waits,
)
from torch.library import Library

_LIBRARY = Library("aten", "IMPL", "CUDA")
_STREAMS = threading.local()
_HANDLES = itertools.count(1)
_GRAPH_BYTES = 1 << 16
_num_graphs = 0


def _load_guard() -> Any:
    """Return the library with the device guard, compiled at first use."""
    root = Path(torch.__file__).parent
    folder = Path(tempfile.gettempdir()) / f"dry_cuda_{torch.__version__}_{os.getuid()}"
    path = folder / "guard.so"
    if not path.exists():
        folder.mkdir(exist_ok=True)
        made = folder / f"{os.getpid()}.so"
        source = Path(__file__).with_name("guard.cpp")
        flags = ["-O1", "-std=c++20", "-shared", "-fPIC", "-w", f"-I{root}/include"]
        subprocess.run(["g++", *flags, "-o", made, source, f"-L{root}/lib", "-lc10"], check=True)
        made.rename(path)
    return ctypes.CDLL(str(path))


class Stream:
    """Does at once what it is told."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        index = device if isinstance(device, int) else None if device is None else torch.device(device).index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self.device_index = self.device.index
        self.cuda_stream = next(_HANDLES)
        self.priority = priority

    def synchronize(self) -> None:
        waits("Stream.synchronize")

    def query(self) -> bool:
        return True

    def wait_stream(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Event:
    """A moment on the host, of the device whose stream recorded it."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._has_time = enable_timing
        self._at: float | None = None
        self._device: Any = None

    def record(self, stream: Stream | None = None) -> None:
        assert stream is None or isinstance(stream, Stream)
        device = (stream or _current_stream()).device
        if self._device not in (None, device):
            raise RuntimeError(f"an event of {self._device} is recorded in a stream of {device}")
        self._at, self._device = time.perf_counter(), device

    def wait(self, stream: Stream | None = None) -> None:
        assert stream is None or isinstance(stream, Stream)

    def query(self) -> bool:
        if current_tape() is not None:
            raise RuntimeError("an event is asked for while a graph is recorded")
        return True

    def synchronize(self) -> None:
        waits("Event.synchronize")

    def elapsed_time(self, later: Event) -> float:
        if not (self._has_time and later._has_time) or self._at is None or later._at is None:
            raise ValueError("both events must have times, and be recorded")
        if self._device != later._device:
            raise RuntimeError(f"CUDA error: invalid resource handle: events of {self._device} and {later._device}")
        return (later._at - self._at) * 1e3


class CUDAGraph:
    """A tape."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._tape = Tape()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        global _num_graphs
        if current_tape() is not None:
            raise RuntimeError("a graph is being recorded already")
        if _current_stream() is _default_stream(torch.cuda.current_device()):
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        _num_graphs += 1
        self._tape = Tape()
        set_tape(self._tape)

    def capture_end(self) -> None:
        if current_tape() is None:
            raise RuntimeError("no graph is being recorded")
        set_tape(None)

    def replay(self) -> None:
        if current_tape() is not None:
            raise RuntimeError("a graph is replayed while one is recorded")
        self._tape.replay()

    def reset(self) -> None:
        self._tape = Tape()

    def pool(self) -> tuple[int, int]:
        return (0, 1)


@contextmanager
def graph(
    cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    """Record."""
    with stream_context(stream or Stream()):
        cuda_graph.capture_begin(pool, capture_error_mode)
        try:
            yield
        finally:
            cuda_graph.capture_end()


class CurrentStream:
    """See `raypp.transport.gpu_access`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def handle(self) -> int:
        return _current_stream(self._device).cuda_stream

    def get(self) -> Stream:
        return _current_stream(self._device)


_DEFAULTS: dict[int, Stream] = {}


def _default_stream(device: Any = None) -> Stream:
    index = _index(device)
    if index not in _DEFAULTS:
        _DEFAULTS[index] = Stream(index)
    return _DEFAULTS[index]


def _index(device: Any) -> int:
    if device is None:
        return torch.cuda.current_device()
    index = device if isinstance(device, int) else torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def _current_stream(device: Any = None) -> Stream:
    index = _index(device)
    return getattr(_STREAMS, "by_device", {}).get(index) or _default_stream(index)


def _set_stream(stream: Stream) -> None:
    if not hasattr(_STREAMS, "by_device"):
        _STREAMS.by_device = {}
    _STREAMS.by_device[stream.device.index] = stream
    torch.cuda.set_device(stream.device)


@contextmanager
def stream_context(stream: Stream | None) -> Iterator[None]:
    """Let a stream be the current one."""
    if stream is None:
        yield
        return
    device, before = torch.cuda.current_device(), _current_stream(stream.device)
    _set_stream(stream)
    try:
        yield
    finally:
        _set_stream(before)
        torch.cuda.set_device(device)


def _empty(size: Any, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **kwargs: Any) -> DryTensor:
    return DryTensor(torch.zeros(size, dtype=dtype, device="cpu"), on_device(device))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> DryTensor:
    return DryTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu").zero_(), on_device(device))


def _arange(*limits: Any, dtype: Any = None, device: Any = None, **kwargs: Any) -> DryTensor:
    return DryTensor(torch.arange(*limits, dtype=dtype, device="cpu"), on_device(device))


def _copy(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return run(torch.ops.aten.copy_.default, (to, source, non_blocking), {})


def _pinning(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made = function(*args, **kwargs)
        if pin_memory:
            assert made.device.type == "cpu", "only host memory can be pinned"
            note_pinned(made)
        return made

    return make


class _Generator(torch.Generator):
    """Of the host, whatever the device."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls)


def install() -> None:
    """Change torch."""
    guard = _load_guard()
    cuda = torch.cuda
    num_devices = dry_machine.num_visible()
    total = dry_machine.memory_bytes()
    for op, function in (
        ("empty.memory_format", _empty),
        ("empty_strided", _empty_strided),
        ("copy_", _copy),
        ("arange", _arange),  # torch would make an empty tensor, and let an operation enlarge it
        ("arange.start", _arange),
        ("arange.start_step", _arange),
    ):
        _LIBRARY.impl(op, function)
    from torch.utils._device import _device_constructors

    _device_constructors()  # remembers the functions as they are
    for name in ("empty", "zeros", "ones", "full", "tensor", "arange", "empty_like", "zeros_like"):
        setattr(torch, name, _pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, device=None: note_pinned(self.clone())  # type: ignore[assignment]
    torch.Tensor.is_pinned = lambda self, device=None: is_pinned(self)  # type: ignore[assignment]
    torch.Generator = _Generator  # type: ignore[misc]

    def set_device(device: Any) -> None:
        index = _index(device)
        if index >= num_devices:
            raise RuntimeError(f"CUDA error: invalid device ordinal ({index} of {num_devices})")
        guard.dry_set_device(index)

    def used() -> int:
        return (1 << 29) + _num_graphs * _GRAPH_BYTES

    def properties(device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(**fields, uuid=f"GPU-{_index(device)}")

    fields = dict(
        name="NVIDIA H200 (dry)",
        major=9,
        minor=0,
        total_memory=total,
        multi_processor_count=132,
        L2_cache_size=50 << 20,
        shared_memory_per_block_optin=232448,
        warp_size=32,
        regs_per_multiprocessor=65536,
    )
    changed: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: num_devices,
        "current_device": lambda: guard.dry_get_device(),  # hashable, unlike what ctypes has
        "set_device": set_device,
        "get_device_name": lambda device=None: fields["name"],
        "get_device_properties": properties,
        "get_device_capability": lambda device=None: (9, 0),
        "can_device_access_peer": lambda a, b: True,
        "is_bf16_supported": lambda *a, **k: True,
        "mem_get_info": lambda device=None: (total - used(), total),
        "memory_reserved": lambda device=None: 1 << 28,
        "memory_allocated": lambda device=None: 1 << 28,
        "max_memory_allocated": lambda device=None: 1 << 28,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "manual_seed_all": lambda seed: None,
        "manual_seed": lambda seed: None,
        "synchronize": lambda device=None: waits("synchronize"),
        "cudart": lambda: SimpleNamespace(cudaHostRegister=page_lock, cudaHostUnregister=page_unlock),
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "graph_pool_handle": lambda: (0, 1),
        "is_current_stream_capturing": lambda: current_tape() is not None,
        "stream": stream_context,
        "set_stream": _set_stream,
        "current_stream": _current_stream,
        "default_stream": _default_stream,
        "_sleep": lambda cycles: None,
        "set_sync_debug_mode": set_sync_debug_mode,
    }
    changed["default_generators"] = tuple(_Generator() for _ in range(num_devices))
    for name, value in changed.items():
        setattr(cuda, name, value)
