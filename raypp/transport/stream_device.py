"""What a link that lives on streams needs of a device: memory that neighbours can map, and flags on the stream.

The link's protocol knows a device by this interface alone, so that a test can run it without a GPU.
"""

from __future__ import annotations

from typing import Protocol

import torch


class StreamDevice(Protocol):
    """One GPU as one process sees it. Addresses are the process's own; a flag is the address of 4 aligned bytes."""

    def allocate(self, num_bytes: int) -> int:
        """Return the address of an allocation of its own, which `export` can hand out.

        Raises:
            ResourceError: there is not enough memory.
        """

    def free(self, address: int) -> None:
        """Free an allocation. Nobody may have it mapped any more."""

    def export(self, address: int) -> bytes:
        """Return what another process needs to map an allocation.

        Raises:
            ResourceError: the device does not share memory between processes.
        """

    def map(self, handle: bytes) -> int:
        """Return the address at which another process's allocation now lies in this one.

        Raises:
            ResourceError: this process cannot reach that memory.
        """

    def unmap(self, address: int) -> None:
        """Undo `map`."""

    def tensor(self, address: int, num_bytes: int) -> torch.Tensor:
        """Return the bytes there as a uint8 tensor of this device. It does not own them."""

    def wait(self, flag: int, value: int) -> None:
        """Let the current stream wait until the flag has reached `value` (`flags.has_reached`). Returns at once."""

    def write(self, flag: int, value: int) -> None:
        """Let the current stream write the flag, visibly after all that it wrote before. Returns at once."""

    def force(self, flag: int, value: int) -> None:
        """Write the flag now, past whatever the current stream waits for. From any thread."""

    def settle(self) -> None:
        """Wait until the device has done all that this process gave it. At start only: it may block for ever."""

    def drain(self, timeout_s: float) -> bool:
        """Wait until the stream that was used last has done all it was given; return whether it has."""

    def close(self) -> None:
        """Release what belongs to the device object itself."""
