"""The real pipeline: stages in other processes, reached over the step channel.

Attributes of the pipeline that others read: `activity`, what its stages did lately.
"""

from __future__ import annotations

import zmq

from raypp.driver.stage_activity import StageActivity
from raypp.driver.stage_health import FailureReports, StageHealth, Witness
from raypp.errors import DeadlineError, EngineDeadError
from raypp.messages import MaskUpdate, StepPlan, StepResult, pack, unpack
from raypp.scheduler.step_predictor import StepPredictor
from raypp.stage.failure import read_failure
from raypp.step_channel import DriverChannel, Heartbeat, StageError, StageResult


class ChannelPipeline:
    """Sends every plan to all stages at once; takes in results, heartbeats, and the errors of stages that give up."""

    def __init__(
        self,
        channel: DriverChannel,
        health: StageHealth,
        failures: FailureReports,
        predictor: StepPredictor | None = None,
    ) -> None:
        """Take over the channel; `predictor` learns how long steps take."""
        self._channel = channel
        self._health = health
        self._failures = failures
        self.activity = StageActivity(health.num_stages, predictor)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """The socket on which results arrive, for a poller."""
        return self._channel.socket

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
                    if report is not None:
                        self.activity.note_report(stage_index, report)
                case StageError(description=description):
                    error, is_cause = read_failure(description)
                    self._failures.add(error, Witness.OWN_FAILURE if is_cause else Witness.NEIGHBOUR)
        return results

    def send_heartbeat(self) -> None:
        """Tell the stages that the driver lives."""
        self._channel.send_heartbeat()

    def close(self) -> None:
        """Tell the stages to stop."""
        self._channel.send_stop()
        self._channel.close()
