"""An encoder's orders: caches, batches, faults, parcels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from toy_tower import PATCH_DIM, ToyTower, toy_item

from raypp.encoder.delivery import ItemReceiver, ItemSender, Parcel
from raypp.encoder.encoder_graphs import EncoderCudaGraphManager
from raypp.encoder.protocol import EncodedItem
from raypp.encoder.worker import EncoderWorker
from raypp.errors import RequestError
from raypp.graphs.buckets import Buckets
from raypp.prompt_items import EncoderItem

CPU = torch.device("cpu")


class Door:
    """A worker, its parcels, and what arrives."""

    def __init__(self, tower: ToyTower, cache_bytes: int = 1 << 20) -> None:
        manager = EncoderCudaGraphManager(tower, Buckets({4, 8}), 3, CPU, None)
        self.worker = EncoderWorker(manager, cache_bytes, CPU)
        self.arrived: list[EncodedItem] = []
        self._receiver = ItemReceiver(CPU, lambda _: pytest.fail("no memory is shared"))

    def deliver(self, items: list[EncoderItem]) -> list:
        return self.worker.deliver(items, [(ItemSender(CPU), self._take)])

    def _take(self, parcel: Parcel) -> None:
        self.arrived.extend(self._receiver.take_in(0, parcel))


class FailingTower(ToyTower):
    """Runs out of memory for items of more tokens than it can take."""

    def eager_forward(self, batch):
        if len(batch.item_of_token) > 12:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().eager_forward(batch)


def narrow_item() -> EncoderItem:
    return EncoderItem.of(np.zeros((6, PATCH_DIM - 1), np.uint8), (6, 1, 1), 2)


def test_everything_arrives_once_and_what_is_known_is_not_encoded_again():
    door = Door(ToyTower())
    items = [toy_item(count, seed) for seed, count in enumerate((6, 9, 30, 3, 12))]
    assert door.deliver(items) == []
    assert sorted(item.key for item in door.arrived) == sorted(item.key for item in items)
    assert door.deliver([*items[1:3], toy_item(4, 99)]) == []
    stats = door.worker.stats()
    assert (stats["num_items"], stats["cache_queries"], stats["cache_hits"]) == (6, 8, 2)
    assert len(door.arrived) == 8
    assert torch.equal(door.arrived[5].rows, next(i for i in door.arrived if i.key == items[1].key).rows)


def test_without_room_in_the_cache_everything_is_encoded_again():
    door = Door(ToyTower(), cache_bytes=0)
    for _ in range(2):
        door.deliver([toy_item(6)])
    assert door.worker.stats()["num_items"] == 2


def test_an_item_at_fault_does_not_take_its_batch_with_it():
    door, bad = Door(ToyTower()), narrow_item()
    [fault] = door.deliver([toy_item(3, 1), bad, toy_item(6, 2)])
    assert fault.key == bad.key
    assert isinstance(fault.error, RequestError)
    assert "6 patches" in fault.error.got
    assert len(door.arrived) == 2


def test_an_item_too_large_for_the_memory_is_named():
    door, large = Door(FailingTower()), toy_item(60)
    [fault] = door.deliver([large, toy_item(3, 1)])
    assert (fault.key, len(door.arrived)) == (large.key, 1)
    assert "too large" in fault.error.message


def test_encoding_for_oneself_gives_rows_or_errors():
    door, good, bad = Door(ToyTower()), toy_item(6), narrow_item()
    results = door.worker.encode([good, bad])
    assert results[good.key].rows.shape[1] == 2
    assert isinstance(results[bad.key], RequestError)
    assert not door.arrived
