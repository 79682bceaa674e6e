from raypp.messages import NO_STEP
from raypp.scheduler.cpu_blocks import CpuBlocks


def taken(blocks: CpuBlocks) -> tuple[int, dict[int, int], dict[int, int]]:
    """Return the batch: after which step, device to CPU blocks out, device to CPU blocks in."""
    blocks.check_integrity()
    return tuple(blocks.take_copies())


def test_what_was_kept_comes_back():
    blocks = CpuBlocks(2)
    blocks.keep(b"a", 5, last_step=3)
    blocks.keep(b"b", 6, last_step=2)
    assert taken(blocks) == (3, {5: 0, 6: 1}, {})
    assert taken(blocks) == (NO_STEP, {}, {})
    blocks.hold([b"b"])
    blocks.bring_back([b"b"], [9], last_step=7)
    assert taken(blocks) == (7, {}, {9: 1})
    assert b"b" in blocks
    blocks.keep(b"b", 9, last_step=8)
    assert taken(blocks) == (NO_STEP, {}, {})
    assert (blocks.num_copied_out, blocks.num_copied_in, len(blocks)) == (2, 1, 2)


def test_the_least_recently_used_goes_first():
    blocks = CpuBlocks(2)
    blocks.keep(b"a", 1, 0)
    blocks.keep(b"b", 2, 0)
    taken(blocks)
    blocks.keep(b"a", 3, 1)  # it was used on the device meanwhile
    blocks.keep(b"c", 4, 1)
    assert taken(blocks) == (1, {4: 1}, {})
    assert b"a" in blocks
    assert b"b" not in blocks


def test_blocks_of_a_batch_stay_until_it_is_taken():
    blocks = CpuBlocks(2)
    blocks.keep(b"a", 1, 0)
    blocks.keep(b"b", 2, 0)
    taken(blocks)
    blocks.hold([b"a"])
    blocks.keep(b"c", 3, 1)
    blocks.keep(b"d", 4, 1)  # no room: a is about to be read, c about to be written
    blocks.bring_back([b"a"], [5], 1)
    assert b"d" not in blocks
    assert taken(blocks) == (1, {3: 1}, {5: 0})
    blocks.keep(b"d", 6, 2)
    assert taken(blocks) == (2, {6: 0}, {})


def test_a_copy_that_nobody_waits_for_is_not_ordered():
    blocks = CpuBlocks(2)
    blocks.keep(b"a", 1, 0)
    taken(blocks)
    blocks.hold([b"a"])
    blocks.bring_back([b"a"], [5], 1)
    blocks.keep(b"a", 5, 1)  # given to somebody else before any plan was built
    assert taken(blocks)[1:] == ({}, {})


def test_without_room_nothing_is_kept():
    blocks = CpuBlocks(0)
    blocks.keep(b"a", 1, 0)
    assert b"a" not in blocks
    assert taken(blocks) == (NO_STEP, {}, {})
