"""The last stage's sampler: each row's parameters in tables, and the cheapest tail that serves a step's rows."""

from __future__ import annotations

import numpy as np
import torch

from raypp.messages import StepPlan
from raypp.ops.sampling import sample, sample_greedy
from raypp.stage.spec import StageSpec


class Sampler:
    """Samples one token per wanted position."""

    def __init__(self, spec: StageSpec, device: torch.device) -> None:
        rows = spec.max_num_seqs
        self._device = device
        self._temperature = torch.zeros(rows, device=device)
        self._top_p = torch.ones(rows, device=device)
        self._top_k = torch.zeros(rows, dtype=torch.int32, device=device)
        self._min_p = torch.zeros(rows, device=device)
        self._seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        # The host's own copy of what decides the tail, so that no step asks the device.
        self._draws_np = np.zeros(rows, bool)
        self._truncates_np = np.zeros(rows, bool)

    def apply(self, plan: StepPlan) -> None:
        """Take over the parameters of rows that start."""
        rows_np = plan.start_rows
        if not len(rows_np):
            return
        rows = torch.from_numpy(rows_np.astype(np.int64)).to(self._device)
        for table, values in (
            (self._temperature, plan.start_temperature),
            (self._top_p, plan.start_top_p),
            (self._top_k, plan.start_top_k),
            (self._min_p, plan.start_min_p),
            (self._seeds, plan.start_seed),
        ):
            table.index_copy_(0, rows, torch.from_numpy(values.copy()).to(self._device))
        self._draws_np[rows_np] = plan.start_temperature > 0
        self._truncates_np[rows_np] = (plan.start_top_p < 1) | (plan.start_top_k > 0) | (plan.start_min_p > 0)

    def __call__(self, logits: torch.Tensor, rows_np: np.ndarray, positions: torch.Tensor) -> torch.Tensor:
        """Return the sampled token of each position, int64 [N].

        Shapes: logits [N, V]; rows_np [N], the row of each; positions [N] int64, of the token that is chosen.
        """
        if not self._draws_np[rows_np].any():
            return sample_greedy(logits)
        rows = torch.from_numpy(rows_np.astype(np.int64)).to(self._device)
        truncation = None
        if self._truncates_np[rows_np].any():
            truncation = tuple(table.index_select(0, rows) for table in (self._top_k, self._top_p, self._min_p))
        return sample(
            logits,
            self._temperature.index_select(0, rows),
            self._seeds.index_select(0, rows),
            positions,
            truncation,  # type: ignore[arg-type]
        )
