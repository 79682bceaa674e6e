"""Counts the users of KV blocks, hands out free ones, and decides which cached block is overwritten first."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from raypp.messages import NO_STEP, NULL_BLOCK
from raypp.scheduler.cpu_blocks import CpuBlocks
from raypp.scheduler.prefix_cache import PrefixCache


class BlockPool:
    """Reference counts of all blocks but the null block, which nobody owns.

    A block without users is free. A free block with cached content is overwritten only when no other block is free, the
    least recently used one first. Its content goes to CPU memory then, if there is some.

    Args:
        num_blocks: The null block included.
        cache: Knows which of them have cached content.
        in_cpu_memory: Gets what is about to be overwritten.
    """

    def __init__(self, num_blocks: int, cache: PrefixCache, in_cpu_memory: CpuBlocks) -> None:
        self._num_users = [0] * num_blocks
        self._last_steps = [NO_STEP] * num_blocks
        self._cache = cache
        self._in_cpu_memory = in_cpu_memory
        self._blank = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out, cached ones included."""
        return len(self._blank) + len(self._evictable)

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks have no user."""
        return sum(not self._num_users[block] for block in blocks)

    def allocate(self, count: int) -> list[int]:
        """Hand out blocks for their user to write; there must be as many free."""
        assert count <= self.num_free
        blocks = []
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            else:
                block, _ = self._evictable.popitem(last=False)
                self._in_cpu_memory.keep(self._cache.forget(block), block, self._last_steps[block])
            self._num_users[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Count one more user of cached blocks, whose content stays as it is."""
        for block in blocks:
            if not self._num_users[block]:
                del self._evictable[block]
            self._num_users[block] += 1

    def release(self, blocks: Sequence[int], last_step: int = NO_STEP) -> None:
        """Count one user less of the blocks of one request, given in the order of its tokens.

        `last_step` is the last dispatched step that contains the request.
        """
        # The end of a prefix first: without its beginning it is of no use, so it must be evicted before it.
        for block in reversed(blocks):
            self._num_users[block] -= 1
            self._last_steps[block] = max(self._last_steps[block], last_step)
            if self._num_users[block]:
                continue
            if block in self._cache:
                self._evictable[block] = None
            else:
                self._blank.append(block)

    def last_step_of(self, block: int) -> int:
        """Return the last dispatched step that contains a request which has released the block."""
        return self._last_steps[block]

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Assert that every block is free or in the block tables as often as counted, and never doubly writable."""
        users = Counter(block for table in block_tables for block in table)
        assert NULL_BLOCK not in users, "the null block is owned"
        assert all(users[block] == count for block, count in enumerate(self._num_users)), "a user count is wrong"
        unused = {block for block, count in enumerate(self._num_users) if not count and block != NULL_BLOCK}
        assert len(self._blank) == len(set(self._blank)), "a block is free twice"
        assert unused == set(self._blank) ^ set(self._evictable), "a block leaked, or is both free and cached"
        assert all(block in self._cache for block in self._evictable)
        assert not any(block in self._cache for block in self._blank)
        assert all(block in self._cache for block, count in users.items() if count > 1), "two writers of one block"
        self._cache.check_integrity()
        self._in_cpu_memory.check_integrity()
