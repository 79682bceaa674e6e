from collections.abc import Iterable, Sequence

import numpy as np

from raypp.scheduler import kv_blocks
from raypp.scheduler.kv_blocks import PrefixCache


def chain_hashes(parent: bytes, tokens: Iterable[int], block_size: int, contents: Sequence[bytes] = ()) -> list[bytes]:
    return kv_blocks.chain_hashes(parent, np.array(list(tokens), np.int32), block_size, contents)


def test_a_key_stands_for_all_tokens_from_the_beginning():
    tokens = [1, 2, 3, 4, 5, 6, 7]
    keys = chain_hashes(b"", tokens, 3)
    assert len(keys) == 2
    assert keys == chain_hashes(b"", tokens[:6], 3)
    assert chain_hashes(b"", [9, *tokens[1:]], 3)[1] != keys[1]
    assert chain_hashes(b"", tokens[3:6], 3)[0] != keys[1]
    assert chain_hashes(keys[0], tokens[3:6], 3) == keys[1:]
    assert chain_hashes(b"", [], 3) == chain_hashes(b"", [1, 2], 3) == []


def test_token_boundaries_cannot_be_confused():
    assert chain_hashes(b"", [1, 256], 2) != chain_hashes(b"", [257, 0], 2)


def test_longest_prefix_ends_at_the_first_miss():
    cache = PrefixCache()
    keys = chain_hashes(b"", range(12), 3)
    for block, key in enumerate(keys, 1):
        cache.insert(key, block)
    assert cache.longest_prefix(keys) == [1, 2, 3, 4]
    cache.forget(2)
    assert cache.longest_prefix(keys) == [1]
    assert 3 in cache
    cache.check_integrity()


def test_a_second_copy_is_not_cached():
    cache = PrefixCache()
    cache.insert(b"key", 1)
    cache.insert(b"key", 2)
    cache.insert(b"other key", 1)
    assert cache.longest_prefix([b"key"]) == [1]
    assert 2 not in cache
    cache.check_integrity()


def test_what_tokens_stand_for_is_part_of_the_key():
    tokens = list(range(8))
    plain = chain_hashes(b"", tokens, 4)
    assert chain_hashes(b"", tokens, 4, [b"", b""]) == plain
    one, other = (chain_hashes(b"", tokens, 4, [b"", key]) for key in (b"a" * 16, b"b" * 16))
    assert one[0] == other[0] == plain[0]
    assert len({one[1], other[1], plain[1]}) == 3
    assert chain_hashes(b"", tokens, 4, [b"", b"a" * 16]) == one
