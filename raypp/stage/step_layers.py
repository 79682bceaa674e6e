"""A step's way through the layers of a stage: from its rows to hidden states, and on to a message or to logits.

Behind a token's residual stream lie the inputs of this stage's layers and of later ones, if a model's layers take any.

    rows, lengths --> [ prepare ] --> [ run ] --> [ leave ] --> message to the next stage      all but the last
                                          +-----> [ last ]  --> logits                         the last

Eager steps and the programs of full graphs go the same way. A graph knows no plan: of lengths it knows their bounds
alone. Steps that are no full graph may run piecewise, padded to a number of tokens:

    hidden, positions, slots --copy--> [ buffers, zeros behind ] --> graph | attention | graph | ... --> [ output ]

Rows and their lengths differ from step to step; only attention sees them, as a break point. Everything else has a fixed
number of tokens. Padding is zeros, writes into the null block, and no token attends to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from raypp.graphs.debug import Watched, only, owned_tokens
from raypp.graphs.graph_manager import CudaGraphManager
from raypp.messages import NULL_BLOCK, StepForm
from raypp.ops.attention import AttentionBatch
from raypp.ops.host_to_device import to_device
from raypp.ops.row_inputs import row_inputs
from raypp.ops.row_state import Checkpoints, LayerMemory, moved_on, written_once
from raypp.specdec.proposer import StepHidden
from raypp.stage.first_steps import padding_step
from raypp.stage.request_rows import BlockTables, NextInputs
from raypp.stage.stage_model import StageModel
from raypp.stage.stage_spec import StageSpec
from raypp.stage.step_batch import LastHidden, StepBatch
from raypp.stage.step_items import ItemRows, ItemStore, carried_rows, place_items, received_deepstack
from raypp.transport.schema import aux_states_name

PIECEWISE = "piecewise"


class AuxStates:
    """The hidden states that a draft head on the last stage wants of layers on any stage: one stage's part.

    A stage keeps the residual stream after those of its layers that the head names, and sends on, with its own, what
    the stages before it kept. Of rows on whose tokens no draft will ever follow, nothing is sent.

    Args:
        spec: Which stage.
        taps: By depth, where the model leaves the states that this stage keeps, [max_tokens, H].
    """

    def __init__(self, spec: StageSpec, taps: Mapping[int, torch.Tensor]) -> None:
        self._taps = taps
        self._depths = () if spec.draft_head is None else spec.draft_head.config.aux_depths
        self._carried_in = spec.carried_depths(spec.stage_index - 1)
        self._carried_out = spec.carried_depths(spec.stage_index)

    def send(self, batch: StepBatch, into: Mapping[str, torch.Tensor]) -> None:
        """Write what the next stage gets of them into the tensors of its message."""
        for depth in self._carried_out:
            name = aux_states_name(depth)
            if depth in self._carried_in:
                into[name].copy_(batch.received[name])
            elif batch.drafting_tokens is None:
                into[name].copy_(self._taps[depth][: batch.num_tokens])
            else:
                torch.index_select(self._taps[depth], 0, batch.drafting_tokens, out=into[name])

    def gather(self, batch: StepBatch) -> list[torch.Tensor]:
        """Return the states that the head wants, in its order, each [T, H]; zeros for tokens that it need not see."""
        return [self._states(depth, batch) for depth in self._depths]

    def _states(self, depth: int, batch: StepBatch) -> torch.Tensor:
        if depth not in self._carried_in:
            return self._taps[depth][: batch.num_tokens]
        states = batch.received[aux_states_name(depth)]
        if batch.drafting_tokens is None:
            return states
        return states.new_zeros(batch.num_tokens, states.shape[1]).index_copy_(0, batch.drafting_tokens, states)


class PiecewiseLayers:
    """The layers as graphs between attention calls. T tokens of a step, P of its bucket, H hidden size.

    Args:
        spec: Of the stage.
        model: Its layers.
        kv_caches: Theirs.
        graphs: Keeps the graphs.
        sizes: Numbers of tokens to capture, the largest first; none: every step is eager.
    """

    def __init__(
        self,
        spec: StageSpec,
        model: StageModel,
        kv_caches: Sequence[LayerMemory],
        graphs: CudaGraphManager,
        sizes: Sequence[int],
    ) -> None:
        self._spec = spec
        self._model = model
        self._kv_caches = kv_caches
        self._graphs = graphs
        self._sizes = sizes
        self._num_tokens = 0  # of the step that ran last
        if not sizes:
            return
        size, device, dtype = sizes[0], torch.device(spec.device), getattr(torch, spec.dtype)
        entering, leaving = (spec.stream_size(spec.stage_index + ahead, model.hidden_size) for ahead in (0, 1))
        self._hidden = torch.zeros(size, entering, dtype=dtype, device=device)
        self._positions = torch.zeros(size, dtype=torch.int64, device=device)
        slots = torch.full((len(spec.groups), size), NULL_BLOCK * spec.block_size, dtype=torch.int64, device=device)
        self._slots = slots.unbind()
        self._attended = {
            width: torch.zeros(size, width, dtype=dtype, device=device) for width in model.attention_sizes
        }
        self._output = torch.zeros(size, leaving, dtype=dtype, device=device)
        self._batches: dict[int, AttentionBatch] = {}  # by bucket: the same object for all steps, as captured

    def record(self) -> tuple[int, ...]:
        """Capture as many sizes as memory allows; return them. All rows are padding meanwhile."""
        return tuple(self._graphs.record_sizes(PIECEWISE, self._sizes, self._record))

    def run(
        self, hidden: torch.Tensor, positions: torch.Tensor, attention: AttentionBatch, bucket: int
    ) -> torch.Tensor:
        """Return the residual stream after the layers, [T, H]; valid until the next step.

        Shapes: hidden [T, H]; positions [T] int64.

        Args:
            hidden: The residual stream.
            positions: Of the tokens.
            attention: The step, its attention planned.
            bucket: A size that was captured, at least T.
        """
        self._num_tokens = num_tokens = len(hidden)
        self._batches[bucket].adopt(attention)
        self._hidden[:num_tokens].copy_(hidden)
        self._positions[:num_tokens].copy_(positions)
        for slots, of_step in zip(self._slots, attention.slot_mappings, strict=True):
            slots[:num_tokens].copy_(of_step)
        if num_tokens < bucket:
            for buffer in (self._hidden, self._positions, *self._slots, *self._attended.values()):
                buffer[num_tokens:bucket].zero_()
        self._graphs.run((PIECEWISE, bucket))
        return self._output[:num_tokens]

    def _record(self, bucket: int) -> None:
        step = padding_step(self._spec, bucket)
        self._model.plan_attention(step.attention, 0)
        batch = self._batches[bucket] = AttentionBatch(
            num_decode_rows=0,
            decode_query_len=1,
            seq_lens=step.attention.seq_lens,
            block_tables=step.attention.block_tables,
            slot_mappings=[slots[:bucket] for slots in self._slots],
            prefill_query_lens=[],
            prefill_seq_lens=[],
            padded_out={width: attended[:bucket] for width, attended in self._attended.items()},
        )
        batch.adopt(step.attention)
        self._num_tokens = bucket
        watched = Watched(
            reads=({"KV cache": written_once(self._kv_caches)},),
            changes=(self, {"states": moved_on(self._kv_caches)}),
            yields=self._yields,
        )
        program = partial(self._layers, bucket)
        self._graphs.record(PIECEWISE, (PIECEWISE, bucket), program, breakable=True, watched=watched)

    def _layers(self, bucket: int) -> None:
        hidden = self._model.forward(
            self._hidden[:bucket], self._positions[:bucket], self._batches[bucket], self._kv_caches
        )
        self._output[:bucket].copy_(hidden)

    def _yields(self, result: None) -> dict[str, torch.Tensor]:
        num_tokens = self._num_tokens
        counts = owned_tokens(self._slots[0][:num_tokens], self._spec.block_size)
        return {"output": only(counts, self._output[:num_tokens])}


class StepLayers:
    """The layers of one stage. T tokens of a step, H hidden size.

    Args:
        spec: Of the stage.
        model: Its layers.
        kv_caches: Theirs.
        block_tables: Of all rows.
        checkpoints: Of all rows; None: no layer of the stage has a state per row.
        next_inputs: On the first stage, where its tokens come from.
        item_rows: Of prompts with images; None: the model takes none.
        items: Their embeddings.
        graphs: Keeps the graphs.
        sizes: Numbers of tokens with piecewise graphs, the largest first; none: every step is eager.
    """

    def __init__(
        self,
        spec: StageSpec,
        model: StageModel,
        kv_caches: Sequence[LayerMemory],
        block_tables: BlockTables,
        checkpoints: Checkpoints | None,
        next_inputs: NextInputs | None,
        item_rows: ItemRows | None,
        items: ItemStore,
        graphs: CudaGraphManager,
        sizes: Sequence[int],
    ) -> None:
        self._spec = spec
        self._device = torch.device(spec.device)
        self._max_len = spec.max_seq_len
        self._model = model
        self.kv_caches = kv_caches
        self.block_tables = block_tables
        self.checkpoints = checkpoints
        self.next_inputs = next_inputs
        self.item_rows = item_rows
        self._items = items
        self._aux_states = None if spec.draft_head is None else AuxStates(spec, model.taps)
        self.pieces = PiecewiseLayers(spec, model, kv_caches, graphs, sizes)
        """The graphs of piecewise steps."""

    def take(self, batch: StepBatch) -> None:
        """Bring to the device what the plan says of an eager or piecewise step, while its input is on its way."""
        plan = batch.plan
        batch.upload(self._device)
        batch.entries = self.block_tables.new_entries(plan)
        if self.item_rows is not None:
            batch.items = self.item_rows.step_items(batch)
        if self._aux_states is not None:
            batch.drafting_tokens = None
            if len(plan.drafting):
                indices = np.flatnonzero(np.repeat(plan.drafting, plan.num_scheduled_tokens))
                batch.drafting_tokens = to_device(indices, self._device)

    def prepare(self, batch: StepBatch, ring_entry: int = 0) -> torch.Tensor:
        """Write new entries into the block tables, find out what the layers read, and plan their attention.

        Args:
            batch: The step; on all stages but the first, with what it received.
            ring_entry: Says which buffers of attention are free.

        Returns:
            Token ids [T] int32 on the first stage, else hidden states [T, H].
        """
        if self.next_inputs is not None:
            batch.num_computed_tokens, entering = self.next_inputs.of_step(batch)
        else:
            batch.num_computed_tokens, entering = (
                batch.received["num_computed_tokens"],
                batch.received["hidden_states"],
            )
        # As the tables are when this runs, so that graphs follow them.
        of_rows = row_inputs(
            self.block_tables.tables,
            batch.entries,
            batch.rows,
            batch.num_computed_tokens,
            batch.queries,
            block_size=self._spec.block_size,
            max_len=self._max_len,
        )
        batch.positions = batch.rope_positions = of_rows.positions
        if self.item_rows is not None:
            batch.rope_positions = self.item_rows.rope_positions(batch)
        prefill_seq_lens: list[int] = []
        if not batch.is_decode:
            plan = batch.plan
            prefill_seq_lens = (plan.num_computed_tokens + plan.num_scheduled_tokens)[batch.num_decode_rows :].tolist()
        batch.attention = AttentionBatch(
            num_decode_rows=batch.num_decode_rows,
            decode_query_len=batch.query_len,
            seq_lens=of_rows.seq_lens,
            block_tables=of_rows.block_tables,
            slot_mappings=of_rows.slot_mappings,
            prefill_query_lens=batch.prefill_query_lens,
            prefill_seq_lens=prefill_seq_lens,
            prefill_spans=None if batch.is_decode or self.item_rows is None else self.item_rows.spans(batch),
        )
        if self.checkpoints is not None:
            starts, begins = batch.num_computed_tokens, batch.queries.query_start_loc
            of_step = (batch.rows, starts, begins, batch.token_rows, batch.num_decode_rows)
            batch.attention.spans = self.checkpoints.spans(*of_step)
        self._model.plan_attention(batch.attention, ring_entry)
        return entering

    def run(self, batch: StepBatch, entering: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the layers, [T, H]; valid until the next step. `entering` may change."""
        hidden, deepstack = entering, None
        if self.next_inputs is not None:
            hidden = self._model.embed(entering)
        if batch.items is not None:
            if self.next_inputs is not None:
                hidden, deepstack = place_items(hidden, batch.items, self._items, self._model.embed_items)
            elif self._spec.num_carried_taps:
                carried = batch.received["deepstack"]
                deepstack = received_deepstack(batch.items, carried, self._spec.num_deepstack_layers)
        batch.deepstack = deepstack
        # Rows to be added and positions along axes, as some models' image tokens have: such a step is eager.
        if batch.size.form is StepForm.PIECEWISE and deepstack is None and batch.rope_positions.ndim == 1:
            assert batch.size.bucket is not None
            return self.pieces.run(hidden, batch.rope_positions, batch.attention, batch.size.bucket)
        return self._model.forward(hidden, batch.rope_positions, batch.attention, self.kv_caches, deepstack)

    def leave(self, batch: StepBatch, hidden: torch.Tensor, into: Mapping[str, torch.Tensor]) -> None:
        """Write the message to the next stage. Shapes: hidden [T, H]."""
        into["num_computed_tokens"].copy_(batch.num_computed_tokens)
        into["hidden_states"].copy_(hidden)
        if batch.deepstack is not None and self._spec.num_carried_taps:
            into["deepstack"].copy_(carried_rows(batch.deepstack, self._spec.num_carried_taps))
        if self._aux_states is not None:
            self._aux_states.send(batch, into)
        batch.drop_inputs()

    def last(
        self,
        batch: StepBatch,
        hidden: torch.Tensor,
        *,
        place: torch.Tensor | None = None,
        next_token_ids: torch.Tensor | None = None,
    ) -> LastHidden:
        """Return the logits of the tokens whose successors are chosen. Last stage only.

        Args:
            batch: The step.
            hidden: [T, H].
            place: [N, V] float32, where the logits go; None: anywhere.
            next_token_ids: See `StepHidden`.
        """
        states, positions = hidden, batch.positions
        if len(batch.logits_rows_np) < batch.num_tokens:
            states, positions = (each.index_select(0, batch.logits_indices) for each in (states, positions))
        logits = self._model.compute_logits(states, place)
        aux = [] if self._aux_states is None else self._aux_states.gather(batch)
        of_rows = (batch.num_decode_rows, batch.logits_indices, next_token_ids)
        stepped = StepHidden(hidden, batch.positions, batch.attention.slot_mappings[0], aux, *of_rows)
        batch.drop_inputs()
        return LastHidden(logits, positions + 1, stepped)
