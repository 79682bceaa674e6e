"""The block tables of running requests: filled at admission, grown as they decode, shared through the prefix cache.

What the prefix cache finds may be in CPU memory alone; then admission orders its copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from raypp.messages import NULL_BLOCK, Bytes
from raypp.scheduler.block_pool import BlockPool
from raypp.scheduler.cpu_blocks import CpuBlocks
from raypp.scheduler.limits import SchedulerLimits
from raypp.scheduler.prefix_cache import PrefixCache, chain_hashes, root_key
from raypp.scheduler.request_state import RequestState


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
        """Blocks that nobody uses."""
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
        num_new = self._limits.num_blocks_for(num_tokens) - len(state.blocks)
        if num_new > self.num_free:
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

    def take_copies(self) -> Bytes:
        """Return a packed `BlockCopies` for the plan that is being built; nothing where nothing is to be copied."""
        return self.in_cpu_memory.take_copies()

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
