"""The endless loop of a stage: take plans from the step channel, run them in order, answer."""

from __future__ import annotations

import gc
import time
from collections import deque
from typing import Protocol

import torch

from raypp.errors import EngineDeadError
from raypp.messages import NO_STEP, StepPlan, StepResult, pack, unpack
from raypp.transport.step_channel import StageChannel, Stop

_NUM_ANNOUNCED = 2  # the step that runs next, and the one after it


class SteppedStage(Protocol):
    """What the loop needs of a stage."""

    def announce(self, plan: StepPlan) -> None:
        """Say that `plan` will be stepped soon."""

    def step(self, plan: StepPlan) -> StepResult | None:
        """Execute a plan; return its result on the last stage."""


def run_stage_loop(stage: SteppedStage, channel: StageChannel, *, heartbeat_s: float, silence_timeout_s: float) -> None:
    """Run the plans that arrive until the driver says stop. Waits only on the channel, and releases the GIL there.

    Args:
        stage: Whose plans these are.
        channel: To the driver.
        heartbeat_s: How often the driver hears from an idle stage.
        silence_timeout_s: How long an idle stage believes in a driver that it does not hear.

    Raises:
        EngineDeadError: the driver fell silent.
        Whatever a step raises: the stage cannot go on, since its state no longer follows the plans.
    """
    announced: deque[StepPlan] = deque()
    last_step_id = NO_STEP
    next_heartbeat = time.monotonic()
    gc.freeze()  # what the start left behind is not looked through again between two steps
    with torch.inference_mode():
        while True:
            # A step's input may arrive as soon as its plan is announced: so be one ahead, but do not look in vain.
            while len(announced) < _NUM_ANNOUNCED:
                message = channel.receive(0.0 if announced else heartbeat_s)
                if isinstance(message, Stop):
                    return
                if message is None:
                    break
                plan = unpack(StepPlan, message)
                stage.announce(plan)
                announced.append(plan)
            if announced:
                plan = announced.popleft()
                result = stage.step(plan)
                last_step_id = plan.step_id
                if result is not None:
                    channel.send_result(pack(result))
            if time.monotonic() >= next_heartbeat:
                if channel.silence_s > silence_timeout_s:
                    raise EngineDeadError(f"the driver has not been heard of for {channel.silence_s:.1f} s")
                channel.send_heartbeat(last_step_id)
                next_heartbeat = time.monotonic() + heartbeat_s
