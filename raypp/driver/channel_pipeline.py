"""The real pipeline: stages in other processes, reached over the step channel."""

from __future__ import annotations

import time

import zmq

from raypp.errors import DeadlineError, EngineDeadError, StageDiedError
from raypp.messages import StepPlan, StepResult, pack, unpack
from raypp.transport.step_channel import DriverChannel, Heartbeat, StageError, StageResult


class ChannelPipeline:
    """Sends every plan to all stages at once, and takes in results and heartbeats."""

    def __init__(self, channel: DriverChannel, num_stages: int) -> None:
        self._channel = channel
        self._last_heartbeat_s = [time.monotonic()] * num_stages
        self._last_step_ids = [-1] * num_stages

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """The socket on which results arrive, for a poller."""
        return self._channel.socket

    def submit(self, plan: StepPlan) -> None:
        """Hand a plan to every stage."""
        try:
            self._channel.send_plan(pack(plan))
        except DeadlineError as error:
            raise EngineDeadError(error.message, got=error.got, hint=error.hint) from error

    def collect(self) -> list[StepResult]:
        """Return the results that have arrived; note the heartbeats."""
        results = []
        for message in self._channel.receive(0.0):
            match message:
                case StageResult(payload=payload):
                    results.append(unpack(StepResult, payload))
                    self._last_heartbeat_s[-1], self._last_step_ids[-1] = time.monotonic(), results[-1].step_id
                case Heartbeat(stage_index=stage_index, step_id=step_id):
                    self._last_heartbeat_s[stage_index] = time.monotonic()
                    self._last_step_ids[stage_index] = step_id
                case StageError(stage_index=stage_index, description=description):
                    raise StageDiedError(
                        f"stage {stage_index} failed", stage_index=stage_index, got=description.get("error")
                    )
        return results

    def send_heartbeat(self) -> None:
        """Tell the stages that the driver lives."""
        self._channel.send_heartbeat()

    def slowest_stage(self) -> tuple[int, float]:
        """Return the stage that finished the fewest steps, and how many seconds ago it was heard of."""
        index = min(range(len(self._last_step_ids)), key=lambda i: (self._last_step_ids[i], self._last_heartbeat_s[i]))
        return index, time.monotonic() - self._last_heartbeat_s[index]

    def close(self) -> None:
        """Tell the stages to stop."""
        self._channel.send_stop()
        self._channel.close()
