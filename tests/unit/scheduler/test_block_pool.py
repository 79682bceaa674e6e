import pytest

from raypp.messages import NULL_BLOCK
from raypp.scheduler.cpu_blocks import CpuBlocks
from raypp.scheduler.kv_blocks import BlockPool, PrefixCache


def _pool(num_blocks: int = 6) -> tuple[BlockPool, PrefixCache]:
    cache = PrefixCache()
    return BlockPool(num_blocks, cache, CpuBlocks(0)), cache


def test_hands_out_every_block_but_the_null_block():
    pool, _ = _pool()
    blocks = pool.allocate(5)
    assert sorted(blocks) == [1, 2, 3, 4, 5]
    assert NULL_BLOCK not in blocks
    assert pool.num_free == 0
    with pytest.raises(AssertionError):
        pool.allocate(1)
    pool.check_integrity([blocks])


def test_cached_blocks_are_overwritten_last_and_the_end_of_a_prefix_first():
    pool, cache = _pool()
    prefix = pool.allocate(3)
    for block in prefix:
        cache.insert(bytes([block]), block)
    pool.release(prefix)
    assert pool.num_free == 5
    first_two = pool.allocate(2)
    assert not set(first_two) & set(prefix)
    assert pool.allocate(1) == [prefix[2]]
    assert prefix[2] not in cache
    assert prefix[1] in cache
    assert pool.allocate(2) == [prefix[1], prefix[0]]
    assert not any(block in cache for block in prefix)


def test_a_shared_block_is_free_when_its_last_user_lets_go():
    pool, cache = _pool()
    blocks = pool.allocate(1)
    cache.insert(b"key", blocks[0])
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_free == 4
    pool.check_integrity([blocks])
    pool.release(blocks)
    assert pool.num_free == 5
    pool.share(blocks)  # found again while nobody used it
    assert pool.num_free == 4
    pool.check_integrity([blocks])


def test_a_hit_makes_a_block_recently_used():
    pool, cache = _pool(3)
    older, newer = pool.allocate(2)
    cache.insert(b"older", older)
    cache.insert(b"newer", newer)
    pool.release([older])
    pool.release([newer])
    pool.share([older])
    pool.release([older])
    assert pool.allocate(1) == [newer]


@pytest.mark.parametrize("tables", [[[1, 2], [2]], [[1]], [[1, 2, 0]], [[1, 2], [3]]])
def test_integrity_finds_double_leaked_null_and_stolen_blocks(tables):
    pool, _ = _pool()
    pool.allocate(2)
    pool.check_integrity([[1], [2]])
    with pytest.raises(AssertionError):
        pool.check_integrity(tables)


def test_integrity_finds_two_writers():
    pool, _ = _pool()
    blocks = pool.allocate(1)
    pool.share(blocks)
    with pytest.raises(AssertionError, match="two writers"):
        pool.check_integrity([blocks, blocks])
