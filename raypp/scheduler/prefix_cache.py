"""Finds the full KV blocks that hold given tokens, so that requests with the same beginning compute it once.

A block's key is a cryptographic hash of its tokens, of the images that some of them stand for, and of the key before
it: H(parent, token ids, content hashes). So equal keys mean equal tokens and images from the request's beginning on.
Before the first block stands a key of the request's salt: keys of different salts never are equal.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from hashlib import blake2b

from raypp.messages import NULL_BLOCK, Int32s

_DIGEST_BYTES = 16


def root_key(salt: str) -> bytes:
    """Return what stands in the place of the key before a request's first block; empty without a salt."""
    return blake2b(salt.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES).digest() if salt else b""


def chain_hashes(parent: bytes, token_ids: Int32s, block_size: int, contents: Sequence[bytes] = ()) -> list[bytes]:
    """Return the keys of the full blocks that `token_ids` fill; tokens of an unfinished block are left out.

    Args:
        parent: The key of the block before them; at the beginning of a request its `root_key`.
        token_ids: [T].
        block_size: Tokens per block.
        contents: For each block the keys of its images; empty for a request without images.
    """
    data = token_ids.tobytes()
    block_bytes = token_ids.itemsize * block_size
    hashes = []
    for index, end in enumerate(range(block_bytes, len(data) + 1, block_bytes)):
        content = contents[index] if contents else b""
        parent = blake2b(parent + data[end - block_bytes : end] + content, digest_size=_DIGEST_BYTES).digest()
        hashes.append(parent)
    return hashes


class PrefixCache:
    """Finds blocks by keys, and keys by blocks. It does not know who uses a block."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._key_of

    def longest_prefix(self, keys: Sequence[bytes], elsewhere: Container[bytes] = ()) -> list[int]:
        """Return the blocks of the leading keys that are all cached: NULL_BLOCK for those that only `elsewhere` has."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                if key not in elsewhere:
                    break
                block = NULL_BLOCK
            blocks.append(block)
        return blocks

    def insert(self, key: bytes, block: int) -> None:
        """Cache a block under a key. The first block with a key stays; a second copy is not cached."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def forget(self, block: int) -> bytes:
        """Forget a cached block, which is about to be overwritten; return its key."""
        key = self._key_of.pop(block)
        del self._block_of[key]
        return key

    def check_integrity(self) -> None:
        """Assert that both directions agree."""
        assert self._key_of == {block: key for key, block in self._block_of.items()}
