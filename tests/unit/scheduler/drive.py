"""Small stand-ins for what surrounds a scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from raypp.messages import BlockGroup, StepPlan, StepResult
from raypp.request import Request, RequestUpdate
from raypp.scheduler.limits import SchedulerLimits
from raypp.scheduler.scheduler import Scheduler
from raypp.types import SamplingParams


def make_limits(**overrides) -> SchedulerLimits:
    settings = {
        "num_stages": 2,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
        "block_size": 4,
        "num_blocks": 200,
        "enable_prefix_caching": False,
        "min_prefill_chunk_tokens": 8,
    }
    settings |= overrides
    sizes = {name: settings.pop(name) for name in ("num_blocks", "num_cpu_blocks", "block_bytes") if name in settings}
    return SchedulerLimits(**{"groups": (BlockGroup(**sizes),)} | settings)


def make_request(
    request_id: str = "a",
    prompt: int | Sequence[int] = 4,
    eos: frozenset[int] = frozenset(),
    begun: Sequence[int] = (),
    **params,
) -> Request:
    """Return a request; `prompt` may be just its length, `begun` are output tokens that it comes with."""
    token_ids = np.array(range(prompt) if isinstance(prompt, int) else prompt, np.int32)
    return Request(
        request_id,
        token_ids,
        SamplingParams(**({"max_tokens": 100} | params)),
        seed=0,
        eos_token_ids=eos,
        output_token_ids=list(begun),
    )


def make_result(plan: StepPlan, token_id: int = 7) -> StepResult:
    """Return a result in which every row that yields, yields `token_id` once."""
    num_rows = len(plan.rows)
    return StepResult(
        step_id=plan.step_id,
        token_ids=np.full((num_rows, 1 + plan.num_drafts), token_id, np.int32),
        num_valid=plan.samples.astype(np.int32),
        num_drafted=np.zeros(num_rows, np.int32),
        num_matched=np.zeros(num_rows, np.int32),
    )


class Pipeline:
    """Keeps what a scheduler dispatched until it is told to answer."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.in_flight: deque[StepPlan] = deque()
        self.plans: list[StepPlan] = []

    def dispatch(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if plan is not None:
            self.in_flight.append(plan)
            self.plans.append(plan)
        return plan

    def dispatch_all(self) -> list[StepPlan]:
        plans = []
        while (plan := self.dispatch()) is not None:
            plans.append(plan)
        return plans

    def answer(self, token_id: int = 7) -> list[RequestUpdate]:
        updates = self.scheduler.update(make_result(self.in_flight.popleft(), token_id))
        self.scheduler.check_integrity()
        return updates

    def finish(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            self.dispatch_all()
            if not self.in_flight:
                break
            self.answer()
        assert not self.scheduler.has_unfinished
