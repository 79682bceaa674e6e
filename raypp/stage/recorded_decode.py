"""Decode steps as recordings: padded to a size that was recorded, between buffers whose addresses never change.

    upload, slot --> body: input, tables, layers, on the last stage logits --> [ tail: sample ] --> output, slot

Every row of such a step has 1 + K tokens, so that a recording fits every step of its size and its K. The tail verifies
drafts and proposes the next ones too. The messages' way from and to the links' slots is part of the recordings.
Padding reads one spare row of the tables and writes another, see `StageSpec`. Messages between stages are padded too:
both ends know to what.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from raypp.graphs.debug import Watched, only, owned_tokens
from raypp.graphs.graph_manager import CudaGraphManager
from raypp.messages import NULL_BLOCK, Int64s, StepPlan
from raypp.ops.row_inputs import NewEntries
from raypp.ops.sample.tables import Needs
from raypp.stage.feedback import FedBack
from raypp.stage.recorded_buffers import MessageSlots, UploadRing
from raypp.stage.recorded_drafts import RecordedDrafts
from raypp.stage.request_rows import NextInputs
from raypp.stage.schemas import StageSchemas
from raypp.stage.speculation import Search
from raypp.stage.stage_model import StageModel
from raypp.stage.stage_spec import StageSpec
from raypp.stage.step_body import StepBody
from raypp.stage.step_end import EndInputs, EndOutputs, LastHidden, StepEnd
from raypp.stage.step_result import ToldTokens
from raypp.stage.step_shape import StepShape, uniform_shape
from raypp.stage.step_sizes import FullSize
from raypp.transport.edges import StageLinks

FULL = "full"

_TAILS = (Needs.GREEDY, Needs.ALL)
"""The second gives each row what it asks for, and holds rows under a grammar to their masks."""
_NUM_SLOTS = 3  # in front of all else: the slot of the step's input, whether there is any, the slot of its output
_COLUMNS = 5  # rows; block entries: row, position, block; rows that are fed back


class RanBody(NamedTuple):
    """What a body leaves, besides its message to the next stage."""

    slot_mapping: torch.Tensor  # [B * (1 + K)] int64, for debug mode
    last: LastHidden | None = None  # of the last stage


class RanTail(NamedTuple):
    """What a tail leaves, besides its message to the first stage."""

    ended: EndOutputs
    top: torch.Tensor | None  # `TopLogprobs.packed` of the step's positions, where their rows ask; None: none does


class RecordedDecode:
    """The recordings of one stage. B rows of a recording, K drafts, V vocabulary."""

    def __init__(
        self,
        spec: StageSpec,
        model: StageModel,
        kv_caches: Sequence[torch.Tensor],
        schemas: StageSchemas,
        graphs: CudaGraphManager,
        sizes: Sequence[FullSize],
        next_inputs: NextInputs | None,
        body: StepBody,
        end: StepEnd | None,
        links: StageLinks,
    ) -> None:
        device = torch.device(spec.device)
        self._spec = spec
        self._model = model
        self._kv_caches = kv_caches
        self._schemas = schemas
        self._next_inputs = next_inputs
        self._sizes = sizes
        self._body = body
        self._end = end
        self._num_rows = 0  # of the step that was uploaded last
        self._graphs = graphs
        self._uploads = UploadRing(spec.num_ring_entries, _NUM_SLOTS + _COLUMNS * spec.max_step_rows, device)
        # What the step reads: the message of the stage before; on the first stage a feedback message.
        self._input = torch.zeros(links.entering.slots.shape[1], dtype=torch.uint8, device=device)
        self._entering = MessageSlots(links.entering.slots, self._input, self._uploads.values[:1])
        self._has_entered = self._uploads.values[1:2]
        # What it writes: the message to the next stage; on the last stage the feedback.
        self._output = torch.zeros(links.leaving.slots.shape[1], dtype=torch.uint8, device=device)
        self._leaving = MessageSlots(links.leaving.slots, self._output, self._uploads.values[2:3])
        self._logits: torch.Tensor | None = None
        self.has_recorded_choice = True
        """Whether the last choice of tokens was a recording."""
        self._last: LastHidden  # of the step that was run last
        self._shapes = {size: self._shape(*size, column=0) for size in sizes}
        self.drafts: RecordedDrafts | None = None
        """What the proposer's own recordings do, if it has some."""
        speculation = None if end is None else end.speculation
        if speculation is not None and speculation.is_recorded_apart:
            self.drafts = RecordedDrafts(
                spec, speculation, graphs, FULL, lambda bucket: self._feedback_views(bucket)["draft_ids"]
            )
        # What is fed back may be a step of any K.
        buckets = {size.num_rows for size in sizes}
        self._fed_back = {bucket: self._shape(bucket, spec.max_drafts, column=4) for bucket in buckets}
        self._padding_np = {bucket: self._padding(bucket) for bucket in buckets}
        if end is not None and graphs.makes_graphs:
            end.sampler.reserve()

    def record(self) -> tuple[FullSize, ...]:
        """Record as many sizes as memory allows; return them. All rows are padding meanwhile."""
        recorded = tuple(self._graphs.record_sizes(FULL, self._sizes, self._record))
        if self.drafts is not None:
            self.drafts.record_proposals({size.num_rows for size in recorded})
        return recorded

    def _record(self, size: FullSize) -> None:
        bucket, num_drafts = size
        padding = self._padding_np[bucket]
        self._uploads.entry(0)[: len(padding)] = padding
        self._uploads.upload(0, len(padding))
        self._num_rows = bucket
        body, watched = partial(self._layers, bucket, num_drafts), self._watched_body(bucket, num_drafts)
        self._graphs.record(FULL, ("body", bucket, num_drafts), body, watched=watched)
        self.run(bucket, num_drafts)  # the tails read what it leaves
        if self._spec.is_last:
            # Where nobody makes graphs, a tail for every need would only be more work.
            for needs in _TAILS if self._graphs.makes_graphs else (Needs.GREEDY,):
                self._record_tail(size, needs)
        if self.drafts is not None:
            self.drafts.record(self._shapes[size], lambda: self._last.hidden)

    def _record_tail(self, size: FullSize, needs: Needs) -> None:
        masks = None
        if needs == Needs.ALL and self._end is not None:
            masks = self._end.grammars.of_places(size.num_rows, size.num_tokens, size.num_drafts)
        tail = partial(self._tail, *size, EndInputs(needs, masks=masks))
        self._graphs.record(FULL, ("tail", *size, needs), tail, watched=self._watched_tail(*size, needs))

    def upload(self, plan: StepPlan, bucket: int, fed_back: FedBack | None) -> None:
        """Queue what the host knows of the step.

        Args:
            plan: The step.
            bucket: The rows that it is padded to.
            fed_back: The feedback message that the step is to apply, on the first stage; None if there is none.
        """
        entry, padding = self._uploads.entry(plan.step_id), self._padding_np[bucket]
        entry[: len(padding)] = padding
        if fed_back is not None:
            entry[:2] = fed_back.step_id % self._entering.num_slots, 1
        elif not self._spec.is_first:
            entry[:2] = plan.step_id % self._entering.num_slots, 1
        entry[2] = plan.step_id % self._leaving.num_slots
        columns = entry[_NUM_SLOTS:]
        self._num_rows, num_blocks = len(plan.rows), len(plan.block_rows)
        columns[: self._num_rows] = plan.rows
        for column, values in enumerate((plan.block_rows, plan.block_positions, plan.block_ids), start=1):
            columns[column * bucket : column * bucket + num_blocks] = values
        if fed_back is not None:
            assert fed_back.num_message_rows == bucket, "its message lies otherwise"
            shape, first = fed_back.shape, 4 * bucket
            rows_np = shape.rows_np
            if not shape.all_sample:  # a row that yielded nothing, in the middle of its prompt, is told nothing
                rows_np = np.where(shape.samples_np, rows_np, self._spec.scrap_row)
            columns[first : first + shape.num_rows] = rows_np
        self._uploads.upload(plan.step_id, len(padding))

    def run(self, bucket: int, num_drafts: int) -> None:
        """Run the step, up to the logits on the last stage. Its input and, but there, its output are in their slots."""
        ran: RanBody = self._graphs.run(("body", bucket, num_drafts))
        if ran.last is not None:
            self._last = ran.last

    def end(self, bucket: int, num_drafts: int, inputs: EndInputs) -> RanTail:
        """Choose the tokens and write the feedback to its slot. Last stage only. Returns what padding chose, too.

        Args:
            bucket: Of `bucket_of`.
            num_drafts: K.
            inputs: What the end of the step is to do.
        """
        ended, top = self._run_tail(bucket, num_drafts, inputs)
        told = ended.told
        has_grammar, search = inputs.masks is not None, inputs.search
        if self.drafts is not None:
            self.drafts.run(bucket, num_drafts, self._num_rows, proposes=search.proposes)
            self._leaving.write(self._schemas.feedback.num_bytes(bucket, bucket))
            if has_grammar:  # the driver is told the drafts, too
                drafts = self._feedback_views(bucket)["draft_ids"]
                told = ToldTokens.of(replace(ended.tokens, draft_ids=drafts), tells_drafts=True)
            if not search.compares:
                told = told.without("num_drafted", "num_matched")
        if not has_grammar and "draft_ids" in told.columns:
            told = told.without("draft_ids")
        return RanTail(ended._replace(told=told), top)

    def _run_tail(self, bucket: int, num_drafts: int, inputs: EndInputs) -> RanTail:
        is_greedy = inputs.needs == Needs.GREEDY and inputs.masks is None
        key = ("tail", bucket, num_drafts, Needs.GREEDY if is_greedy else Needs.ALL)
        self.has_recorded_choice = key in self._graphs
        if not self.has_recorded_choice:  # there was no memory for it, or nobody makes graphs
            return self._tail(bucket, num_drafts, inputs)
        ran: RanTail = self._graphs.run(key)
        return ran

    @property
    def logits(self) -> torch.Tensor:
        """The logits of the step that was run last, [B * (1 + K), V]. Last stage only."""
        return self._last.logits

    def _shape(self, bucket: int, num_drafts: int, *, column: int) -> StepShape:
        first = _NUM_SLOTS + column * bucket
        rows = self._uploads.values[first : first + bucket]
        return uniform_shape(rows, query_len=1 + num_drafts)

    def _padding(self, bucket: int) -> Int64s:
        """Return what is uploaded for a step of padding alone, int64 [3 + 5 * bucket]."""
        scrap_row = self._spec.scrap_row
        columns = np.array([self._spec.padding_row, scrap_row, 0, NULL_BLOCK, scrap_row], np.int64)
        return np.concatenate((np.zeros(_NUM_SLOTS, np.int64), np.repeat(columns, bucket)))

    def _layers(self, bucket: int, num_drafts: int) -> RanBody:
        spec, shape = self._spec, self._shapes[FullSize(bucket, num_drafts)]
        columns = self._uploads.values[_NUM_SLOTS : _NUM_SLOTS + _COLUMNS * bucket].chunk(_COLUMNS)
        _, entry_rows, entry_positions, entry_blocks, _ = columns
        if self._next_inputs is not None:
            self._entering.read(self._schemas.feedback.num_bytes(bucket, bucket), self._has_entered)
            feedback = self._schemas.feedback.views(self._input, bucket, bucket)
            self._next_inputs.apply_feedback(self._fed_back[bucket], feedback)
            entering: Mapping[str, torch.Tensor] = {}
            num_computed_tokens = self._next_inputs.decode_lengths(shape)
            hidden = self._model.embed(self._next_inputs.decode_input_ids(shape))
        else:
            schema = self._schemas.forward[spec.stage_index - 1]
            self._entering.read(schema.num_bytes(bucket, shape.num_tokens), self._has_entered)
            entering = schema.views(self._input, bucket, shape.num_tokens)
            num_computed_tokens, hidden = entering["num_computed_tokens"], entering["hidden_states"]
        entries = NewEntries(entry_rows, entry_positions, entry_blocks)
        inputs = self._body.inputs(shape, num_computed_tokens, entries, entering)
        hidden = self._model.forward(hidden, inputs.rope_positions, inputs.attention, self._kv_caches)
        slot_mapping = inputs.attention.slot_mapping
        if spec.is_last:
            return RanBody(slot_mapping, self._body.last(inputs, hidden, place=self._place_of_logits(len(hidden))))
        schema = self._schemas.forward[spec.stage_index]
        self._body.leave(inputs, hidden, schema.views(self._output, bucket, shape.num_tokens))
        self._leaving.write(schema.num_bytes(bucket, shape.num_tokens))
        return RanBody(slot_mapping)

    def _watched_body(self, bucket: int, num_drafts: int) -> Watched:
        def yields(ran: RanBody) -> dict[str, torch.Tensor]:
            num_rows, num_tokens = self._num_rows, self._num_rows * (1 + num_drafts)
            counts = owned_tokens(ran.slot_mapping, self._spec.block_size)[:num_tokens]
            if ran.last is not None:
                return {"logits": only(counts, ran.last.logits[:num_tokens])}
            schema = self._schemas.forward[self._spec.stage_index]
            leaving = schema.views(self._output, bucket, bucket * (1 + num_drafts))
            states = {name: view for name, view in leaving.items() if name != "num_computed_tokens"}
            return {
                "num_computed_tokens": leaving["num_computed_tokens"][:num_rows],
                **{name: only(counts, view[:num_tokens]) for name, view in states.items()},
            }

        caches = {"KV cache": self._kv_caches}
        return Watched(
            reads=({"output": self._output}, self._uploads, self._body.block_tables, self._body.item_rows, caches),
            changes=({"input": self._input}, self._next_inputs),
            yields=yields,
        )

    def _watched_tail(self, bucket: int, num_drafts: int, needs: Needs) -> Watched:
        assert self._end is not None
        sampler, grammars, speculation = self._end.sampler, self._end.grammars, self._end.speculation

        def yields(ran: RanTail) -> dict[str, torch.Tensor]:
            num_rows, num_tokens = self._num_rows, self._num_rows * (1 + num_drafts)
            counts = owned_tokens(self._last.hidden.slot_mapping, self._spec.block_size)[:num_tokens]
            rows = {name: column[:num_rows] for name, column in self._feedback_views(bucket).items()}
            tokens = rows["token_ids"][:, : 1 + num_drafts].reshape(-1)
            return {**rows, "token_ids": only(counts, tokens), "chosen": only(counts, ran.ended.chosen[:num_tokens])}

        tables = None if speculation is None else speculation.tables
        history = sampler.history if needs.history else None
        return Watched(
            reads=({"output": self._output}, sampler.rows.draws, sampler.rows.tables, grammars),
            changes=(sampler.history.tokens, tables, history),
            yields=yields,
        )

    def _place_of_logits(self, num_tokens: int) -> torch.Tensor:
        """Return memory that all recordings share: kept by each, logits would take gigabytes."""
        if self._logits is None:  # the largest recording comes first
            self._logits = torch.empty(num_tokens, self._spec.vocab_size, device=self._input.device)
        assert num_tokens <= len(self._logits), "a larger step was recorded after smaller ones"
        return self._logits[:num_tokens]

    def _tail(self, bucket: int, num_drafts: int, inputs: EndInputs) -> RanTail:
        """End a step. Drafts are always compared and proposed: which steps do without is known when it runs."""
        shape, last, draft = self._shapes[FullSize(bucket, num_drafts)], self._last, None
        assert self._end is not None
        if self.drafts is not None:
            draft = partial(self.drafts.keep, shape.rows)
        elif self._end.speculation is not None:
            draft = partial(self._end.speculation.draft, shape, last.hidden, self._spec.max_seq_len + 1, Search())
        inputs = replace(inputs, search=Search())
        ended = self._end.run(shape, last, inputs, self._feedback_views(bucket), draft)
        if self.drafts is None:
            self._leaving.write(self._schemas.feedback.num_bytes(bucket, bucket))
        top = None
        if Needs.LOGPROBS in inputs.needs:
            top = self._end.sampler.report(last.logits, shape.rows_of_logits(), ended.chosen).packed()
        return RanTail(ended, top)

    def _feedback_views(self, bucket: int) -> dict[str, torch.Tensor]:
        """Return the message to the first stage. Last stage only."""
        return self._schemas.feedback.views(self._output, bucket, bucket)
