"""The choice of tokens by kernels: what the last stage's sampler calls on a GPU."""

from __future__ import annotations

import torch

from raypp.ops.cuda.adjust_kernel import LogitAdjuster, remember
from raypp.ops.cuda.draw_kernels import TokenChooser
from raypp.ops.cuda.kernel_launch import Device, Workspace
from raypp.ops.cuda.logprobs_kernel import Reporter
from raypp.ops.cuda.verify_kernels import hold
from raypp.ops.row_tokens import StepTokens
from raypp.ops.sample.draw_sizes import MAX_CHANGED_POSITIONS
from raypp.ops.sample.tables import AdjustedLogits, Adjustments
from raypp.ops.sample.token_choice import TopLogprobs
from raypp.ops.sample.token_history import TokenHistory


class KernelTokenChoice(TokenChooser):
    """See `raypp.ops.sample.token_choice.TokenChoice`. Buffers are made at first use, before recording.

    Args:
        max_positions: The most positions of a call.
        device: Where it runs.
        workspace: For the parts' results.
    """

    def __init__(self, max_positions: int, device: Device, workspace: Workspace) -> None:
        super().__init__(max_positions, device, workspace)
        self._device = device
        self._max_positions = max_positions
        self._adjuster: LogitAdjuster | None = None
        self._reporter: Reporter | None = None

    def adjust(self, logits: torch.Tensor, asked: Adjustments) -> AdjustedLogits:
        """Do what rows and masks ask for. Shapes: logits [N, V] contiguous; N at most MAX_CHANGED_POSITIONS."""
        if self._adjuster is None:
            most = min(self._max_positions, MAX_CHANGED_POSITIONS)
            self._adjuster = LogitAdjuster(most, logits.shape[1], self._device)
        return self._adjuster.adjust(logits, asked)

    def remember(self, tokens: StepTokens, needs: torch.Tensor, history: TokenHistory, *, counts: bool) -> None:
        """Write tokens to the history of rows that need it."""
        remember(tokens, needs, history, self._device, counts=counts)

    hold = staticmethod(hold)

    def report(
        self, logits: torch.Tensor, rows: torch.Tensor, chosen: torch.Tensor, num_reported: torch.Tensor
    ) -> TopLogprobs:
        """Return the log-probabilities of positions whose rows ask; see `raypp.ops.cuda.logprobs_kernel`."""
        if self._reporter is None:
            self._reporter = Reporter(self._max_positions, logits.shape[1], self._device)
        return self._reporter.report(logits, rows, chosen, num_reported)
