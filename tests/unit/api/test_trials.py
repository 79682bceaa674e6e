"""Which request is held to kill engines: deaths played to `Trials`, with a request that does and without one."""

from __future__ import annotations

import random

import pytest

from raypp.api.trials import Trials, Verdict

NOTHING = Verdict(None, 0)
ROUND_S = 0.02


class Play:
    """A client's requests in engines that die whenever they run a poison one; others yield a token a round."""

    def __init__(self, num_requests: int, poison: set[int], *, knows_in_flight: bool = True, rows: int = 64) -> None:
        self.now_s = 0.0
        self.part = 0  # what dies
        self.trials = Trials(rows, lambda: self.now_s)
        self.tokens = dict.fromkeys(range(num_requests), 0)
        self.poison = poison
        self.poisonous_at = 0  # how many tokens it has when it begins to kill
        self.knows_in_flight = knows_in_flight
        self.slow: dict[int, int] = {}  # of some, how many rounds of each engine they take until they yield a token
        self.rounds_here: dict[int, int] = {}  # that they have had
        self.in_engine = list(self.tokens)
        self.running: list[int] = []
        self.num_deaths = self.num_excused = self.most_counted = 0
        self.convicted: list[int] = []

    def run(self, num_rounds: int, at_once: int = 4) -> None:
        """Each round the engine takes in some more requests, in order, and runs all that it has taken in."""
        for _ in range(num_rounds):
            self.now_s += ROUND_S
            self.running = [h for h in self.running if h in self.tokens]
            self.running += [h for h in self.in_engine if h in self.tokens and h not in self.running][:at_once]
            if any(self.tokens[handle] >= self.poisonous_at for handle in self.poison.intersection(self.running)):
                self.die()
                continue
            for handle in self.running:
                self.rounds_here[handle] = self.rounds_here.get(handle, 0) + 1
            speaking = [h for h in self.running if self.rounds_here[h] > self.slow.get(h, 0)]
            for handle in speaking:
                self.tokens[handle] += 1
            if self.trials.are_going_on:
                self.trials.note_tokens(speaking)
            self.go_on()

    def die(self) -> None:
        self.num_deaths += 1
        self.most_counted = max(self.most_counted, self.num_deaths - self.num_excused)
        self.trials.note_loss(self.part)
        in_flight, self.running, self.rounds_here = self.running, [], {}
        verdict = self.trials.note_death(
            in_flight if self.knows_in_flight else None, self.tokens, is_only_request=len(self.tokens) == 1
        )
        self.num_excused += verdict.num_excused
        if verdict.convicted is not None:
            self.convicted.append(verdict.convicted)
            del self.tokens[verdict.convicted]
        self.in_engine = self.trials.begin(self.tokens)
        self.go_on()

    def go_on(self) -> None:
        if handles := self.trials.next(self.tokens):
            self.in_engine = [*handles, *self.in_engine]


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
def test_a_poison_request_is_convicted_at_its_third_death_at_the_earliest(
    num_requests: int, poison: int, at_once: int, knows_in_flight: bool
) -> None:
    play = Play(num_requests, {poison}, knows_in_flight=knows_in_flight)
    play.run(200, at_once)
    assert play.convicted == [poison]
    assert play.num_deaths == (3 if knows_in_flight or num_requests == 1 else 4)
    assert play.most_counted <= 3, "the default limit of restarts holds"
    assert all(play.tokens.values()), "the others go on"
    assert not play.trials.are_going_on
    if num_requests > 1:
        assert play.num_excused == play.num_deaths - 1, "it counts as one death"


def test_one_that_kills_after_some_tokens_takes_a_death_more() -> None:
    play = Play(16, {7})
    play.poisonous_at = 10
    play.run(200)
    assert play.convicted == [7]
    assert play.num_deaths == 4
    assert play.most_counted <= 3, "the default limit of restarts holds"


def test_the_first_of_many_suspects_is_convicted_once_another_one_has_run() -> None:
    play = Play(32, {0})
    play.run(200, at_once=32)  # at each death all are in flight, and none has had a token
    assert play.convicted == [0]
    assert play.num_deaths == 4, "its first trial proves nothing"
    assert play.most_counted <= 3


def test_two_poison_requests_are_both_convicted() -> None:
    play = Play(16, {3, 4})
    play.run(300)
    assert sorted(play.convicted) == [3, 4]
    assert play.num_deaths <= 6
    assert play.most_counted <= 3


def test_an_engine_that_runs_nothing_convicts_nobody_and_uses_its_restarts_up() -> None:
    play = Play(8, set(range(8)))
    while play.num_deaths < 12:
        play.run(1, at_once=8)
    assert play.convicted == []
    assert play.num_excused == 1


def test_deaths_that_tokens_lie_between_make_no_suspects() -> None:
    trials = Trials(8)
    tokens = {0: 1, 1: 1}
    for _ in range(10):
        assert trials.note_death([0, 1], tokens, is_only_request=False) == NOTHING
        assert trials.begin(tokens) == [0, 1]
        assert not trials.are_going_on
        tokens = {handle: count + 1 for handle, count in tokens.items()}


@pytest.mark.parametrize("in_flight", [[], None])
def test_requests_that_are_in_no_step_are_not_suspected(in_flight: list[int] | None) -> None:
    trials = Trials(max_running=2)
    tokens = {0: 1, 1: 1, 2: 0}  # 0 and 1 have both rows
    for _ in range(10):
        assert trials.note_death(in_flight, tokens, is_only_request=False) == NOTHING
        assert trials.begin(tokens) == [0, 1, 2]
        tokens = {0: tokens[0] + 1, 1: tokens[1] + 1, 2: 0}


def test_suspects_wait_for_the_tokens_of_those_that_were_in_a_step() -> None:
    trials = Trials(8)
    tokens = {0: 0, 1: 5, 2: 0, 3: 0}
    trials.note_death([0, 1, 3], tokens, is_only_request=False)
    assert trials.begin(tokens) == [1, 2]
    trials.note_tokens([2])
    assert trials.next(tokens) == [], "1 was in a step, too"
    trials.note_tokens([1])
    assert trials.next(tokens) == [0, 3]
    assert trials.next(tokens) == []
    trials.note_death([0, 1, 2, 3], tokens := {0: 0, 1: 6, 2: 1, 3: 0}, is_only_request=False)
    assert trials.begin(tokens) == [1, 2]
    trials.note_tokens([1, 2])
    assert trials.next(tokens) == [0], "one at a time"
    trials.note_tokens([1, 2])
    assert trials.next(tokens) == []
    trials.note_tokens([0])
    assert trials.next(tokens) == [3]
    trials.note_tokens([3])
    assert not trials.are_going_on


def test_nobody_waits_for_those_that_have_ended() -> None:
    trials = Trials(8)
    for count in (5, 6):
        tokens = {0: 0, 1: count, 2: 0}
        trials.note_death([0, 1, 2], tokens, is_only_request=False)
        trials.begin(tokens)
        trials.note_tokens([1])
        trials.next(tokens)
    assert trials.next({1: 9, 2: 0}) == [2], "0 was on trial and has ended"
    assert trials.next({1: 9}) == []
    assert not trials.are_going_on


def test_a_death_without_the_request_on_trial_says_nothing_of_it() -> None:
    trials = Trials(8)
    for num_tokens in (7, 8):
        trials.note_death([0], {0: 0, 1: num_tokens}, is_only_request=False)
        trials.begin({0: 0, 1: num_tokens})
        trials.note_tokens([1])
        assert trials.next([0, 1]) == [0]
    assert trials.note_death([1], {0: 0, 1: 9}, is_only_request=False) == NOTHING
    assert trials.begin({0: 0, 1: 9}) == [1], "it still waits for its trial"


def test_one_that_waits_for_a_row_on_its_trial_is_not_convicted_by_a_death_of_the_driver() -> None:
    trials = Trials(8)
    for num_tokens in (7, 8, 9):
        verdict = trials.note_death(None, {0: 0, 1: num_tokens}, is_only_request=False)
        assert verdict.convicted is None
        trials.begin({0: 0, 1: num_tokens})
        trials.note_tokens([1])
        assert trials.next([0, 1]) == [0]
    trials.note_tokens([0])
    assert not trials.are_going_on


@pytest.mark.parametrize("knows_in_flight", [True, False])
def test_deaths_from_outside_convict_nobody_also_when_three_come_close_together(knows_in_flight: bool) -> None:
    rng = random.Random(0)
    play = Play(32, set(), knows_in_flight=knows_in_flight)
    for _ in range(50):
        for num_rounds in (rng.randrange(100, 300), rng.randrange(6), rng.randrange(6)):
            play.run(num_rounds, at_once=8)
            play.die()
    play.run(200, at_once=8)
    assert not play.convicted
    assert all(play.tokens.values())
    assert not play.trials.are_going_on


@pytest.mark.parametrize("seed", range(8))
def test_deaths_from_outside_soon_after_each_start_do_not_convict_a_request_with_a_long_prompt(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        play = Play(9, set())
        play.slow = {8: 6}
        for index in range(6):
            play.part = index % 2
            play.run(rng.choice((1, 5, 15)), at_once=9)
            play.die()
        play.run(500, at_once=9)
        assert not play.convicted
        assert all(play.tokens.values())


def begin_trial_of_first(trials: Trials, *parts: int) -> dict[int, int]:
    """Let the engine die under two requests, and hand the first over alone, which has had no token."""
    for num_tokens, part in enumerate(parts):
        trials.note_loss(part)
        trials.note_death([0, 1], {0: 0, 1: 1 + num_tokens}, is_only_request=False)
        trials.begin({0: 0, 1: 1 + num_tokens})
        trials.note_tokens([1])
        assert trials.next([0, 1]) == [0]
    return {0: 0, 1: 1 + len(parts)}


def test_a_death_that_is_not_its_doing_makes_one_more_trial_necessary() -> None:
    trials = Trials(8, lambda: 0.0)
    tokens = begin_trial_of_first(trials, 0, 0)
    assert trials.note_death([1], tokens, is_only_request=False) == NOTHING
    for verdict in (Verdict(None, 1), Verdict(0, 1)):
        trials.begin(tokens)
        trials.note_tokens([1])
        assert trials.next(tokens) == [0]
        tokens[1] += 1
        assert trials.note_death([0, 1], tokens, is_only_request=False) == verdict


def test_deaths_of_different_parts_are_not_counted_together() -> None:
    trials = Trials(8, lambda: 0.0)
    tokens = begin_trial_of_first(trials, 0, 1)
    for part, verdict in ((1, Verdict(None, 1)), (0, Verdict(None, 1)), (1, Verdict(0, 1))):
        trials.note_loss(part)
        assert trials.note_death([0, 1], tokens, is_only_request=False) == verdict
        trials.begin(tokens)
        trials.note_tokens([1])
        trials.next(tokens)
        tokens[1] += 1


def test_a_trial_waits_until_the_engine_is_older_than_those_that_have_died() -> None:
    now_s = 100.0
    trials = Trials(8, lambda: now_s)
    tokens = {0: 0}
    for _ in range(2):
        trials.begin(tokens)
        trials.next(tokens)
        now_s += 0.3
        trials.note_loss(0)
        trials.note_death([0], tokens, is_only_request=True)
    trials.begin(tokens)
    assert trials.next(tokens) == []
    assert trials.hold_s == pytest.approx(0.6)
    now_s += 0.61
    assert trials.hold_s == 0
    assert trials.next(tokens) == [0]


def test_deaths_that_have_another_cause_are_nobodys_doing() -> None:
    trials = Trials(8, lambda: 0.0)
    tokens = begin_trial_of_first(trials, 0, 0)
    for _ in range(5):
        assert trials.note_death([0, 1], tokens, is_only_request=False, is_explained=True) == NOTHING
        assert trials.begin(tokens) == [1]
        trials.note_tokens([1])
        assert trials.next(tokens) == [0], "it is still on trial"
        tokens[1] += 1
    assert trials.note_death([0, 1], tokens, is_only_request=False) == Verdict(0, 1), "and nobody else was to blame"
