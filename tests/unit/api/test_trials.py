"""Which request is held to kill engines: deaths played to `Trials`, with a request that does and without one."""

from __future__ import annotations

import random

import pytest

from raypp.api.trials import Trials, Verdict

NOTHING = Verdict(None, 0)


class Play:
    """A client's requests in engines that die whenever they run a poison one; others yield a token a round."""

    def __init__(self, num_requests: int, poison: set[int], *, knows_in_flight: bool = True) -> None:
        self.trials = Trials()
        self.tokens = dict.fromkeys(range(num_requests), 0)
        self.poison = poison
        self.knows_in_flight = knows_in_flight
        self.in_engine = list(self.tokens)
        self.num_deaths = self.num_excused = 0
        self.convicted: list[int] = []

    def run(self, num_rounds: int, at_once: int = 4) -> None:
        """Each round the engine takes in some more requests, in order, and runs all that it has taken in."""
        running: list[int] = []
        for _ in range(num_rounds):
            running = [h for h in running if h in self.tokens]
            running += [h for h in self.in_engine if h in self.tokens and h not in running][:at_once]
            if self.poison.intersection(running):
                self.die(running)
                running = []
                continue
            for handle in running:
                self.tokens[handle] += 1
            if self.trials.are_going_on:
                self.trials.note_tokens(running)
            self.go_on()

    def die(self, in_flight: list[int]) -> None:
        self.num_deaths += 1
        had = {h: n for h, n in self.tokens.items() if h in self.in_engine or h in self.trials._waiting}
        verdict = self.trials.note_death(
            in_flight if self.knows_in_flight else None, had, is_only_request=len(had) == 1
        )
        self.num_excused += verdict.num_excused
        if verdict.convicted is not None:
            self.convicted.append(verdict.convicted)
            del self.tokens[verdict.convicted]
        self.in_engine = self.trials.begin(list(self.tokens))
        self.go_on()

    def go_on(self) -> None:
        while (handle := self.trials.next(self.tokens)) is not None:
            self.in_engine.append(handle)


@pytest.mark.parametrize(
    ("num_requests", "poison", "at_once", "knows_in_flight"),
    [
        (32, 20, 4, True),
        (32, 0, 4, True),
        (32, 31, 32, True),
        (32, 20, 4, False),
        (32, 31, 32, False),
        (1, 0, 1, False),
    ],
)
def test_a_poison_request_is_convicted_at_the_third_death(
    num_requests: int, poison: int, at_once: int, knows_in_flight: bool
) -> None:
    play = Play(num_requests, {poison}, knows_in_flight=knows_in_flight)
    play.run(200, at_once)
    assert play.convicted == [poison]
    assert play.num_deaths == 3
    assert all(play.tokens.values()), "the others go on"
    assert not play.trials.are_going_on
    if num_requests > 1:
        assert play.num_excused == play.num_deaths - 1, "it counts as one death"


def test_the_first_of_many_suspects_is_convicted_once_another_one_has_run() -> None:
    play = Play(32, {0})
    play.run(200, at_once=32)  # at each death all are in flight, and none has had a token
    assert play.convicted == [0]
    assert play.num_deaths == 4, "its first trial proves nothing"
    assert play.num_excused == 3


def test_two_poison_requests_are_both_convicted() -> None:
    play = Play(16, {3, 4})
    play.run(300)
    assert sorted(play.convicted) == [3, 4]
    assert play.num_deaths <= 6
    assert play.num_deaths - play.num_excused <= 3, "the default limit of restarts holds"


def test_an_engine_that_runs_nothing_convicts_nobody_and_uses_its_restarts_up() -> None:
    play = Play(8, set(range(8)))
    play.run(12, at_once=8)
    assert play.convicted == []
    assert play.num_deaths == 12
    assert play.num_excused == 1


def test_deaths_that_tokens_lie_between_make_no_suspects() -> None:
    trials = Trials()
    tokens = {0: 1, 1: 1}
    for _ in range(10):
        assert trials.note_death([0, 1], tokens, is_only_request=False) == NOTHING
        assert trials.begin([0, 1]) == [0, 1]
        assert not trials.are_going_on
        tokens = {handle: count + 1 for handle, count in tokens.items()}


def test_requests_that_are_in_no_step_are_not_suspected() -> None:
    trials = Trials()
    for _ in range(10):
        assert trials.note_death([], {0: 0}, is_only_request=True) == NOTHING
        assert trials.begin([0]) == [0]


def test_a_trial_waits_for_the_tokens_of_those_that_were_in_a_step() -> None:
    trials = Trials()
    trials.note_death([0, 1], {0: 0, 1: 0, 2: 0}, is_only_request=False)
    trials.begin([0, 1, 2])
    trials.note_death([0, 1], {0: 0, 1: 5, 2: 0}, is_only_request=False)
    assert trials.begin([0, 1, 2]) == [1, 2]
    trials.note_tokens([2])
    assert trials.next([0, 1, 2]) is None, "1 was in a step, too"
    trials.note_tokens([1])
    assert trials.next([0, 1, 2]) == 0
    assert trials.next([0, 1, 2]) is None, "one at a time"
    trials.note_tokens([0])
    assert not trials.are_going_on


@pytest.mark.parametrize("ended", [0, 1])
def test_a_trial_does_not_wait_for_those_that_have_ended(ended: int) -> None:
    trials = Trials()
    for _ in range(2):
        trials.note_death([0, 1], {0: 0, 1: 0, 2: 9}, is_only_request=False)
        trials.begin([0, 1, 2])
    trials.note_tokens([2])
    assert trials.next([0, 1, 2]) == 0
    left = [handle for handle in (0, 1, 2) if handle != ended]
    assert trials.next(left) == (1 if ended == 0 else None)


def test_a_death_without_the_request_on_trial_says_nothing_of_it() -> None:
    trials = Trials()
    for _ in range(2):
        trials.note_death([0], {0: 0, 1: 7}, is_only_request=False)
        trials.begin([0, 1])
    trials.note_tokens([1])
    assert trials.next([0, 1]) == 0
    assert trials.note_death([1], {0: 0, 1: 8}, is_only_request=False) == NOTHING
    assert trials.begin([0, 1]) == [1], "it still waits for its trial"


def test_deaths_from_outside_convict_nobody_also_when_two_come_close_together() -> None:
    rng = random.Random(0)
    play = Play(32, set())
    for _ in range(30):
        for num_rounds in (200, rng.randrange(1, 6)):
            play.run(num_rounds, at_once=8)
            play.die([handle for handle in play.in_engine if rng.random() < 0.8])
    play.run(200, at_once=8)
    assert not play.convicted
    assert play.num_excused, "some were suspected"
    assert all(play.tokens.values())
    assert not play.trials.are_going_on
