"""The endless loop of a stage: take plans from the step channel, run them in order, answer.

    reader thread: channel -> unpack, announce --plans--> main thread: step --results--> writer thread: pack -> channel

The main thread touches neither sockets nor bytes: what it does between two forwards is time in which the stage is idle.
"""

from __future__ import annotations

import gc
import queue
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from raypp.errors import DeadlineError, EngineDeadError
from raypp.messages import NO_STEP, MaskUpdate, StepPlan, pack, unpack
from raypp.stage.failure import describe_failure
from raypp.stage.step_result import PendingResult
from raypp.step_channel import Masks, StageChannel, Stop
from raypp.tracing import ForwardCounter

_READER_POLL_S = 0.1  # how soon the reader notices that the loop has ended for another reason than Stop
_LAST_RESULTS_S = 5.0
_REPORT_S = 0.1  # how old the driver's image of a busy stage may get
_PAUSE_S = 0.02  # without a plan: the stage looks back at what its device has done meanwhile


class SteppedStage(Protocol):
    """What the loop needs of a stage."""

    def bind_thread(self) -> None:
        """Prepare the thread that will call `step`."""

    def announce(self, plan: StepPlan) -> None:
        """Say that `plan` will be stepped soon. From another thread than `step`."""

    def take_masks(self, update: MaskUpdate) -> None:
        """Take in which tokens grammars allow. The last stage's, from another thread than `step`."""

    def step(self, plan: StepPlan) -> PendingResult | None:
        """Execute a plan, or queue it on the device; return its result to be on the last stage."""

    def catch_up(self) -> bool:
        """Take note of what the device has done since the last step; return whether that is everything."""


def run_stage_loop(
    stage: SteppedStage,
    channel: StageChannel,
    *,
    process_index: int,
    num_members: int = 1,
    heartbeat_s: float,
    silence_timeout_s: float,
    forwards: ForwardCounter | None = None,
    is_leaving: threading.Event | None = None,
) -> None:
    """Run the plans that arrive until the driver says stop. Waits only for plans, and releases the GIL there.

    What ends it early is told to the driver before it is raised.

    Args:
        stage: Whose plans these are.
        channel: To the driver.
        process_index: Of this process among all of the stages, for its errors.
        num_members: Of each stage.
        heartbeat_s: How often the driver hears from the stage, busy or idle.
        silence_timeout_s: How long an idle stage believes in a driver that it does not hear.
        forwards: The sums that are reported to the driver.
        is_leaving: Ends the loop as the driver's stop does, once it is set.

    Raises:
        EngineDeadError: the driver fell silent.
        Whatever a step raises: the stage cannot go on, since its state no longer follows the plans.
    """
    reader = _PlanReader(channel, stage, is_leaving or threading.Event())
    writer = _ResultWriter(channel, heartbeat_s, forwards or ForwardCounter())
    failure: dict[str, Any] | None = None
    silent_s = 0.0  # added up from waits, not from a clock, so that a process that was stopped itself blames nobody
    is_behind = False  # whether the device may have done what nobody has taken note of
    gc.freeze()  # what the start left behind is not looked through again between two steps
    try:
        stage.bind_thread()
        with torch.inference_mode():
            while True:
                wait_s = min(_PAUSE_S, heartbeat_s) if is_behind else heartbeat_s
                plan = reader.next_plan(wait_s)
                if isinstance(plan, Stop):
                    return
                if plan is not None:
                    writer.put(plan.step_id, stage.step(plan))
                    is_behind = True
                    continue
                writer.check()
                is_behind = is_behind and not stage.catch_up()
                silent_s = silent_s + wait_s if channel.silence_s > 2 * heartbeat_s else 0.0
                if silent_s > silence_timeout_s:
                    raise EngineDeadError(f"the driver has not been heard of for {channel.silence_s:.1f} s")
    except Exception as error:
        failure = describe_failure(process_index, num_members, error)
        raise
    finally:
        reader.close()
        writer.close(failure)


class _PlanReader:
    """Receives, unpacks and announces plans on a thread of its own: a step's input may arrive from then on."""

    def __init__(self, channel: StageChannel, stage: SteppedStage, is_leaving: threading.Event) -> None:
        self._channel = channel
        self._stage = stage
        self._is_leaving = is_leaving
        self._plans: queue.SimpleQueue[StepPlan | Stop | Exception] = queue.SimpleQueue()
        self._is_closing = False
        self._thread = threading.Thread(target=self._read, name="plan-reader", daemon=True)
        self._thread.start()

    def next_plan(self, timeout_s: float) -> StepPlan | Stop | None:
        """Return the next plan, Stop, or None when there is none in time.

        Raises:
            Exception: whatever went wrong with receiving or announcing it.
        """
        try:
            plan = self._plans.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(plan, Exception):
            raise plan
        return plan

    def close(self) -> None:
        """End the thread."""
        self._is_closing = True
        self._thread.join()

    def _read(self) -> None:
        try:
            while not self._is_closing:
                if self._is_leaving.is_set():
                    self._plans.put(Stop())
                    return
                message = self._channel.receive(_READER_POLL_S)
                if message is None:
                    continue
                if isinstance(message, Stop):
                    self._plans.put(message)
                    return
                if isinstance(message, Masks):
                    self._stage.take_masks(unpack(MaskUpdate, message.payload))
                    continue
                plan = unpack(StepPlan, message)
                self._stage.announce(plan)
                self._plans.put(plan)
        except Exception as error:
            self._plans.put(error)


@dataclass(frozen=True)
class _End:
    failure: dict[str, Any] | None


class _ResultWriter:
    """Waits for results, packs and sends them on a thread of its own; heartbeats too: often while steps end.

    A heartbeat tells the last step that the main thread finished: one that hangs is noticed by that.
    """

    def __init__(self, channel: StageChannel, heartbeat_s: float, forwards: ForwardCounter) -> None:
        self._channel = channel
        self._heartbeat_s = heartbeat_s
        self._forwards = forwards
        self._last_heartbeat_s = time.monotonic()
        self._results: queue.SimpleQueue[PendingResult | _End] = queue.SimpleQueue()
        self._last_step_id = NO_STEP
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._write, name="result-writer", daemon=True)
        self._thread.start()

    def put(self, step_id: int, result: PendingResult | None) -> None:
        """Note that a step is done, and send its result if there is one.

        Raises:
            Exception: whatever kept an earlier one from being sent.
        """
        self.check()
        self._last_step_id = step_id
        if result is not None:
            self._results.put(result)

    def check(self) -> None:
        """Raise whatever kept a result from being sent."""
        if self._error is not None:
            raise self._error

    def close(self, failure: dict[str, Any] | None) -> None:
        """Send what is left, then why the stage gives up if it does, and end the thread.

        A result that never comes, from a device that hangs, does not hold up the end.
        """
        self._results.put(_End(failure))
        self._thread.join(_LAST_RESULTS_S)

    def _write(self) -> None:
        try:
            failure = self._send_results()
        except Exception as error:
            self._error = error  # the main thread finds it, and comes to an end
            failure = self._next_failure()
        if failure is not None:
            with suppress(DeadlineError):  # a driver that does not listen finds out by itself, or is gone
                self._channel.send_error(failure)

    def _send_results(self) -> dict[str, Any] | None:
        """Send results and heartbeats until the end; return what the stage gives up for."""
        while True:
            try:
                result = self._results.get(timeout=min(_REPORT_S, self._heartbeat_s))
            except queue.Empty:
                self._report_if_due()
                continue
            if isinstance(result, _End):
                return result.failure
            self._channel.send_result(pack(result.wait()))
            self._report_if_due()

    def _next_failure(self) -> dict[str, Any] | None:
        while not isinstance(result := self._results.get(), _End):
            pass
        return result.failure

    def _report_if_due(self) -> None:
        silent_s = time.monotonic() - self._last_heartbeat_s
        if silent_s >= self._heartbeat_s or (silent_s >= _REPORT_S and self._forwards.has_news):
            self._last_heartbeat_s += silent_s
            report = self._forwards.report() if self._forwards.has_news else None
            if self._channel.send_heartbeat(self._last_step_id, report) and report is not None:
                self._forwards.note_told(report)
