"""The engine loop: collect, update, schedule, dispatch. Never waits for a step before it dispatches the next.

What encoders have done is collected in the same turn, and what they are to do is ordered in it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

from raypp.driver.grammars import Grammars
from raypp.driver.item_encoders import ItemEncoders, ItemFailed, ItemsDropped, ItemsStored
from raypp.driver.stage_health import FailureReports, StageActivity, StageHealth, Witness
from raypp.errors import DeadlineError, EngineDeadError, NonFiniteLogitsError, RayppError, RequestError
from raypp.messages import MaskUpdate, StepPlan, StepResult, pack, unpack
from raypp.request import Request, RequestUpdate
from raypp.scheduler.scheduler import Scheduler
from raypp.scheduler.scheduler_stats import SchedulerStats
from raypp.scheduler.step_budget import StepPredictor
from raypp.stage.failure import read_failure
from raypp.step_channel import DriverChannel, Heartbeat, StageError, StageResult
from raypp.tracing import Tracer, now_ns
from raypp.types import FinishReason


class ChannelPipeline:
    """Sends every plan to all stages at once; takes in results, heartbeats, and the errors of stages that give up."""

    def __init__(
        self,
        channel: DriverChannel,
        health: StageHealth,
        failures: FailureReports,
        predictor: StepPredictor,
        num_members: int = 1,
    ) -> None:
        """Take over the channel; `predictor` learns how long steps take, from each stage's first member."""
        self._channel = channel
        self._num_members = num_members
        self._health = health
        self._failures = failures
        self.activity = StageActivity(predictor)
        self.socket = channel.socket
        """On which results arrive, for a poller."""
        self.send_heartbeat = channel.send_heartbeat
        """Tells the stages that the driver lives."""

    def submit(self, plan: StepPlan) -> None:
        """Hand a plan to every stage.

        Raises:
            EngineDeadError: a stage does not take its plans.
            RayppError: it does not, since it, or a neighbour, has failed.
        """
        self.activity.note_dispatched(plan)
        try:
            self._channel.send_plan(pack(plan), is_over=lambda: self._failures.verdict() is not None)
        except DeadlineError as error:
            if (cause := self._failures.verdict()) is not None:
                raise cause from None
            raise EngineDeadError(error.message, got=error.got, hint=error.hint) from error

    def send_masks(self, update: MaskUpdate) -> None:
        """Tell the last stage which tokens grammars allow."""
        self._channel.send_masks(pack(update))

    def collect(self) -> list[StepResult]:
        """Return the results that have arrived; note the heartbeats and the errors."""
        results = []
        for message in self._channel.receive(0.0):
            match message:
                case StageResult(stage_index=stage_index, payload=payload):
                    results.append(unpack(StepResult, payload))
                    self._health.heard(stage_index, results[-1].step_id)
                    self.activity.note_collected()
                case Heartbeat(stage_index=stage_index, step_id=step_id, report=report):
                    self._health.heard(stage_index, step_id)
                    stage, rank = divmod(stage_index, self._num_members)
                    if report is not None and rank == 0:
                        self.activity.note_report(stage, report)
                case StageError(description=description):
                    error, is_cause = read_failure(description)
                    self._failures.add(error, Witness.OWN_FAILURE if is_cause else Witness.NEIGHBOUR)
        return results

    def close(self) -> None:
        """Tell the stages to stop."""
        self._channel.send_stop()
        self._channel.close()


class Pipeline(Protocol):
    """A pipeline of stages, wherever they run."""

    def submit(self, plan: StepPlan) -> None:
        """Hand a plan to every stage. Does not wait for it to be executed.

        Raises:
            DeadlineError: a stage does not take its plans.
        """

    def send_masks(self, update: MaskUpdate) -> None:
        """Tell the last stage which tokens grammars allow. Does not wait."""

    def collect(self) -> list[StepResult]:
        """Return the results that have arrived since the last call, in step order; does not wait.

        Raises:
            StageDiedError: a stage reported an error.
        """

    def close(self) -> None:
        """Tell the stages to stop."""


_MAX_INT32 = 2**31 - 1


class Engine:
    """A scheduler, the pipeline that it plans for, and the encoders of images if there are any.

    Args:
        scheduler: Plans steps.
        pipeline: Executes the plans.
        tracer: Of the driver.
        encoders: Encode images; without them, requests with images are refused.
        grammars: Follows grammars.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pipeline: Pipeline,
        tracer: Tracer,
        encoders: ItemEncoders | None,
        grammars: Grammars,
    ) -> None:
        self._scheduler = scheduler
        self._pipeline = pipeline
        self._tracer = tracer
        self._encoders = encoders
        self._grammars = grammars
        self._updates: list[RequestUpdate] = []
        self._failed: list[tuple[Request, RayppError]] = []
        self._may_plan = False  # whether anything has changed since the scheduler had nothing to plan

    def add(self, request: Request) -> None:
        """Take in a request. One under a grammar runs when that is compiled, or is among those of `take_failed`.

        Raises:
            RequestError: it can never run.
        """
        request.arrival_ns = now_ns()
        self._may_plan = True
        if request.items is not None and self._encoders is None:
            raise RequestError(
                "the model takes no images",
                request_id=request.request_id,
                got=f"{len(request.items.items)} images",
                hint="ask a model that has a vision tower",
            )
        if not request.has_grammar:
            self._scheduler.add(request)
        elif self._grammars.add(request):
            self._schedule(request)

    def abort(self, request: Request) -> bool:
        """End a request now; return whether it was unfinished."""
        self._may_plan = True
        if request.has_grammar:
            if self._grammars.is_held_back(request):
                request.finish_reason = FinishReason.ABORT
            self._grammars.close(request)
            if request.finish_reason:
                return True
        return self._scheduler.abort(request.request_id)

    def fileno(self) -> int | None:
        """Return what a poller finds readable when `step` has something to do although no result has come."""
        return self._grammars.fileno()

    def close(self) -> None:
        """End what the engine has started."""
        self._grammars.stop()

    def step(self) -> None:
        """Take in the results that are there, and dispatch every step that may go.

        What changed is there for `take_updates` and `take_failed`, also when this raises.

        Raises:
            RayppError: the pipeline failed.
        """
        started = now_ns()
        results = self._pipeline.collect()
        for result in results:
            brought = self._scheduler.update(result)
            if self._scheduler.without_logits:
                self._failed += [(request, not_finite(request)) for request in self._scheduler.without_logits]
                self._scheduler.without_logits = []
            if self._grammars.texts:
                self._grammars.note_step(result.step_id, brought)
                brought = [update for update in brought if update.is_news]
            self._updates.extend(brought)
        if self._grammars.texts:
            self._look_at_grammars()
        if self._encoders is not None:
            self._exchange(self._encoders)
        step_id = results[-1].step_id if results else -1
        # A mask that arrives changes no plan; the scheduler is asked again when something else has happened.
        may_plan = self._may_plan or bool(results) or self._encoders is not None
        self._may_plan = False
        while may_plan and (plan := self._scheduler.schedule()) is not None:
            self._pipeline.submit(plan)
            step_id = plan.step_id
            if len(plan.start_rows):
                self._note_started(plan, now_ns())
        if step_id >= 0:
            self._tracer.record("step", step_id, started, now_ns())

    def relay_masks(self) -> bool:
        """Send on what the grammars allow; return whether `step` has anything to do about it.

        That is all of `step` that there is to be done when nothing but `fileno` is readable.
        """
        self._look_at_grammars()
        return self._may_plan or bool(self._failed)

    def take_updates(self) -> Sequence[RequestUpdate]:
        """Return what steps brought to requests since the last call."""
        taken, self._updates = self._updates, []
        return taken

    def take_failed(self) -> Sequence[tuple[Request, RayppError]]:
        """Return the requests that ended with an error since the last call."""
        taken, self._failed = self._failed, []
        for request, _ in taken:
            self._grammars.close(request)
        return taken

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return self._scheduler.has_unfinished or self._grammars.num_held_back > 0

    def requests_in_flight(self) -> list[Request]:
        """Return the unfinished requests that are in steps in flight, each once."""
        return self._scheduler.requests_in_flight()

    @property
    def is_busy(self) -> bool:
        """Whether steps are in flight."""
        return self._scheduler.num_in_flight > 0

    def stats(self) -> SchedulerStats:
        """Return the scheduler's counters. Requests that are held back for their grammar count as waiting."""
        stats = self._scheduler.stats()
        return replace(stats, num_waiting=stats.num_waiting + self._grammars.num_held_back)

    def stats_dict(self) -> dict[str, Any]:
        """Return the scheduler's counters and the encoders' figures, as plain data."""
        return asdict(self.stats()) | ({} if self._encoders is None else self._encoders.stats())

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

    def _note_started(self, plan: StepPlan, now: int) -> None:
        for request, row in zip(self._scheduler.started_by_last_step(), plan.start_rows.tolist(), strict=True):
            if not request.is_admitted_again:
                request.queue_us = min((now - request.arrival_ns) // 1000, _MAX_INT32)
            if request.has_grammar:
                self._grammars.note_started(request, row, plan.step_id)

    def _look_at_grammars(self) -> None:
        news = self._grammars.poll()
        self._may_plan |= bool(news.admitted or news.refused or news.failed)
        for request in news.admitted:
            try:
                self._schedule(request)
            except RequestError as error:
                self._failed.append((request, error))
        for request, _ in news.failed:
            self._scheduler.abort(request.request_id)
        for request, refusal in (*news.refused, *news.failed):
            request.finish_reason = FinishReason.ERROR
            self._failed.append((request, refusal))

    def _schedule(self, request: Request) -> None:
        """Queue a request whose grammar is compiled.

        Raises:
            RequestError: it can never run.
        """
        try:
            self._scheduler.add(request)
        except RequestError:
            self._grammars.close(request)
            raise


def not_finite(request: Request) -> NonFiniteLogitsError:
    """Return the error of a request for which the model computed no numbers."""
    return NonFiniteLogitsError(
        "the model's logits are not finite",
        got=f"NaN or infinity after {len(request.output_token_ids)} tokens",
        expected="numbers",
        hint="weights that overflow in float16 may not in bfloat16 or float32 (dtype); see whether others fail, too",
    )


_LOG = logging.getLogger(__name__)
_INTERVAL_S = 10.0


class DraftLog:
    """Logs, at most every ten seconds, what became of the drafts since the last line; nothing when there were none."""

    def __init__(self) -> None:
        self._next_s = 0.0
        self._last: SchedulerStats | None = None

    def note(self, stats: SchedulerStats, now_s: float) -> None:
        """Take in the engine's figures at a monotonic time, seconds."""
        if now_s < self._next_s:
            return
        last, self._last, self._next_s = self._last, stats, now_s + _INTERVAL_S
        drafted = stats.num_draft_tokens - (last.num_draft_tokens if last else 0)
        if not drafted:
            return
        accepted = stats.num_accepted_tokens - (last.num_accepted_tokens if last else 0)
        rows = stats.num_verified_rows - (last.num_verified_rows if last else 0)
        rates = [
            f"{_since(last.accepted_by_position if last else [], stats.accepted_by_position, place) / count:.2f}"
            for place in range(len(stats.drafted_by_position))
            if (count := _since(last.drafted_by_position if last else [], stats.drafted_by_position, place))
        ]
        _LOG.info(
            "speculation: %d drafts, %.0f %% accepted, %.2f tokens per row and step; by position %s",
            drafted,
            100 * accepted / drafted,
            1 + accepted / rows,
            " ".join(rates),
        )


def _since(before: list[int], now: list[int], place: int) -> int:
    return now[place] - (before[place] if before else 0)
