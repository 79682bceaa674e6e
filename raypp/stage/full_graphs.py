"""Decode steps as one CUDA graph each: padded to a size that was captured, between buffers whose addresses stay.

    upload, slot --> body: input, tables, layers, on the last stage logits --> [ tail: sample ] --> output, slot

Every row of such a step has 1 + K tokens, so that a graph fits every step of its size and its K. The tail verifies
drafts and proposes the next ones too. The messages' way from and to the links' slots is part of the graphs. Padding
reads one spare row of the tables and writes another, see `StageSpec`. Messages between stages are padded too: both ends
know to what.

The host runs ahead of the device, so every step in flight has pinned memory of its own. It is used again after
`num_ring_entries` steps: by then the driver has had the step's result. A graph repeats its addresses, and a step's
message lies in another slot each time: the slot's number is uploaded with all else, so the host launches no copy.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from raypp.graphs.debug import Watched, only, owned_tokens
from raypp.graphs.graph_manager import CudaGraphManager
from raypp.messages import NULL_BLOCK, Int64s
from raypp.ops.row_inputs import NewEntries
from raypp.ops.row_state import moved_on, written_once
from raypp.row_params import Needs
from raypp.stage.draft_graphs import DraftGraphs
from raypp.stage.request_rows import FedBack
from raypp.stage.schemas import StageSchemas
from raypp.stage.stage_spec import StageSpec
from raypp.stage.step_batch import LastHidden, StepBatch, graph_batch
from raypp.stage.step_end import EndInputs, EndOutputs, StepEnd
from raypp.stage.step_layers import StepLayers
from raypp.stage.step_result import PackedResult
from raypp.stage.step_sizes import FullSize
from raypp.transport.edges import StageLinks


class UploadRing:
    """A device buffer and a ring of host buffers.

    Args:
        num_entries: Steps in flight.
        max_values: The most values of a step.
        device: Where they go.
    """

    def __init__(self, num_entries: int, max_values: int, device: torch.device) -> None:
        self.values = torch.zeros(max_values, dtype=torch.int64, device=device)
        """Where the values of the step arrive, int64 [max_values]."""
        self._host = torch.zeros(num_entries, max_values, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.host: Int64s = self._host.numpy()
        """The host's buffers, [num_entries, max_values]: that of a step is filled before it is uploaded."""
        self._copies: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}  # by entry and number: to, from

    def upload(self, step_id: int, num_values: int) -> None:
        """Queue the copy of the entry's first values to the device."""
        key = (step_id % len(self.host), num_values)
        copy = self._copies.get(key)
        if copy is None:
            copy = self._copies[key] = self.values[:num_values], self._host[key[0]][:num_values]
        copy[0].copy_(copy[1], non_blocking=True)

    def settle(self) -> None:
        """Wait until what was queued is on the device. At start only: it has no deadline."""
        if self.values.is_cuda:
            torch.cuda.current_stream(self.values.device).synchronize()


_WORD = torch.int64
"""Messages are moved in words: a byte per thread would take eight times as many threads. Their parts are aligned."""


class MessageSlots:
    """Copies messages between a buffer and the slots of a link.

    Args:
        slots: uint8 [num_slots, slot_bytes], see `raypp.transport.link`; sizes are multiples of 8, as are those of
            messages.
        buffer: uint8 [slot_bytes].
        index: int64 [1], on the same device: the slot of the step that runs.
    """

    def __init__(self, slots: torch.Tensor, buffer: torch.Tensor, index: torch.Tensor) -> None:
        self.num_slots = len(slots)
        self._slots = slots.view(_WORD)
        self._buffer = buffer.view(_WORD).unsqueeze(0)
        self._index = index

    def read(self, num_bytes: int, is_there: torch.Tensor) -> None:
        """Copy the start of the slot to the buffer; zeros where is_there, int64 [1], is 0 and not 1: no message is."""
        words = num_bytes // _WORD.itemsize
        into = self._buffer[:, :words]
        torch.index_select(self._slots[:, :words], 0, self._index, out=into)
        into.mul_(is_there)

    def write(self, num_bytes: int) -> None:
        """Copy the start of the buffer to the start of the slot."""
        words = num_bytes // _WORD.itemsize
        self._slots[:, :words].index_copy_(0, self._index, self._buffer[:, :words])


FULL = "full"

_TAILS = (Needs.GREEDY, Needs.ALL)
"""The second gives each row what it asks for but log-probabilities, and holds rows under a grammar to their masks."""
_NUM_SLOTS = 3  # in front of all else: the slot of the step's input, whether there is any, the slot of its output
_COLUMNS = 2  # rows; rows that are fed back
_ENTRY_COLUMNS = 3  # of block entries: row of the tables, position, block; as many by group of layers


class FullGraphs:
    """The graphs of one stage. B rows of a graph, K drafts, V vocabulary."""

    def __init__(
        self,
        spec: StageSpec,
        schemas: StageSchemas,
        graphs: CudaGraphManager,
        sizes: tuple[FullSize, ...],
        layers: StepLayers,
        end: StepEnd | None,
        links: StageLinks,
    ) -> None:
        device = torch.device(spec.device)
        self._spec = spec
        self._schemas = schemas
        self._sizes = sizes
        self._layers = layers
        self._end = end
        self._num_rows = 0  # of the step that was uploaded last
        self._graphs = graphs
        self._is_first = spec.is_first
        self._num_columns = _COLUMNS + _ENTRY_COLUMNS * len(spec.groups)
        self._uploads = UploadRing(spec.num_ring_entries, _NUM_SLOTS + self._num_columns * spec.max_step_rows, device)
        # What the step reads: the message of the stage before; on the first stage a feedback message.
        self._input = torch.zeros(links.entering.slots.shape[1], dtype=torch.uint8, device=device)
        self._entering = MessageSlots(links.entering.slots, self._input, self._uploads.values[:1])
        self._has_entered = self._uploads.values[1:2]
        # What it writes: the message to the next stage; on the last stage the feedback.
        self._output = torch.zeros(links.leaving.slots.shape[1], dtype=torch.uint8, device=device)
        self._leaving = MessageSlots(links.leaving.slots, self._output, self._uploads.values[2:3])
        self._logits: torch.Tensor | None = None
        self.has_graph_of_choice = True
        """Whether the last choice of tokens was a graph."""
        self.last: LastHidden
        """Of the step that was run last, padding included. Last stage only."""
        self._chosen: torch.Tensor  # [N] int64, tokens, where the tail that was recorded last leaves them
        self._batches = {size: self._batch(size) for size in sizes}
        self.drafts: DraftGraphs | None = None
        """What the proposer's own graphs do, if it has some."""
        speculation = None if end is None else end.speculation
        if speculation is not None and speculation.proposer.has_own_graphs:
            self.drafts = DraftGraphs(
                spec, speculation, graphs, FULL, lambda bucket: self._feedback_views(bucket)["draft_ids"]
            )
        # What is fed back may be a step of any K.
        buckets = {size.num_rows for size in sizes}
        self._fed_back = {bucket: graph_batch(self._column(1, bucket), 1 + spec.max_drafts) for bucket in buckets}
        self._padding_np = {bucket: self._padding(bucket) for bucket in buckets}
        if end is not None and graphs.makes_graphs:
            end.sampler.reserve()

    def record(self) -> tuple[FullSize, ...]:
        """Capture as many sizes as memory allows; return them. All rows are padding meanwhile."""
        recorded = tuple(self._graphs.record_sizes(FULL, self._sizes, self._record))
        if self.drafts is not None:
            self.drafts.record_proposals({size.num_rows for size in recorded})
        return recorded

    def _record(self, size: FullSize) -> None:
        padding, batch = self._padding_np[size.num_rows], self._batches[size]
        self._uploads.host[0, : len(padding)] = padding
        self._uploads.upload(0, len(padding))
        self._uploads.settle()  # `run` may wait for other members: the next size would overwrite what is not copied yet
        self._num_rows = size.num_rows
        body, watched = partial(self._body, batch), self._watched_body(batch)
        self._graphs.record(FULL, ("body", *size), body, watched=watched)
        self.run(size)  # the tails read what it leaves
        if self._end is not None:
            # Where there are no graphs, a tail for every need would only be more work.
            for needs in _TAILS if self._graphs.makes_graphs else (Needs.GREEDY,):
                masks = None
                if needs == Needs.ALL:
                    masks = self._end.grammars.of_places(size.num_rows, size.num_tokens, size.num_drafts)
                tail = partial(self._tail, batch, EndInputs(needs, masks=masks))
                self._graphs.record(FULL, ("tail", *size, needs), tail, watched=self._watched_tail(batch, needs))
            if self._graphs.makes_graphs and self._spec.graphs.has_reports:
                self._graphs.record(FULL, ("report", *size), partial(self._report, batch, self._chosen))
        if self.drafts is not None:
            self.drafts.record(batch, lambda: self.last.hidden)

    def upload(self, step: StepBatch, fed_back: FedBack | None) -> None:
        """Queue what the host knows of a step.

        Args:
            step: It.
            fed_back: The feedback message that the step is to apply, on the first stage; None if there is none.
        """
        plan, bucket = step.plan, step.size.message[0]
        padding, num_rows, num_blocks = self._padding_np[bucket], len(plan.rows), len(plan.block_rows)
        entry = self._uploads.host[plan.step_id % len(self._uploads.host)]
        entry[: len(padding)] = padding
        if fed_back is not None:
            entry[:2] = fed_back.step_id % self._entering.num_slots, 1
        elif not self._is_first:
            entry[:2] = plan.step_id % self._entering.num_slots, 1
        entry[2] = plan.step_id % self._leaving.num_slots
        columns, self._num_rows = entry[_NUM_SLOTS:], num_rows
        columns[:num_rows] = plan.rows
        if num_blocks:
            num_places = len(self._spec.groups) * bucket
            for index, values in enumerate(self._layers.block_tables.columns(plan)):
                first = _COLUMNS * bucket + index * num_places
                columns[first : first + num_blocks] = values
        if fed_back is not None:
            batch, first = fed_back.batch, bucket
            rows_np = batch.rows_np
            if not batch.all_sample:  # a row that yielded nothing, in the middle of its prompt, has no feedback
                rows_np = np.where(batch.samples_np, rows_np, self._spec.scrap_row)
            columns[first : first + batch.num_rows] = rows_np
        self._uploads.upload(plan.step_id, len(padding))

    def run(self, size: tuple[int, int]) -> None:
        """Run a step of that size, up to the logits on the last stage. Input and output are in slots."""
        _, last = self._graphs.run(("body", *size))
        if last is not None:
            self.last = last

    def end(self, step: StepBatch, inputs: EndInputs) -> tuple[EndOutputs, torch.Tensor | None, tuple[str, ...]]:
        """Choose the tokens and write the feedback to its slot. Last stage only.

        Args:
            step: What was run last.
            inputs: What the end of the step is to do.

        Returns:
            What became of it, padding included; `TopLogprobs.packed` of the step's positions, if any row asks; and
            which columns of the result do not count.
        """
        size, search, masks = FullSize(step.size.message[0], step.query_len - 1), inputs.search, inputs.masks
        is_greedy = inputs.needs == Needs.GREEDY and masks is None
        key = ("tail", *size, Needs.GREEDY if is_greedy else Needs.ALL)
        self.has_graph_of_choice = key in self._graphs
        batch, top = self._batches[size], None
        if self.has_graph_of_choice:
            outputs: EndOutputs = self._graphs.run(key)
        else:  # there was no memory for it, or there are no graphs
            outputs = self._tail(batch, inputs)
        if Needs.LOGPROBS in inputs.needs:
            reported = ("report", *size)
            has_graph = self.has_graph_of_choice and reported in self._graphs
            top = self._graphs.run(reported) if has_graph else self._report(batch, outputs.chosen)
        without: tuple[str, ...] = () if masks is not None else ("draft_ids",)
        if self.drafts is not None:
            self.drafts.run(size, self._num_rows, search.num_drafts)
            self._leaving.write(self._schemas.feedback.num_bytes(size.num_rows, size.num_rows))
            if masks is not None:  # the driver gets the drafts, too
                tokens = replace(outputs.tokens, draft_ids=self._feedback_views(size.num_rows)["draft_ids"])
                outputs = outputs._replace(result=PackedResult.of(tokens, has_drafts=True))
            if not search.compares:
                without += ("num_drafted", "num_matched")
        return outputs, top, without

    def _column(self, column: int, bucket: int, width: int = 1) -> torch.Tensor:
        first = _NUM_SLOTS + column * bucket
        return self._uploads.values[first : first + width * bucket]

    def _batch(self, size: FullSize) -> StepBatch:
        batch = graph_batch(self._column(0, size.num_rows), 1 + size.num_drafts)
        width = len(self._spec.groups)
        batch.entries = NewEntries(
            *(self._column(_COLUMNS + index * width, size.num_rows, width) for index in range(_ENTRY_COLUMNS))
        )
        return batch

    def _padding(self, bucket: int) -> Int64s:
        """Return what is uploaded for a step of padding alone, int64 [3 + columns * bucket]."""
        scrap_row, width = self._spec.scrap_row, len(self._spec.groups)
        values = np.array([self._spec.padding_row, scrap_row, scrap_row, 0, NULL_BLOCK], np.int64)
        return np.concatenate(
            (np.zeros(_NUM_SLOTS, np.int64), np.repeat(values, [bucket] * _COLUMNS + [width * bucket] * _ENTRY_COLUMNS))
        )

    def _body(self, batch: StepBatch) -> tuple[torch.Tensor, LastHidden | None]:
        """Run the layers; return the slots of the tokens in the KV cache, and on the last stage what they gave."""
        bucket, index = batch.num_rows, self._spec.stage_index
        if self._layers.next_inputs is not None:
            self._entering.read(self._schemas.feedback.num_bytes(bucket, bucket), self._has_entered)
            self._layers.next_inputs.apply(
                self._fed_back[bucket], self._schemas.feedback.views(self._input, bucket, bucket)
            )
        else:
            schema = self._schemas.forward[index - 1]
            self._entering.read(schema.num_bytes(*batch.size.message), self._has_entered)
            batch.received = schema.views(self._input, *batch.size.message)
        hidden = self._layers.run(batch, self._layers.prepare(batch))
        slot_mapping = batch.attention.slot_mappings[0]
        if self._spec.is_last:
            return slot_mapping, self._layers.last(batch, hidden, place=self._place_of_logits(len(hidden)))
        schema = self._schemas.forward[index]
        self._layers.leave(batch, hidden, schema.views(self._output, *batch.size.message))
        self._leaving.write(schema.num_bytes(*batch.size.message))
        return slot_mapping, None

    def _report(self, batch: StepBatch, chosen: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of the step that was run last. Shapes: chosen [N] int64."""
        assert self._end is not None
        return self._end.sampler.report(self.last.logits, batch.rows_of_logits(), chosen).packed()

    def _tail(self, batch: StepBatch, inputs: EndInputs) -> EndOutputs:
        """End a step. Drafts are always compared and proposed: which steps do without is known when it runs."""
        last, end, draft = self.last, self._end, None
        assert end is not None
        if self.drafts is not None:
            draft = self.drafts.keep
        elif end.speculation is not None:
            draft = partial(end.speculation.draft, last.hidden, self._spec.max_seq_len + 1, end.speculation.search)
        if end.speculation is not None:
            inputs = replace(inputs, search=end.speculation.search)
        outputs = end.run(batch, last, inputs, self._feedback_views(batch.num_rows), draft)
        if self.drafts is None:
            self._leaving.write(self._schemas.feedback.num_bytes(batch.num_rows, batch.num_rows))
        self._chosen = outputs.chosen
        return outputs

    def _watched_body(self, batch: StepBatch) -> Watched:
        def yields(ran: tuple[torch.Tensor, LastHidden | None]) -> dict[str, torch.Tensor]:
            slot_mapping, last = ran
            num_rows, num_tokens = self._num_rows, self._num_rows * batch.query_len
            counts = owned_tokens(slot_mapping, self._spec.block_size)[:num_tokens]
            if last is not None:
                return {"logits": only(counts, last.logits[:num_tokens])}
            leaving = self._schemas.forward[self._spec.stage_index].views(self._output, *batch.size.message)
            states = {name: view for name, view in leaving.items() if name != "num_computed_tokens"}
            return {
                "num_computed_tokens": leaving["num_computed_tokens"][:num_rows],
                **{name: only(counts, view[:num_tokens]) for name, view in states.items()},
            }

        layers, caches = self._layers, {"KV cache": written_once(self._layers.kv_caches)}
        return Watched(
            reads=({"output": self._output}, self._uploads, layers.block_tables, layers.item_rows, caches),
            changes=(
                {"input": self._input, "states": moved_on(layers.kv_caches)},
                layers.next_inputs,
                layers.checkpoints,
            ),
            yields=yields,
        )

    def _watched_tail(self, batch: StepBatch, needs: Needs) -> Watched:
        assert self._end is not None
        sampler, grammars, speculation = self._end.sampler, self._end.grammars, self._end.speculation

        def yields(outputs: EndOutputs) -> dict[str, torch.Tensor]:
            num_rows, num_tokens = self._num_rows, self._num_rows * batch.query_len
            counts = owned_tokens(self.last.hidden.slot_mapping, self._spec.block_size)[:num_tokens]
            rows = {name: column[:num_rows] for name, column in self._feedback_views(batch.num_rows).items()}
            tokens, chosen = rows["token_ids"][:, : batch.query_len].reshape(-1), outputs.chosen
            return {**rows, "token_ids": only(counts, tokens), "chosen": only(counts, chosen[:num_tokens])}

        tables = None if speculation is None else speculation.tables
        history = sampler.history if needs & Needs.HISTORY else None
        return Watched(
            reads=({"output": self._output}, sampler.rows.tables, grammars),
            changes=(sampler.history.tokens, tables, history),
            yields=yields,
        )

    def _place_of_logits(self, num_tokens: int) -> torch.Tensor:
        """Return memory that all graphs share: kept by each, logits would take gigabytes."""
        if self._logits is None:  # the largest graph comes first
            self._logits = torch.empty(num_tokens, self._spec.num_logits, device=self._input.device)
        assert num_tokens <= len(self._logits), "a larger step was captured after smaller ones"
        return self._logits[:num_tokens]

    def _feedback_views(self, bucket: int) -> dict[str, torch.Tensor]:
        """Return the message to the first stage. Last stage only."""
        return self._schemas.feedback.views(self._output, bucket, bucket)
