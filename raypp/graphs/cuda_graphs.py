"""CUDA graphs by torch: one memory pool for all, one stream to record on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from raypp.graphs.pieces import MemoryUse, Replay
from raypp.transport.gpu_access import tensor_at


class CudaGraphs:
    """See `raypp.graphs.pieces.GraphMaker`.

    All graphs share a pool. They run one after the other in one stream, so none disturbs another while it runs. What a
    graph needed for itself is free for those recorded after it: so a replay may overwrite what later recordings left,
    and what they left must have been read by then. See docs/design/0125.

    Args:
        device: A CUDA device.
    """

    can_hold_break_points = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._spoiled: list[torch.cuda.CUDAGraph] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record on the stream for it. Nothing is collected meanwhile: freeing a tensor may be no part of a graph."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                yield
            torch.cuda.synchronize(self._device)
        finally:
            if was_enabled:
                gc.enable()

    def begin(self) -> None:
        """Begin a graph."""
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Replay:
        """End it; return its replay."""
        assert self._graph is not None
        graph, self._graph = self._graph, None
        graph.capture_end()
        return graph.replay

    def abandon(self) -> None:
        """End it after an error, which may have spoiled it."""
        graph, self._graph = self._graph, None
        if graph is None:
            return
        try:
            graph.capture_end()
        except RuntimeError:
            # torch goes on counting the pool as one that is recorded to, and asks the graph by which stream.
            self._spoiled.append(graph)
            self._pool = torch.cuda.graph_pool_handle()

    def memory(self) -> MemoryUse:
        """Return the device's memory in use."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        own_bytes = torch.cuda.memory_reserved(self._device)
        return MemoryUse(own_bytes, total_bytes - free_bytes - own_bytes)

    def trim(self) -> None:
        """Give back what the first, unrecorded runs of programs took on the stream for recording."""
        torch.cuda.empty_cache()

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor at the same memory that does not own it."""
        if not tensor.is_cuda or not tensor.numel():
            return tensor
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        memory = tensor_at(tensor.data_ptr(), span * tensor.element_size(), tensor.device)
        return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
