"""A CUDA stream and device memory by their bare handles: what torch's own compiler uses, without a Python object each.

A link asks for the current stream four times a step; `torch.cuda.current_stream` makes a new object each time and takes
ten times as long. `CurrentStream` makes one only when the handle has changed.
"""

from __future__ import annotations

import torch


class CurrentStream:
    """Finds the current stream of one device.

    Args:
        device: A CUDA device; without an index, the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index: int = torch.cuda.current_device() if device.index is None else device.index
        self._last: torch.cuda.Stream | None = None
        self._last_handle = 0

    @property
    def handle(self) -> int:
        """The current stream's CUDA handle."""
        return torch._C._cuda_getCurrentRawStream(self._index)

    def get(self) -> torch.cuda.Stream:
        """Return the current stream."""
        handle = self.handle
        if self._last is None or handle != self._last_handle:
            self._last = torch.cuda.current_stream(self._device)
            self._last_handle = handle
        return self._last


def tensor_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return the bytes at an address as a tensor, uint8 [num_bytes], that does not own them.

    torch's public way, `__cuda_array_interface__`, asks the driver which device an address belongs to. For memory of a
    neighbour's GPU the answer would be that GPU, while the tensor must belong to the GPU that writes into it.

    Args:
        address: Where they are.
        num_bytes: How many.
        device: The tensor's device; it must be able to reach them.
    """
    storage = torch._C._construct_storage_from_data_pointer(address, device, num_bytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
