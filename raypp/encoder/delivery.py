"""Sends embeddings from an encoder to the first stage, in parcels.

    encoder                                            first stage
    ItemSender --rows--> memory of the stage's GPU --> ItemReceiver --copy--> tensors of its own --> its store
        +------------- parcel: keys, shapes --------------^
        +------------- parcel with the rows in it --------^   on CPUs, between nodes, and what is too large

The memory is the receiver's and holds one parcel at a time: the next is written when the one before was taken in, which
the sender learns by the answer to its call. No flag is waited for, by no stream: an encoder that dies half-way leaves
rows that are never read, and the next one writes over them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from raypp.encoder.protocol import EncodedItem
from raypp.transport.ipc.cuda_device import CudaDevice

_ALIGNMENT = 256
_HOST_PARCEL_BYTES = 1 << 26


@dataclass(frozen=True)
class Parcel:
    """Some items' embeddings, on their way."""

    keys: tuple[bytes, ...]
    shapes: tuple[tuple[int, ...], ...]  # [1 + L, N, H] of each
    dtype: str
    payload: NDArray[np.uint8] | None  # all rows, each item's aligned; None: they lie in the receiver's memory

    @property
    def offsets(self) -> list[int]:
        """Where each item's rows begin, in bytes; and where the last one's end."""
        sizes = [_aligned(int(np.prod(shape)) * getattr(torch, self.dtype).itemsize) for shape in self.shapes]
        return [sum(sizes[:index]) for index in range(len(sizes) + 1)]


class ItemSender:
    """The encoder's end.

    Args:
        device: The encoder's.
        memory_device: Maps the receiver's memory on that device; None: everything travels in the parcels.
        handle: Of the receiver's memory for this encoder, when there is a memory device.
        num_bytes: Of that memory.
    """

    def __init__(
        self, device: torch.device, memory_device: CudaDevice | None = None, handle: bytes = b"", num_bytes: int = 0
    ) -> None:
        self._num_bytes = num_bytes if memory_device is not None else _HOST_PARCEL_BYTES
        self._memory = memory_device.tensor(memory_device.map(handle), num_bytes) if memory_device is not None else None
        # Not the encoder's stream: that has begun with the next batch.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def writes_to_receiver(self) -> bool:
        """Whether rows go to the receiver's memory; else they travel in the parcels."""
        return self._memory is not None

    def parcels(self, items: Sequence[EncodedItem], computed: torch.cuda.Event | None) -> Iterator[Parcel]:
        """Return the items in parcels, complete. Ask for the next when the one before was taken in.

        Args:
            items: Which.
            computed: When they are computed, on a GPU.
        """
        batch: list[EncodedItem] = []
        filled = 0
        for item in items:
            size = _aligned(item.num_bytes)
            if batch and filled + size > self._num_bytes:
                yield self._parcel(batch, filled, computed)
                batch, filled = [], 0
            batch.append(item)
            filled += size
        if batch:
            yield self._parcel(batch, filled, computed)

    def _parcel(self, items: Sequence[EncodedItem], num_bytes: int, computed: torch.cuda.Event | None) -> Parcel:
        if self._stream is None:
            return self._pack(items, num_bytes)
        assert computed is not None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(computed)
            parcel = self._pack(items, num_bytes)
        self._stream.synchronize()
        return parcel

    def _pack(self, items: Sequence[EncodedItem], num_bytes: int) -> Parcel:
        payload, target, offset = None, self._memory, 0
        if target is None or num_bytes > self._num_bytes:
            target = payload = torch.zeros(num_bytes, dtype=torch.uint8)
        for item in items:
            target[offset : offset + item.num_bytes].copy_(_bytes_of(item.rows))
            offset += _aligned(item.num_bytes)
        return Parcel(
            keys=tuple(item.key for item in items),
            shapes=tuple(tuple(item.rows.shape) for item in items),
            dtype=str(items[0].rows.dtype).removeprefix("torch."),
            payload=None if payload is None else payload.numpy(),
        )


class ItemReceiver:
    """The first stage's end, for one encoder after the other.

    Args:
        device: Of the stage.
        memory_device: Makes what allocates shared memory; called for the first encoder that can reach it.
    """

    def __init__(self, device: torch.device, memory_device: Callable[[torch.device], CudaDevice]) -> None:
        self._device = device
        self._make_memory_device = memory_device
        self._memory_device: CudaDevice | None = None
        self._memories: dict[int, tuple[bytes, torch.Tensor]] = {}
        self._lock = threading.Lock()
        # Not the stage's stream: its steps do not wait for what arrives.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def open(self, encoder_index: int, num_bytes: int) -> bytes:
        """Return the handle of memory that an encoder writes into; one that was started again gets the same.

        It is kept to the end of the process: a dead encoder's last write may still be under way.

        Args:
            encoder_index: Whose memory.
            num_bytes: Of it; the same every time.
        """
        with self._lock:
            if self._memory_device is None:
                self._memory_device = self._make_memory_device(self._device)
            if encoder_index not in self._memories:
                base = self._memory_device.allocate(num_bytes)
                memory = self._memory_device.tensor(base, num_bytes)
                self._memories[encoder_index] = (self._memory_device.export(base), memory)
            return self._memories[encoder_index][0]

    def take_in(self, encoder_index: int, parcel: Parcel) -> list[EncodedItem]:
        """Return a parcel's items, complete, in memory of their own on the stage's device. From any thread."""
        if self._stream is None:
            return self._unpack(encoder_index, parcel)
        with torch.cuda.stream(self._stream):
            items = self._unpack(encoder_index, parcel)
        self._stream.synchronize()
        return items

    def _unpack(self, encoder_index: int, parcel: Parcel) -> list[EncodedItem]:
        memory = self._memories[encoder_index][1] if parcel.payload is None else None
        # What Ray hands out is read-only, and not to be kept.
        source = memory if memory is not None else torch.from_numpy(np.array(parcel.payload))
        dtype, offsets = getattr(torch, parcel.dtype), parcel.offsets
        items = []
        for key, shape, start in zip(parcel.keys, parcel.shapes, offsets, strict=False):
            num_bytes = int(np.prod(shape)) * dtype.itemsize
            rows = torch.empty(shape, dtype=dtype, device=self._device)
            _bytes_of(rows).copy_(source[start : start + num_bytes])
            items.append(EncodedItem(key, rows))
        return items


def _bytes_of(rows: torch.Tensor) -> torch.Tensor:
    """Return the memory of contiguous rows as bytes."""
    return rows.view(-1).view(torch.uint8)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
