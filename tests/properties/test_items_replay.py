"""Requests with pictures among others: the first stage has the embeddings that a plan reads, whatever happens."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sizes import sized
from test_scheduler_replay import Drive, drive, limits, scarce_limits

from raypp.errors import RequestError
from raypp.messages import BlockGroup, StartItems, StepPlan, unpack
from raypp.prompt_items import EncoderItem, PromptItems, keys_of_array
from raypp.scheduler.limits import SchedulerLimits
from raypp.types import FinishReason


def item_of(number: int) -> EncoderItem:
    return EncoderItem.of(np.full((1, 1), number, np.uint8), (1, 1, 1), num_tokens=1 + number % 3)


class ItemDrive(Drive):
    """Encoders that answer late and out of order, fail at times, and a store that minds what it is asked for."""

    def __init__(self, limits: SchedulerLimits, rng: random.Random) -> None:
        super().__init__(limits, rng)
        self.met: Counter[str] = Counter()

    def start_engine(self) -> None:
        super().start_engine()
        self.store: set[bytes] = set()
        self.ordered: list[bytes] = []
        self.dropping: list[bytes] = []
        self.places: dict[int, list[tuple[int, int, bytes]]] = {}  # row -> start, end, key

    def make_items(self, num_prompt: int) -> PromptItems | None:
        rng, items, starts, start = self.rng, [], [], self.rng.randrange(4)
        if rng.random() < 0.4:
            return None
        while start < num_prompt and len(items) < 4:
            item = item_of(rng.randrange(6))
            if start + item.num_tokens > num_prompt:
                break
            items.append(item)
            starts.append(start)
            start += item.num_tokens + rng.randrange(3)
        return PromptItems(tuple(items), tuple(starts), merge_size=1) if items else None

    def add(self) -> None:
        try:
            super().add()
        except RequestError:  # its pictures never fit together
            self.requests.pop()
            self.met["refused"] += 1

    def waits_for_others(self) -> bool:
        return len(self.scheduler.items) > 0

    def execute(self) -> None:
        if self.stage.submitted:
            self.check_reads(self.stage.submitted[0])
        super().execute()

    def check_reads(self, plan: StepPlan) -> None:
        for row in plan.start_rows.tolist():
            self.places[row] = []
        if len(plan.start_items):
            started = unpack(StartItems, plan.start_items.data)
            keys = keys_of_array(started.item_keys)
            owners = np.repeat(started.rows, started.num_items).tolist()
            for row, start, count, key in zip(
                owners, started.item_starts.tolist(), started.item_lens.tolist(), keys, strict=True
            ):
                self.places[row].append((start, start + count, key))
        for index in range(plan.num_decode_rows, len(plan.rows)):
            first = int(plan.num_computed_tokens[index])
            last = first + int(plan.num_scheduled_tokens[index])
            for start, end, key in self.places[int(plan.rows[index])]:
                if start < last and first < end:
                    assert key in self.store, "a plan reads what the first stage does not have"
                    self.met["read"] += 1
                    is_cut = start < first or last < end
                    # A prefix hit may have computed the beginning, when it was whole.
                    assert end <= last or not self.limits.whole_item_tokens, "a plan cuts a picture"
                    self.met["cut"] += is_cut
                    self.met["whole"] += not is_cut

    def relay(self) -> None:
        """Carry out one thing of what was ordered."""
        self.ordered += [item.key for item in self.scheduler.items.take_orders()]
        self.dropping += self.scheduler.items.take_drops()
        assert len(set(self.ordered)) == len(self.ordered)
        if self.dropping and self.rng.random() < 0.5:
            key = self.dropping.pop(self.rng.randrange(len(self.dropping)))
            self.store.remove(key)
            self.scheduler.items.note_dropped([key])
            self.met["dropped"] += 1
        elif self.ordered:
            key = self.ordered.pop(self.rng.randrange(len(self.ordered)))
            if self.rng.random() < 0.15:
                failed = self.scheduler.note_item_failed(key, RequestError("it is too large"))
                assert all(request.finish_reason == FinishReason.ERROR for request, _ in failed)
                self.met["failed"] += len(failed)
            else:
                assert key not in self.store
                self.store.add(key)
                self.scheduler.items.note_stored([key])
                self.met["stored"] += 1
        assert sum(1 for _ in self.store) <= self.limits.max_item_tokens + len(self.dropping)

    def schedule(self) -> bool:
        if self.rng.random() < 0.7:
            self.relay()
            self.check()
        return super().schedule()

    def check_outcome(self) -> None:
        for request in self.requests:
            if request.finish_reason == FinishReason.ERROR:
                request.finish_reason = FinishReason.ABORT  # it has a part of its output, too
            self.met["handed over with items"] += request.num_earlier_tokens > 0 and request.items is not None
            self.met["preempted with items"] += request.num_preemptions > 0 and request.items is not None
        super().check_outcome()

    def check_nothing_is_left(self) -> None:
        self.relay()
        while self.ordered or self.dropping:
            self.relay()
        super().check_nothing_is_left()
        assert len(self.scheduler.items) == 0
        assert self.scheduler.items._room.pinned == 0
        assert self.scheduler.items.num_stored_tokens <= self.limits.max_item_tokens


def with_room(limits: SchedulerLimits, max_item_tokens: int, **changes: int) -> SchedulerLimits:
    return replace(limits, max_item_tokens=max_item_tokens, **changes)


@settings(max_examples=sized(30, 60), deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(limits(), st.integers(2, 14), st.integers(0, 2**32), st.integers(1, 120), st.booleans())
def test_plans_read_only_what_the_first_stage_has(limits, max_item_tokens, seed, num_actions, is_whole):
    drive(with_room(limits, max_item_tokens, whole_item_tokens=3 * is_whole), seed, num_actions, ItemDrive)


def test_the_random_drives_meet_what_they_are_for():
    met: Counter[str] = Counter()
    for seed in range(30):
        met.update(drive(scarce_limits(seed, max_item_tokens=7), seed, 80, ItemDrive).met)
    whats = ("read", "cut", "stored", "dropped", "failed", "refused")
    for what in (*whats, "preempted with items", "handed over with items"):
        assert met[what] >= 5, f"{what} was met only {met[what]} times: {dict(met)}"


def test_the_random_drives_of_whole_pictures_meet_what_they_are_for():
    met: Counter[str] = Counter()
    for seed in range(30):
        limits = with_room(scarce_limits(seed, max_item_tokens=7), 7, whole_item_tokens=3)
        met.update(drive(limits, seed, 80, ItemDrive).met)
    for what in ("whole", "stored", "refused", "preempted with items", "handed over with items"):
        assert met[what] >= 5, f"{what} was met only {met[what]} times: {dict(met)}"


def small_limits(max_item_tokens: int) -> SchedulerLimits:
    return SchedulerLimits(
        num_stages=1,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=40,
        block_size=4,
        groups=(BlockGroup(40),),
        enable_prefix_caching=False,
        max_item_tokens=max_item_tokens,
    )


def test_text_overtakes_pictures_that_are_not_there():
    run = Drive(small_limits(max_item_tokens=8), random.Random(0))
    items = PromptItems((item_of(2),), (1,), merge_size=1)
    run.make_items = lambda num_prompt: items  # type: ignore[method-assign]
    run.add()
    run.make_items = lambda num_prompt: None  # type: ignore[method-assign]
    run.add()
    with_picture, text = run.requests
    while not text.finish_reason:
        run.schedule()
        run.execute()
        run.collect()
        run.check()
    assert not with_picture.output_token_ids
    assert run.scheduler.stats().num_waiting_for_items == 1
    assert [item.key for item in run.scheduler.items.take_orders()] == [items.items[0].key]
    run.scheduler.items.note_stored([items.items[0].key])
    run.finish()
    assert with_picture.output_token_ids


def test_a_failure_that_nobody_waits_for_makes_room_for_others():
    run = ItemDrive(small_limits(max_item_tokens=3), random.Random(0))
    run.make_items = lambda num_prompt: PromptItems((item_of(2),), (0,), merge_size=1)  # type: ignore[method-assign]
    while not run.requests:
        Drive.add(run)
    run.make_items = lambda num_prompt: PromptItems((item_of(5),), (0,), merge_size=1)  # type: ignore[method-assign]
    Drive.add(run)
    items = run.scheduler.items
    assert [item.key for item in items.take_orders()] == [item_of(2).key]
    run.scheduler.abort(run.requests[0].request_id)
    assert not items.take_orders()
    assert not run.scheduler.note_item_failed(item_of(2).key, RequestError("it is too large"))
    assert [item.key for item in items.take_orders()] == [item_of(5).key]


def test_pictures_without_an_encoder_are_refused():
    run = ItemDrive(small_limits(max_item_tokens=0), random.Random(0))
    items = PromptItems((item_of(2),), (1,), merge_size=1)
    run.make_items = lambda num_prompt: items  # type: ignore[method-assign]
    with pytest.raises(RequestError, match="stage_embedding_bytes allows"):
        Drive.add(run)
