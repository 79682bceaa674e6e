"""The tokens of running rows that the driver sent: prompts, and after a preemption the output so far. On the host."""

from __future__ import annotations

import numpy as np
import torch

from raypp.messages import NO_INT32S, Int32s, StepPlan
from raypp.ops.host_to_device import to_device
from raypp.stage.step_shape import StepShape
from raypp.starting_rows import StartingRows


class KnownTokens:
    """Remembers them by row, until another request takes the row over. T tokens of a step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_rows: dict[int, Int32s] = {}

    def start(self, starting: StartingRows) -> None:
        """Take over rows that start."""
        self._of_rows.update(zip(starting.rows_np.tolist(), starting.token_ids, strict=True))

    def of_chunks(self, plan: StepPlan, shape: StepShape) -> Int32s:
        """Return the tokens of the step's chunks, one chunk after the other."""
        chunks = [known[start : start + count] for known, start, count in self._chunks(plan, shape)]
        return np.concatenate(chunks) if chunks else NO_INT32S

    def after_each(self, plan: StepPlan, shape: StepShape) -> torch.Tensor | None:
        """Return the token after each of the step's tokens where it is known, else 0, int32 [T]; None: none is."""
        chunks = self._chunks(plan, shape)
        if not chunks:
            return None
        following = np.zeros(shape.num_tokens, np.int32)
        begin = shape.num_decode_rows * shape.decode_query_len
        for known, start, count in chunks:
            after = known[start + 1 : start + 1 + count]
            following[begin : begin + len(after)] = after
            begin += count
        return to_device(following, self._device)

    def _chunks(self, plan: StepPlan, shape: StepShape) -> list[tuple[Int32s, int, int]]:
        """Return the known tokens of each row with a chunk, and the chunk's first position and length."""
        first = shape.num_decode_rows
        rows, starts = plan.rows[first:].tolist(), plan.num_computed_tokens[first:].tolist()
        return [
            (self._of_rows[row], start, count)
            for row, start, count in zip(rows, starts, shape.prefill_query_lens, strict=True)
        ]
