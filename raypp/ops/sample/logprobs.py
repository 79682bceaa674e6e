"""Computes log-probabilities of chosen tokens and of the most likely ones. N positions, V vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import torch


class TopLogprobs(NamedTuple):
    """Log-probabilities at N positions: column 0 is the chosen token, then the L most likely ones, best first."""

    token_ids: torch.Tensor  # [N, 1 + L] int32
    logprobs: torch.Tensor  # [N, 1 + L] float32
    ranks: torch.Tensor  # [N] int32, of the chosen token; 1 is the most likely

    def packed(self) -> torch.Tensor:
        """Return all of it side by side, int32 [N, 2 * (1 + L) + 1]: one copy brings it to the host."""
        return torch.cat((self.token_ids, self.logprobs.view(torch.int32), self.ranks.unsqueeze(1)), dim=1)


def top_logprobs(logits: torch.Tensor, chosen: torch.Tensor, num_top: int) -> TopLogprobs:
    """Return the log-softmax of the logits at the chosen tokens and at the most likely ones.

    Shapes: logits [N, V], left as they are; chosen [N] int64; num_top: L <= V. Never synchronizes with the host.
    """
    logits = logits.to(torch.float32)
    normalizer = logits.logsumexp(dim=1, keepdim=True)
    chosen = chosen.unsqueeze(1)
    chosen_logits = logits.gather(1, chosen)
    ranks = (logits > chosen_logits).sum(dim=1, dtype=torch.int32) + 1
    top = logits.topk(num_top, dim=1)
    return TopLogprobs(
        token_ids=torch.cat((chosen, top.indices), dim=1).to(torch.int32),
        logprobs=torch.cat((chosen_logits, top.values), dim=1).sub_(normalizer),
        ranks=ranks,
    )
