"""Parcels: what goes in comes out, through the receiver's memory and without."""

from __future__ import annotations

import pickle

import numpy as np
import torch
from fake_stream_device import FakeMemory, FakeStreamDevice
from hypothesis import given
from hypothesis import strategies as st

from raypp.encoder.delivery import ItemReceiver, ItemSender
from raypp.encoder.protocol import EncodedItem

CPU = torch.device("cpu")
MEMORY_BYTES = 4096

token_counts = st.lists(st.integers(1, 60), max_size=8)


def _items(token_counts: list[int], dtype: torch.dtype) -> list[EncodedItem]:
    generator = torch.Generator().manual_seed(len(token_counts))
    return [
        EncodedItem(bytes([index]) * 16, torch.randn(3, count, 5, generator=generator).to(dtype))
        for index, count in enumerate(token_counts)
    ]


def _check(found: list[EncodedItem], items: list[EncodedItem]) -> None:
    assert [item.key for item in found] == [item.key for item in items]
    for got, given_item in zip(found, items, strict=True):
        assert got.rows.dtype == given_item.rows.dtype
        assert torch.equal(got.rows, given_item.rows)


@given(token_counts, st.sampled_from([torch.float32, torch.bfloat16]))
def test_rows_travel_in_the_parcels(token_counts, dtype):
    items, sender = _items(token_counts, dtype), ItemSender(CPU)
    receiver = ItemReceiver(CPU, lambda _: FakeStreamDevice(FakeMemory()))
    assert not sender.writes_to_receiver
    found = []
    for parcel in sender.parcels(items, None):
        found += receiver.take_in(0, pickle.loads(pickle.dumps(parcel)))
    _check(found, items)


@given(token_counts, st.sampled_from([torch.float32, torch.bfloat16]))
def test_rows_go_through_the_receivers_memory_one_parcel_at_a_time(token_counts, dtype):
    device = FakeStreamDevice(FakeMemory())
    try:
        receiver = ItemReceiver(CPU, lambda _: device)
        sender = ItemSender(CPU, device, receiver.open(1, MEMORY_BYTES), MEMORY_BYTES)
        assert receiver.open(1, MEMORY_BYTES) == receiver.open(1, MEMORY_BYTES)
        assert receiver.open(0, MEMORY_BYTES) != receiver.open(1, MEMORY_BYTES)
        items, found = _items(token_counts, dtype), []
        for parcel in sender.parcels(items, None):
            too_large = len(parcel.keys) == 1 and parcel.offsets[-1] > MEMORY_BYTES
            assert (parcel.payload is None) != too_large
            assert too_large or parcel.offsets[-1] <= MEMORY_BYTES
            found += receiver.take_in(1, pickle.loads(pickle.dumps(parcel)))
        _check(found, items)
    finally:
        device.close()


def test_what_was_taken_in_is_the_receivers_own():
    device = FakeStreamDevice(FakeMemory())
    try:
        receiver = ItemReceiver(CPU, lambda _: device)
        sender = ItemSender(CPU, device, receiver.open(0, MEMORY_BYTES), MEMORY_BYTES)
        first, second = _items([4, 4], torch.float32)
        [taken] = [item for parcel in sender.parcels([first], None) for item in receiver.take_in(0, parcel)]
        for parcel in sender.parcels([second], None):
            receiver.take_in(0, parcel)
        assert torch.equal(taken.rows, first.rows)
    finally:
        device.close()


def test_a_payload_that_is_shared_is_copied():
    [item] = _items([4], torch.float32)
    [parcel] = ItemSender(CPU).parcels([item], None)
    assert parcel.payload is not None
    parcel.payload.flags.writeable = False  # as Ray hands it out
    [taken] = ItemReceiver(CPU, lambda _: FakeStreamDevice(FakeMemory())).take_in(0, parcel)
    before = np.array(parcel.payload)
    taken.rows.zero_()
    np.testing.assert_array_equal(parcel.payload, before)
