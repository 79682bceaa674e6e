"""The messages of a stage's edges, and how large they get."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raypp.stage.stage_spec import StageSpec
from raypp.transport.schema import MessageSpec, Schema, feedback_schema, hidden_states_schema


@dataclass(frozen=True)
class StageSchemas:
    """The schemas of the forward edges, one from each stage to the next, and of the feedback edge; on every stage."""

    forward: tuple[Schema, ...]
    feedback: Schema

    @classmethod
    def of(cls, spec: StageSpec, hidden_size: int) -> StageSchemas:
        """Return the schemas for a model's hidden size."""
        dtype = getattr(torch, spec.dtype)
        forward = (
            hidden_states_schema(
                hidden_size,
                dtype,
                spec.num_carried_taps,
                spec.carried_depths(sender),
                spec.stream_size(sender + 1, hidden_size),
            )
            for sender in range(spec.num_stages - 1)
        )
        return cls(tuple(forward), feedback_schema(spec.max_drafts))

    def forward_messages(self, spec: StageSpec) -> list[MessageSpec]:
        """Return what travels from each stage to the next."""
        return [MessageSpec(schema, spec.max_step_rows, spec.max_step_tokens) for schema in self.forward]

    def feedback_messages(self, spec: StageSpec) -> MessageSpec:
        """Return what travels from the last stage to the first. It has nothing per token."""
        return MessageSpec(self.feedback, spec.max_step_rows, spec.max_step_rows)
