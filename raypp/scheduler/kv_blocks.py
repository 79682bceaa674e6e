"""The block tables of running requests: filled at admission, grown as they decode, shared through the prefix cache.

What the prefix cache finds may be in CPU memory alone; then admission orders its copy.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Container, Iterable, Sequence
from hashlib import blake2b

import numpy as np

from raypp.messages import NO_BYTES, NO_STEP, NULL_BLOCK, BlockCopies, Bytes, Int32s, pack_inside
from raypp.scheduler.limits import SchedulerLimits
from raypp.scheduler.request_state import RequestState


class CpuBlocks:
    """Which blocks CPU memory holds, by the keys of the prefix cache, and the copies that the next plan orders.

    Args:
        num_blocks: There is room for so many; 0: nothing is ever kept.
    """

    def __init__(self, num_blocks: int) -> None:
        self._block_of: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._num_blocks = num_blocks
        self._out: dict[int, int] = {}  # ordered since the last plan: device block -> CPU block
        self._in: dict[int, int] = {}  # likewise, device block -> CPU block
        self._held: set[int] = set()  # CPU blocks of ordered copies
        self._after = NO_STEP
        self.num_copied_out = 0
        """Blocks, since the start."""
        self.num_copied_in = 0

    @property
    def num_ordered_in(self) -> int:
        """Blocks that the next plan brings back."""
        return len(self._in)

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, key: object) -> bool:
        return key in self._block_of

    def keep(self, key: bytes, block: int, last_step: int) -> None:
        """Order a copy of a cached device block that is about to be overwritten, unless its content is here.

        It is lost when all room is taken by blocks of copies that the next plan orders.

        Args:
            key: Of its content.
            block: On the device.
            last_step: The last dispatched step that contains a row which had the block.
        """
        self._in.pop(block, None)  # a copy in that nobody waits for any more
        if key in self._block_of:
            self._block_of.move_to_end(key)
            return
        cpu_block = self._make_room()
        if cpu_block is None:
            return
        self._block_of[key] = cpu_block
        self._held.add(cpu_block)
        self._out[block] = cpu_block
        self._after = max(self._after, last_step)
        self.num_copied_out += 1

    def hold(self, keys: Iterable[bytes]) -> None:
        """Let these blocks stay until the next plan; they are here."""
        for key in keys:
            self._block_of.move_to_end(key)
            self._held.add(self._block_of[key])

    def bring_back(self, keys: Sequence[bytes], blocks: Sequence[int], last_step: int) -> None:
        """Order copies of held blocks to device blocks.

        Args:
            keys: Of their content.
            blocks: On the device, which nobody uses otherwise.
            last_step: The last dispatched step that contains a row which had any of these.
        """
        for key, block in zip(keys, blocks, strict=True):
            self._in[block] = self._block_of[key]
        self._after = max(self._after, last_step)
        self.num_copied_in += len(keys)

    def take_copies(self) -> Bytes:
        """Return a packed `BlockCopies` of what was ordered since the last call; nothing where nothing was."""
        self._held.clear()
        if not self._out and not self._in:
            return NO_BYTES
        copies = BlockCopies(
            after_step=self._after,
            out_block_ids=np.array(list(self._out), np.int32),
            out_cpu_block_ids=np.array(list(self._out.values()), np.int32),
            in_block_ids=np.array(list(self._in), np.int32),
            in_cpu_block_ids=np.array(list(self._in.values()), np.int32),
        )
        self._out.clear()
        self._in.clear()
        self._after = NO_STEP
        return pack_inside(copies)

    def check_integrity(self) -> None:
        """Assert that every CPU block is blank or holds one content, and that no batch uses one for two things."""
        used = list(self._block_of.values())
        assert sorted([*used, *self._blank]) == list(range(self._num_blocks)), "a CPU block leaked, or is used twice"
        out = list(self._out.values())
        assert len(out) == len(set(out)), "two copies to one CPU block"
        assert {*out, *self._in.values()} <= self._held <= set(used), "a CPU block of a batch was given away"

    def _make_room(self) -> int | None:
        if self._blank:
            return self._blank.pop()
        # What is held was used last, so if the first is, all are.
        key = next(iter(self._block_of), None)
        if key is None or self._block_of[key] in self._held:
            return None
        return self._block_of.pop(key)


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


class KvBlocks:
    """Gives blocks to requests and takes them back.

    A released block may be handed out at once, even while steps that use it are in flight: every stage executes the
    plans in the same order, and the step that writes the block next comes later.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._offers = limits.enable_prefix_caching
        self._block_size = limits.block_size
        self._cache = PrefixCache()
        self.in_cpu_memory = CpuBlocks(limits.num_cpu_blocks)
        """Blocks that had to make room, and those that are copied back."""
        self._pool = BlockPool(limits.num_blocks, self._cache, self.in_cpu_memory)

    @property
    def num_free(self) -> int:
        """Blocks that no request uses."""
        return self._pool.num_free

    def may_admit(self, state: RequestState, num_reserved: int) -> bool:
        """Return False when blocks that the last attempt lacked are still missing: spares another prefix look-up."""
        return self.num_free >= state.num_wanted_blocks + num_reserved

    def find_prefix(self, state: RequestState) -> list[int]:
        """Return the cached blocks that the request can start from, NULL_BLOCK for each that is in CPU memory alone.

        At least one token is left to compute.
        """
        if not self._limits.enable_prefix_caching:
            return []
        # A cached token has no logits, so the log-probability of the token after it must have been reported already.
        num_tokens = state.num_scored_tokens if state.scores_prompt else state.num_tokens - 1
        num_blocks = num_tokens // self._limits.block_size
        self._extend_hashes(state, num_blocks)
        return self._cache.longest_prefix(state.block_hashes[:num_blocks], self.in_cpu_memory)

    def is_being_computed(self, state: RequestState, index: int, prefilling: Iterable[RequestState]) -> bool:
        """Return whether a prefill under way will offer the block after a waiting request's cached prefix.

        It does so when the chunk that holds the block is dispatched, and such chunks come before those of new requests.
        So a request that waits for the block loses little, and the continuations of one prompt, or requests that begin
        alike, compute their beginning once.

        Args:
            state: The waiting request; `find_prefix` was called just before.
            index: Blocks of its prefix.
            prefilling: The requests whose prefill is under way.
        """
        block_size = self._limits.block_size
        if (
            not self._limits.enable_prefix_caching
            or state.scores_prompt
            or index >= (state.num_tokens - 1) // block_size
        ):
            return False
        key = state.block_hashes[index]
        for other in prefilling:
            if other.num_offered_blocks <= index < self._num_hashable(other.num_prefill_tokens) // block_size:
                self._extend_hashes(other, index + 1)
                if other.block_hashes[index] == key:
                    return True
        return False

    def try_admit(self, state: RequestState, prefix: list[int], num_reserved: int) -> bool:
        """Give a request the blocks of all its known tokens, `prefix` among them, if enough others stay free.

        It gets blocks for the whole prompt, so that no prefill has to stop halfway because blocks lack. What is in CPU
        memory alone is copied by the next plan. If that is more than a plan may carry beside what others compute, a
        part of it is copied, and the request waits for the rest.
        """
        num_tokens = min(state.num_tokens + self._limits.num_lookahead_tokens, state.limit)
        found = [block for block in prefix if block != NULL_BLOCK]
        num_new = self._limits.num_blocks_for(num_tokens) - len(found)
        num_wanted = num_new + self._pool.num_free_among(found)
        if self.num_free < num_wanted + num_reserved:
            state.num_wanted_blocks = num_wanted
            return False
        absent = [key for key, block in zip(state.block_hashes, prefix, strict=False) if block == NULL_BLOCK]
        self._pool.share(found)
        self.in_cpu_memory.hold(absent)
        num_copied = len(absent)
        if num_reserved:  # else nobody would wait for the copies but the request itself
            num_copied = min(num_copied, self._num_copies_left)
        is_admitted = num_copied == len(absent)
        new = self._pool.allocate(num_new if is_admitted else num_copied)
        if num_copied:
            # Copies wait for the steps that had the blocks: those that nobody has had for longest are there first.
            new.sort(key=self._pool.last_step_of)
            self._bring_back(absent[:num_copied], new[:num_copied])
        following = iter(new)
        blocks = [next(following, NULL_BLOCK) if block == NULL_BLOCK else block for block in prefix]
        if not is_admitted:
            self._pool.release([block for block in blocks if block != NULL_BLOCK])
            return False
        state.blocks = blocks + list(following)
        state.num_sent_blocks = state.num_wanted_blocks = 0
        state.num_offered_blocks = len(prefix)
        return True

    def try_grow(self, state: RequestState, num_tokens: int) -> bool:
        """Make the request's blocks hold that many tokens; return False, and change nothing, when too few are free."""
        num_new = -(-num_tokens // self._block_size) - len(state.blocks)
        if num_new > self._pool.num_free:
            return False
        state.blocks += self._pool.allocate(num_new)
        return True

    def release(self, state: RequestState) -> None:
        """Take all blocks of the request back."""
        self._pool.release(state.blocks, state.last_step)
        state.blocks = []
        state.num_sent_blocks = state.num_offered_blocks = 0

    def offer(self, state: RequestState, num_computed_tokens: int) -> None:
        """Put the request's full blocks into the prefix cache.

        Args:
            state: A running request.
            num_computed_tokens: Leading known tokens whose KV dispatched steps have written.
        """
        # This runs for every row of every step, and nearly always there is nothing to do.
        if not self._offers or num_computed_tokens < (state.num_offered_blocks + 1) * self._block_size:
            return
        num_blocks = min(num_computed_tokens, self._num_hashable(state.num_tokens)) // self._block_size
        if num_blocks <= state.num_offered_blocks:
            return
        self._extend_hashes(state, num_blocks)
        for index in range(state.num_offered_blocks, num_blocks):
            self._cache.insert(state.block_hashes[index], state.blocks[index])
        state.num_offered_blocks = num_blocks

    def check_integrity(self, running: Collection[RequestState]) -> None:
        """Assert that blocks are counted right, and that nobody writes a block that others may read."""
        self._pool.check_integrity(state.blocks for state in running)
        for state in running:
            # The first position that a later step may write: the next chunk's, or the last known token's.
            first_written = max(state.num_prefilled_tokens, 0 if state.is_prefilling else state.num_tokens - 1)
            assert state.num_offered_blocks * self._limits.block_size <= first_written
            assert not any(block in self._cache for block in state.blocks[first_written // self._limits.block_size :])
            num_held = min(state.num_tokens + state.max_in_flight_tokens - 1, state.limit)
            assert len(state.blocks) >= self._limits.num_blocks_for(num_held), "a step in flight writes past its blocks"
            assert len(state.blocks) <= self._limits.num_blocks_for(state.limit)

    @property
    def _num_copies_left(self) -> int:
        """Blocks that the next plan may still bring back beside what others compute."""
        return max(0, self._limits.max_copied_blocks - self.in_cpu_memory.num_ordered_in)

    def _bring_back(self, keys: list[bytes], blocks: list[int]) -> None:
        self.in_cpu_memory.bring_back(keys, blocks, max(map(self._pool.last_step_of, blocks)))
        for key, block in zip(keys, blocks, strict=True):
            self._cache.insert(key, block)

    def _extend_hashes(self, state: RequestState, num_blocks: int) -> None:
        hashes, block_size = state.block_hashes, self._limits.block_size
        if len(hashes) < num_blocks:
            parent = hashes[-1] if hashes else root_key(state.request.cache_salt)
            starts = range(len(hashes) * block_size, num_blocks * block_size, block_size)
            items = state.request.items
            contents = [] if items is None else [b"".join(items.keys_in(at, at + block_size)) for at in starts]
            begin, end = starts.start, starts.stop
            if self._limits.caches_next_token:  # a key covers the block's tokens but the first, and the token after it
                parent = parent if hashes else parent + state.token_ids(0, 1).tobytes()
                begin, end = begin + 1, end + 1
            hashes += chain_hashes(parent, state.token_ids(begin, end), block_size, contents)

    def _num_hashable(self, num_known_tokens: int) -> int:
        """Return how many leading tokens blocks can have keys for."""
        return num_known_tokens - self._limits.caches_next_token
