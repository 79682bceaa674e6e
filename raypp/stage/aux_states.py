"""The hidden states that a draft head on the last stage wants of layers on any stage: kept, and carried hop by hop.

A stage keeps the residual stream after those of its layers that were asked for, and sends on, with its own, what the
stages before it kept. Of rows on whose tokens no draft will ever follow, nothing is sent.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from raypp.messages import StepPlan
from raypp.ops.host_to_device import to_device
from raypp.stage.stage_spec import StageSpec
from raypp.stage.step_shape import StepShape
from raypp.transport.schema import aux_states_name


class AuxStates:
    """One stage's part.

    Args:
        spec: Which stage.
        taps: By depth, where the model leaves the states that this stage keeps, [max_tokens, H].
    """

    def __init__(self, spec: StageSpec, taps: Mapping[int, torch.Tensor]) -> None:
        self._taps = taps
        self._depths = () if spec.draft_head is None else spec.draft_head.config.aux_depths
        self._carried_in = spec.carried_depths(spec.stage_index - 1)
        self._carried_out = spec.carried_depths(spec.stage_index)

    def drafting_tokens(self, plan: StepPlan, shape: StepShape) -> torch.Tensor | None:
        """Return which of the step's tokens the head must see, int64 [M]; None: all."""
        if not len(plan.drafting) or not self._depths:
            return None
        indices = np.flatnonzero(np.repeat(plan.drafting, plan.num_scheduled_tokens))
        return to_device(indices, shape.rows.device)

    def send(
        self,
        received: Mapping[str, torch.Tensor],
        into: Mapping[str, torch.Tensor],
        num_tokens: int,
        drafting_tokens: torch.Tensor | None = None,
    ) -> None:
        """Write what the next stage is told, of a step of that many tokens.

        Args:
            received: The tensors of the message of the stage before; none on the first stage.
            into: The tensors of the message to the next.
            num_tokens: T.
            drafting_tokens: Which of them travel; None: all.
        """
        for depth in self._carried_out:
            name = aux_states_name(depth)
            if depth in self._carried_in:
                into[name].copy_(received[name])
            elif drafting_tokens is None:
                into[name].copy_(self._taps[depth][:num_tokens])
            else:
                torch.index_select(self._taps[depth], 0, drafting_tokens, out=into[name])

    def gather(
        self, received: Mapping[str, torch.Tensor], num_tokens: int, drafting_tokens: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Return the states that the head wants, in its order, each [T, H]; zeros for tokens that it need not see."""
        return [self._states(depth, received, num_tokens, drafting_tokens) for depth in self._depths]

    def _states(
        self, depth: int, received: Mapping[str, torch.Tensor], num_tokens: int, drafting_tokens: torch.Tensor | None
    ) -> torch.Tensor:
        if depth not in self._carried_in:
            return self._taps[depth][:num_tokens]
        states = received[aux_states_name(depth)]
        if drafting_tokens is None:
            return states
        return states.new_zeros(num_tokens, states.shape[1]).index_copy_(0, drafting_tokens, states)
