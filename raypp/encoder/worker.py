"""Executes an encoder's orders: looks in the cache, encodes the rest in batches, and sends everything in parcels.

items --cache--> known --------------------+
          +----> batches --encode--> ------+--> parcels, while the next batch is computed
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Generic

import torch

from raypp.encoder.delivery import ItemSender, Parcel
from raypp.encoder.encoder_graphs import EncoderCudaGraphManager, PackedBatch
from raypp.encoder.lru_cache import LruCache
from raypp.encoder.protocol import BatchT, EncodedItem, ItemFault
from raypp.errors import RayppError, RequestError
from raypp.prompt_items import EncoderItem

logger = logging.getLogger(__name__)


Way = tuple[ItemSender, Callable[[Parcel], None]]
"""What makes parcels for a receiver, and what takes one there and returns when it was taken in."""


class EncoderWorker(Generic[BatchT]):
    """One encoder with its cache. Not for several threads at a time.

    Args:
        manager: Encodes.
        cache_bytes: Embeddings to keep.
        device: Where they are.
    """

    def __init__(self, manager: EncoderCudaGraphManager[BatchT], cache_bytes: int, device: torch.device) -> None:
        self._manager = manager
        self._cache: LruCache[bytes, EncodedItem] = LruCache(cache_bytes)
        self._device = device
        self._num_queries = 0
        self._num_hits = 0

    @property
    def budgets(self) -> tuple[int, ...]:
        """Tokens of the captured batches."""
        return self._manager.budgets

    @torch.inference_mode()
    def deliver(self, items: Sequence[EncoderItem], ways: Sequence[Way]) -> list[ItemFault]:
        """Encode items and hand them on; return those that cannot be encoded.

        Args:
            items: Each once.
            ways: To all members of the first stage.

        Raises:
            RuntimeError: the device has failed.
        """
        faults: list[ItemFault] = []
        ready: list[EncodedItem] = []
        computed: torch.cuda.Event | None = None
        for encoded in self._encode(items, faults):
            now = self._event()
            _hand_on(ready, computed, ways)  # while this batch is computed
            ready, computed = encoded, now
        _hand_on(ready, computed, ways)
        return faults

    @torch.inference_mode()
    def encode(self, items: Sequence[EncoderItem]) -> dict[bytes, EncodedItem | RayppError]:
        """Return what the encoder makes of each item, or why it makes nothing of it, by key."""
        faults: list[ItemFault] = []
        results: dict[bytes, EncodedItem | RayppError] = {
            item.key: item for batch in self._encode(items, faults) for item in batch
        }
        return results | {fault.key: fault.error for fault in faults}

    def stats(self) -> dict[str, Any]:
        """Return counters and figures, as plain data."""
        stats = self._manager.stats
        return asdict(stats) | {
            "hit_rate": stats.hit_rate,
            "padding_share": stats.padding_share,
            "budgets": list(self._manager.budgets),
            "cache_bytes": self._cache.used,
            "cache_queries": self._num_queries,
            "cache_hits": self._num_hits,
        }

    def _encode(self, items: Sequence[EncoderItem], faults: list[ItemFault]) -> Iterator[list[EncodedItem]]:
        """Yield the items in groups: the known ones, then batch by batch. What fails goes to `faults`."""
        found = {item.key: self._cache.get(item.key) for item in items}
        known = [encoded for encoded in found.values() if encoded is not None]
        self._num_queries += len(found)
        self._num_hits += len(known)
        if known:
            yield known
        missing = [item for item in items if found[item.key] is None]
        for packed in self._manager.pack(missing):
            encoded = self._encode_batch(missing, packed, faults)
            for item in encoded:
                self._cache.put(item.key, item, item.num_bytes)
            yield encoded

    def _encode_batch(
        self, items: Sequence[EncoderItem], packed: PackedBatch, faults: list[ItemFault]
    ) -> list[EncodedItem]:
        """Encode a batch; one that fails item by item, so that only those at fault fail."""
        try:
            return self._manager.encode_batch(items, packed)
        except (RuntimeError, ValueError, IndexError) as error:
            self._check_device()
            if len(packed.indices) == 1:
                item = items[packed.indices[0]]
                logger.warning("an image of %s patches cannot be encoded: %s", len(item.patches), error)
                faults.append(ItemFault(item.key, _fault_of(item, error)))
                return []
        encoded = []
        for index in packed.indices:
            for alone in self._manager.pack([items[index]]):
                whole = PackedBatch((index,), alone.num_tokens, alone.budget)
                encoded += self._encode_batch(items, whole, faults)
        return encoded

    def _event(self) -> torch.cuda.Event | None:
        """Return when all that was queued so far is computed."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _check_device(self) -> None:
        """Raise when the device has failed: then it is no item's fault."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()


def _fault_of(item: EncoderItem, error: Exception) -> RayppError:
    size = f"{len(item.patches)} patches, {item.num_tokens} tokens"
    if isinstance(error, torch.OutOfMemoryError):
        return RequestError(
            "the image is too large for the encoder's memory",
            got=size,
            hint="a smaller image, or a larger encoder_num_gpus",
        )
    return RequestError("the encoder cannot take the image", got=f"{size}: {error}")


def _hand_on(items: Sequence[EncodedItem], computed: torch.cuda.Event | None, ways: Sequence[Way]) -> None:
    for sender, take in ways:
        for parcel in sender.parcels(items, computed):
            take(parcel)
