"""The first stage's inbox: what the last stage sampled, applied in step order, as late as it may be."""

from __future__ import annotations

from collections import deque

from raypp.messages import StepPlan
from raypp.stage.request_rows import NextInputs
from raypp.stage.step_shape import StepShape
from raypp.transport.link import LinkReceiver
from raypp.transport.schema import Schema


class FeedbackInbox:
    """Takes in one message per step, and applies it when a plan needs it or its slot."""

    def __init__(self, receiver: LinkReceiver, schema: Schema, num_stages: int) -> None:
        self._receiver = receiver
        self._schema = schema
        self._num_slots = 2 * num_stages
        self._expected: deque[tuple[int, StepShape]] = deque()  # (step_id, its shape)

    def expect(self, step_id: int, shape: StepShape) -> None:
        """Say that this step will be fed back. Comes after `apply_before`, which frees the step's slot."""
        self._expected.append((step_id, shape))
        self._receiver.post_recv(step_id, self._schema.num_bytes(shape.num_rows, shape.num_rows))

    def apply_before(self, plan: StepPlan, next_inputs: NextInputs) -> None:
        """Apply, in order, all feedback that `plan` builds on, and what would else hold the slot that it needs."""
        until = max(plan.requires_feedback_of, plan.step_id - self._num_slots)
        while self._expected and self._expected[0][0] <= until:
            step_id, shape = self._expected.popleft()
            buffer = self._receiver.wait(step_id)
            next_inputs.apply_feedback(shape, self._schema.views(buffer, shape.num_rows, shape.num_rows))
            self._receiver.release(step_id)
