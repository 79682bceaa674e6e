"""Who encodes what: balance, order, deaths."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raypp.driver.item_encoders import MAX_ATTEMPTS, MAX_CALLS, EncoderShares, cost_of
from raypp.prompt_items import EncoderItem


def item(number: int, num_patches: int = 4) -> EncoderItem:
    patches = np.full((num_patches, 2), number % 256, np.uint8)
    patches[0] = (number >> 8, number & 255)
    return EncoderItem.of(patches, (1, 1, num_patches), max(num_patches // 4, 1))


def shares_of(num_encoders: int, max_call_items: int = 16) -> EncoderShares:
    shares = EncoderShares(num_encoders, max_call_items)
    for index in range(num_encoders):
        shares.note_up(index)
    return shares


def test_one_request_of_many_pictures_is_shared_out_evenly():
    shares = shares_of(2)
    shares.add([item(number) for number in range(20)])
    calls = shares.assign()
    assert [len(call.items) for call in calls] == [10, 10]
    assert not shares.num_waiting


@given(st.lists(st.integers(1, 400), min_size=1, max_size=40), st.integers(1, 4))
def test_no_encoder_gets_much_more_than_another(sizes, num_encoders):
    shares = shares_of(num_encoders, max_call_items=100)
    shares.add([item(number, size) for number, size in enumerate(sizes)])
    loads = [0.0] * num_encoders
    for call in shares.assign():
        loads[call.encoder_index] = call.cost
    assert max(loads) - min(loads) <= max(cost_of(item(0, size)) for size in sizes) + 1e-6


def test_who_is_idle_starts_at_once_and_who_is_busy_gets_one_more_call():
    shares = shares_of(1, max_call_items=2)
    shares.add([item(number) for number in range(7)])
    first, second = shares.assign()[0], shares.assign()[0]
    assert [len(call.items) for call in (first, second)] == [2, 2]
    assert shares.assign() == []
    assert len(shares.calls_of(0)) == MAX_CALLS
    assert shares.note_done(first)
    assert [i.key for i in shares.assign()[0].items] == [item(4).key, item(5).key]


def test_an_item_goes_to_who_may_remember_it():
    shares = shares_of(3)
    shares.add([item(number) for number in range(9)])
    homes = {}
    for call in shares.assign():
        homes |= {i.key: call.encoder_index for i in call.items}
        shares.note_done(call)
    shares.add([item(number) for number in reversed(range(9))])
    for call in shares.assign():
        assert all(homes[i.key] == call.encoder_index for i in call.items)


def test_what_kills_encoders_is_given_up():
    shares = shares_of(1)
    shares.add([item(0)])
    for attempt in range(1, MAX_ATTEMPTS + 1):
        [call] = shares.assign()
        given_up = shares.note_down(0)
        assert [i.key for i in given_up] == ([item(0).key] if attempt == MAX_ATTEMPTS else [])
        assert not shares.note_done(call)
        shares.note_up(0)
    assert shares.assign() == []


@given(st.integers(0, 2**32))
def test_every_item_is_done_once_whatever_dies(seed):
    rng = random.Random(seed)
    num_encoders = rng.randint(1, 3)
    shares, done, added = shares_of(num_encoders, rng.randint(1, 5)), Counter(), 0
    under_way, given_up = [], []
    for _ in range(200):
        action = rng.random()
        if action < 0.3 and added < 30:
            shares.add([item(added)])
            added += 1
        elif action < 0.6:
            under_way += shares.assign()
        elif action < 0.9 and under_way:
            call = under_way.pop(rng.randrange(len(under_way)))
            if shares.note_done(call):
                done.update(i.key for i in call.items)
        elif action > 0.97:
            index = rng.randrange(num_encoders)
            given_up += shares.note_down(index)
            shares.note_up(index)
    for _ in range(1000):
        under_way += shares.assign()
        if not under_way:
            break
        call = under_way.pop(0)
        if shares.note_done(call):
            done.update(i.key for i in call.items)
    assert len(done) + len(given_up) == added
    assert all(count == 1 for count in done.values())
    assert not set(done) & {i.key for i in given_up}
