"""The engine loop: collect, update, schedule, dispatch. Never waits for a step before it dispatches the next.

What encoders have done is collected in the same turn, and what they are to do is ordered in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from raypp.driver.item_encoders import ItemEncoders, ItemFailed, ItemsDropped, ItemsStored
from raypp.driver.pipeline import Pipeline
from raypp.errors import RayppError, RequestError
from raypp.scheduler.request import Request, RequestUpdate
from raypp.scheduler.scheduler import Scheduler
from raypp.scheduler.stats import SchedulerStats
from raypp.tracing import Tracer, now_ns

_MAX_INT32 = 2**31 - 1


class Engine:
    """A scheduler, the pipeline that it plans for, and the encoders of pictures if there are any.

    Args:
        scheduler: Who plans.
        pipeline: Who executes the plans.
        tracer: Of the driver.
        encoders: Who encodes pictures; without them, requests with pictures are refused.
    """

    def __init__(
        self, scheduler: Scheduler, pipeline: Pipeline, tracer: Tracer, encoders: ItemEncoders | None = None
    ) -> None:
        self._scheduler = scheduler
        self._pipeline = pipeline
        self._tracer = tracer
        self._encoders = encoders
        self._failed: list[tuple[Request, RayppError]] = []

    def add(self, request: Request) -> None:
        """Take in a request.

        Raises:
            RequestError: it can never run.
        """
        request.arrival_ns = now_ns()
        if request.items is not None and self._encoders is None:
            raise RequestError(
                "the model takes no pictures",
                request_id=request.request_id,
                got=f"{len(request.items.items)} pictures",
                hint="ask a model that has a vision tower",
            )
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
        if self._encoders is not None:
            self._exchange(self._encoders)
        step_id = results[-1].step_id if results else -1
        while (plan := self._scheduler.schedule()) is not None:
            self._pipeline.submit(plan)
            step_id = plan.step_id
            if len(plan.start_rows):
                self._note_queue_times(now_ns())
        if step_id >= 0:
            self._tracer.record("step", step_id, started, now_ns())
        return updates

    def take_failed(self) -> Sequence[tuple[Request, RayppError]]:
        """Return the requests that ended with an error since the last call."""
        taken, self._failed = self._failed, []
        return taken

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

    def stats_dict(self) -> dict[str, Any]:
        """Return the scheduler's counters and the encoders' figures, as plain data."""
        return asdict(self._scheduler.stats()) | ({} if self._encoders is None else self._encoders.stats())

    def _exchange(self, encoders: ItemEncoders) -> None:
        """Take in what the encoders did, and order what is wanted now."""
        items = self._scheduler.items
        while True:
            for event in encoders.poll():
                match event:
                    case ItemsStored(keys):
                        items.note_stored(keys)
                    case ItemsDropped(keys):
                        items.note_dropped(keys)
                    case ItemFailed(key, error):
                        self._failed += self._scheduler.note_item_failed(key, error)
            drops, orders = items.take_drops(), items.take_orders()
            if not drops and not orders:
                return
            if drops:
                encoders.drop(drops)
            if orders:
                encoders.encode(orders)
            # Some encoders, those of tests, have done it by now.

    def _note_queue_times(self, now: int) -> None:
        for request in self._scheduler.started_by_last_step():
            if not request.num_preemptions:
                request.queue_us = min((now - request.arrival_ns) // 1000, _MAX_INT32)
