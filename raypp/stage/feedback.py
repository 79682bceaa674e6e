"""The first stage's inbox: what the last stage sampled, applied in step order, as late as it may be.

Feedback never blocks the last stage. Each step sends exactly one message, possibly empty, into slot
`step_id mod 2 * num_stages`. Before step s goes on to the next stage, the first stage has applied every message up to
`max(requires_feedback_of, s - 2 * num_stages)` and given its slot back. So the last stage always finds its slot free,
and the ring of stages cannot deadlock, however many steps are in flight.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from raypp.messages import StepPlan
from raypp.stage.request_rows import NextInputs
from raypp.stage.step_shape import StepShape
from raypp.transport.edges import num_feedback_slots
from raypp.transport.link import LinkReceiver
from raypp.transport.schema import Schema


@dataclass(frozen=True, eq=False)
class FedBack:
    """A step that is fed back, and the rows of its message: those of the step, then padding."""

    step_id: int
    shape: StepShape
    num_message_rows: int


class FeedbackInbox:
    """Takes in one message per step, and applies it when a plan needs it or its slot."""

    def __init__(self, receiver: LinkReceiver, schema: Schema, num_stages: int) -> None:
        self._receiver = receiver
        self._schema = schema
        self._num_slots = num_feedback_slots(num_stages)
        self._expected: deque[FedBack] = deque()

    def expect(self, step_id: int, shape: StepShape, num_message_rows: int) -> None:
        """Say that this step will be fed back. Comes after what is due before it, which frees the step's slot soon."""
        self._expected.append(FedBack(step_id, shape, num_message_rows))
        self._receiver.post_recv(step_id, self._schema.num_bytes(num_message_rows, num_message_rows))

    def apply_before(
        self, plan: StepPlan, next_inputs: NextInputs, *, handed_over_rows: int | None = None
    ) -> FedBack | None:
        """Apply, in order, all feedback that `plan` builds on, and what would else hold the slot that it needs.

        Args:
            plan: The next step.
            next_inputs: Where to.
            handed_over_rows: Leave the newest message to the step itself, if it has that many rows. It is there, in its
                slot, until `release`.

        Returns:
            What was left to the step; None: nothing.
        """
        due = []
        while self._is_due(plan):
            due.append(self._expected.popleft())
        left = due.pop() if due and due[-1].num_message_rows == handed_over_rows else None
        for fed_back in due:
            self._apply(fed_back, next_inputs)
        if left is not None:
            self._receiver.wait(left.step_id)
        return left

    def release(self, fed_back: FedBack) -> None:
        """Give the slot of a message back that was handed over, once the step that reads it was queued."""
        self._receiver.release(fed_back.step_id)

    def _is_due(self, plan: StepPlan) -> bool:
        until = max(plan.requires_feedback_of, plan.step_id - self._num_slots)
        return bool(self._expected) and self._expected[0].step_id <= until

    def _apply(self, fed_back: FedBack, next_inputs: NextInputs) -> None:
        num_rows = fed_back.num_message_rows
        feedback = self._schema.views(self._receiver.wait(fed_back.step_id), num_rows, num_rows)
        if num_rows > fed_back.shape.num_rows:
            feedback = {name: column[: fed_back.shape.num_rows] for name, column in feedback.items()}
        next_inputs.apply_feedback(fed_back.shape, feedback)
        self._receiver.release(fed_back.step_id)
