"""A step's way through the layers of a stage: from its rows to hidden states, and on to a message or to logits.

    rows, lengths --> [ inputs ] --> layers --> [ leave ] --> message to the next stage      all but the last
                                           +--> [ last ]  --> logits                         the last

Steps that are called and steps that are recorded go the same way. A recording knows no plan: of lengths it knows their
bounds alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from raypp.messages import StepPlan
from raypp.models.decoder import Deepstack
from raypp.ops.attention import AttentionBatch
from raypp.ops.row_inputs import NewEntries
from raypp.specdec.proposer import StepHidden
from raypp.stage.aux_states import AuxStates
from raypp.stage.request_rows import BlockTables
from raypp.stage.stage_model import StageModel
from raypp.stage.stage_spec import StageSpec
from raypp.stage.step_end import LastHidden
from raypp.stage.step_items import ItemRows, carried_rows
from raypp.stage.step_shape import StepShape


@dataclass(frozen=True, eq=False)
class StepInputs:
    """What the layers of a step read beside the hidden states. R rows, T tokens."""

    shape: StepShape
    num_computed_tokens: torch.Tensor  # [R] int32, before the step
    positions: torch.Tensor  # [T] int64
    rope_positions: torch.Tensor  # [T] int64, or [T, 3] along axes
    attention: AttentionBatch
    received: Mapping[str, torch.Tensor]  # the message of the stage before; none on the first stage
    drafting_tokens: torch.Tensor | None  # int64, those whose states travel to a draft head; None: all


class StepBody:
    """Of one stage.

    Args:
        spec: Which stage.
        model: Its layers.
        block_tables: Of all rows.
        item_rows: Of prompts with images; None: the model takes none.
        aux_states: What a draft head on the last stage wants of the layers.
    """

    def __init__(
        self,
        spec: StageSpec,
        model: StageModel,
        block_tables: BlockTables,
        item_rows: ItemRows | None,
        aux_states: AuxStates,
    ) -> None:
        self._spec = spec
        self._model = model
        self.block_tables = block_tables
        self.item_rows = item_rows
        self._aux_states = aux_states

    def inputs(
        self,
        shape: StepShape,
        num_computed_tokens: torch.Tensor,
        entries: NewEntries,
        received: Mapping[str, torch.Tensor],
        plan: StepPlan | None = None,
    ) -> StepInputs:
        """Write new entries into the block tables, and return what the layers read; their attention is planned.

        Args:
            shape: The step.
            num_computed_tokens: [R] int32, before the step.
            entries: Of the block tables.
            received: The message of the stage before; empty on the first stage.
            plan: The step's; None in a recording, whose rows all decode.
        """
        of_rows = self.block_tables.inputs(entries, shape, num_computed_tokens)
        rope_positions = of_rows.positions
        if self.item_rows is not None:
            rope_positions = self.item_rows.rope_positions(shape, plan, of_rows.positions)
        seq_lens = None if plan is None else plan.num_computed_tokens + plan.num_scheduled_tokens
        prefill_seq_lens: list[int] = [] if seq_lens is None else seq_lens[shape.num_decode_rows :].tolist()
        attention = AttentionBatch(
            num_decode_rows=shape.num_decode_rows,
            decode_query_len=shape.decode_query_len,
            seq_lens=of_rows.seq_lens,
            block_tables=of_rows.block_tables,
            slot_mapping=of_rows.slot_mapping,
            prefill_query_lens=shape.prefill_query_lens,
            prefill_seq_lens=prefill_seq_lens,
        )
        self._model.plan_attention(attention, 0 if plan is None else plan.step_id % self._spec.num_ring_entries)
        drafting_tokens = None if plan is None else self._aux_states.drafting_tokens(plan, shape)
        return StepInputs(
            shape, num_computed_tokens, of_rows.positions, rope_positions, attention, received, drafting_tokens
        )

    def leave(
        self,
        inputs: StepInputs,
        hidden: torch.Tensor,
        into: Mapping[str, torch.Tensor],
        deepstack: Deepstack | None = None,
    ) -> None:
        """Write the message to the next stage. Shapes: hidden [T, H]."""
        into["num_computed_tokens"].copy_(inputs.num_computed_tokens)
        into["hidden_states"].copy_(hidden)
        if deepstack is not None and self._spec.num_carried_taps:
            into["deepstack"].copy_(carried_rows(deepstack, self._spec.num_carried_taps))
        self._aux_states.send(inputs.received, into, inputs.shape.num_tokens, inputs.drafting_tokens)

    def last(
        self,
        inputs: StepInputs,
        hidden: torch.Tensor,
        *,
        place: torch.Tensor | None = None,
        next_token_ids: torch.Tensor | None = None,
    ) -> LastHidden:
        """Return the logits of the tokens whose successors are chosen. Last stage only.

        Args:
            inputs: Of the step.
            hidden: [T, H].
            place: [N, V] float32, where the logits go; None: anywhere.
            next_token_ids: See `StepHidden`.
        """
        shape, states, positions = inputs.shape, hidden, inputs.positions
        if len(shape.logits_rows_np) < shape.num_tokens:
            states, positions = (each.index_select(0, shape.logits_indices) for each in (states, positions))
        logits = self._model.compute_logits(states, place)
        aux = self._aux_states.gather(inputs.received, shape.num_tokens, inputs.drafting_tokens)
        stepped = StepHidden(hidden, inputs.positions, inputs.attention.slot_mapping, aux, next_token_ids)
        return LastHidden(logits, positions + 1, stepped)
