"""When an engine is started again, how often, and what its users hear of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import pytest

from raypp.config.sections import FaultsSection
from raypp.errors import DeadlineError, EngineDeadError, RayppError, ResourceError, StageDiedError
from raypp.supervision.supervisor import StartTimes, Supervisor

WAIT_S = 20.0


class FakeLife:
    start_times = StartTimes(num_kept_stages=1)

    def __init__(self, number: int) -> None:
        self.client_address = f"inproc://{number}"
        self.num_ends = self.lost = 0
        self.die: Callable[[RayppError], None] = lambda _: None
        self.died_at_once: RayppError | None = None

    def watch(self, on_death: Callable[[RayppError], None]) -> None:
        self.die = on_death
        if self.died_at_once is not None:
            threading.Thread(target=on_death, args=(self.died_at_once,), daemon=True).start()

    def num_lost_nodes(self) -> int:
        return self.lost

    def end(self) -> None:
        self.num_ends += 1


class Listener:
    """Notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, object]] = []
        self.explained: list[bool] = []
        self._changed = threading.Condition()

    def engine_lost(self, error: RayppError) -> None:
        self._note("lost", error)

    def engine_back(self, client_address: str, *, is_explained: bool) -> None:
        self.explained.append(is_explained)
        self._note("back", client_address)

    def engine_dead(self, error: RayppError) -> None:
        self._note("dead", error)

    def wait_for(self, *words: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.words == list(words), WAIT_S), self.heard

    @property
    def words(self) -> list[str]:
        return [word for word, _ in self.heard]

    def _note(self, word: str, about: object) -> None:
        with self._changed:
            self.heard.append((word, about))
            self._changed.notify_all()


class Owner:
    """Starts fake lives; `starts` says what becomes of each start after the first."""

    def __init__(self, *starts: Exception | FakeLife, obstacle: RayppError | None = None, **faults: float) -> None:
        self.now_s = 0.0
        self.first = FakeLife(0)
        self.starts = list(starts)
        self.obstacle = obstacle
        self.listener = Listener()
        self.supervisor = Supervisor(
            self.first,
            self.start_next,
            FaultsSection.model_validate(faults),
            obstacle=lambda: self.obstacle,
            clock=lambda: self.now_s,
        )
        self.supervisor.watch(self.listener)

    def start_next(self) -> FakeLife:
        self.now_s += 2.0
        outcome = self.starts.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def stage_died() -> StageDiedError:
    return StageDiedError("stage 1 died", stage_index=1)


@pytest.fixture
def own() -> Iterator[Callable[..., Owner]]:
    owners = []

    def make(*starts: Exception | FakeLife, **settings: object) -> Owner:
        owners.append(Owner(*starts, **settings))  # type: ignore[arg-type]
        return owners[-1]

    yield make
    for owner in owners:
        assert owner.supervisor.stop(WAIT_S)


def test_without_restarts_a_death_is_final(own: Callable[..., Owner]) -> None:
    owner, error = own(max_engine_restarts=0), stage_died()
    owner.first.die(error)
    owner.listener.wait_for("dead")
    assert owner.listener.heard == [("dead", error)]
    assert owner.first.num_ends == 0, "closing ends it, and writes its trace"


def test_the_next_life_has_its_own_address(own: Callable[..., Owner]) -> None:
    owner = own(FakeLife(1), max_engine_restarts=1)
    owner.first.die(stage_died())
    owner.listener.wait_for("lost", "back")
    assert owner.listener.heard[1] == ("back", "inproc://1")
    assert owner.supervisor.life.client_address == "inproc://1"
    assert owner.first.num_ends == 1
    [recovery] = owner.supervisor.recoveries()
    assert recovery.died == "stage 1 died"
    assert (recovery.end_s, recovery.start_s, recovery.total_s) == (0.0, 2.0, 2.0)


def test_what_is_said_of_an_earlier_life_is_ignored(own: Callable[..., Owner]) -> None:
    owner = own(FakeLife(1), max_engine_restarts=3)
    owner.supervisor.report_death(EngineDeadError("frozen", silent_s=1.5), "inproc://0")
    owner.listener.wait_for("lost", "back")
    owner.supervisor.report_death(stage_died(), "inproc://0")
    owner.first.die(stage_died())
    assert owner.supervisor.is_running
    assert owner.supervisor.recoveries()[0].notice_s == 1.5


def test_who_uses_it_hears_whether_a_request_may_have_done_it(own: Callable[..., Owner]) -> None:
    lives = [FakeLife(number) for number in (1, 2, 3)]
    owner = own(*lives, max_engine_restarts=3)
    owner.first.die(stage_died())
    owner.listener.wait_for("lost", "back")
    lives[0].lost = 1
    lives[0].die(stage_died())
    owner.listener.wait_for("lost", "back", "lost", "back")
    owner.supervisor.restart()
    assert owner.listener.explained == [False, True, True]
    assert [recovery.num_lost_nodes for recovery in owner.supervisor.recoveries()] == [0, 1, 0]


def test_restarts_are_counted_within_a_window(own: Callable[..., Owner]) -> None:
    lives = [FakeLife(number) for number in (1, 2, 3)]
    owner = own(*lives, max_engine_restarts=2, restart_window_s=100.0)
    owner.first.die(stage_died())
    owner.listener.wait_for("lost", "back")
    owner.now_s = 90.0
    lives[0].die(stage_died())
    owner.listener.wait_for(*["lost", "back"] * 2)
    owner.now_s = 101.0  # the first is too long ago
    lives[1].die(stage_died())
    owner.listener.wait_for(*["lost", "back"] * 3)
    lives[2].die(stage_died())
    owner.listener.wait_for(*["lost", "back"] * 3, "dead")


def test_excused_restarts_do_not_count(own: Callable[..., Owner]) -> None:
    lives = [FakeLife(number) for number in (1, 2)]
    owner = own(*lives, max_engine_restarts=1)
    owner.first.die(stage_died())
    owner.listener.wait_for("lost", "back")
    owner.supervisor.excuse_restarts(3)
    lives[0].die(stage_died())
    owner.listener.wait_for(*["lost", "back"] * 2)


@pytest.mark.parametrize("error", [stage_died(), DeadlineError("stage 0 took too long")])
def test_a_death_while_it_starts_costs_one_more_restart(own: Callable[..., Owner], error: RayppError) -> None:
    owner = own(error, FakeLife(1), max_engine_restarts=2)
    owner.first.die(stage_died())
    owner.listener.wait_for("lost", "back")
    assert owner.supervisor.recoveries()[0].num_starts == 2


def test_a_death_while_it_starts_may_be_one_too_many(own: Callable[..., Owner]) -> None:
    last = stage_died()
    owner = own(last, max_engine_restarts=1)
    owner.first.die(stage_died())
    owner.listener.wait_for("lost", "dead")
    assert owner.listener.heard[1] == ("dead", last)


def test_a_life_that_died_before_it_was_watched_is_replaced(own: Callable[..., Owner]) -> None:
    short = FakeLife(1)
    short.died_at_once = stage_died()
    owner = own(short, FakeLife(2), max_engine_restarts=2)
    owner.first.die(stage_died())
    owner.listener.wait_for(*["lost", "back"] * 2)


@pytest.mark.parametrize("error", [ResourceError("no room", got="1 GPU"), ValueError("of somebody else")])
def test_an_engine_that_cannot_start_says_what_is_missing(own: Callable[..., Owner], error: Exception) -> None:
    owner = own(error, max_engine_restarts=9)
    owner.first.die(stage_died())
    owner.listener.wait_for("lost", "dead")
    said = owner.listener.heard[1][1]
    assert isinstance(said, EngineDeadError)
    assert str(error) in str(said)
    assert "its end: stage 1 died" in str(said)


def test_nothing_helps_where_the_owners_own_side_has_failed(own: Callable[..., Owner]) -> None:
    obstacle = EngineDeadError("Ray's raylet died")
    owner = own(FakeLife(1), max_engine_restarts=9, obstacle=obstacle)
    owner.first.die(stage_died())
    owner.listener.wait_for("dead")
    assert owner.listener.heard == [("dead", obstacle)]


def test_who_comes_late_hears_how_it_stands(own: Callable[..., Owner]) -> None:
    may_start, late, too_late = threading.Event(), Listener(), Listener()
    owner = own(FakeLife(1), max_engine_restarts=1)
    start_next = owner.supervisor._start_next

    def slowly() -> FakeLife:
        assert may_start.wait(WAIT_S)
        return start_next()

    owner.supervisor._start_next = slowly
    owner.first.die(stage_died())
    owner.listener.wait_for("lost")
    owner.supervisor.watch(late)
    assert late.words == ["lost"]
    may_start.set()
    late.wait_for("lost", "back")
    owner.supervisor.life.die(stage_died())
    late.wait_for("lost", "back", "dead")
    owner.supervisor.watch(too_late)
    assert too_late.words == ["dead"]


def test_who_fails_to_listen_harms_nobody(own: Callable[..., Owner], caplog: pytest.LogCaptureFixture) -> None:
    class Deaf(Listener):
        def engine_lost(self, error: RayppError) -> None:
            raise KeyError("a user's own")

    owner, after = own(FakeLife(1), max_engine_restarts=1), Listener()
    owner.supervisor.watch(Deaf())
    owner.supervisor.watch(after)
    with caplog.at_level(logging.ERROR):
        owner.first.die(stage_died())
        after.wait_for("lost", "back")
    assert "a watcher of the engine failed" in caplog.text


def test_a_life_that_starts_while_the_engine_is_closed_ends(own: Callable[..., Owner]) -> None:
    starting, may_start, life = threading.Event(), threading.Event(), FakeLife(1)
    owner = own(life, max_engine_restarts=1)

    def slowly() -> FakeLife:
        starting.set()
        assert may_start.wait(WAIT_S)
        return life

    owner.supervisor._start_next = slowly
    owner.first.die(stage_died())
    assert starting.wait(WAIT_S)
    assert not owner.supervisor.stop(0.01)
    may_start.set()
    assert owner.supervisor.stop(WAIT_S)
    assert life.num_ends == 1
    assert owner.listener.words == ["lost"]
