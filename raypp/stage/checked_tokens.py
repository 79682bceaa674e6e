"""Which tokens of a step must come out alike whenever it is run, for debug mode.

A token at or past its row's limit writes the null block, as padding does, and reads there what others wrote at the same
time. Nobody reads what becomes of it, and it need not be the same twice.
"""

from __future__ import annotations

import torch

from raypp.messages import NULL_BLOCK
from raypp.stage.spec import StageSpec


def owned_tokens(slot_mapping: torch.Tensor, spec: StageSpec) -> torch.Tensor:
    """Return whether each token lies in a block of its row, bool [T]. Shapes: slot_mapping [T] int64."""
    return slot_mapping >= (NULL_BLOCK + 1) * spec.block_size


def only(counts: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return a copy of the values, zero where they do not count. Shapes: counts [T] bool; values [T, ...]."""
    return values.masked_fill(~counts.view(-1, *[1] * (values.ndim - 1)), 0)
