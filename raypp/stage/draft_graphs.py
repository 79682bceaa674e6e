"""A proposer with CUDA graphs of its own: what it does after a verified decode step, between buffers of its own.

    [ verified tokens ] --> follow (per rows and K) --> [ followed ] --> propose (per rows and K) --> [ next drafts ]

Verification has graphs for every need of the sampler; these have none of that, so there are few of them. After any
other step, with prompts in it, the second takes the rows that yielded just so. Rows that are proposed nothing skip it.
The K of the second is that of the drafts which it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch

from raypp.graphs.debug import Watched, only
from raypp.graphs.graph_manager import CudaGraphManager
from raypp.ops.row_tokens import StepTokens
from raypp.specdec.proposer import Followed, StepHidden
from raypp.stage.speculation import Search, Speculation
from raypp.stage.stage_spec import StageSpec
from raypp.stage.step_batch import StepBatch
from raypp.stage.step_sizes import FullSize

_PADDING_LENGTH = 2  # of the row that padding reads: one token, and the one that it yields


class DraftGraphs:
    """The graphs, and their buffers. B rows of a graph, K drafts.

    Args:
        spec: The last stage's.
        speculation: Whose proposer it is.
        graphs: The stage's.
        mode: What they are accounted to.
        drafts_of: Where the next drafts of B rows go in the message to the first stage, [B, K_max] int32.
    """

    def __init__(
        self,
        spec: StageSpec,
        speculation: Speculation,
        graphs: CudaGraphManager,
        mode: str,
        drafts_of: Callable[[int], torch.Tensor],
    ) -> None:
        device, rows = torch.device(spec.device), spec.max_step_rows
        self._speculation = speculation
        self._graphs = graphs
        self._mode = mode
        self._drafts_of = drafts_of
        self._max_length = spec.max_seq_len + 1
        self._padding_row = spec.padding_row
        self._rows = torch.full((rows,), spec.padding_row, dtype=torch.int64, device=device)
        self._token_ids = torch.zeros(rows * (1 + spec.max_drafts), dtype=torch.int32, device=device)
        self._num_valid = torch.ones(rows, dtype=torch.int32, device=device)
        self._lengths = torch.full((rows,), _PADDING_LENGTH, dtype=torch.int64, device=device)
        self._recorded: list[int] = []  # numbers of rows with a graph of proposals
        self._num_rows = 0  # of the step that ran last, without padding
        self._followed: Followed | None = None  # [max_step_rows, ...]; made with the first graph

    def keep(self, tokens: StepTokens) -> StepTokens:
        """Copy a verified step's tokens to where the graphs read them. Part of the graph that verifies.

        Returns the tokens, without drafts: these come when they were proposed.
        """
        assert tokens.num_valid is not None, "a full graph compares"
        assert tokens.lengths is not None
        num_rows = len(tokens.rows)
        self._rows[:num_rows].copy_(tokens.rows)
        self._token_ids[: tokens.token_ids.numel()].view_as(tokens.token_ids).copy_(tokens.token_ids)
        self._lengths[:num_rows].copy_(tokens.lengths)
        self._num_valid[:num_rows].copy_(tokens.num_valid)
        return tokens

    def record(self, batch: StepBatch, hidden_of: Callable[[], StepHidden]) -> None:
        """Capture what follows a step of that batch.

        Args:
            batch: Of the step.
            hidden_of: Returns what the step left: of a graph always the same tensors, else new ones each time.
        """
        bucket, width = batch.num_rows, batch.query_len
        self._num_rows = bucket
        follow = partial(self._follow, bucket, width, hidden_of)
        watched = Watched(reads=(self,), yields=self._yields_followed)
        self._graphs.record(self._mode, ("follow", bucket, width), follow, watched=watched)

    def record_proposals(self, buckets: Iterable[int]) -> None:
        """Capture the proposals of those numbers of rows, as far as memory allows, when everything else is captured.

        They run before the host is told what the step's tail chose, so they may not have for themselves the memory
        where the tail of any K leaves that: all of them must have theirs by now.
        """
        self._graphs.record_sizes(self._mode, sorted(buckets, reverse=True), self._record_proposal)

    def _record_proposal(self, bucket: int) -> None:
        self._num_rows = bucket
        watched = Watched(
            reads=(self._speculation.tokens,),
            changes=(self._speculation.tables, self),  # a layer may overwrite what was followed
            yields=lambda _: {"drafts": only(self._have_room(), self._drafts_of(bucket)[: self._num_rows])},
        )
        for count in (0, *self._speculation.num_proposed):
            self._graphs.record(
                self._mode, ("propose", bucket, count), partial(self._propose, bucket, count), watched=watched
            )
        self._recorded.append(bucket)

    def run(self, size: FullSize, num_rows: int, num_drafts: int) -> None:
        """Run it, on what was kept last, and propose `num_drafts`. Rows after the first `num_rows` of B are padding."""
        bucket, self._num_rows = size.num_rows, num_rows
        self._graphs.run(("follow", bucket, 1 + size.num_drafts))
        if bucket in self._recorded:
            self._graphs.run(("propose", bucket, num_drafts))
        else:
            self._propose(bucket, num_drafts)

    def draft(self, hidden: StepHidden, max_length: int, search: Search, tokens: StepTokens) -> StepTokens:
        """Do as `Speculation.draft`, after a step that was no full graph; the drafts are valid until the next step."""
        num_rows = len(tokens.rows)
        # The smallest graph of proposals for so many rows.
        bucket = min((bucket for bucket in self._recorded if bucket >= num_rows), default=None)
        if bucket is None or not num_rows or not search.num_drafts:
            return self._speculation.draft(hidden, max_length, search, tokens)
        assert self._followed is not None
        assert tokens.lengths is not None
        followed = self._speculation.proposer.follow(tokens, hidden)
        self._rows[num_rows:bucket] = self._padding_row
        self._lengths[num_rows:bucket] = _PADDING_LENGTH
        for tensor in self._followed:
            tensor[num_rows:bucket] = 0
        kept, values = (self._rows, self._lengths, *self._followed), (tokens.rows, tokens.lengths, *followed)
        for into, value in zip(kept, values, strict=True):
            into[:num_rows].copy_(value)
        self._num_rows = num_rows
        self._graphs.run(("propose", bucket, search.num_drafts))
        return replace(tokens, draft_ids=self._drafts_of(bucket)[:num_rows])

    def _yields_followed(self, result: None) -> dict[str, torch.Tensor]:
        counts, followed = self._have_room(), self._followed or ()
        return {f"followed {index}": only(counts, tensor[: self._num_rows]) for index, tensor in enumerate(followed)}

    def _have_room(self) -> torch.Tensor:
        """Return which rows have blocks for all that is drafted: what others do with the null block is arbitrary."""
        return self._speculation.tables.have_room(self._rows[: self._num_rows], self._lengths[: self._num_rows])

    def _kept(self, num_rows: int, width: int) -> StepTokens:
        lengths = self._lengths[:num_rows]
        return StepTokens(
            rows=self._rows[:num_rows],
            positions=lengths,  # not read
            token_ids=self._token_ids[: num_rows * width].view(num_rows, width),
            num_valid=self._num_valid[:num_rows],
            lengths=lengths,
        )

    def _follow(self, bucket: int, width: int, hidden_of: Callable[[], StepHidden]) -> None:
        followed = self._speculation.proposer.follow(self._kept(bucket, width), hidden_of())
        if self._followed is None:
            rows = len(self._num_valid)
            self._followed = tuple(tensor.new_zeros(rows, *tensor.shape[1:]) for tensor in followed)
        for into, values in zip(self._followed, followed, strict=True):
            into[:bucket].copy_(values)

    def _propose(self, bucket: int, num_drafts: int) -> None:
        if not num_drafts:  # any valid ids will do: zeros, and whatever was verified, are
            rows, verified = self._rows[:bucket], self._token_ids[:bucket].unsqueeze(1)
            self._drafts_of(bucket).copy_(self._speculation.tables.miss(rows, verified))
            return
        assert self._followed is not None
        followed = tuple(tensor[:bucket] for tensor in self._followed)
        drafts = self._speculation.propose(self._kept(bucket, 1), followed, self._max_length, num_drafts)
        self._drafts_of(bucket).copy_(drafts)
