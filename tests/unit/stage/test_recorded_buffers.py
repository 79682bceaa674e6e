"""Messages come out of the slot that a number says, and go into it; nothing else is touched."""

from __future__ import annotations

import torch

from raypp.stage.full_graphs import MessageSlots


def _slots(num_slots: int, stride: int, slot_bytes: int) -> torch.Tensor:
    """Return slots with gaps between them, as a link between GPUs has them."""
    memory = torch.arange(num_slots * stride, dtype=torch.int64).to(torch.uint8)
    return memory.view(num_slots, stride)[:, :slot_bytes]


def test_the_slot_is_read_that_the_index_says():
    slots, buffer = _slots(3, 64, 48), torch.full((48,), 9, dtype=torch.uint8)
    index, is_there = torch.tensor([0]), torch.tensor([1])
    reader = MessageSlots(slots, buffer, index)
    for slot in (2, 0, 1):
        index.fill_(slot)
        reader.read(32, is_there)
        assert torch.equal(buffer[:32], slots[slot, :32])
        assert (buffer[32:] == 9).all(), "more than the message was written"


def test_no_message_reads_as_zeros():
    slots, buffer = _slots(2, 32, 32), torch.full((32,), 9, dtype=torch.uint8)
    MessageSlots(slots, buffer, torch.tensor([1])).read(16, torch.tensor([0]))
    assert not buffer[:16].any()
    assert (buffer[16:] == 9).all()


def test_only_the_slot_is_written():
    slots, buffer, index = _slots(3, 64, 48), torch.arange(100, 148, dtype=torch.uint8), torch.tensor([1])
    before = slots.clone()
    writer = MessageSlots(slots, buffer, index)
    assert writer.num_slots == 3
    writer.write(40)
    assert torch.equal(slots[1, :40], buffer[:40])
    assert torch.equal(slots[1, 40:], before[1, 40:])
    assert torch.equal(slots[0], before[0])
    assert torch.equal(slots[2], before[2])
