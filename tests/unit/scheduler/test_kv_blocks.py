import pytest
from drive import make_limits, make_request

from raypp.messages import NULL_BLOCK, BlockCopies, unpack
from raypp.scheduler.kv_blocks import KvBlocks
from raypp.scheduler.request_state import RequestState


def _state(num_tokens: int, limit: int = 100, salt: str = "") -> RequestState:
    request = make_request(prompt=num_tokens)
    request.cache_salt = salt
    return RequestState(request, 0, limit, frozenset(), num_tokens)


def _try(kv: KvBlocks, state: RequestState, num_reserved: int) -> int:
    prefix = kv.find_prefix(state)
    return kv.try_admit(state, prefix, state.num_tokens - 4 * prefix.num_blocks, num_reserved)


def _found(kv: KvBlocks, state: RequestState, group: int = 0) -> list[int]:
    prefix = kv.find_prefix(state)
    return prefix.blocks[group] if prefix.blocks else []


def _admitted(kv: KvBlocks, num_tokens: int) -> RequestState:
    state = _state(num_tokens)
    assert _try(kv, state, 0)
    return state


def test_admission_takes_the_blocks_of_the_whole_prompt_and_leaves_the_reserve():
    kv = KvBlocks(make_limits(num_blocks=11))
    state = _state(17)
    assert not _try(kv, state, 6)
    assert not state.tables
    assert not kv.may_admit(state, num_reserved=6)
    assert kv.may_admit(state, num_reserved=5)
    assert _try(kv, state, 5)
    assert len(state.tables[0].blocks) == 5
    assert kv.num_free == 5
    kv.release(state)
    assert kv.num_free == 10


def test_a_prefix_leaves_one_token_to_compute():
    kv = KvBlocks(make_limits(enable_prefix_caching=True))
    first = _admitted(kv, 8)
    kv.offer(first, 8)
    assert _found(kv, _state(8)) == first.tables[0].blocks[:1]
    assert _found(kv, _state(9)) == first.tables[0].blocks
    assert _found(kv, _state(4)) == []


def test_a_shared_prefix_costs_no_free_blocks_but_an_unused_one_does():
    kv = KvBlocks(make_limits(enable_prefix_caching=True, num_blocks=6))
    first = _admitted(kv, 12)
    kv.offer(first, 12)
    second = _state(13)
    assert not _try(kv, second, 2)
    assert _try(kv, second, 1)
    assert second.tables[0].blocks[:3] == first.tables[0].blocks
    kv.release(first)
    kv.release(second)
    third = _state(13)
    assert not _try(kv, third, 2)
    assert _try(kv, third, 1)


def test_growing_is_all_or_nothing():
    kv = KvBlocks(make_limits(num_blocks=5))
    state = _admitted(kv, 4)
    assert not kv.try_grow(state, 17)
    assert len(state.tables[0].blocks) == 1
    assert kv.try_grow(state, 16)
    assert len(state.tables[0].blocks) == 4
    assert kv.try_grow(state, 13)
    assert len(state.tables[0].blocks) == 4


def test_only_full_computed_blocks_are_offered_and_generated_ones_too():
    kv = KvBlocks(make_limits(enable_prefix_caching=True))
    state = _admitted(kv, 6)
    kv.offer(state, 3)
    assert state.num_offered_blocks == 0
    kv.offer(state, 6)
    assert state.num_offered_blocks == 1
    state.request.output_token_ids += [6, 7, 8]
    state.num_tokens = 9
    kv.offer(state, 8)
    assert _found(kv, _state(20)) == state.tables[0].blocks[:2]


def test_without_prefix_caching_nothing_is_found():
    kv = KvBlocks(make_limits(enable_prefix_caching=False))
    first = _admitted(kv, 8)
    kv.offer(first, 8)
    assert _found(kv, _state(9)) == []


@pytest.mark.parametrize("caches_next_token", [False, True])
def test_requests_of_different_salts_share_nothing(caches_next_token: bool):
    kv = KvBlocks(make_limits(enable_prefix_caching=True, num_blocks=40, caches_next_token=caches_next_token))
    for salt in ("", "me", "you"):
        salted = _state(9, salt=salt)
        assert _found(kv, salted) == []
        assert not kv.is_being_computed(salted, 0, [])
        assert _try(kv, salted, 0)
        assert not any(kv.is_being_computed(_other(kv, salt), 0, [salted]) for salt in {"", "me", "you"} - {salt})
        kv.offer(salted, 9)
        assert _found(kv, _state(9, salt=salt)) == salted.tables[0].blocks[:2]


def _other(kv: KvBlocks, salt: str) -> RequestState:
    state = _state(9, salt=salt)
    kv.find_prefix(state)
    return state


def _spilled(limits) -> tuple[KvBlocks, RequestState]:
    """Return blocks of a request of 21 tokens that another one has pushed out to CPU memory, all five full ones."""
    kv = KvBlocks(limits)
    first = _admitted(kv, 21)
    kv.offer(first, 21)
    kv.release(first)
    pushing = _salted(limits.max_request_tokens)
    assert _try(kv, pushing, 0)
    kv.take_copies()
    kv.release(pushing)
    assert kv.groups[0].in_cpu_memory.num_copied_out == 5
    state = _state(21)
    assert _found(kv, state) == [NULL_BLOCK] * 5
    return kv, state


def _salted(num_tokens: int) -> RequestState:
    return _state(num_tokens, salt="another")


def test_what_cpu_memory_has_comes_with_the_admission_of_who_is_alone():
    kv, state = _spilled(make_limits(enable_prefix_caching=True, num_blocks=9, num_cpu_blocks=20))
    assert _try(kv, state, 0)
    copies = unpack(BlockCopies, kv.take_copies().data)
    assert copies.in_block_ids.tolist() == state.tables[0].blocks[:5]
    assert state.num_offered_blocks == 5
    assert kv.groups[0].in_cpu_memory.num_copied_in == 5


def test_beside_others_a_plan_brings_back_so_many_blocks_and_the_request_waits_for_the_rest():
    kv, state = _spilled(make_limits(enable_prefix_caching=True, num_blocks=9, num_cpu_blocks=20, max_copied_blocks=2))
    brought = []
    for num_there in (2, 4):
        assert kv.may_admit(state, 1)
        assert not _try(kv, state, 1)
        assert not _try(kv, state, 1), "the plan may carry no more"
        brought += unpack(BlockCopies, kv.take_copies().data).in_block_ids.tolist()
        assert _found(kv, state) == brought + [NULL_BLOCK] * (5 - num_there)
        assert kv.num_free == 8
    assert _try(kv, state, 1)
    assert state.tables[0].blocks[:4] == brought
    assert unpack(BlockCopies, kv.take_copies().data).in_block_ids.tolist() == state.tables[0].blocks[4:5]


def test_nothing_is_brought_back_for_who_has_no_room():
    kv, state = _spilled(make_limits(enable_prefix_caching=True, num_blocks=9, num_cpu_blocks=20, max_copied_blocks=2))
    assert not _try(kv, state, 3)
    assert not len(kv.take_copies())
    assert not kv.may_admit(state, 3)
