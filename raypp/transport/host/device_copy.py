"""Host links for stages whose tensors are on a GPU: each message is copied to the host, and back on the other side.

Every copy waits for the GPU. For `gloo` and `ray_collective`, where users ask for them or GPUs have no other link.
"""

from __future__ import annotations

import torch

from raypp.transport.link import LinkReceiver, LinkSender


class DeviceCopySender:
    """A sending end with one slot on the device; see `LinkSender`.

    Args:
        sender: The host link's end.
        slot_bytes: Of the edge.
        device: Where the stage computes.
    """

    def __init__(self, sender: LinkSender, slot_bytes: int, device: torch.device) -> None:
        self._sender = sender
        self._all_slots = torch.zeros(1, slot_bytes, dtype=torch.uint8, device=device)
        self._slot = self._all_slots[0]
        self._host_slot = self._slot[:0]

    @property
    def slots(self) -> torch.Tensor:
        """All slots, uint8 [num_slots, slot_bytes]."""
        return self._all_slots

    def acquire(self, step_id: int) -> torch.Tensor:
        """Return a slot, uint8 [slot_bytes], once the step's slot in host memory is free."""
        self._host_slot = self._sender.acquire(step_id)
        return self._slot

    def send(self, step_id: int, num_bytes: int) -> None:
        """Copy the message to the host, which waits for the stream, and send it."""
        self._host_slot[:num_bytes].copy_(self._slot[:num_bytes])
        self._sender.send(step_id, num_bytes)

    def abort(self) -> None:
        """End waits in progress. From any thread."""
        self._sender.abort()

    def close(self) -> None:
        """Release everything, once the messages that were sent are out."""
        self._sender.close()


class DeviceCopyReceiver:
    """A receiving end with slots on the device; see `LinkReceiver`.

    Args:
        receiver: The host link's end.
        num_slots: Of the edge.
        slot_bytes: Of the edge.
        device: Where the stage computes.
    """

    def __init__(self, receiver: LinkReceiver, num_slots: int, slot_bytes: int, device: torch.device) -> None:
        self._receiver = receiver
        self._all_slots = torch.zeros(num_slots, slot_bytes, dtype=torch.uint8, device=device)
        self._slots = self._all_slots.unbind()
        self._num_bytes: dict[int, int] = {}

    @property
    def slots(self) -> torch.Tensor:
        """All slots, uint8 [num_slots, slot_bytes]."""
        return self._all_slots

    def post_recv(self, step_id: int, num_bytes: int) -> None:
        """Say that the message will be wanted. From any one thread."""
        self._num_bytes[step_id] = num_bytes
        self._receiver.post_recv(step_id, num_bytes)

    def wait(self, step_id: int) -> torch.Tensor:
        """Return the step's slot, uint8 [slot_bytes], once its message is there and copied to the device."""
        slot, num_bytes = self._slots[step_id % len(self._slots)], self._num_bytes[step_id]
        slot[:num_bytes].copy_(self._receiver.wait(step_id)[:num_bytes])
        return slot

    def release(self, step_id: int) -> None:
        """Give the slot back."""
        del self._num_bytes[step_id]
        self._receiver.release(step_id)

    def abort(self) -> None:
        """End waits in progress. From any thread."""
        self._receiver.abort()

    def close(self) -> None:
        """Release everything."""
        self._receiver.close()
