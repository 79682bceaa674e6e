"""The last stage's share in speculation: verify the step's drafts, remember its tokens, propose the next drafts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from raypp.errors import ConfigError
from raypp.messages import StepPlan
from raypp.models.draft_head import DraftHead
from raypp.ops.kv_cache import allocate_kv_caches
from raypp.ops.row_tokens import NewTokens, RowTokens
from raypp.specdec.draft_tables import DraftTables
from raypp.specdec.eagle import EagleProposer
from raypp.specdec.forced_acceptance import AlwaysProposing, ForcedAcceptance
from raypp.specdec.hybrid import HybridProposer
from raypp.specdec.ngram_proposer import NgramProposer
from raypp.specdec.proposer import DraftingRows, Drafts, Followed, Proposer, StepHidden, VerifiedStep
from raypp.stage.stage_spec import StageSpec
from raypp.stage.step_result import StepTokens
from raypp.stage.step_shape import StepShape
from raypp.starting_rows import StartingRows

_LOG = logging.getLogger(__name__)

_SHADOW_EVERY = 4
"""On a CPU, where a search costs a few percent of a small model's step: of the steps without drafts, one in so many is
followed by a search, and its outcome compared in the next one."""

_HEAD_SHADOW_EVERY = 8
"""The same where a head proposes, on any device."""


@dataclass(frozen=True, slots=True)
class Search:
    """What a step without drafts does all the same, so that the driver hears of text that turns repetitive."""

    compares: bool = True  # the first draft with the token that is sampled
    proposes: bool = True  # the next drafts


class Speculation:
    """The tables of drafts, and the proposer.

    Args:
        spec: The last stage's.
        device: Its device.
        tokens: Of all rows; `start` finds those of rows that start written.
        head: The draft head, for methods that have one.
        block_tables: Of all rows, int32 [max_num_seqs, W], kept current by the stage.

    Raises:
        ConfigError: the method drafts by a head, and there is none.
    """

    def __init__(
        self,
        spec: StageSpec,
        device: torch.device,
        tokens: RowTokens,
        head: DraftHead | None,
        block_tables: torch.Tensor,
    ) -> None:
        given = spec.speculative
        self.tokens = tokens
        self.tables = DraftTables(spec.max_num_seqs, spec.max_drafts, tokens, device)
        """The drafts of all rows. Steps change them, and the rows' tokens, at addresses that stay."""
        self.head_kv_caches: list[torch.Tensor] = []
        """Of the draft head, [1, ...] as a stage has its own."""
        if given.uses_head:
            self.head_kv_caches.append(_head_kv_caches(spec, head, device))
        self._proposer = _proposer(spec, tokens.table, head, self.head_kv_caches, block_tables)
        self._is_sparing = device.type == "cpu" or self._proposer.is_recorded_apart
        self._shadow_every = _HEAD_SHADOW_EVERY if self._proposer.is_recorded_apart else _SHADOW_EVERY
        self._num_plain_steps: dict[int, int] = {}  # by cohort, since the last search
        self._forced: ForcedAcceptance | None = None
        if given.forced_acceptance_rate is not None:
            _LOG.warning("drafts are accepted at a forced rate of %g: texts are nonsense", given.forced_acceptance_rate)
            self._forced = ForcedAcceptance(given.forced_acceptance_rate, spec.max_drafts, device)
            self._proposer = AlwaysProposing(self._proposer)

    @property
    def is_recorded_apart(self) -> bool:
        """Whether `follow` and `propose` get recordings of their own."""
        return self._proposer.is_recorded_apart

    def start(self, starting: StartingRows) -> None:
        """Take over rows that start."""
        self.tables.start(starting)

    def search_of(self, plan: StepPlan) -> Search:
        """Return what to do in this step; called once for each. A step with drafts does everything."""
        if not self._is_sparing or plan.num_drafts or not plan.num_decode_rows:
            self._num_plain_steps[plan.cohort] = 0
            return Search()
        count = self._num_plain_steps.get(plan.cohort, self._shadow_every - 1) + 1
        self._num_plain_steps[plan.cohort] = count % self._shadow_every
        return Search(compares=count == 1, proposes=count == self._shadow_every)

    def drafts(self, shape: StepShape) -> torch.Tensor:
        """Return the drafts that the step verifies, int32 [D, K] for its D decode rows."""
        decode_rows = shape.rows[: shape.num_decode_rows]
        return self.tables.of(decode_rows)[:, : shape.decode_query_len - 1]

    def verify(self, shape: StepShape, chosen: torch.Tensor, positions: torch.Tensor, search: Search) -> StepTokens:
        """Verify the step's drafts, and remember its tokens.

        Args:
            shape: The step.
            chosen: [N] int32, the model's tokens: K + 1 of each decode row, then one of each final chunk; -1 where its
                logits were not finite.
            positions: [N] int64, theirs.
            search: What the step does.
        """
        rows = shape.sampled_rows
        told_ids, first = _by_row(shape, chosen, positions)
        token_ids = told_ids.clamp(min=0)
        if self._forced is not None:
            token_ids = self._forced(token_ids, self.tables.of(rows), rows, first)
            told_ids = torch.where(told_ids < 0, told_ids, token_ids)
        if not search.compares:
            self.tokens.write(NewTokens(rows, first, token_ids))
            return StepTokens(token_ids, first, first + 1, told_ids=told_ids)
        verified = self.tables.verify(rows, first, token_ids)
        return StepTokens(
            token_ids=token_ids,
            positions=first,
            lengths=verified.lengths,
            num_valid=verified.num_valid,
            num_drafted=verified.num_drafted,
            num_matched=verified.num_matched,
            told_ids=told_ids,
        )

    def follow(self, shape: StepShape, tokens: StepTokens, hidden: StepHidden) -> Followed:
        """Let the proposer take in a step that was verified.

        Args:
            shape: The step.
            tokens: What its rows yield.
            hidden: For proposers that draft from hidden states.
        """
        return self._proposer.follow(
            VerifiedStep(
                rows=shape.sampled_rows,
                token_ids=tokens.token_ids,
                num_valid=tokens.num_valid,
                num_decode_rows=shape.num_decode_rows,
                token_indices=shape.logits_indices,
                hidden=hidden,
            )
        )

    def propose(self, rows: torch.Tensor, lengths: torch.Tensor, followed: Followed, max_length: int) -> torch.Tensor:
        """Propose the next drafts of the rows that yielded, and remember them; return them, [Y, K_max] int32.

        Shapes: rows, lengths [Y] int64; `max_length` is an upper bound of the lengths that the host knows.
        """
        drafts: Drafts = self._proposer.propose(DraftingRows(rows, lengths, max_length), followed)
        self.tables.remember(rows, drafts)
        return drafts.draft_ids

    def draft(
        self, shape: StepShape, hidden: StepHidden, max_length: int, search: Search, tokens: StepTokens
    ) -> StepTokens:
        """Follow a step that was verified, and propose; return its tokens with the next drafts."""
        rows, followed = shape.sampled_rows, self.follow(shape, tokens, hidden)
        if not search.proposes:
            return replace(tokens, draft_ids=self.tables.miss(rows, tokens.token_ids))
        return replace(tokens, draft_ids=self.propose(rows, tokens.lengths, followed, max_length))


def _proposer(
    spec: StageSpec,
    tokens: torch.Tensor,
    head: DraftHead | None,
    head_kv_caches: Sequence[torch.Tensor],
    block_tables: torch.Tensor,
) -> Proposer:
    given = spec.speculative
    ngram = NgramProposer(
        tokens,
        window=spec.ngram_window,
        min_n=given.min_n,
        max_n=given.max_n,
        num_drafts=spec.max_drafts,
        max_rows=spec.max_step_rows,
    )
    if head is None or not head_kv_caches:
        return ngram
    kv_cache = head_kv_caches[0][0]
    eagle = EagleProposer(head, kv_cache, block_tables, num_drafts=spec.max_drafts, max_len=spec.max_seq_len)
    return HybridProposer(ngram, eagle) if given.method == "auto" else eagle


def _head_kv_caches(spec: StageSpec, head: DraftHead | None, device: torch.device) -> torch.Tensor:
    """Return the KV cache of the head's layer, [1, ...]."""
    if head is None:
        raise ConfigError(
            "the method of speculation drafts by a head, and the last stage has none",
            got=f"speculative.method {spec.speculative.method}",
            hint="a stage factory brings no head; take ngram",
        )
    layer = head.config.layer
    dtype: torch.dtype = getattr(torch, spec.kv_dtype)
    return allocate_kv_caches(1, spec.num_blocks, spec.block_size, layer.num_kv_heads, layer.head_dim, dtype, device)


def _by_row(shape: StepShape, chosen: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens [Y, 1 + K], a final chunk's in the first column, and each row's first position [Y]."""
    width = shape.decode_query_len
    if width == 1:
        return chosen.unsqueeze(1), positions
    num_decode_tokens = shape.num_decode_rows * width
    decode = chosen[:num_decode_tokens].view(-1, width)
    first = positions[:num_decode_tokens:width]
    if len(chosen) == num_decode_tokens:
        return decode, first
    chunks = chosen[num_decode_tokens:].unsqueeze(1).expand(-1, width)
    return torch.cat((decode, chunks)), torch.cat((first, positions[num_decode_tokens:]))
