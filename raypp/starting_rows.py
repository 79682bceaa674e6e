"""The rows that requests take over with a plan: read once, uploaded once, and given to all tables by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raypp.messages import Int32s, StartItems, StartLists, StepPlan, unpack
from raypp.ops.host_to_device import to_device_together
from raypp.row_params import needs_of, words_of


class StartingRows:
    """S rows, and what their requests start with. `StepPlan` says what the plan's own columns mean.

    Args:
        plan: With at least one row that starts.
        device: Of the stage.
    """

    def __init__(self, plan: StepPlan, device: torch.device) -> None:
        self.plan = plan
        self.device = device
        self.rows_np = plan.start_rows.astype(np.int64)
        """[S]"""
        ends = np.cumsum(plan.start_num_tokens)
        self.token_ids: list[Int32s] = np.split(plan.start_token_ids, ends[:-1])
        """The known tokens of each row: its prompt, and after a preemption its output so far."""
        self.params = plan.start_params
        """[S] see `raypp.row_params`."""
        self.needs_np = needs_of(self.params)
        """[S] what each row asks of the sampler."""
        self.lists = unpack(StartLists, plan.start_lists.data) if len(plan.start_lists) else None
        """Lists among sampling parameters; None: no row has any."""
        self.items = unpack(StartItems, plan.start_items.data) if len(plan.start_items) else None
        """Pictures in prompts; None: no row has any."""
        columns: list[NDArray[Any]] = [self.rows_np, plan.start_num_tokens, plan.start_limits]
        columns += [self.needs_np, words_of(self.params), np.ascontiguousarray(self.params["seed"])]
        self.rows, self.num_tokens, self.limits, self.needs, self.words, self.seeds = to_device_together(
            columns, device
        )
