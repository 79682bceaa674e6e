"""Which request is found to kill engines: deaths are played to `PoisonDetector`, with and without a poison request."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest
from sizes import sized

from raypp.api.poison_requests import Finding, PoisonDetector

NOTHING = Finding(None, 0)
ROUND_S = 0.02


def named(*indices: int) -> list[str]:
    return [f"r{index}" for index in indices]


class Play:
    """A client's requests in engines that die whenever they run a poison one; others yield a token a round."""

    def __init__(
        self, num_requests: int, poison: Collection[int], *, knows_in_flight: bool = True, rows: int = 64
    ) -> None:
        self.now_s = 0.0
        self.part = 0  # what dies
        self.detector = PoisonDetector(lambda: self.now_s)
        self.tokens = dict.fromkeys(named(*range(num_requests)), 0)
        self.poison = set(named(*poison))
        self.poisonous_at = 0  # how many tokens it has when it begins to kill
        self.knows_in_flight = knows_in_flight
        self.rows = rows
        self.slow: dict[str, float] = {}  # of some, how many rounds of each engine they take until they yield a token
        self.rounds_here: dict[str, int] = {}  # that they have had
        self.in_engine = list(self.tokens)
        self.running: list[str] = []
        self.num_deaths = self.num_excused = self.most_counted = 0
        self.found: list[str] = []

    def run(self, num_rounds: int, at_once: int = 4) -> None:
        """Each round the engine takes in some more requests, in order, and runs all that it has taken in."""
        for _ in range(num_rounds):
            self.now_s += ROUND_S
            self.running = [name for name in self.running if name in self.tokens]
            self.running += [n for n in self.in_engine if n in self.tokens and n not in self.running][:at_once]
            if any(self.tokens[name] >= self.poisonous_at for name in self.poison.intersection(self.running)):
                self.die()
                continue
            for name in self.running:
                self.rounds_here[name] = self.rounds_here.get(name, 0) + 1
            speaking = [name for name in self.running if self.rounds_here[name] > self.slow.get(name, 0)]
            for name in speaking:
                self.tokens[name] += 1
            if self.detector.suspects:
                self.detector.note_tokens(speaking)
            self.go_on()

    def die(self) -> None:
        self.num_deaths += 1
        self.most_counted = max(self.most_counted, self.num_deaths - self.num_excused)
        self.detector.note_loss(self.part)
        in_flight, self.running, self.rounds_here = self.running, [], {}
        finding = self.detector.note_death(
            in_flight if self.knows_in_flight else None, self.tokens, max_running=self.rows
        )
        self.num_excused += finding.num_excused
        if finding.poison_id is not None:
            self.found.append(finding.poison_id)
            del self.tokens[finding.poison_id]
        self.in_engine = self.detector.begin(self.tokens)
        self.go_on()

    def go_on(self) -> None:
        if (name := self.detector.next(self.tokens)) is not None:
            self.in_engine = [name, *self.in_engine]


@pytest.mark.parametrize(
    ("num_requests", "poison", "at_once", "knows_in_flight"),
    [
        (32, 20, 4, True),
        (32, 0, 4, True),
        (32, 31, 32, True),
        (32, 20, 4, False),
        (32, 31, 32, False),
        (1, 0, 1, True),
        (1, 0, 1, False),
    ],
)
def test_a_poison_request_is_found_after_three_runs_alone(
    num_requests: int, poison: int, at_once: int, knows_in_flight: bool
) -> None:
    play = Play(num_requests, [poison], knows_in_flight=knows_in_flight)
    play.run(2000, at_once)
    assert play.found == named(poison)
    assert play.num_deaths == (3 if num_requests == 1 else 4)
    assert play.most_counted <= 3, "the default limit of restarts holds"
    assert all(play.tokens.values()), "the others go on"
    assert not play.detector.suspects
    assert play.num_excused == play.num_deaths - 1, "it counts as one death"


def test_one_that_kills_after_some_tokens_takes_a_death_more() -> None:
    play = Play(16, [7])
    play.poisonous_at = 10
    play.run(2000)
    assert play.found == named(7)
    assert play.num_deaths == 5
    assert play.most_counted <= 3


def test_the_first_of_many_suspects_is_found_once_another_one_has_run() -> None:
    play = Play(32, [0])
    play.run(2000, at_once=32)  # at the first death all are in flight, and none has had a token
    assert play.found == named(0)
    assert play.num_deaths == 5, "its first run alone proves nothing"
    assert play.most_counted <= 3
    assert play.num_excused == play.num_deaths - 1


def test_two_poison_requests_are_both_found() -> None:
    play = Play(16, [3, 4])
    play.run(6000)
    assert sorted(play.found) == named(3, 4)
    assert play.num_deaths <= 8
    assert play.most_counted <= 3


def test_an_engine_that_runs_nothing_blames_no_request_and_uses_its_restarts_up() -> None:
    play = Play(8, range(8))
    while play.num_deaths < 30:
        play.run(1, at_once=8)
    assert not play.found
    assert not play.num_excused


def test_deaths_that_tokens_lie_between_make_no_suspects() -> None:
    detector = PoisonDetector()
    tokens = {"a": 1, "b": 1}
    for _ in range(10):
        assert detector.note_death(["a", "b"], tokens, max_running=8) == NOTHING
        assert detector.begin(tokens) == ["a", "b"]
        assert not detector.suspects
        tokens = {name: num_tokens + 1 for name, num_tokens in tokens.items()}


@pytest.mark.parametrize("in_flight", [[], None])
def test_requests_that_are_in_no_step_are_not_suspected(in_flight: list[str] | None) -> None:
    detector = PoisonDetector()
    tokens = {"a": 1, "b": 1, "c": 0}  # a and b have both rows
    for _ in range(10):
        assert detector.note_death(in_flight, tokens, max_running=2) == NOTHING
        assert detector.begin(tokens) == ["a", "b", "c"]
        tokens = {"a": tokens["a"] + 1, "b": tokens["b"] + 1, "c": 0}


def test_suspects_run_one_by_one_after_the_tokens_of_those_that_were_in_a_step() -> None:
    detector = PoisonDetector(lambda: 0.0)
    tokens = {"a": 0, "b": 5, "c": 0, "d": 0}
    detector.note_death(["a", "b", "d"], tokens, max_running=8)
    assert detector.begin(tokens) == ["b", "c"]
    detector.note_tokens(["c"])
    assert detector.next(tokens) is None, "b was in a step, too"
    detector.note_tokens(["b"])
    assert detector.next(tokens) == "a"
    detector.note_tokens(["b", "c"])
    assert detector.next(tokens) is None
    detector.note_tokens(["a"])
    assert detector.next(tokens) == "d"
    detector.note_tokens(["d"])
    assert not detector.suspects


def test_no_suspect_waits_for_requests_that_have_ended() -> None:
    detector = PoisonDetector(lambda: 0.0)
    tokens = {"a": 0, "b": 5, "c": 0}
    detector.note_death(["a", "b", "c"], tokens, max_running=8)
    detector.begin(tokens)
    detector.note_tokens(["b"])
    assert detector.next(tokens) == "a"
    assert detector.next({"b": 9, "c": 0}) == "c", "a ran alone and has ended"
    assert detector.next({"b": 9}) is None
    assert not detector.suspects


def run_alone(detector: PoisonDetector, tokens: dict[str, int]) -> None:
    """Hand request a over alone, after a token of request b."""
    detector.begin(tokens)
    tokens["b"] += 1
    detector.note_tokens(["b"])
    assert detector.next(tokens) == "a"


def test_a_death_before_or_beside_the_run_of_a_suspect_makes_it_count_anew() -> None:
    detector, tokens = PoisonDetector(lambda: 0.0), {"a": 0, "b": 1}
    assert detector.note_death(["a", "b"], tokens, max_running=8) == NOTHING
    for in_flight in (["b"], []):
        for _ in range(2):
            run_alone(detector, tokens)
            assert detector.note_death(["a", "b"], tokens, max_running=8) == Finding(None, 1)
        run_alone(detector, tokens)
        assert detector.note_death(in_flight, tokens, max_running=8) == NOTHING
    for finding in (Finding(None, 1), Finding(None, 1), Finding("a", 1)):
        run_alone(detector, tokens)
        assert detector.note_death(["a", "b"], tokens, max_running=8) == finding


def test_deaths_of_different_parts_are_not_counted_together() -> None:
    detector, tokens = PoisonDetector(lambda: 0.0), {"a": 0, "b": 1}
    detector.note_death(["a", "b"], tokens, max_running=8)
    for part, poison_id in ((0, None), (0, None), (1, None), (0, None), (1, None), (1, None), (1, "a")):
        run_alone(detector, tokens)
        detector.note_loss(part)
        assert detector.note_death(["a", "b"], tokens, max_running=8) == Finding(poison_id, 1)


def test_deaths_of_known_cause_count_for_nothing() -> None:
    detector, tokens = PoisonDetector(lambda: 0.0), {"a": 0, "b": 1}
    detector.note_death(["a", "b"], tokens, max_running=8)
    for poison_id in (None, None, "a"):
        for _ in range(3):
            run_alone(detector, tokens)
            assert detector.note_death(["a", "b"], tokens, max_running=8, is_explained=True) == NOTHING
        run_alone(detector, tokens)
        assert detector.note_death(["a", "b"], tokens, max_running=8) == Finding(poison_id, 1)


def test_a_run_alone_waits_until_the_engine_is_older_than_those_that_died_soon_after_their_start() -> None:
    now_s = 100.0
    detector, tokens = PoisonDetector(lambda: now_s), {"a": 0}
    for lived_s, wait_s in ((1.0, 0.0), (0.3, 0.9), (0.7, 2.1), (0.1, 2.1), (14.0, 30.0), (100.0, 30.0)):
        detector.begin(tokens)
        now_s += lived_s
        detector.note_loss("driver")
        detector.note_death([], {"a": 0, "b": 1}, max_running=8)  # of no request; so that none is found
        detector.note_death(["a"], {"a": 0, "b": 1}, max_running=8)
        detector.begin(tokens)
        assert detector.wait_s == pytest.approx(wait_s)
        assert (detector.next(tokens) == "a") == (not wait_s)
        now_s += wait_s + 0.01
        assert detector.wait_s == 0
        assert detector.next(tokens) == ("a" if wait_s else None)


@pytest.mark.parametrize("knows_in_flight", [True, False])
def test_deaths_from_outside_find_no_request_also_when_three_come_close_together(knows_in_flight: bool) -> None:
    rng = random.Random(0)
    play = Play(32, (), knows_in_flight=knows_in_flight)
    for _ in range(50):
        for num_rounds in (rng.randrange(100, 300), rng.randrange(6), rng.randrange(6)):
            play.run(num_rounds, at_once=8)
            play.die()
    play.run(2000, at_once=8)
    assert not play.found
    assert all(play.tokens.values())
    assert not play.detector.suspects


@pytest.mark.parametrize("seed", range(sized(2, 8)))
@pytest.mark.parametrize("num_parts", [1, 3])
def test_fifteen_deaths_from_outside_in_a_row_find_no_request(seed: int, num_parts: int) -> None:
    """Beside quick requests there are two with long prompts, which have no token for as long as engines live."""
    rng, found = random.Random(seed), list[str]()
    for _ in range(40):
        play = Play(9, (), knows_in_flight=rng.random() < 0.7)
        play.slow = dict.fromkeys(named(7, 8), rng.choice((6, 15, 50)))
        mean_rounds = rng.choice((3, 10, 30))
        lives = rng.choice(
            [
                lambda mean=mean_rounds: round(rng.expovariate(1 / mean)),
                lambda mean=mean_rounds: rng.randrange(2 * mean),
                lambda mean=mean_rounds: rng.choice((1, mean // 2, 2 * mean)),
            ]
        )
        play.run(rng.randrange(60), at_once=9)
        for _ in range(15):
            play.part = rng.randrange(num_parts)
            play.die()
            play.run(lives(), at_once=9)
        play.run(1700, at_once=9)
        found += play.found
        assert all(play.tokens.values())
    assert not found
