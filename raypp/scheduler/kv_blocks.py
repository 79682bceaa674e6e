"""The block tables of running requests: filled at admission, grown as they decode, shared through the prefix cache.

What the prefix cache finds may be in CPU memory alone; then admission orders its copy.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Container, Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from raypp.messages import (
    NO_BYTES,
    NO_STEP,
    NULL_BLOCK,
    BlockCopies,
    BlockGroup,
    Bytes,
    Int32s,
    pack_inside,
)
from raypp.scheduler.cpu_blocks import CpuBlocks
from raypp.scheduler.limits import SchedulerLimits
from raypp.scheduler.request_state import BlockTable, RequestState
from raypp.scheduler.state_snapshots import StateSnapshots

_WORTH_A_CHUNK = 512
"""Tokens that prompts share, for which a chunk is cut: those that share them later begin there."""


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
        self._cache.check_integrity()
        assert NULL_BLOCK not in users, "the null block is owned"
        counts = [0] * len(self._num_users)  # tests check every step: no Python per block of a large cache
        for block, count in users.items():
            counts[block] = count
        assert counts == self._num_users, "a user count is wrong"
        held = sorted([*self._blank, *self._evictable, *users])
        assert held == list(range(NULL_BLOCK + 1, len(counts))), "a block leaked, or is free twice"
        cached = set(self._cache.block_of.values())
        assert self._evictable.keys() <= cached <= self._evictable.keys() | users.keys(), "a blank block is cached"
        assert all(block in cached for block, count in users.items() if count > 1), "two writers of one block"
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
        self.block_of: dict[bytes, int] = {}
        """By their keys."""
        self._key_of: dict[int, bytes] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._key_of

    def longest_prefix(self, keys: Sequence[bytes], elsewhere: Container[bytes] = ()) -> list[int]:
        """Return the blocks of the leading keys that are all cached: NULL_BLOCK for those that only `elsewhere` has."""
        blocks = []
        for key in keys:
            block = self.block_of.get(key)
            if block is None:
                if key not in elsewhere:
                    break
                block = NULL_BLOCK
            blocks.append(block)
        return blocks

    def insert(self, key: bytes, block: int) -> None:
        """Cache a block under a key. The first block with a key stays; a second copy is not cached."""
        if key not in self.block_of and block not in self._key_of:
            self.block_of[key] = block
            self._key_of[block] = key

    def forget(self, block: int) -> bytes:
        """Forget a cached block, which is about to be overwritten; return its key."""
        key = self._key_of.pop(block)
        del self.block_of[key]
        return key

    def check_integrity(self) -> None:
        """Assert that both directions agree."""
        assert self._key_of == {block: key for key, block in self.block_of.items()}


class KvGroup:
    """The blocks of the layers that keep the same tokens.

    Args:
        group: Its sizes.
        block_size: Tokens per block.
    """

    def __init__(self, group: BlockGroup, block_size: int) -> None:
        self.window = group.window
        """Tokens that a query sees, its own included; None: all before it."""
        self.num_usable = group.num_blocks - 1
        self.cache = PrefixCache()
        self.in_cpu_memory = CpuBlocks(group.num_cpu_blocks)
        """Blocks that had to make room, and those that are copied back."""
        self.pool = BlockPool(group.num_blocks, self.cache, self.in_cpu_memory)
        self._block_size = block_size

    def first_seen(self, position: int) -> int:
        """Return the index of the first block that the token at a position sees, or any after it."""
        return 0 if self.window is None else max(0, position + 1 - self.window) // self._block_size

    def longest_prefix(self, keys: Sequence[bytes]) -> int:
        """Return how many leading blocks a request may have computed by others: what its next token sees is held."""
        if self.window is None:
            return len(self.cache.longest_prefix(keys, self.in_cpu_memory))
        end = index = len(keys)
        while index > self.first_seen(end * self._block_size):
            index -= 1
            if keys[index] not in self.cache.block_of and keys[index] not in self.in_cpu_memory:
                end = index
        return end


class Prefix(NamedTuple):
    """Leading blocks of a request that others have computed."""

    num_blocks: int
    firsts: tuple[int, ...] = ()  # by group: the first of these that the tokens behind them see
    blocks: tuple[list[int], ...] = ()  # by group, from there on: NULL_BLOCK for each that is in CPU memory alone


class KvBlocks:
    """Gives blocks to requests and takes them back.

    A released block may be handed out at once, even while steps that use it are in flight: every stage executes the
    plans in the same order, and the step that writes the block next comes later.

    Where all tokens are kept, a request gets blocks for its whole prompt at once, so that no prefill has to stop
    halfway. Where a window is kept, it gets them chunk by chunk, and gives back what no token to come can see.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._offers = limits.enable_prefix_caching
        self._block_size = limits.block_size
        self.groups = [KvGroup(group, limits.block_size) for group in limits.groups]
        self.snapshots: StateSnapshots | None = None
        """Of rows' states, where layers have some: a prefix ends where one stands."""
        if limits.num_snapshots is not None:
            self.snapshots = StateSnapshots(limits.num_snapshots, limits.num_cpu_snapshots)
        self._windowed = [index for index, group in enumerate(self.groups) if group.window is not None]

    @property
    def num_free(self) -> int:
        """Blocks that no request uses, of the group with the fewest."""
        return min([group.pool.num_free for group in self.groups])

    @property
    def free_share(self) -> float:
        """The free share of the blocks that longer requests need more of, 0 to 1."""
        growing = [group for group in self.groups if group.window is None] or self.groups
        return min(group.pool.num_free / group.num_usable for group in growing)

    def may_admit(self, state: RequestState, num_reserved: int) -> bool:
        """Return False when blocks that the last attempt lacked are still missing: spares another prefix look-up."""
        return all(
            group.pool.num_free >= wanted + num_reserved
            for group, wanted in zip(self.groups, state.num_wanted_blocks, strict=False)
        )

    def find_prefix(self, state: RequestState) -> Prefix:
        """Return the cached blocks that the request can start from. At least one token is left to compute."""
        if not self._limits.enable_prefix_caching:
            return Prefix(0)
        # A cached token has no logits, so the log-probability of the token after it must have been reported already.
        num_tokens = state.num_scored_tokens if state.scores_prompt else state.num_tokens - 1
        end = num_tokens // self._block_size
        self._extend_hashes(state, end)
        keys, before, shared = state.block_hashes[:end], -1, 0
        while end != before:  # a group that has less may make another one have less
            before = end
            for group in self.groups:
                end = group.longest_prefix(keys[:end])
            if self.snapshots is not None:
                shared = max(shared, end)
                end = self.snapshots.longest_prefix(keys[:end])
        least = min(_WORTH_A_CHUNK, self._limits.min_prefill_chunk_tokens)
        is_worth_a_chunk = (shared - end) * self._block_size >= least
        state.num_shared_blocks = shared if is_worth_a_chunk else 0
        firsts = tuple([group.first_seen(end * self._block_size) for group in self.groups])
        blocks = [
            [group.cache.block_of.get(key, NULL_BLOCK) for key in keys[first:end]]
            for group, first in zip(self.groups, firsts, strict=True)
        ]
        return Prefix(end, firsts, tuple(blocks))

    def is_being_computed(self, state: RequestState, index: int, prefilling: Iterable[RequestState]) -> bool:
        """Return whether a prefill under way will offer more than a waiting request's cached prefix.

        It does so when the chunk that holds the next block is dispatched, or the one behind which a snapshot stands,
        and such chunks come before those of new requests. So a request that waits for it loses little, and the
        continuations of one prompt, or requests that begin alike, compute their beginning once.

        Args:
            state: The waiting request; `find_prefix` was called just before.
            index: Blocks of its prefix.
            prefilling: The requests whose prefill is under way.
        """
        most = (state.num_tokens - 1) // self._block_size
        if not self._limits.enable_prefix_caching or state.scores_prompt or index >= most:
            return False
        for other in prefilling:
            for end in self._ends_to_come(other, index):
                if index < end <= most:
                    self._extend_hashes(other, end)
                    if other.block_hashes[end - 1] == state.block_hashes[end - 1]:
                        return True
        return False

    def _ends_to_come(self, other: RequestState, index: int) -> tuple[int, ...]:
        """Return behind how many blocks others will be able to begin, of those that a prefill under way computes.

        Where no snapshots are needed, the next one counts that is behind the first `index`.
        """
        if self.snapshots is None:
            num_full = self._num_hashable(other.num_prefill_tokens) // self._block_size
            return (index + 1,) if other.num_offered_blocks <= index < num_full else ()
        last, shared = (other.num_prefill_tokens - 1) // self._block_size, other.num_shared_blocks
        return (last, shared) if other.num_prefilled_tokens <= shared * self._block_size else (last,)

    def try_admit(self, state: RequestState, prefix: Prefix, num_tokens: int, num_reserved: int) -> int:
        """Give a request the blocks that it starts with, if enough others stay free.

        What is in CPU memory alone is copied by the next plan. If that is more than a plan may carry beside what others
        compute, a part of it is copied, and the request waits for the rest.

        Args:
            state: A waiting request.
            prefix: What `find_prefix` returned.
            num_tokens: The most tokens behind the prefix that its first chunk may have.
            num_reserved: Blocks of each group that stay free.

        Returns:
            The tokens of its first chunk; 0: it has to wait.
        """
        start, whole = prefix.num_blocks * self._block_size, self._with_lookahead(state, state.num_tokens)
        firsts = prefix.firsts or (0,) * len(self.groups)
        blocks = prefix.blocks or ([],) * len(self.groups)
        found = [[block for block in of_group if block != NULL_BLOCK] for of_group in blocks]
        # What it takes of the free blocks before any new ones: those that nobody else has, and room for copies.
        taken = [
            group.pool.num_free_among(present) + len(all_found) - len(present)
            for group, present, all_found in zip(self.groups, found, blocks, strict=True)
        ]
        num_ahead = self._limits.num_lookahead_tokens
        for index in self._windowed:
            num_left = max(0, self.groups[index].pool.num_free - num_reserved - taken[index])
            num_tokens = min(num_tokens, num_left * self._block_size - num_ahead)
        num_tokens = self._without_parts(state, start, num_tokens)
        chunk_end = self._with_lookahead(state, start + num_tokens)
        ends = [self._limits.num_blocks_for(whole if group.window is None else chunk_end) for group in self.groups]
        wanted = [end - prefix.num_blocks + count for end, count in zip(ends, taken, strict=True)]
        if num_tokens <= 0 or any(
            group.pool.num_free < count + num_reserved for group, count in zip(self.groups, wanted, strict=True)
        ):
            state.num_wanted_blocks = tuple(
                count if group.window is None else 1 for group, count in zip(self.groups, wanted, strict=True)
            )
            return 0
        if self.snapshots is not None and prefix.num_blocks:
            key = state.block_hashes[prefix.num_blocks - 1]
            if not self.snapshots.can_restore(key, beside_others=num_reserved > 0):
                return 0
        num_copies_left = self._num_copies_left if num_reserved else sum(map(len, blocks))
        is_admitted, tables = True, []
        for group, first, present, all_found in zip(self.groups, firsts, found, blocks, strict=True):
            keys = state.block_hashes[first : prefix.num_blocks]
            absent = [key for key, block in zip(keys, all_found, strict=True) if block == NULL_BLOCK]
            group.pool.share(present)
            if absent:
                group.in_cpu_memory.hold(absent)
            # Without a reserve nobody would wait for the copies but the request itself.
            num_copied = min(len(absent), num_copies_left)
            num_copies_left -= num_copied
            is_admitted = is_admitted and num_copied == len(absent)
            copied = group.pool.allocate(num_copied)
            if num_copied:
                # Copies wait for the steps that had the blocks: those that nobody has had for longest are there first.
                copied.sort(key=group.pool.last_step_of)
                group.in_cpu_memory.bring_back(absent[:num_copied], copied, max(map(group.pool.last_step_of, copied)))
                for key, block in zip(absent, copied, strict=False):
                    group.cache.insert(key, block)
            following = iter(copied)
            held = [next(following, NULL_BLOCK) if block == NULL_BLOCK else block for block in all_found]
            tables.append(BlockTable([NULL_BLOCK] * first + held, first, first))
        if not is_admitted:
            for group, table in zip(self.groups, tables, strict=True):
                group.pool.release([block for block in table.blocks[table.first :] if block != NULL_BLOCK])
            return 0
        state.tables, state.num_wanted_blocks, state.num_offered_blocks = tables, (), prefix.num_blocks
        self._extend(state, ends)
        return num_tokens

    def hold_chunk(self, state: RequestState, num_tokens: int, num_reserved: int) -> int:
        """Let a request's blocks hold its next chunk, and give back what that and all after it cannot see.

        Args:
            state: Its prefill is under way.
            num_tokens: The most tokens of the chunk.
            num_reserved: Blocks of each group that stay free.

        Returns:
            The tokens that there are blocks for; 0: it has to wait.
        """
        if not self._windowed:
            return num_tokens
        start = state.num_prefilled_tokens
        self.release_behind(state, start)
        for index in self._windowed:
            held = len(state.tables[index].blocks) * self._block_size - start
            num_left = max(0, self.groups[index].pool.num_free - num_reserved)
            num_tokens = min(num_tokens, held + num_left * self._block_size - self._limits.num_lookahead_tokens)
        num_tokens = self._without_parts(state, start, num_tokens)
        if num_tokens <= 0:
            return 0
        return num_tokens if self.try_grow(state, self._with_lookahead(state, start + num_tokens)) else 0

    def _without_parts(self, state: RequestState, start: int, num_tokens: int) -> int:
        """Return the tokens of a chunk that was cut to what there are blocks for, less an image's part."""
        items = state.request.items
        if items is None or not self._limits.whole_item_tokens or num_tokens <= 0:
            return num_tokens
        return items.end_between(start, start + num_tokens) - start

    def to_snapshot(self, state: RequestState, start: int, num_tokens: int) -> int:
        """Return how many of a chunk's tokens to compute at first, so that a snapshot can stand behind shared blocks.

        The next request that begins alike starts there.

        Args:
            state: A request whose next chunk it is.
            start: Of the chunk.
            num_tokens: Of the chunk.
        """
        shared = state.num_shared_blocks * self._block_size
        if not shared or not start <= shared < start + num_tokens:
            return num_tokens
        return min(num_tokens, shared + self._block_size - start)

    def save_state(self, state: RequestState, num_tokens: int, num_ahead: int = 0) -> None:
        """Order a snapshot of a request's row, which stands behind the last block that ends before a token.

        Args:
            state: The request.
            num_tokens: Up to that token, its own included; all before it are computed.
            num_ahead: The most tokens that steps have computed behind it. If they may have moved the row's checkpoint,
                there is no snapshot.
        """
        end = (num_tokens - 1) // self._block_size
        if self.snapshots is None or not self._offers or not end:
            return
        if (num_tokens - 1 + num_ahead) // self._block_size != end:
            return
        self._extend_hashes(state, end)
        of_prompt = (state.num_prefill_tokens - 1) // self._block_size
        before = state.block_hashes[of_prompt - 1] if 0 < of_prompt < end else None
        self.snapshots.save(state.block_hashes[end - 1], state.row, before)

    def ends_shared(self, state: RequestState) -> bool:
        """Return whether the chunk that was dispatched last was cut for a snapshot, see `to_snapshot`."""
        return (state.num_prefilled_tokens - 1) // self._block_size == state.num_shared_blocks

    def restore_state(self, state: RequestState, prefix: Prefix) -> None:
        """Order that a request's row begins with the state behind its prefix."""
        if self.snapshots is not None and prefix.num_blocks:
            self.snapshots.restore(state.block_hashes[prefix.num_blocks - 1], state.row)

    def try_grow(self, state: RequestState, num_tokens: int) -> bool:
        """Make the request's blocks hold that many tokens; return False, and change nothing, when too few are free."""
        end = -(-num_tokens // self._block_size)
        for group, table in zip(self.groups, state.tables, strict=True):
            if end - len(table.blocks) > group.pool.num_free:
                return False
        self._extend(state, [end] * len(self.groups))
        return True

    def release_behind(self, state: RequestState, position: int) -> None:
        """Take back the blocks that the token at a position, and all after it, cannot see. No earlier one follows."""
        for index in self._windowed:
            group, table = self.groups[index], state.tables[index]
            first = min(group.first_seen(position), len(table.blocks))
            if first > table.first:
                group.pool.release(table.blocks[table.first : first], state.last_step)
                table.blocks[table.first : first] = [NULL_BLOCK] * (first - table.first)
                table.first = first

    def release(self, state: RequestState) -> None:
        """Take all blocks of the request back."""
        for group, table in zip(self.groups, state.tables, strict=True):
            group.pool.release(table.blocks[table.first :], state.last_step)
        state.tables, state.num_held_tokens, state.num_offered_blocks = [], 0, 0

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
        for group, table in zip(self.groups, state.tables, strict=True):
            for index in range(max(state.num_offered_blocks, table.first), num_blocks):
                group.cache.insert(state.block_hashes[index], table.blocks[index])
        state.num_offered_blocks = num_blocks

    def take_computed(self, state: RequestState) -> None:
        """Take in that a decoding request's tokens but the last are computed: offer them, and give back what is behind.

        The last known token may be computed again, after a late mask.
        """
        self.offer(state, state.num_tokens - 1)
        if self._windowed and not state.is_prefilling:
            self.release_behind(state, state.num_tokens - 1)

    def take_copies(self) -> Bytes:
        """Return a packed `BlockCopies` of what was ordered since the last call; nothing where nothing was."""
        orders = [group.in_cpu_memory.take_copies() for group in self.groups]
        if self.snapshots is not None:
            orders.append(self.snapshots.in_cpu_memory.take_copies())
        after = max(order.after for order in orders)
        out = [(index, *pair) for index, order in enumerate(orders) for pair in order.out.items()]
        back = [(index, *pair) for index, order in enumerate(orders) for pair in order.back.items()]
        if not out and not back:
            return NO_BYTES
        outs, backs = (np.array(each, np.int32).reshape(-1, 3).T.copy() for each in (out, back))
        return pack_inside(BlockCopies(after, *outs, *backs))

    def check_integrity(self, running: Collection[RequestState]) -> None:
        """Assert that blocks are counted right, and that nobody writes a block that others may read."""
        block_size = self._block_size
        if self.snapshots is not None:
            self.snapshots.check_integrity()
        for index, group in enumerate(self.groups):
            group.pool.check_integrity([state.tables[index].blocks[state.tables[index].first :] for state in running])
        for state in running:
            # The first position that a later step may write: the next chunk's, or the last known token's.
            first_written = max(state.num_prefilled_tokens, 0 if state.is_prefilling else state.num_tokens - 1)
            assert state.num_offered_blocks * block_size <= first_written
            num_held = min(state.num_tokens + state.max_in_flight_tokens - 1, state.limit)
            for group, table in zip(self.groups, state.tables, strict=True):
                assert table.first <= group.first_seen(first_written), "a token that is seen was given back"
                assert all(block == NULL_BLOCK for block in table.blocks[: table.first])
                assert not any(block in group.cache for block in table.blocks[first_written // block_size :])
                is_chunked = group.window is not None and state.is_prefilling
                least = state.num_prefilled_tokens if is_chunked else num_held
                assert len(table.blocks) >= self._limits.num_blocks_for(least), "a step writes past its blocks"
                assert len(table.blocks) <= self._limits.num_blocks_for(state.limit)

    @property
    def _num_copies_left(self) -> int:
        """Blocks that the next plan may still bring back beside what others compute."""
        num_ordered = sum(group.in_cpu_memory.num_ordered_in for group in self.groups)
        return max(0, self._limits.max_copied_blocks - num_ordered)

    def _extend(self, state: RequestState, ends: Sequence[int]) -> None:
        """Make the request's tables so long, by group; there are as many free blocks."""
        for group, table, end in zip(self.groups, state.tables, ends, strict=True):
            if end > len(table.blocks):
                table.blocks += group.pool.allocate(end - len(table.blocks))
        state.num_held_tokens = min([len(table.blocks) for table in state.tables]) * self._block_size
        state.has_new_blocks = True

    def _with_lookahead(self, state: RequestState, num_tokens: int) -> int:
        return min(num_tokens + self._limits.num_lookahead_tokens, state.limit)

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
