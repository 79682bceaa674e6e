"""One pipeline stage: a step on one screen.

    first stage    feedback -> tokens -> embed --+
    other stages   receive ----------------------+--> layers --> send            (all but the last)
                                                             +-> sample -> feedback, result   (last)

A stage executes the driver's plans in their order and decides nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from raypp.graphs.graph_manager import CudaGraphManager, graph_maker
from raypp.messages import MaskUpdate, StepForm, StepPlan, Unrecorded
from raypp.models.decoder import Deepstack
from raypp.ops.row_tokens import RowTokens
from raypp.ops.sample.tables import Needs
from raypp.stage.aux_states import AuxStates
from raypp.stage.cpu_kv import open_cpu_kv
from raypp.stage.feedback import FeedbackInbox
from raypp.stage.first_steps import compile_ahead, warm_up
from raypp.stage.forward_clock import forward_clock
from raypp.stage.grammar_masks import GrammarMasks
from raypp.stage.known_tokens import KnownTokens
from raypp.stage.logprob_reports import LogprobReporter, no_logprobs
from raypp.stage.padded_forward import PaddedForward
from raypp.stage.recorded_decode import RecordedDecode
from raypp.stage.request_rows import BlockTables, NextInputs
from raypp.stage.sampler import Sampler
from raypp.stage.schemas import StageSchemas
from raypp.stage.speculation import Speculation
from raypp.stage.stage_model import StageModel
from raypp.stage.stage_spec import StageSpec
from raypp.stage.step_body import StepBody, StepInputs
from raypp.stage.step_end import LastHidden, StepEnd
from raypp.stage.step_items import ItemRows, ItemStore, place_items, received_deepstack
from raypp.stage.step_result import PendingResult, ResultRing, step_result
from raypp.stage.step_shape import StepShape, StepShapes
from raypp.stage.step_sizes import StageRecordings, StepPadding, StepSizes, check_required
from raypp.starting_rows import StartingRows
from raypp.tracing import HOST, Tracer, now_ns
from raypp.transport.edges import StageLinks
from raypp.transport.schema import Schema


class Stage:
    """Runs step plans over its layers; owns their KV cache and the request rows."""

    def __init__(
        self,
        spec: StageSpec,
        model: StageModel,
        kv_caches: torch.Tensor,
        links: StageLinks,
        schemas: StageSchemas,
        tracer: Tracer,
        graphs: CudaGraphManager | None = None,
    ) -> None:
        """Make a stage, and run its first steps: kernels compile, graphs are recorded.

        Args:
            spec: Which stage.
            model: Its layers.
            kv_caches: Of its layers, [L, ...], see `raypp.ops.kv_cache`.
            links: To its neighbours.
            schemas: Of what travels there.
            tracer: Of this process.
            graphs: Keeps the recordings; None: what the device has.
        """
        self._spec = spec
        self._model = model
        self._links = links
        self._tracer = tracer
        self._device = torch.device(spec.device)
        self._clock = forward_clock(tracer, self._device)
        self._schemas = schemas
        self._shapes = StepShapes(self._device, num_kept=4 * spec.num_stages)
        self._block_tables = BlockTables(spec, self._device)
        self._item_rows = ItemRows(spec, self._device) if spec.takes_items else None
        self.items = ItemStore()
        """Embeddings of images; filled from outside, on the first stage alone."""
        if spec.is_first:
            assert links.feedback_in is not None
            self._next_inputs = NextInputs(spec, self._device)
            self._inbox = FeedbackInbox(links.feedback_in, self._schemas.feedback, spec.num_stages)
        self._speculation: Speculation | None = None
        if spec.is_last:
            tokens = RowTokens(spec.max_num_seqs, spec.row_tokens_width, self._device)
            self._sampler = Sampler(spec, self._device, tokens)
            self._logprobs = LogprobReporter(spec, self._sampler)
            self._grammars = GrammarMasks(spec, self._device)
            most_told = spec.max_step_rows * (1 + 3 + 2 * spec.max_drafts)
            self._results = ResultRing(spec.num_ring_entries, most_told, self._device)
            if spec.max_drafts:
                tables = self._block_tables.tables
                self._speculation = Speculation(spec, self._device, tokens, model.draft_head, tables)
            self._end = StepEnd(tokens, self._sampler, self._grammars, self._speculation, self._device)
        self._body = StepBody(spec, model, self._block_tables, self._item_rows, AuxStates(spec, model.taps))
        self._known_tokens = KnownTokens(self._device)
        self._drafts_by_head = spec.is_last and spec.draft_head is not None
        of_head = [] if self._speculation is None else self._speculation.head_kv_caches
        self._cpu_kv = open_cpu_kv(spec, [kv_caches, *of_head], tracer.forwards)
        by_layer = kv_caches.unbind()
        if self._device.type == "cuda":
            with torch.inference_mode():
                warm_up(spec, model, by_layer, self._sampler if spec.is_last else None)
        self._graphs = graphs or CudaGraphManager(
            graph_maker(self._device),
            debug_every=spec.graphs.debug_every,
            max_bytes=spec.graphs.max_bytes,
        )
        wanted = StepSizes.wanted(
            spec.graphs,
            spec.speculative.ladder,
            max_step_rows=spec.max_step_rows,
            max_step_tokens=spec.max_step_tokens,
            can_be_full=model.can_be_recorded,
        )
        compile_ahead(spec, model, by_layer, self._sampler if spec.is_last else None, wanted.full)
        self._layers = PaddedForward(spec, model, by_layer, self._graphs, wanted.piecewise)
        self._recorded: RecordedDecode | None = None
        if wanted.full:
            first = self._next_inputs if spec.is_first else None
            end = self._end if spec.is_last else None
            self._recorded = RecordedDecode(
                spec, model, by_layer, schemas, self._graphs, wanted.full, first, self._body, end, links
            )
        with torch.inference_mode(), self._graphs.recording():
            piecewise = self._layers.record()
            full = () if self._recorded is None else self._recorded.record()
        recorded_drafts = None if self._recorded is None else self._recorded.drafts
        self._drafting = recorded_drafts or self._speculation
        self._graphs.log_costs()
        recorded = StepSizes(full, piecewise)
        if spec.graphs.is_required:
            check_required(spec.stage_index, wanted, recorded, self._graphs.costs)
        self.recordings = StageRecordings(recorded, {**model.costs, **self._graphs.costs})
        """What this stage has recorded."""
        self.pad_to(self.recordings.sizes)

    def pad_to(self, sizes: StepSizes) -> None:
        """Pad steps to these sizes, which all stages have. Before any step."""
        self._padding = StepPadding(sizes)

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
        """Say that `plan` will be stepped soon, in the order of the announcements: its input may arrive already.

        From another thread than `step`, if need be.
        """
        if self._links.previous is not None:
            bucket = self._padding.full_rows(plan)
            num_rows = len(plan.rows) if bucket is None else bucket
            num_tokens = int(plan.num_scheduled_tokens.sum()) if bucket is None else bucket * (1 + plan.num_drafts)
            num_drafting_tokens = num_tokens if bucket is not None else plan.num_drafting_tokens
            num_bytes = self._entering.num_bytes(num_rows, num_tokens, plan.num_item_tokens, num_drafting_tokens)
            self._links.previous.post_recv(plan.step_id, num_bytes)

    def take_masks(self, update: MaskUpdate) -> None:
        """Take in which tokens grammars allow. Last stage only; from another thread than `step`, if need be."""
        self._grammars.put(update)

    def close(self) -> None:
        """Close the links, once what was sent is out."""
        self._links.close()

    def abort(self) -> None:
        """End all waits for neighbours, those of the device too. From any thread."""
        self._links.abort()

    def step(self, plan: StepPlan) -> PendingResult | None:
        """Execute a plan that was announced; return its result on the last stage. Under `torch.inference_mode`.

        Raises:
            DeadlineError, StageDiedError: a neighbour does not answer.
        """
        self._cpu_kv.before_step(plan)
        bucket = self._padding.full_rows(plan)
        result = self._step(plan) if bucket is None else self._step_recorded(plan, bucket)
        self._cpu_kv.after_step(plan)
        return result

    def _step_recorded(self, plan: StepPlan, bucket: int) -> PendingResult | None:
        """Execute a decode step as a recording, padded to `bucket` rows."""
        recorded, links = self._recorded, self._links
        assert recorded is not None
        started, step_id, shape, fed_back = now_ns(), plan.step_id, None, None
        if self._spec.is_first:
            shape = self._shapes.of(plan)
            fed_back = self._inbox.apply_before(plan, self._next_inputs, handed_over_rows=bucket)
            self._inbox.expect(step_id, shape, bucket)
        recorded.upload(plan, bucket, fed_back)
        if links.previous is not None:
            links.previous.wait(step_id)
        if links.next is not None:
            links.next.acquire(step_id)
        self._clock.begin(step_id, StepForm.RECORDED)
        recorded.run(bucket, plan.num_drafts)
        if fed_back is not None:
            self._inbox.release(fed_back)
        if links.previous is not None:
            links.previous.release(step_id)
        if links.next is not None:
            self._clock.end()
            links.next.send(step_id, self._leaving.num_bytes(bucket, bucket * (1 + plan.num_drafts)))
            self._clock.read()
            self._tracer.record(HOST, step_id, started, now_ns())
            return None
        assert links.feedback_out is not None
        links.feedback_out.acquire(step_id)  # on a single stage that is the slot which was released just now
        shape = shape or self._shapes.of(plan)
        asked = self._end.inputs(plan, shape, bucket, bucket * (1 + plan.num_drafts))
        ended, top = recorded.end(bucket, plan.num_drafts, asked)
        if not recorded.has_recorded_choice and self._graphs.makes_graphs:
            self._tracer.forwards.add_unrecorded(Unrecorded.CHOICE)
        self._clock.end()
        links.feedback_out.send(step_id, self._schemas.feedback.num_bytes(bucket, bucket))
        logprobs = no_logprobs
        if top is not None and Needs.LOGPROBS in asked.needs:
            logprobs = self._logprobs.report_recorded(shape, recorded.logits, ended.chosen, top)
        result = step_result(self._results, plan, shape, ended.told, logprobs)
        self._clock.read()
        self._tracer.record(HOST, step_id, started, now_ns())
        return result

    def _step(self, plan: StepPlan) -> PendingResult | None:
        """Execute any step, operation by operation."""
        began = now_ns()
        # What the plan alone says is made ready while the input is still on its way.
        shape = self._shapes.of(plan)
        starting = StartingRows(plan, self._device) if len(plan.start_rows) else None
        if starting is not None:
            self._block_tables.start(starting)
        items = None
        if self._item_rows is not None:
            if starting is not None:
                self._item_rows.start(starting)
            items = self._item_rows.step_items(shape, plan)
        entries = self._block_tables.new_entries(plan)
        if starting is not None and (self._spec.is_first or self._drafts_by_head):
            self._known_tokens.start(starting)
        if self._spec.is_last and starting is not None:
            self._end.start(starting)
            self._logprobs.start(starting)

        waiting, deepstack = now_ns(), None
        if self._spec.is_first:
            self._inbox.apply_before(plan, self._next_inputs)
            self._inbox.expect(plan.step_id, shape, shape.num_rows)
            if starting is not None:
                self._next_inputs.start(starting)
            num_computed_tokens = self._next_inputs.num_computed_tokens(shape, plan)
            received: Mapping[str, torch.Tensor] = {}
            entering = self._next_inputs.input_ids(shape, self._known_tokens.of_chunks(plan, shape))
        else:
            assert self._links.previous is not None
            sizes = (shape.num_rows, shape.num_tokens, plan.num_item_tokens, plan.num_drafting_tokens)
            received = self._entering.views(self._links.previous.wait(plan.step_id), *sizes)
            num_computed_tokens, entering = received["num_computed_tokens"], received["hidden_states"]
            if items is not None and self._spec.num_carried_taps:
                deepstack = received_deepstack(items, received["deepstack"], self._spec.num_deepstack_layers)
        inputs = self._body.inputs(shape, num_computed_tokens, entries, received, plan)

        bucket = self._padding.piecewise_tokens(shape.num_tokens)
        started = now_ns()
        self._clock.begin(plan.step_id, StepForm.CALLED if bucket is None else StepForm.PIECES)
        hidden = self._model.embed(entering) if self._spec.is_first else entering
        if self._spec.is_first and items is not None:
            hidden, deepstack = place_items(hidden, items, self.items)
        if self._graphs.makes_graphs:
            decodes = plan.num_decode_rows == len(plan.rows) and not len(plan.start_rows)
            if decodes or bucket is None:
                self._tracer.forwards.add_unrecorded(Unrecorded.ROWS if decodes else Unrecorded.TOKENS)
        hidden = self._layers.run(hidden, inputs.rope_positions, inputs.attention, bucket, deepstack)
        last = None
        if self._spec.is_last:
            following = self._known_tokens.after_each(plan, shape) if self._drafts_by_head else None
            last = self._body.last(inputs, hidden, next_token_ids=following)
        self._clock.end()
        ended = now_ns()

        result = None
        if last is not None:
            result = self._finish(plan, shape, last)
        else:
            self._send(plan, inputs, hidden, deepstack)
        if self._links.previous is not None:
            self._links.previous.release(plan.step_id)
        self._clock.read()
        self._tracer.record("wait", plan.step_id, waiting, started)
        self._tracer.record("sample" if self._spec.is_last else "send", plan.step_id, ended, now_ns())
        self._tracer.record(HOST, plan.step_id, began, now_ns())
        return result

    @property
    def _entering(self) -> Schema:
        """Of the messages of the stage before."""
        return self._schemas.forward[self._spec.stage_index - 1]

    @property
    def _leaving(self) -> Schema:
        """Of the messages to the next stage."""
        return self._schemas.forward[self._spec.stage_index]

    def _send(self, plan: StepPlan, inputs: StepInputs, hidden: torch.Tensor, deepstack: Deepstack | None) -> None:
        link, schema = self._links.next, self._leaving
        assert link is not None
        shape = inputs.shape
        sizes = (shape.num_rows, shape.num_tokens, plan.num_item_tokens, plan.num_drafting_tokens)
        self._body.leave(inputs, hidden, schema.views(link.acquire(plan.step_id), *sizes), deepstack)
        link.send(plan.step_id, schema.num_bytes(*sizes))

    def _finish(self, plan: StepPlan, shape: StepShape, last: LastHidden) -> PendingResult:
        """Sample, verify drafts and propose the next ones, feed back to the first stage, and return the result."""
        logits, link, schema = last.logits, self._links.feedback_out, self._schemas.feedback
        assert link is not None
        asked, draft = self._end.inputs(plan, shape, len(shape.sampled_np), len(logits)), None
        if self._drafting is not None:
            max_length = int((plan.num_computed_tokens + plan.num_scheduled_tokens).max()) + 1
            draft = partial(self._drafting.draft, shape, last.hidden, max_length, asked.search)
        feedback = schema.views(link.acquire(plan.step_id), shape.num_rows, shape.num_rows)
        ended = self._end.run(shape, last, asked, feedback, draft)
        link.send(plan.step_id, schema.num_bytes(shape.num_rows, shape.num_rows))
        hidden, compute_logits = last.hidden.hidden_states, self._model.compute_logits
        logprobs = self._logprobs.report(plan, shape, logits, ended.chosen, hidden, compute_logits)
        return step_result(self._results, plan, shape, ended.told, logprobs)
