"""How many requests are let in, and what the others are told."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from serve_app.admission import Admission
from serve_app.errors import QueueFullError


def test_room_is_what_runs_and_what_may_wait() -> None:
    admission = Admission(max_running=2, max_queued=3)
    with ExitStack() as running:
        for _ in range(5):
            running.enter_context(admission.admit(1))
        with pytest.raises(QueueFullError) as caught, admission.admit(1):
            pass
        assert caught.value.retry_after_s >= 1
        assert admission.num_unfinished == 5
        assert admission.num_refused == 1
    assert admission.num_unfinished == 0
    with admission.admit(5):
        assert admission.num_unfinished == 5


def test_every_choice_counts() -> None:
    admission = Admission(max_running=2, max_queued=2)
    with admission.admit(3), pytest.raises(QueueFullError), admission.admit(2):
        pass


def test_a_request_larger_than_the_queue_is_let_in_when_nothing_waits() -> None:
    admission = Admission(max_running=2, max_queued=0)
    with admission.admit(128):
        assert admission.num_unfinished == 128


def test_room_comes_back_after_an_error() -> None:
    admission = Admission(max_running=1, max_queued=0)
    with pytest.raises(KeyError), admission.admit(1):
        raise KeyError
    assert admission.num_unfinished == 0
