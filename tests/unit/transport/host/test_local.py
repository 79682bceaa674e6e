"""The local link in one thread, where waiting can never help."""

from __future__ import annotations

import pytest

from raypp.errors import DeadlineError
from raypp.transport.host.local import open_local_edge


def test_one_thread_sends_and_receives_in_turn() -> None:
    sender, receiver = open_local_edge(2, 16)
    for step_id in range(10):
        receiver.post_recv(step_id, 4)
        sender.acquire(step_id)[:4] = step_id
        sender.send(step_id, 4)
        assert receiver.wait(step_id)[:4].tolist() == [step_id] * 4
        receiver.release(step_id)


def test_the_slot_is_shared_not_copied() -> None:
    sender, receiver = open_local_edge(2, 16)
    slot = sender.acquire(0)
    sender.send(0, 16)
    receiver.post_recv(0, 16)
    assert receiver.wait(0).data_ptr() == slot.data_ptr()


def test_what_was_never_sent_is_an_error_at_once() -> None:
    _, receiver = open_local_edge(2, 16)
    receiver.post_recv(0, 4)
    with pytest.raises(DeadlineError, match=r"step 0.*within 0\.0 s"):
        receiver.wait(0)


def test_a_slot_that_was_never_released_is_an_error_at_once() -> None:
    sender, _ = open_local_edge(2, 16)
    for step_id in (0, 1):
        sender.acquire(step_id)
        sender.send(step_id, 4)
    with pytest.raises(DeadlineError, match="step 0"):
        sender.acquire(2)


def test_ends_that_disagree_about_a_size_are_a_bug() -> None:
    sender, receiver = open_local_edge(2, 16)
    sender.acquire(0)
    sender.send(0, 4)
    receiver.post_recv(0, 8)
    with pytest.raises(AssertionError, match="sent 4 bytes, wanted 8"):
        receiver.wait(0)
