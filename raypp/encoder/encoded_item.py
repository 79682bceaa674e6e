"""The embeddings of one item."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False, slots=True)
class EncodedItem:
    """What stands for one item in the language model: one tensor, so that it travels in one message.

    N tokens, H hidden size of the language model, L of its leading layers that take a row too (deepstack; 0 for most).
    """

    key: bytes  # of the `EncoderItem`
    rows: torch.Tensor  # [1 + L, N, H] of the stages' type and device, contiguous

    @property
    def embeddings(self) -> torch.Tensor:
        """What the placeholders' tokens are embedded as, [N, H]."""
        return self.rows[0]

    @property
    def deepstack(self) -> torch.Tensor:
        """What is added to the residual stream after each of the first L layers, [L, N, H]."""
        return self.rows[1:]

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows."""
        return self.rows.numel() * self.rows.element_size()
