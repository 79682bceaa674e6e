"""How much work is let in, and what the others are told."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from raypp.errors import QueueFullError, RequestError
from serve_app.runner import Admission, AdmissionLimits


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def admission_of(max_running: int, max_queued: int, **limits: int) -> Admission:
    return Admission(AdmissionLimits(max_running, max_queued, **limits))


def test_room_is_what_runs_and_what_may_wait() -> None:
    admission = admission_of(max_running=2, max_queued=3)
    with ExitStack() as running:
        for _ in range(5):
            running.enter_context(admission.admit(1, 10))
        with pytest.raises(QueueFullError) as caught, admission.admit(1, 10):
            pass
        assert caught.value.retry_after_s >= 1
        assert admission.num_unfinished == 5
    assert admission.num_unfinished == 0
    with admission.admit(5, 10):
        assert admission.num_unfinished == 5


def test_every_choice_counts() -> None:
    admission = admission_of(max_running=2, max_queued=2)
    with admission.admit(3, 1), pytest.raises(QueueFullError), admission.admit(2, 1):
        pass


def test_the_first_one_in_is_counted_like_any_other() -> None:
    admission = admission_of(max_running=2, max_queued=2)
    with pytest.raises(QueueFullError), admission.admit(5, 1):
        pass
    assert admission.num_unfinished == 0


@pytest.mark.parametrize(
    ("num_prompts", "n", "max_queued", "limit"),
    [(80, 128, 1024, 256), (1600, 1, 1024, 256), (257, 1, 1024, 256), (1, 128, 5, 13)],
)
def test_a_body_that_asks_for_too_much_is_refused_with_the_limit(
    num_prompts: int, n: int, max_queued: int, limit: int
) -> None:
    admission = admission_of(max_running=8, max_queued=max_queued)
    with pytest.raises(RequestError, match=rf"{num_prompts * n} sequences.*at most {limit}\b.*hint"):
        admission.check(num_prompts, n)
    admission.check(limit, 1)


def test_prompt_tokens_are_work_too() -> None:
    admission = admission_of(max_running=8, max_queued=8, max_unfinished_tokens=100, max_body_tokens=50)
    with pytest.raises(RequestError, match=r"51 tokens.*max_tokens_per_request = 50"):
        admission.limits.check_tokens(2, 51)
    admission.limits.check_tokens(1, 51)  # one alone may fill the context
    with admission.admit(1, 60):
        with pytest.raises(QueueFullError, match="max_unfinished_tokens = 100"), admission.admit(1, 41):
            pass
        with admission.admit(1, 40):
            assert admission.num_unfinished_tokens == 100
    with admission.admit(1, 1000):  # longer than the queue, and nobody else is there
        pass
    assert admission.num_unfinished_tokens == 0


def test_room_comes_back_after_an_error() -> None:
    admission = admission_of(max_running=1, max_queued=0)
    with pytest.raises(KeyError), admission.admit(1, 1):
        raise KeyError
    assert admission.num_unfinished == admission.num_unfinished_tokens == 0


def test_retry_after_is_the_mean_duration_of_what_waits() -> None:
    """Two run at a time and six wait: three times the mean. The mean follows the newest requests."""
    clock = Clock()
    admission = Admission(AdmissionLimits(max_running=2, max_queued=6), clock)

    def retry_after_s() -> int:
        with admission.admit(8, 8), pytest.raises(QueueFullError) as caught:
            admission.check(1, 1)
        return caught.value.retry_after_s

    for _ in range(100):
        with admission.admit(1, 1):
            clock.now_s += 4.9
    assert retry_after_s() == 15
    for _ in range(100):
        with admission.admit(1, 1):
            clock.now_s += 1.9
    assert retry_after_s() == 6
    for _ in range(100):
        with admission.admit(1, 1):
            clock.now_s += 1000.0
    assert retry_after_s() == 60, "nobody is told to come back in an hour"
