"""The rows that requests take over with a plan: read once, uploaded once, and told to all who keep tables by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raypp.messages import Int32s, StartExtras, StartItems, StepPlan, unpack
from raypp.ops.host_to_device import to_device_together


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
        self.extras = unpack(StartExtras, plan.start_extras.data) if len(plan.start_extras) else None
        """Parameters beyond the plan's; None: no row has any."""
        self.items = unpack(StartItems, plan.start_items.data) if len(plan.start_items) else None
        """Pictures in prompts; None: no row has any."""
        columns: list[NDArray[Any]] = [self.rows_np, plan.start_num_tokens, plan.start_limits]
        columns += [plan.start_temperature, plan.start_top_p, plan.start_top_k, plan.start_min_p, plan.start_seed]
        self.rows, self.num_tokens, self.limits, *draws = to_device_together(columns, device)
        self.temperature, self.top_p, self.top_k, self.min_p, self.seeds = draws
