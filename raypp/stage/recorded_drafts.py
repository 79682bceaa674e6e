"""A proposer that is recorded apart: what it does after a verified decode step, between buffers of its own.

    [ verified tokens ] --> follow (per rows and K) --> [ followed ] --> propose (per rows) --> [ next drafts ]

Verification has recordings for every need of the sampler; these have none of that, so there are few of them. After any
other step, with prompts in it, the second takes the rows that yielded just so. Rows that are proposed nothing skip it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch

from raypp.graphs.debug import Watched, only
from raypp.graphs.graph_manager import CudaGraphManager
from raypp.specdec.proposer import Followed, StepHidden
from raypp.stage.speculation import Search, Speculation
from raypp.stage.stage_spec import StageSpec
from raypp.stage.step_result import StepTokens
from raypp.stage.step_shape import StepShape

_PADDING_LENGTH = 2  # of the row that padding reads: one token, and the one that it yields


class RecordedDrafts:
    """The recordings, and the buffers. B rows of a recording, K drafts.

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
        self._recorded: list[int] = []  # numbers of rows that proposals are recorded for
        self._num_rows = 0  # of the step that ran last, without padding
        self._followed: Followed | None = None  # [max_step_rows, ...]; made with the first recording

    def keep(self, rows: torch.Tensor, tokens: StepTokens) -> StepTokens:
        """Copy a verified step's tokens to where the recordings read them. Part of the recording that verifies.

        Returns the tokens, without drafts: these come when they were proposed.
        """
        assert tokens.num_valid is not None, "a recorded step compares"
        kept = self._kept(*tokens.token_ids.shape)
        for into, values in (
            (self._rows[: len(rows)], rows),
            (kept.token_ids, tokens.token_ids),
            (kept.lengths, tokens.lengths),
        ):
            into.copy_(values)
        self._num_valid[: len(tokens.num_valid)].copy_(tokens.num_valid)
        return tokens

    def record(self, shape: StepShape, hidden_of: Callable[[], StepHidden]) -> None:
        """Record what follows a step of that shape.

        Args:
            shape: Of the step.
            hidden_of: Returns what the step left: in a recording always the same tensors, else new ones each time.
        """
        bucket, width = shape.num_rows, shape.decode_query_len
        self._num_rows = bucket
        follow = partial(self._follow, shape, hidden_of)
        watched = Watched(reads=(self,), yields=self._yields_followed)
        self._graphs.record(self._mode, ("follow", bucket, width), follow, watched=watched)

    def record_proposals(self, buckets: Iterable[int]) -> None:
        """Record the proposals of those numbers of rows, as far as memory allows, when everything else is recorded.

        One serves steps of every K. It runs before the host is told what the step's tail chose, so it may not have for
        itself the memory where the tail of any K leaves that: all of them must have theirs by now.
        """
        self._graphs.record_sizes(self._mode, sorted(buckets, reverse=True), self._record_proposal)

    def _record_proposal(self, bucket: int) -> None:
        self._num_rows = bucket
        watched = Watched(
            reads=(self._speculation.tokens,),
            changes=(self._speculation.tables, self),  # a layer may overwrite what was followed
            yields=lambda _: {"drafts": only(self._have_room(), self._drafts_of(bucket)[: self._num_rows])},
        )
        for name, program in (("propose", self._propose), ("miss", self._miss)):
            self._graphs.record(self._mode, (name, bucket), partial(program, bucket), watched=watched)
        self._recorded.append(bucket)

    def run(self, bucket: int, num_drafts: int, num_rows: int, *, proposes: bool) -> None:
        """Run it, on what was kept last. Of the B rows all but the first `num_rows` are padding."""
        self._num_rows = num_rows
        self._graphs.run(("follow", bucket, 1 + num_drafts))
        if bucket in self._recorded:
            self._graphs.run(("propose" if proposes else "miss", bucket))
        elif proposes:
            self._propose(bucket)
        else:
            self._miss(bucket)

    def draft(
        self, shape: StepShape, hidden: StepHidden, max_length: int, search: Search, tokens: StepTokens
    ) -> StepTokens:
        """Do as `Speculation.draft`, after a step that was no recording; the drafts are valid until the next step."""
        num_rows = len(shape.sampled_rows)
        bucket = self._fit(num_rows)
        if bucket is None or not search.proposes:
            return self._speculation.draft(shape, hidden, max_length, search, tokens)
        assert self._followed is not None
        followed = self._speculation.follow(shape, tokens, hidden)
        self._rows[num_rows:bucket] = self._padding_row
        self._lengths[num_rows:bucket] = _PADDING_LENGTH
        for tensor in self._followed:
            tensor[num_rows:bucket] = 0
        kept, values = (self._rows, self._lengths, *self._followed), (shape.sampled_rows, tokens.lengths, *followed)
        for into, value in zip(kept, values, strict=True):
            into[:num_rows].copy_(value)
        self._num_rows = num_rows
        self._graphs.run(("propose", bucket))
        return replace(tokens, draft_ids=self._drafts_of(bucket)[:num_rows])

    def _fit(self, num_rows: int) -> int | None:
        """Return the smallest recording of proposals for so many rows; None if there is none, or nothing to propose."""
        return min((bucket for bucket in self._recorded if bucket >= num_rows), default=None) if num_rows else None

    def _yields_followed(self, result: None) -> dict[str, torch.Tensor]:
        counts, followed = self._have_room(), self._followed or ()
        return {f"followed {index}": only(counts, tensor[: self._num_rows]) for index, tensor in enumerate(followed)}

    def _have_room(self) -> torch.Tensor:
        """Return which rows have blocks for all that is drafted: what others do with the null block is arbitrary."""
        return self._speculation.tables.have_room(self._rows[: self._num_rows], self._lengths[: self._num_rows])

    def _kept(self, num_rows: int, width: int) -> StepTokens:
        return StepTokens(
            token_ids=self._token_ids[: num_rows * width].view(num_rows, width),
            positions=self._lengths[:num_rows],  # not asked for
            lengths=self._lengths[:num_rows],
            num_valid=self._num_valid[:num_rows],
        )

    def _follow(self, shape: StepShape, hidden_of: Callable[[], StepHidden]) -> None:
        kept = self._kept(shape.num_rows, shape.decode_query_len)
        followed = self._speculation.follow(shape, kept, hidden_of())
        if self._followed is None:
            rows = len(self._num_valid)
            self._followed = tuple(tensor.new_zeros(rows, *tensor.shape[1:]) for tensor in followed)
        for into, values in zip(self._followed, followed, strict=True):
            into[: shape.num_rows].copy_(values)

    def _propose(self, bucket: int) -> None:
        assert self._followed is not None
        followed = tuple(tensor[:bucket] for tensor in self._followed)
        drafts = self._speculation.propose(self._rows[:bucket], self._lengths[:bucket], followed, self._max_length)
        self._drafts_of(bucket).copy_(drafts)

    def _miss(self, bucket: int) -> None:
        # Any valid ids will do: zeros, and whatever was verified, are.
        self._drafts_of(bucket).copy_(
            self._speculation.tables.miss(self._rows[:bucket], self._token_ids[:bucket].unsqueeze(1))
        )
