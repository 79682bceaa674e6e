"""The first stage's inbox: what the last stage sampled, applied in step order, as late as it may be."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from raypp.messages import StepPlan
from raypp.stage.request_rows import NextInputs
from raypp.transport.link import LinkReceiver
from raypp.transport.schema import Schema


class FeedbackInbox:
    """Takes in one message per step, and applies it when a plan needs it or its slot."""

    def __init__(self, receiver: LinkReceiver, schema: Schema, num_stages: int, device: torch.device) -> None:
        self._receiver = receiver
        self._schema = schema
        self._num_slots = 2 * num_stages
        self._device = device
        self._expected: deque[tuple[int, np.ndarray]] = deque()  # (step_id, rows)

    def expect(self, plan: StepPlan) -> None:
        """Say that this step will be fed back. Comes after `apply_before(plan)`, which frees the step's slot."""
        self._expected.append((plan.step_id, plan.rows))
        num_rows = len(plan.rows)
        self._receiver.post_recv(plan.step_id, self._schema.num_bytes(num_rows, num_rows))

    def apply_before(self, plan: StepPlan, next_inputs: NextInputs) -> None:
        """Apply, in order, all feedback that `plan` builds on, and what would else hold the slot that it needs."""
        until = max(plan.requires_feedback_of, plan.step_id - self._num_slots)
        while self._expected and self._expected[0][0] <= until:
            step_id, rows_np = self._expected.popleft()
            buffer = self._receiver.wait(step_id)
            rows = torch.from_numpy(rows_np.astype(np.int64)).to(self._device)
            next_inputs.apply_feedback(rows, self._schema.views(buffer, len(rows_np), len(rows_np)))
            self._receiver.release(step_id)
