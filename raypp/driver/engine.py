"""The engine loop: collect, update, schedule, dispatch. Never waits for a step before it dispatches the next."""

from __future__ import annotations

from raypp.driver.pipeline import Pipeline
from raypp.scheduler.request import Request, RequestUpdate
from raypp.scheduler.scheduler import Scheduler
from raypp.scheduler.stats import SchedulerStats
from raypp.tracing import Tracer, now_ns

_MAX_INT32 = 2**31 - 1


class Engine:
    """A scheduler and the pipeline that it plans for."""

    def __init__(self, scheduler: Scheduler, pipeline: Pipeline, tracer: Tracer) -> None:
        self._scheduler = scheduler
        self._pipeline = pipeline
        self._tracer = tracer

    def add(self, request: Request) -> None:
        """Take in a request.

        Raises:
            RequestError: it can never run.
        """
        request.arrival_ns = now_ns()
        self._scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        """End a request now; return whether there was one."""
        return self._scheduler.abort(request_id)

    def step(self) -> list[RequestUpdate]:
        """Take in the results that are there, dispatch every step that may go, and return what changed."""
        started = now_ns()
        updates: list[RequestUpdate] = []
        results = self._pipeline.collect()
        for result in results:
            updates.extend(self._scheduler.update(result))
        step_id = results[-1].step_id if results else -1
        while (plan := self._scheduler.schedule()) is not None:
            self._pipeline.submit(plan)
            step_id = plan.step_id
            if len(plan.start_rows):
                self._note_queue_times(now_ns())
        if step_id >= 0:
            self._tracer.record("step", step_id, started, now_ns())
        return updates

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return self._scheduler.has_unfinished

    @property
    def is_busy(self) -> bool:
        """Whether steps are in flight."""
        return self._scheduler.num_in_flight > 0

    def stats(self) -> SchedulerStats:
        """Return the scheduler's counters."""
        return self._scheduler.stats()

    def _note_queue_times(self, now: int) -> None:
        for request in self._scheduler.started_by_last_step():
            if not request.num_preemptions:
                request.queue_us = min((now - request.arrival_ns) // 1000, _MAX_INT32)
