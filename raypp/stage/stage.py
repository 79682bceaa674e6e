"""One pipeline stage: a step on one screen.

    first stage    feedback -> tokens -> embed --+
    other stages   receive ----------------------+--> layers --> send            (all but the last)
                                                             +-> sample -> feedback, result   (last)

A stage executes the driver's plans in their order and decides nothing itself. A step is one CUDA graph, or piecewise
graphs, or eager: what it is padded to says which (`step_sizes.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

import torch

from raypp.graphs.graph_manager import CudaGraphManager, graph_maker
from raypp.members import Members
from raypp.messages import Int32s, MaskUpdate, StateCopies, StepForm, StepPlan, Unrecorded, unpack
from raypp.ops.row_state import Checkpoints, LayerMemory, moved_on
from raypp.ops.row_tokens import RowTokens
from raypp.ops.sample.vocabulary_part import VocabularyPart
from raypp.row_params import Needs
from raypp.stage.cpu_kv import open_cpu_kv
from raypp.stage.first_steps import compile_ahead, warm_up
from raypp.stage.full_graphs import FullGraphs
from raypp.stage.grammar_masks import GrammarMasks
from raypp.stage.logprob_reports import LogprobReporter
from raypp.stage.request_rows import BlockTables, FedBack, KnownTokens, NextInputs
from raypp.stage.schemas import StageSchemas
from raypp.stage.speculation import Speculation
from raypp.stage.stage_model import StageModel
from raypp.stage.stage_spec import StageSpec
from raypp.stage.step_batch import LastHidden, StepBatch, StepBatches
from raypp.stage.step_end import Sampler, StepEnd
from raypp.stage.step_items import ItemRows, ItemStore
from raypp.stage.step_layers import StepLayers
from raypp.stage.step_result import PendingResult, ResultRing, forward_clock
from raypp.stage.step_sizes import StageGraphs, StepPadding, StepSize, StepSizes, check_required
from raypp.starting_rows import StartingRows
from raypp.tracing import HOST, Tracer, now_ns
from raypp.transport.edges import StageLinks


class Stage:
    """Runs step plans over its layers; owns their KV cache and the request rows."""

    def __init__(
        self,
        spec: StageSpec,
        model: StageModel,
        kv_caches: Sequence[LayerMemory],
        links: StageLinks,
        schemas: StageSchemas,
        tracer: Tracer,
        graphs: CudaGraphManager | None = None,
        members: Members | None = None,
    ) -> None:
        """Make a stage, and run its first steps: kernels compile, graphs are captured.

        Args:
            spec: Which stage.
            model: Its layers.
            kv_caches: Of its layers.
            links: To its neighbours.
            schemas: Of what travels there.
            tracer: Of this process.
            graphs: Keeps the graphs; None: what the device has.
            members: Of the stage, if it has several.
        """
        self._model = model
        self._links = links
        self._tracer = tracer
        self._members = members
        self._device, self._num_rows = torch.device(spec.device), spec.max_num_seqs
        device = self._device
        self._num_ring_entries = spec.num_ring_entries
        self._clock = forward_clock(tracer, device)
        self._announced: deque[StepSize] = deque()
        self._batches = StepBatches(num_kept=4 * spec.num_stages)
        self._feedback = schemas.feedback
        # Of the messages of the stage before, and to the next.
        self._entering = None if spec.is_first else schemas.forward[spec.stage_index - 1]
        self._leaving = None if spec.is_last else schemas.forward[spec.stage_index]
        self._graphs = graphs or CudaGraphManager(
            graph_maker(device),
            debug_every=spec.graphs.debug_every,
            max_bytes=spec.graphs.max_bytes if members is None else None,
            must_record_all=members is not None,
        )
        self._makes_graphs = self._graphs.makes_graphs
        wanted = StepSizes.wanted(
            spec.graphs,
            spec.speculative.ladder,
            max_step_rows=spec.max_step_rows,
            max_step_tokens=spec.max_step_tokens,
            modes=model.graph_modes,
        )

        self._block_tables = BlockTables(spec, device)
        self._item_rows = ItemRows(spec, device) if spec.takes_items else None
        self.items = ItemStore()
        """Embeddings of images; filled from outside, on the first stage alone."""
        self._drafts_by_head = spec.is_last and spec.draft_head is not None
        self._known_tokens = KnownTokens(device) if spec.is_first or self._drafts_by_head else None
        self._next_inputs: NextInputs | None = None
        if spec.is_first:
            assert links.feedback_in is not None
            assert self._known_tokens is not None
            self._next_inputs = NextInputs(spec, device, self._known_tokens, links.feedback_in, schemas.feedback)
        self._end = self._make_end(spec) if spec.is_last else None
        speculation = None if self._end is None else self._end.speculation
        of_head = [] if speculation is None else speculation.head_kv_caches
        self._checkpoints: Checkpoints | None = None
        if moved_on(kv_caches):
            num_rows = spec.max_num_seqs + spec.num_snapshots
            self._checkpoints = Checkpoints(num_rows, spec.block_size, device, kv_caches)
        of_rows = [] if self._checkpoints is None else self._checkpoints.tables
        self._cpu_kv = open_cpu_kv(spec, kv_caches, of_head, of_rows, tracer.forwards)

        sampler = None if self._end is None else self._end.sampler
        if device.type == "cuda":
            with torch.inference_mode():
                warm_up(spec, model, kv_caches, sampler)
        compile_ahead(spec, model, kv_caches, sampler, wanted.full)
        rows = (self._block_tables, self._checkpoints, self._next_inputs, self._item_rows, self.items)
        self._layers = StepLayers(spec, model, kv_caches, *rows, self._graphs, wanted.piecewise)
        self._full: FullGraphs | None = None
        if wanted.full:
            self._full = FullGraphs(spec, schemas, self._graphs, wanted.full, self._layers, self._end, links)
        with torch.inference_mode(), self._graphs.recording():
            piecewise = self._layers.pieces.record()
            full = () if self._full is None else self._full.record()
        self._drafting = speculation if self._full is None else self._full.drafts or speculation
        self._graphs.log_costs()
        sizes = StepSizes(full, piecewise)
        if spec.graphs.is_required:
            check_required(spec.stage_index, wanted, sizes, self._graphs.costs)
        self.graphs = StageGraphs(sizes, {**model.costs, **self._graphs.costs})
        """What this stage has captured."""
        self.pad_to(sizes)

    def _make_end(self, spec: StageSpec) -> StepEnd:
        tokens, device = RowTokens(spec.max_num_seqs, spec.row_tokens_width, self._device), self._device
        part = None if self._members is None else VocabularyPart(self._members, spec.vocab_size)
        sampler, speculation = Sampler(spec, device, tokens, part), None
        self._logprobs = LogprobReporter(spec, sampler)
        widest_result = spec.max_step_rows * (1 + 3 + 2 * spec.max_drafts)
        self._results = ResultRing(spec.num_ring_entries, widest_result, device)
        if spec.max_drafts:
            speculation = Speculation(spec, device, tokens, self._model.draft_head, self._block_tables.tables[:1])
        return StepEnd(tokens, sampler, GrammarMasks(spec, device, self._members), speculation, device)

    def pad_to(self, sizes: StepSizes) -> None:
        """Pad steps to these sizes, which all stages have. Before any step."""
        self._padding = StepPadding(sizes, len(self._block_tables.tables))

    def bind_thread(self) -> None:
        """Make what the calling thread does on a GPU go to the stage's own, in a stream of its own. Before any step."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            torch.cuda.synchronize(self._device)  # what was made so far was made in other streams
            torch.cuda.set_stream(torch.cuda.Stream(self._device))

    def catch_up(self) -> bool:
        """Take note of what the device has done since the last step; return whether that is everything."""
        return self._clock.catch_up()

    def announce(self, plan: StepPlan) -> None:
        """Say that `plan` will be stepped, in the order of the announcements: its input may arrive already.

        From another thread than `step`, if need be.
        """
        size = self._padding.size_of(plan)
        self._announced.append(size)
        if self._entering is not None and self._links.previous is not None:
            self._links.previous.post_recv(plan.step_id, self._entering.num_bytes(*size.message))

    def take_masks(self, update: MaskUpdate) -> None:
        """Take in which tokens grammars allow. Last stage only; from another thread than `step`, if need be."""
        assert self._end is not None
        self._end.grammars.put(update)

    def close(self) -> None:
        """Close the links, once what was sent is out."""
        try:
            self._links.close()
        finally:
            if self._members is not None:
                self._members.close()

    def abort(self) -> None:
        """End all waits for neighbours and other members, those of the device too. From any thread."""
        self._links.abort()
        if self._members is not None:
            self._members.abort()

    def step(self, plan: StepPlan) -> PendingResult | None:
        """Execute a plan that was announced; return its result on the last stage. Under `torch.inference_mode`.

        Raises:
            DeadlineError, StageDiedError: a neighbour does not answer.
        """
        began, result = now_ns(), None
        if self._cpu_kv is not None:
            self._cpu_kv.before_step(plan)
        copies = unpack(StateCopies, plan.state_copies.data) if len(plan.state_copies) else None
        if copies is not None:
            self._copy_states(copies.saved_rows, self._num_rows + copies.saved_snapshots)
        batch = self._batches.of(plan, self._announced.popleft())
        starting = StartingRows(plan, self._device) if len(plan.start_rows) else None
        if starting is not None:
            self._start(starting)
        if copies is not None:
            self._copy_states(self._num_rows + copies.restored_snapshots, copies.restored_rows)
        left = None
        if self._next_inputs is not None:
            left = self._next_inputs.take_feedback(batch)
            if starting is not None:
                self._next_inputs.start(starting)
        last = self._run_graph(batch, left) if batch.is_full_graph else self._run(batch)
        if last is not None:
            result = self._finish(batch, last)
        if not batch.is_full_graph and self._links.previous is not None:
            self._links.previous.release(plan.step_id)
        self._clock.read()
        self._tracer.record(HOST, plan.step_id, began, now_ns())
        if self._cpu_kv is not None:
            self._cpu_kv.after_step(plan)
        return result if self._members is None or self._members.rank == 0 else None

    def _copy_states(self, sources: Int32s, targets: Int32s) -> None:
        """Copy states of rows; snapshots are the rows behind those of requests. A stage without states has none."""
        if self._checkpoints is not None:
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                self._checkpoints.copy(source, target)

    def _start(self, starting: StartingRows) -> None:
        """Take over rows that start, in every table but that of the next inputs: feedback of old owners comes first."""
        self._batches.note_started()
        self._block_tables.start(starting)
        if self._checkpoints is not None:
            self._checkpoints.start(starting.rows)
        if self._item_rows is not None:
            self._item_rows.start(starting)
        if self._known_tokens is not None:
            self._known_tokens.start(starting)
        if self._end is not None:
            self._end.start(starting)
            self._logprobs.start(starting)

    def _run_graph(self, batch: StepBatch, left: FedBack | None) -> LastHidden | None:
        """Run a decode step as one graph, up to the message to the next stage, or to logits; those are returned."""
        full, previous, following, step_id = self._full, self._links.previous, self._links.next, batch.plan.step_id
        assert full is not None
        full.upload(batch, left)
        if previous is not None:
            previous.wait(step_id)
        if following is not None:
            following.acquire(step_id)
        self._clock.begin(step_id, StepForm.FULL_GRAPH)
        full.run((batch.size.message[0], batch.query_len - 1))
        if left is not None and self._next_inputs is not None:
            self._next_inputs.release(left)
        if previous is not None:
            previous.release(step_id)
        if following is None or self._leaving is None:
            return full.last
        self._clock.end()
        following.send(step_id, self._leaving.num_bytes(*batch.size.message))
        return None

    def _run(self, batch: StepBatch) -> LastHidden | None:
        """Run any step, eager or piecewise; return and send likewise."""
        layers, step_id, link = self._layers, batch.plan.step_id, self._links.next
        layers.take(batch)
        waiting = now_ns()
        if self._entering is not None and self._links.previous is not None:
            batch.received = self._entering.views(self._links.previous.wait(step_id), *batch.size.message)
        entering = layers.prepare(batch, step_id % self._num_ring_entries)
        started = now_ns()
        self._clock.begin(step_id, batch.size.form)
        if self._makes_graphs and (batch.is_decode or batch.size.form is StepForm.EAGER):
            self._tracer.forwards.add_unrecorded(Unrecorded.ROWS if batch.is_decode else Unrecorded.TOKENS)
        hidden, last, following = layers.run(batch, entering), None, None
        if link is None:
            if self._drafts_by_head and self._known_tokens is not None and not batch.is_decode:
                following = self._known_tokens.after_each(batch)
            last = layers.last(batch, hidden, next_token_ids=following)
        self._clock.end()
        self._tracer.record("wait", step_id, waiting, started)
        if link is not None and self._leaving is not None:
            sending = now_ns()
            layers.leave(batch, hidden, self._leaving.views(link.acquire(step_id), *batch.size.message))
            link.send(step_id, self._leaving.num_bytes(*batch.size.message))
            self._tracer.record("send", step_id, sending, now_ns())
        return last

    def _finish(self, batch: StepBatch, last: LastHidden) -> PendingResult:
        """Sample, verify drafts and propose the next ones, feed back to the first stage, and return the result."""
        end, full, link, plan = self._end, self._full, self._links.feedback_out, batch.plan
        assert end is not None
        assert link is not None
        began, step_id, num_rows, logprobs = now_ns(), plan.step_id, batch.size.message[0], None
        without: tuple[str, ...] = ()
        slot = link.acquire(step_id)  # on a single stage that may be the one which was released just now
        asked = end.inputs(batch)
        wants_logprobs = Needs.LOGPROBS in asked.needs
        if batch.is_full_graph and full is not None:
            outputs, top, without = full.end(batch, asked)
            if not full.has_graph_of_choice and self._makes_graphs:
                self._tracer.forwards.add_unrecorded(Unrecorded.CHOICE)
            self._clock.end()
            link.send(step_id, self._feedback.num_bytes(num_rows, num_rows))
            if top is not None:
                logprobs = self._logprobs.report_full_graph(batch, last.logits, outputs.chosen, top)
        else:
            draft = None
            if self._drafting is not None:
                max_length = int((plan.num_computed_tokens + plan.num_scheduled_tokens).max()) + 1
                draft = partial(self._drafting.draft, last.hidden, max_length, asked.search)
            outputs = end.run(batch, last, asked, self._feedback.views(slot, num_rows, num_rows), draft)
            link.send(step_id, self._feedback.num_bytes(num_rows, num_rows))
            if wants_logprobs or self._logprobs.prompts:
                hidden, compute_logits = last.hidden.hidden_states, self._model.compute_logits
                logprobs = self._logprobs.report(batch, last.logits, outputs.chosen, hidden, compute_logits)
            self._tracer.record("sample", step_id, began, now_ns())
        return self._results.fetch(batch, outputs.result, logprobs, without)
