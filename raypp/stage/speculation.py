"""The last stage's share in speculation: verify the step's drafts, remember its tokens, propose the next drafts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from raypp.errors import ConfigError
from raypp.messages import StepPlan
from raypp.models.draft_head import DraftHead
from raypp.ops.kv_cache import LayerCache, allocate_layer_cache
from raypp.ops.row_tokens import RowTokens, StepTokens
from raypp.specdec.draft_tables import DraftTables
from raypp.specdec.eagle import EagleProposer
from raypp.specdec.forced_acceptance import AlwaysProposing, ForcedAcceptance
from raypp.specdec.ngram_proposer import NgramProposer
from raypp.specdec.proposer import Followed, HybridProposer, Proposer, StepHidden
from raypp.stage.stage_spec import StageSpec
from raypp.stage.step_batch import StepBatch

_LOG = logging.getLogger(__name__)

_SHADOW_EVERY = 4
"""On a CPU, where a search costs a few percent of a small model's step: of the steps without drafts, one in so many is
followed by a search, and its outcome compared in the next one."""

_HEAD_SHADOW_EVERY = 8
"""The same where a head proposes, on any device: one draft, which is all that is compared."""


@dataclass(frozen=True, slots=True)
class Search:
    """What a step without drafts does all the same, so that the driver hears of text that turns repetitive."""

    num_drafts: int = 0  # that are proposed for the next step
    compares: bool = True  # the first draft with the token that is sampled


class Speculation:
    """The tables of drafts, and the proposer.

    Args:
        spec: The last stage's.
        device: Its device.
        tokens: Of all rows; `start` finds those of rows that start written.
        head: The draft head, for methods that have one.
        block_tables: Of all rows, int32 [1, max_num_seqs, W], kept current by the stage.

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
        self.head_kv_caches: list[LayerCache] = []
        """That of the draft head's layer, if there is a head."""
        if given.uses_head:
            self.head_kv_caches.append(_head_kv_cache(spec, head, device))
        self.proposer = _proposer(spec, tokens.table, head, self.head_kv_caches, block_tables)
        self._is_sparing = device.type == "cpu" or self.proposer.has_own_graphs
        self._shadow_every = _HEAD_SHADOW_EVERY if self.proposer.has_own_graphs else _SHADOW_EVERY
        self._num_plain_steps: dict[int, int] = {}  # by cohort, since the last search
        self.search = Search(spec.max_drafts)
        """Of a step that does everything."""
        self.num_proposed = tuple(sorted({1, *spec.speculative.ladder} - {0}))
        """How many drafts a step may propose: 1, and the values of K."""
        self._forced: ForcedAcceptance | None = None
        if given.forced_acceptance_rate is not None:
            _LOG.warning("drafts are accepted at a forced rate of %g: texts are nonsense", given.forced_acceptance_rate)
            self._forced = ForcedAcceptance(given.forced_acceptance_rate, spec.max_drafts, device)
            self.proposer = AlwaysProposing(self.proposer)

    def search_of(self, plan: StepPlan) -> Search:
        """Return what to do in this step; called once for each. With drafts it proposes as many as it verifies."""
        if not self._is_sparing:
            return self.search
        if plan.num_drafts or not plan.num_decode_rows:
            self._num_plain_steps[plan.cohort] = 0
            if not plan.num_drafts:
                return self.search
            return Search(next(count for count in self.num_proposed if count >= plan.num_drafts))
        count = self._num_plain_steps.get(plan.cohort, self._shadow_every - 1) + 1
        self._num_plain_steps[plan.cohort] = count % self._shadow_every
        return Search(int(count == self._shadow_every), compares=count == 1)

    def drafts(self, batch: StepBatch) -> torch.Tensor:
        """Return the drafts that the step verifies, int32 [D, K] for its D decode rows."""
        return self.tables.of(batch.rows[: batch.num_decode_rows])[:, : batch.query_len - 1]

    def verify(self, batch: StepBatch, chosen: torch.Tensor, positions: torch.Tensor, search: Search) -> StepTokens:
        """Verify the step's drafts, and remember its tokens.

        Args:
            batch: The step.
            chosen: [N] int32, the model's tokens: K + 1 of each decode row, then one of each final chunk; -1 where its
                logits were not finite.
            positions: [N] int64, theirs.
            search: What the step does.
        """
        rows = batch.sampled_rows
        reported_ids, first = _by_row(batch, chosen, positions)
        token_ids = reported_ids.clamp(min=0)
        if self._forced is not None:
            token_ids = self._forced(token_ids, self.tables.of(rows), rows, first)
            reported_ids = torch.where(reported_ids < 0, reported_ids, token_ids)
        tokens = StepTokens(rows, first, token_ids, reported_ids=reported_ids)
        if not search.compares:
            self.tokens.write(tokens)
            return replace(tokens, lengths=first + 1)
        return replace(tokens, **self.tables.verify(rows, first, token_ids)._asdict())

    def propose(self, tokens: StepTokens, followed: Followed, max_length: int, most: int) -> torch.Tensor:
        """Propose the next drafts of the rows that yielded, and remember them; return them, [Y, K_max] int32.

        Args:
            tokens: What they yielded.
            followed: What the proposer made of the step.
            max_length: An upper bound of their lengths that the host knows.
            most: So many drafts of a row are enough.
        """
        drafts = self.proposer.propose(tokens, followed, max_length, most)
        self.tables.remember(tokens.rows, drafts)
        return drafts.draft_ids

    def draft(self, hidden: StepHidden, max_length: int, search: Search, tokens: StepTokens) -> StepTokens:
        """Follow a step that was verified, and propose; return its tokens with the next drafts."""
        followed = self.proposer.follow(tokens, hidden)
        if not search.num_drafts:
            return replace(tokens, draft_ids=self.tables.miss(tokens.rows, tokens.token_ids))
        return replace(tokens, draft_ids=self.propose(tokens, followed, max_length, search.num_drafts))


def _proposer(
    spec: StageSpec,
    tokens: torch.Tensor,
    head: DraftHead | None,
    head_kv_caches: Sequence[LayerCache],
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
    eagle = EagleProposer(head, head_kv_caches[0], block_tables, num_drafts=spec.max_drafts, max_len=spec.max_seq_len)
    return HybridProposer(ngram, eagle) if given.method == "auto" else eagle


def _head_kv_cache(spec: StageSpec, head: DraftHead | None, device: torch.device) -> LayerCache:
    """Return the KV cache of the head's layer."""
    if head is None:
        raise ConfigError(
            "the method of speculation drafts by a head, and the last stage has none",
            got=f"speculative.method {spec.speculative.method}",
            hint="a stage factory brings no head; take ngram",
        )
    layer = head.config.layer
    dtype: torch.dtype = getattr(torch, spec.kv_dtype)
    cache = layer.attending[0].cache
    sizes = (cache.num_kv_heads, cache.k_dim, cache.v_dim)
    return allocate_layer_cache(spec.groups[0].num_blocks, spec.block_size, *sizes, dtype, device)


def _by_row(batch: StepBatch, chosen: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens [Y, 1 + K], a final chunk's in the first column, and each row's first position [Y]."""
    width = batch.query_len
    if width == 1:
        return chosen.unsqueeze(1), positions
    num_decode_tokens = batch.num_decode_rows * width
    decode = chosen[:num_decode_tokens].view(-1, width)
    first = positions[:num_decode_tokens:width]
    if len(chosen) == num_decode_tokens:
        return decode, first
    chunks = chosen[num_decode_tokens:].unsqueeze(1).expand(-1, width)
    return torch.cat((decode, chunks)), torch.cat((first, positions[num_decode_tokens:]))
