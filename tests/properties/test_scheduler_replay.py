"""Random arrivals, aborts, preemptions, delays and deaths: what the stages compute is right, and nothing leaks.

After a death another scheduler and other stages get the unfinished requests, with the tokens that were collected.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replay_stage import VOCAB_SIZE, PlanWatcher, ReplayStage, reference_output
from sizes import sized

from raypp.messages import BlockGroup, StepResult, TokenLogprobs
from raypp.prompt_items import PromptItems
from raypp.request import Request
from raypp.scheduler.limits import SchedulerLimits
from raypp.scheduler.scheduler import Scheduler
from raypp.types import FinishReason, SamplingParams

EOS = frozenset({0})


@st.composite
def limits(draw: st.DrawFn) -> SchedulerLimits:
    num_stages = draw(st.integers(1, 4))
    max_num_seqs = draw(st.integers(1, 9))
    max_step_rows = -(-max_num_seqs // num_stages)
    enable_prefix_caching = draw(st.booleans())
    windows = [draw(st.sampled_from([None, None, 1, 2, 7, 16]))]
    windows += draw(st.lists(st.integers(1, 20), max_size=2))
    groups = tuple(
        BlockGroup(draw(st.integers(8, 40)), window, draw(st.integers(0, 30)) if enable_prefix_caching else 0)
        for window in windows
    )
    num_snapshots = draw(st.none() | st.integers(1, 6)) if enable_prefix_caching else None
    keeps_states = num_snapshots is not None and any(group.num_cpu_blocks for group in groups)
    return SchedulerLimits(
        num_stages=num_stages,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.integers(max_step_rows, max_step_rows + 24)),
        max_model_len=draw(st.integers(12, 48)),
        block_size=draw(st.integers(1, 5)),
        groups=groups,
        enable_prefix_caching=enable_prefix_caching,
        max_copied_blocks=draw(st.integers(1, 9)),
        num_snapshots=num_snapshots,
        num_cpu_snapshots=draw(st.integers(0, 6)) if keeps_states else 0,
        min_prefill_chunk_tokens=draw(st.integers(1, 12)),
        max_steps_per_cohort=draw(st.integers(2, 4)),
        max_drafts=draw(st.integers(0, 3)),
    )


@dataclass
class RandomDrafts:
    rng: random.Random

    def num_drafts(self, cohort: int, num_rows: int, most: int) -> int:
        return self.rng.randint(0, most)

    def note_result(self, cohort: int, num_drafts: int, num_drafted: np.ndarray, num_matched: np.ndarray) -> None:
        assert (num_matched <= num_drafted).all()


class Drive:
    """A scheduler, a replayed pipeline, and the requests between them."""

    def __init__(self, limits: SchedulerLimits, rng: random.Random) -> None:
        self.limits, self.rng = limits, rng
        self.requests: list[Request] = []
        self.start_engine()
        self.num_deaths = 0
        self.num_late_deaths = 0  # that `finish` may bring
        self.told: Counter[str] = Counter()
        self.logprobs: dict[str, list[TokenLogprobs]] = defaultdict(list)
        self.prompt_logprobs: dict[str, list[TokenLogprobs]] = defaultdict(list)
        self.has_priorities = rng.random() < 0.5
        self.shared = [[rng.randrange(2, VOCAB_SIZE) for _ in range(limits.max_model_len)] for _ in range(2)]

    def start_engine(self) -> None:
        self.scheduler = Scheduler(self.limits, RandomDrafts(self.rng))
        self.stage = ReplayStage(self.limits, self.rng, caps_at_limit=self.rng.random() < 0.5)
        self.watcher = PlanWatcher(self.limits)
        self.results: deque[StepResult] = deque()
        self.num_before = sum(1 for request in self.requests if request.finish_reason)

    def die(self) -> None:
        """Lose the engine; hand what is unfinished to another one, which finds it where the others are."""
        in_flight = self.scheduler.requests_in_flight()
        assert len(set(in_flight)) == len(in_flight)
        assert not any(request.finish_reason for request in in_flight)
        self.start_engine()
        self.num_deaths += 1
        ended = [request for request in self.requests if request.finish_reason]
        begun = [self.handed_over(request) for request in self.requests if not request.finish_reason]
        self.requests, self.num_before = [*ended, *begun], len(ended)
        for request in begun:
            self.scheduler.add(request)

    def handed_over(self, request: Request) -> Request:
        """Return the request as its client hands it over: with its tokens, asking anew for what is of its prompt."""
        self.prompt_logprobs[request.request_id].clear()
        return Request(
            request.request_id,
            request.prompt_token_ids,
            request.params,
            request.seed,
            EOS,
            priority=request.priority,
            items=request.items,
            output_token_ids=request.output_token_ids.copy(),
        )

    def limit(self, request: Request) -> int:
        return min(len(request.prompt_token_ids) + request.params.max_tokens, self.limits.max_model_len)

    def add(self) -> None:
        rng = self.rng
        capacity = min(self.limits.max_model_len, self.limits.max_request_tokens)
        num_prompt = rng.randint(1, capacity - 1)
        prompt = rng.choice(self.shared)[: rng.randint(0, num_prompt)]
        prompt = prompt + [rng.randrange(VOCAB_SIZE) for _ in range(num_prompt - len(prompt))]
        max_tokens = rng.randint(1, max(capacity - num_prompt, 1))
        params = SamplingParams(
            max_tokens=max_tokens if capacity < self.limits.max_model_len else max_tokens + rng.randint(0, 9),
            ignore_eos=not (has_grammar := rng.random() < 0.2) and rng.random() < 0.7,
            structured_outputs={"json_object": True} if has_grammar else None,
            stop_token_ids=(1,) if rng.random() < 0.3 else (),
            logprobs=rng.randrange(3) if rng.random() < 0.3 else None,
            prompt_logprobs=rng.randrange(3) if rng.random() < 0.3 else None,
        )
        priority = rng.randrange(3) if self.has_priorities else 0
        items = self.make_items(num_prompt)
        request = Request(
            str(len(self.requests)),
            np.array(prompt, np.int32),
            params,
            rng.randrange(3),
            EOS,
            priority=priority,
            items=items,
        )
        self.requests.append(request)
        self.scheduler.add(request)

    def make_items(self, num_prompt: int) -> PromptItems | None:
        return None

    def abort(self) -> None:
        request = self.rng.choice(self.requests)
        was_running = not request.finish_reason
        assert self.scheduler.abort(request.request_id) == was_running
        if was_running:
            assert request.finish_reason == FinishReason.ABORT

    def schedule(self) -> bool:
        plan = self.scheduler.schedule()
        waits = self.scheduler.num_in_flight or not self.scheduler.has_unfinished or self.waits_for_others()
        assert plan is not None or waits, "a standstill"
        if plan is None:
            return False
        self.watcher.note_dispatched(plan)
        for state in self.scheduler._running:
            if state.row in plan.rows:
                # Counted already, this step included: a row whose steps in flight must end it needs no further one.
                assert state.num_tokens + state.num_in_flight_yields <= state.limit
                held = {(g, i): table.blocks[i] for g, table in enumerate(state.tables) for i in table.indices}
                sent = self.watcher.tables[state.row]
                assert held == {at: block for at, block in sent.items() if at[1] in state.tables[at[0]].indices}
        self.stage.submit(plan)
        assert self.scheduler.num_in_flight <= self.limits.max_steps_per_cohort * self.limits.num_stages
        return True

    def waits_for_others(self) -> bool:
        return False

    def execute(self) -> None:
        if self.stage.submitted:
            self.results.append(self.stage.step())

    def collect(self) -> None:
        if not self.results:
            return
        result = self.results.popleft()
        ended = {r.request_id for r in self.requests if r.finish_reason}
        self.watcher.note_collected(result.step_id)
        for update in self.scheduler.update(result):
            assert update.request.request_id not in ended
            assert update.is_news or update.request.has_grammar
            self.told[update.request.request_id] += len(update.new_token_ids)
            if update.logprobs is not None:
                self.logprobs[update.request.request_id].append(update.logprobs.own)
            if update.prompt_logprobs is not None:
                self.prompt_logprobs[update.request.request_id].append(update.prompt_logprobs.own)

    def check(self) -> None:
        self.scheduler.check_integrity()

    def finish(self) -> None:
        """Run to the end, in a bounded number of steps."""
        for _ in range(20_000):
            if not self.scheduler.has_unfinished and not self.scheduler.num_in_flight:
                break
            self.schedule()
            self.check()
            if self.num_late_deaths and self.rng.random() < 0.05:
                self.num_late_deaths -= 1
                self.die()
            if self.rng.random() < 0.7:
                self.execute()
            if self.rng.random() < 0.7:
                self.collect()
                self.check()
        else:
            pytest.fail("it does not come to an end")

    def check_outcome(self) -> None:
        for request in self.requests:
            expected = reference_output(request, self.limit(request))
            output = request.output_token_ids
            assert self.told[request.request_id] == len(output)
            self.check_logprobs(request)
            if request.finish_reason == FinishReason.ABORT:
                assert output == expected[: len(output)]
                continue
            assert output == expected
            ends_by_stop = output[-1] in request.params.stop_token_ids
            ends_by_eos = output[-1] in EOS and not request.params.ignore_eos
            assert request.finish_reason == (FinishReason.STOP if ends_by_stop or ends_by_eos else FinishReason.LENGTH)
            assert request.stop_token_id == (output[-1] if ends_by_stop else -1)
        self.check_nothing_is_left()

    def check_logprobs(self, request: Request) -> None:
        """Assert that every token was reported once, in order, with as many beside it as were asked for."""
        params, output = request.params, request.output_token_ids
        reported = self.logprobs[request.request_id]
        assert [t for piece in reported for t in piece.token_ids[:, 0].tolist()] == (
            [] if params.logprobs is None else output
        )
        assert all(piece.token_ids.shape[1] == 1 + params.logprobs for piece in reported)
        assert all((piece.logprobs == piece.token_ids / 2).all() for piece in reported)
        assert all((piece.ranks == piece.token_ids[:, 0] + 1).all() for piece in reported)
        reported = self.prompt_logprobs[request.request_id]
        scored = [t for piece in reported for t in piece.token_ids[:, 0].tolist()]
        expected = [] if params.prompt_logprobs is None else request.prompt_token_ids[1:].tolist()
        assert scored == (expected if request.num_new_tokens else expected[: len(scored)])
        assert [r for piece in reported for r in piece.ranks.tolist()] == list(range(2, 2 + len(scored)))
        assert all(piece.logprobs.shape[1] == 1 + params.prompt_logprobs for piece in reported)

    def check_nothing_is_left(self) -> None:
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_in_flight) == (0, 0, 0)
        assert stats.num_free_blocks == sum(group.num_blocks - 1 for group in self.limits.groups)
        assert self.scheduler._running.num_free_rows == self.limits.max_num_seqs
        assert self.scheduler.schedule() is None
        assert stats.num_preemptions == sum(r.num_preemptions for r in self.requests[self.num_before :])
        assert stats.num_generated_tokens == sum(r.num_new_tokens for r in self.requests[self.num_before :])


def drive(limits: SchedulerLimits, seed: int, num_actions: int, kind: type[Drive] = Drive) -> Drive:
    rng = random.Random(seed)
    run = kind(limits, rng)
    weights = [rng.random(), rng.random() * 0.2, 0.2 + rng.random(), 0.2 + rng.random(), 0.2 + rng.random()]
    weights.append(rng.choice([0.0, 0.1]))
    run.num_late_deaths = rng.choice([0, 3])
    actions = [run.add, run.abort, run.schedule, run.execute, run.collect, run.die]
    while not run.requests:
        run.add()
    for action in rng.choices(actions, weights, k=num_actions):
        action()
        run.check()
    run.finish()
    run.check_outcome()
    return run


@settings(max_examples=sized(60, 120), deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(limits(), st.integers(0, 2**32), st.integers(1, 120))
def test_every_token_is_computed_from_the_right_history(limits, seed, num_actions):
    drive(limits, seed, num_actions)


def scarce_limits(seed: int, window: int | None = None, **more: int) -> SchedulerLimits:
    """Return limits under which a few requests run out of everything; every second has blocks in CPU memory."""
    num_cpu_blocks = 0 if seed % 2 else seed
    groups = [BlockGroup(20, None, num_cpu_blocks)]
    if window is not None:
        groups.append(BlockGroup(14, window, num_cpu_blocks))
    return SchedulerLimits(
        num_stages=1 + seed % 4,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        max_model_len=40,
        block_size=3,
        groups=tuple(groups),
        enable_prefix_caching=seed % 2 == 0,
        min_prefill_chunk_tokens=4,
        **more,
    )


@pytest.mark.in_ci("5")
@pytest.mark.parametrize("window", [None, 5])
def test_the_random_drives_meet_what_they_are_for(window: int | None):
    met: Counter[str] = Counter()
    for seed in range(30):
        run = drive(scarce_limits(seed, window, max_drafts=seed % 3), seed, num_actions=80)
        stats = run.scheduler.stats()
        met["preempted"] += stats.num_preemptions > 0
        met["cached"] += stats.num_prefix_hit_tokens > 0
        met["copied to CPU memory"] += stats.num_blocks_copied_out > 0
        met["copied back"] += stats.num_blocks_copied_in > 0
        met["copied back in parts"] += run.stage.num_ahead > 0
        met["full CPU memory"] += 0 < stats.num_cpu_blocks == stats.num_used_cpu_blocks
        met["chunked"] += stats.num_prefill_chunks > stats.num_prefills
        met["drafts accepted"] += stats.num_accepted_tokens > 0
        met["drafts refused"] += stats.num_accepted_tokens < stats.num_draft_tokens
        met.update(request.finish_reason.name for request in run.requests)
        met["prompt logprobs after a preemption"] += any(
            r.num_preemptions and r.params.prompt_logprobs is not None for r in run.requests
        )
        met["handed over with tokens"] += any(r.num_earlier_tokens for r in run.requests)
        met["handed over twice"] += run.num_deaths > 1
        met["prompt logprobs in pieces"] += any(len(pieces) > 1 for pieces in run.prompt_logprobs.values())
    whats = ("preempted", "cached", "chunked", "drafts accepted", "drafts refused", "STOP", "LENGTH", "ABORT")
    whats += ("handed over with tokens", "handed over twice", "copied to CPU memory", "copied back")
    whats += ("copied back in parts", "full CPU memory")
    for what in (*whats, "prompt logprobs after a preemption", "prompt logprobs in pieces"):
        assert met[what] >= 5, f"{what} was met only {met[what]} times: {dict(met)}"


def test_the_random_drives_meet_snapshots_in_cpu_memory():
    met: Counter[str] = Counter()
    for seed in range(2, 62, 2):
        more = {"num_snapshots": 1 + seed // 2 % 3, "num_cpu_snapshots": 1 + seed // 2 % 5, "max_drafts": seed % 3}
        run = drive(scarce_limits(seed, **more), seed, num_actions=120)
        stats = run.scheduler.stats()
        met["begun with"] += stats.num_prefix_hit_tokens > 0
        met["in CPU memory"] += stats.num_cpu_snapshots > 0
        met["full CPU memory"] += stats.num_cpu_snapshots == run.limits.num_cpu_snapshots
        met["copied back"] += stats.num_snapshots_copied_in > 0
        met["preempted"] += stats.num_preemptions > 0
    assert min(met.values()) >= 5, dict(met)
