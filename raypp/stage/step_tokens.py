"""What a step yielded, and the two who are told: the first stage, and the driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from raypp.messages import NO_INT32S, Bytes, StepPlan, StepResult
from raypp.stage.pending_result import PendingResult, columns_to_host
from raypp.stage.step_shape import StepShape


@dataclass(frozen=True, eq=False)
class StepTokens:
    """The tokens of the Y rows that yield, `StepShape.sampled` of the step's R rows; K drafts were verified."""

    token_ids: torch.Tensor  # [Y, 1 + K] int32, valid up to num_valid
    positions: torch.Tensor  # [Y] int64, of the first of them
    lengths: torch.Tensor  # [Y] int64, of the rows, the new tokens included
    num_valid: torch.Tensor | None = None  # [Y] int32; None: 1 each
    num_drafted: torch.Tensor | None = None  # [Y] int32, see `StepResult`; None: nobody drafts
    num_matched: torch.Tensor | None = None  # [Y] int32, likewise
    draft_ids: torch.Tensor | None = None  # [Y, K_max] int32, the next drafts

    @classmethod
    def one_each(cls, token_ids: torch.Tensor, positions: torch.Tensor) -> StepTokens:
        """Return the tokens of a step without speculation. Shapes: token_ids [Y] int32; positions [Y] int64."""
        return cls(token_ids.unsqueeze(1), positions, positions + 1)

    def first(self, num_rows: int) -> StepTokens:
        """Return those of the first rows: the others are padding."""
        optional = (self.num_valid, self.num_drafted, self.num_matched, self.draft_ids)
        needed = (self.token_ids[:num_rows], self.positions[:num_rows], self.lengths[:num_rows])
        return StepTokens(*needed, *(column if column is None else column[:num_rows] for column in optional))


def write_feedback(feedback: dict[str, torch.Tensor], shape: StepShape, tokens: StepTokens) -> None:
    """Write a step's message to the first stage; see `transport.schema.feedback_schema`. Its width is that of K_max."""
    width = tokens.token_ids.shape[1]
    columns = [
        (feedback["length"], tokens.lengths.to(torch.int32)),
        (feedback["token_ids"][:, :width], tokens.token_ids),
    ]
    if tokens.draft_ids is not None:
        columns.append((feedback["draft_ids"], tokens.draft_ids))
    for view, values in columns:
        if shape.all_sample:
            view.copy_(values)
        else:
            view.fill_(-1).index_copy_(0, shape.sampled, values)


def pending_result(
    device: torch.device,
    plan: StepPlan,
    shape: StepShape,
    tokens: StepTokens,
    logprobs: Callable[[], Bytes],
    *,
    tells_drafts: bool = False,
) -> PendingResult:
    """Return what the driver is told, on its way to the host. `logprobs` packs the `StepLogprobs`."""
    told_drafts = tokens.draft_ids if tells_drafts else None
    columns = (tokens.token_ids, tokens.num_valid, tokens.num_drafted, tokens.num_matched, told_drafts)
    copied = iter(columns_to_host([column for column in columns if column is not None]))
    told = [column if column is None else next(copied) for column in columns]
    token_ids, num_valid, num_drafted, num_matched, draft_ids = told

    def by_row(values: torch.Tensor | None, nothing: int) -> NDArray[np.int32]:
        """Return values of the rows that yield as values of all rows."""
        if values is None:
            return NO_INT32S
        if shape.all_sample:
            return np.ascontiguousarray(values.numpy())
        spread = np.full((shape.num_rows, *values.shape[1:]), nothing, np.int32)
        spread[shape.sampled_np] = values.numpy()
        return spread

    return PendingResult(
        device,
        lambda: StepResult(
            step_id=plan.step_id,
            token_ids=by_row(token_ids, -1),
            num_valid=shape.samples_np.astype(np.int32) if num_valid is None else by_row(num_valid, 0),
            num_drafted=by_row(num_drafted, 0),
            num_matched=by_row(num_matched, 0),
            logprobs=logprobs(),
            draft_ids=by_row(draft_ids, -1),
        ),
    )
