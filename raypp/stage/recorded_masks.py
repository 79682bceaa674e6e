"""A step's masks where recordings find them: a place for every row and position, neutral for rows without a grammar."""

from __future__ import annotations

import torch

from raypp.stage.spec import StageSpec
from raypp.stage.step_masks import StepMasks


class RecordedMasks:
    """Buffers for the largest recording. B rows of a recording, N = B * (1 + K) positions, W words of a bit mask.

    Args:
        spec: Of the last stage.
        num_rows: B at most.
        num_positions: N at most.
        last_token_ids: See `StepMasks`.
    """

    def __init__(self, spec: StageSpec, num_rows: int, num_positions: int, last_token_ids: torch.Tensor) -> None:
        device = last_token_ids.device
        self._last_token_ids = last_token_ids
        self._yielding = torch.arange(num_rows, device=device)
        self._is_free = torch.ones(num_rows, dtype=torch.bool, device=device)
        self._positions = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._num_masks = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._draft_ids = torch.zeros(num_rows, spec.max_drafts, dtype=torch.int32, device=device)
        words = -(-spec.vocab_size // 32)
        self._mask_of = torch.full((num_positions,), -1, dtype=torch.int32, device=device)
        self._bitmasks = torch.zeros(num_positions, words, dtype=torch.int32, device=device)
        self._logit_indices = torch.zeros(0, dtype=torch.int64, device=device)  # recordings have `mask_of`

    def load(self, masks: StepMasks, num_drafts: int) -> None:
        """Queue what is known of a step's rows under a grammar; of all others, that they are free."""
        yielding, num_positions = masks.yielding, masks.num_yielding * (1 + num_drafts)
        self._is_free.fill_(True).index_fill_(0, yielding, False)
        self._positions.index_copy_(0, yielding, masks.positions)
        self._num_masks.index_copy_(0, yielding, masks.num_masks)
        self._draft_ids[:, :num_drafts].index_copy_(0, yielding, masks.draft_ids)
        self._mask_of[:num_positions].copy_(masks.by_position(num_positions))
        self._bitmasks[: len(masks.bitmasks)].copy_(masks.bitmasks)

    def of(self, rows: torch.Tensor, num_drafts: int) -> StepMasks:
        """Return what a recording reads. Shapes: rows [B] int64, at an address that stays."""
        count = len(rows)
        return StepMasks(
            num_yielding=count,
            yielding=self._yielding[:count],
            rows=rows,
            positions=self._positions[:count],
            num_masks=self._num_masks[:count],
            draft_ids=self._draft_ids[:count, :num_drafts],
            logit_indices=self._logit_indices,
            bitmasks=self._bitmasks,
            last_token_ids=self._last_token_ids,
            is_free=self._is_free[:count],
            mask_of=self._mask_of[: count * (1 + num_drafts)],
        )

    def read(self) -> dict[str, torch.Tensor]:
        """Return what recordings read."""
        return {
            "rows without a grammar": self._is_free,
            "positions of masks": self._positions,
            "numbers of masks": self._num_masks,
            "drafts of masks": self._draft_ids,
            "masks": self._bitmasks,
            "masks of positions": self._mask_of,
        }

    def changed(self) -> dict[str, torch.Tensor]:
        """Return what they change, too."""
        return {"last tokens under a grammar": self._last_token_ids}
