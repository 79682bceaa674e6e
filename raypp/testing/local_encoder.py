"""The encoder of an engine that lives in one process: encodes when it is told to, in the calling thread. For tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from raypp.driver.item_encoders import ItemEvent, ItemFailed, ItemsDropped, ItemsStored, encoder_sums
from raypp.encoder.build_encoder import build_manager
from raypp.encoder.delivery import ItemReceiver, ItemSender, Parcel
from raypp.encoder.worker import EncoderWorker
from raypp.models.registry import build_encoder
from raypp.models.weights import open_weights
from raypp.plan.engine_plan import EnginePlan
from raypp.prompt_items import EncoderItem
from raypp.stage.step_items import ItemStore
from raypp.transport.ipc.cuda_device import CudaDevice


class LocalEncoder:
    """The plan's own tower behind its graphs' manager, cache and parcels. An `ItemEncoders`.

    Args:
        plan: Of the engine.
        store: Of the first stage.
    """

    def __init__(self, plan: EnginePlan, store: ItemStore) -> None:
        spec, device = plan.encoders.spec(0), torch.device(plan.device)
        source = open_weights(spec.load_format, spec.model_path, spec.seed, device)
        tower = build_encoder(plan.model, dtype=getattr(torch, plan.dtype), device=device, source=source)
        self.worker = EncoderWorker(build_manager(tower, spec), spec.cache_bytes, device)
        self._store = store
        self._sender = ItemSender(device)
        self._receiver = ItemReceiver(device, CudaDevice)
        self._events: list[ItemEvent] = []

    def encode(self, items: Sequence[EncoderItem]) -> None:
        """Encode the items, and put them into the store."""
        faults = {fault.key: fault.error for fault in self.worker.deliver(items, self._sender, self._put)}
        self._events.append(ItemsStored([item.key for item in items if item.key not in faults]))
        self._events += [ItemFailed(key, error) for key, error in faults.items()]

    def drop(self, keys: Sequence[bytes]) -> None:
        """Take embeddings out of the store."""
        for key in keys:
            self._store.drop(key)
        self._events.append(ItemsDropped(keys))

    def poll(self) -> list[ItemEvent]:
        """Return what happened since the last call."""
        events, self._events = self._events, []
        return events

    def stats(self) -> dict[str, Any]:
        """Return the encoder's figures."""
        counted = self.worker.stats()
        return {"encoders": {"num_encoders": 1, "num_up": 1, "actors": [counted]}, **encoder_sums([counted])}

    def _put(self, parcel: Parcel) -> None:
        for item in self._receiver.take_in(0, parcel):
            self._store.put(item)
