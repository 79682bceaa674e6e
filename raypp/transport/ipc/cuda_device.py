"""A GPU as an `ipc` link needs it: shared memory and stream flags, through CUDA's driver API (cuda-bindings 13).

It does not allocate through torch: torch's caching allocator hands out parts of larger segments, and a handle shares
the whole segment.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from raypp.errors import ConfigError, ResourceError, install
from raypp.transport.gpu_access import CurrentStream, tensor_at

_GRANULARITY = 1 << 21
_POLL_S = 0.001


class CudaDevice:
    """One GPU as one process sees it. Addresses are the process's own; a flag is the address of 4 aligned bytes.

    Tests and measurements without a GPU put other classes with these methods in its place.

    Args:
        device: A CUDA device with an index. It becomes the current one.

    Raises:
        ConfigError: cuda-bindings is not installed.
        ResourceError: the device cannot be used.
    """

    def __init__(self, device: torch.device) -> None:
        self._driver = _import_driver()
        self._device = self.torch_device = device
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # makes torch's context, which the driver API then uses
        self._context = self._call("find the context", self._driver.cuCtxGetCurrent)
        self._thread = threading.get_ident()
        self._current = CurrentStream(device)
        self._last_stream: torch.cuda.Stream | None = None
        self._wait_flags = self._geq_flags()
        _, greatest = self._call("ask for priorities", self._driver.cuCtxGetStreamPriorityRange)
        # A stream of another priority does not queue behind torch's streams, even where all share one connection. It
        # stays until the process ends: destroying it could wait for its work.
        self._force_stream = self._call(
            "make a stream",
            self._driver.cuStreamCreateWithPriority,
            int(self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING),
            greatest,
        )

    def allocate(self, num_bytes: int) -> int:
        """Return the address of an allocation of its own, which `export` can hand out.

        Raises:
            ResourceError: there is not enough memory.
        """
        # CUDA packs small allocations together, and one handle would share them all.
        rounded = -(-num_bytes // _GRANULARITY) * _GRANULARITY
        self._enter()
        return int(self._call(f"allocate {rounded} bytes for link slots", self._driver.cuMemAlloc, rounded))

    def free(self, address: int) -> None:
        """Free an allocation. No process may have it mapped any more."""
        self._enter()
        self._call("free link slots", self._driver.cuMemFree, address)

    def export(self, address: int) -> bytes:
        """Return the handle with which another process maps an allocation, 64 bytes.

        Raises:
            ResourceError: the device does not share memory between processes.
        """
        self._enter()
        handle = self._call("share memory", self._driver.cuIpcGetMemHandle, address)
        return bytes(handle.reserved)

    def map(self, handle: bytes) -> int:
        """Return the address that another process's allocation gets in this one. Its GPU may be another.

        Raises:
            ResourceError: this process cannot reach that memory.
        """
        self._enter()
        ipc_handle = self._driver.CUipcMemHandle()
        ipc_handle.reserved = handle
        flags = int(self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        return int(self._call("map a neighbour's memory", self._driver.cuIpcOpenMemHandle, ipc_handle, flags))

    def unmap(self, address: int) -> None:
        """Undo `map`."""
        self._enter()
        self._call("unmap a neighbour's memory", self._driver.cuIpcCloseMemHandle, address)

    def tensor(self, address: int, num_bytes: int) -> torch.Tensor:
        """Return the bytes there as a uint8 tensor of this device. It does not own them."""
        return tensor_at(address, num_bytes, self._device)

    def wait(self, flag: int, value: int) -> None:
        """Let the current stream wait until the flag has reached `value`, modulo 2^32. Returns at once."""
        stream = self._enter_stream()
        self._call("wait on a flag", self._driver.cuStreamWaitValue32, stream, flag, value, self._wait_flags)

    def write(self, flag: int, value: int) -> None:
        """Let the current stream write the flag, visibly after all that it wrote before. Returns at once."""
        self._call("write a flag", self._driver.cuStreamWriteValue32, self._enter_stream(), flag, value, 0)

    def force(self, flag: int, value: int) -> None:
        """Write the flag now, on a stream of its own, whatever other streams wait for. From any thread."""
        # `_enter` goes by the thread's id, which a later thread can get again.
        self._call("enter the context", self._driver.cuCtxSetCurrent, self._context)
        self._call("force a flag", self._driver.cuStreamWriteValue32, self._force_stream, flag, value, 0)

    def settle(self) -> None:
        """Wait until the device has done all that this process gave it. At start only: it has no deadline."""
        torch.cuda.synchronize(self._device)

    def drain(self, timeout_s: float, stream: torch.cuda.Stream | None = None) -> bool:
        """Wait up to `timeout_s` until a stream, or the one that was used last, is done; return whether it is."""
        stream = stream or self._last_stream
        if stream is None:
            return True
        ends = time.monotonic() + timeout_s
        done = torch.cuda.Event()
        try:
            done.record(stream)
            while not done.query():
                if time.monotonic() > ends:
                    return False
                time.sleep(_POLL_S)
        except RuntimeError:
            return False  # the device has failed; its memory cannot be given back in order
        return True

    def _geq_flags(self) -> int:
        """Return the options of a wait for a flag, modulo 2^32, after which the sender's data is visible as well."""
        flags = int(self._driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        number = self._call("find the device", self._driver.cuCtxGetDevice)
        can_flush = self._driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES
        # Where the device may reorder writes of another one, the wait has to flush them.
        if self._call("ask for an attribute", self._driver.cuDeviceGetAttribute, can_flush, number):
            flags |= int(self._driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_FLUSH)
        return flags

    def _enter_stream(self) -> int:
        self._enter()
        self._last_stream = self._current.get()
        return self._current.handle

    def _enter(self) -> None:
        """Make the context current in this thread: a stage opens its links in one thread and runs in another."""
        thread = threading.get_ident()
        if thread != self._thread:
            self._call("enter the context", self._driver.cuCtxSetCurrent, self._context)
            self._thread = thread

    def _call(self, what: str, function: Any, *args: object) -> Any:
        """Call the driver API, and return what it returns besides the error: nothing, a value, or several."""
        error, *values = function(*args)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise self._failed(what, error)
        return values[0] if len(values) == 1 else values

    def _failed(self, what: str, error: Any) -> ResourceError:
        _, name = self._driver.cuGetErrorName(error)
        try:
            free, total = torch.cuda.mem_get_info(self._device)
            memory = f", {free >> 20} of {total >> 20} MiB free"
        except RuntimeError:  # the device has failed, and answers nothing any more
            memory = ""
        hint = "containers need --ipc=host; without, links go by transport='nccl', members by NCCL_P2P_DISABLE=1"
        if error == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            hint = "a slot holds the largest step: lower max_num_batched_tokens, or gpu_memory_utilization"
        return ResourceError(
            f"CUDA could not {what}", got=f"{name.decode() if name else error} on {self._device}{memory}", hint=hint
        )


def _import_driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ConfigError("ipc links need the package cuda-bindings", got=str(error), hint=install("gpu")) from error
    return driver
