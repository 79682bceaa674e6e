"""The last stage's share in speculation: verify the step's drafts, remember its tokens, propose the next drafts."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from raypp.messages import StepPlan
from raypp.specdec.draft_tables import DraftTables
from raypp.specdec.forced_acceptance import AlwaysProposing, ForcedAcceptance
from raypp.specdec.ngram import NgramProposer
from raypp.specdec.proposer import Proposer, SteppedHidden, SteppedTokens
from raypp.specdec.token_table import TokenTable
from raypp.stage.spec import StageSpec
from raypp.stage.step_shape import StepShape
from raypp.stage.step_tokens import StepTokens

_LOG = logging.getLogger(__name__)

_SHADOW_EVERY = 4
"""On a CPU, where a search costs a few percent of a small model's step: of the steps without drafts, one in so many is
followed by a search, and its outcome compared in the next one."""


@dataclass(frozen=True, slots=True)
class Search:
    """What a step without drafts does all the same, so that the driver hears of text that turns repetitive."""

    compares: bool = True  # the first draft with the token that is sampled
    proposes: bool = True  # the next drafts


class Speculation:
    """The token table, the tables of drafts, and the proposer."""

    def __init__(self, spec: StageSpec, device: torch.device) -> None:
        given = spec.speculative
        self._tokens = TokenTable(spec.max_num_seqs, spec.ngram_window, device)
        self._drafts = DraftTables(spec.max_num_seqs, spec.max_drafts, self._tokens, device)
        self._proposer: Proposer = NgramProposer(
            self._tokens.tokens,
            min_n=given.min_n,
            max_n=given.max_n,
            num_drafts=spec.max_drafts,
            max_rows=spec.max_step_rows,
        )
        self._is_sparing = device.type == "cpu"
        self._num_plain_steps: dict[int, int] = {}  # by cohort, since the last search
        self._forced: ForcedAcceptance | None = None
        if given.forced_acceptance_rate is not None:
            _LOG.warning("drafts are accepted at a forced rate of %g: texts are nonsense", given.forced_acceptance_rate)
            self._forced = ForcedAcceptance(given.forced_acceptance_rate)
            self._proposer = AlwaysProposing(self._proposer)

    @property
    def token_table_bytes(self) -> int:
        """The bytes of the token table."""
        return self._tokens.num_bytes

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what a step reads and changes, at addresses that never change."""
        return {"token table": self._tokens.tokens, **self._drafts.tensors()}

    def apply(self, plan: StepPlan) -> None:
        """Take over rows that start."""
        self._tokens.apply(plan)
        self._drafts.apply(plan)
        self._proposer.apply(plan)

    def search_of(self, plan: StepPlan) -> Search:
        """Return what to do in this step; called once for each. A step with drafts does everything."""
        if not self._is_sparing or plan.num_drafts or not plan.num_decode_rows:
            self._num_plain_steps[plan.cohort] = 0
            return Search()
        count = self._num_plain_steps.get(plan.cohort, _SHADOW_EVERY - 1) + 1
        self._num_plain_steps[plan.cohort] = count % _SHADOW_EVERY
        return Search(compares=count == 1, proposes=count == _SHADOW_EVERY)

    def drafts(self, shape: StepShape) -> torch.Tensor:
        """Return the drafts that the step verifies, int32 [D, K] for its D decode rows."""
        decode_rows = shape.rows[: shape.num_decode_rows]
        return self._drafts.draft_ids(decode_rows)[:, : shape.decode_query_len - 1]

    def finish(
        self,
        shape: StepShape,
        chosen: torch.Tensor,
        positions: torch.Tensor,
        hidden: SteppedHidden,
        max_length: int,
        search: Search,
    ) -> StepTokens:
        """Verify, remember, propose.

        Args:
            shape: The step.
            chosen: [N] int32, the model's tokens: K + 1 of each decode row, then one of each final chunk.
            positions: [N] int64, theirs.
            hidden: For proposers that draft from hidden states.
            max_length: An upper bound of the rows' lengths after the step.
            search: What the step does.
        """
        rows = shape.sampled_rows
        token_ids, first = _by_row(shape, chosen, positions)
        if self._forced is not None:
            token_ids = self._forced(token_ids, self._drafts.draft_ids(rows), rows, first)
        if not search.compares:
            self._tokens.append(rows, first, token_ids, None)
            tokens = StepTokens.one_each(token_ids.squeeze(1), first)
        else:
            verified = self._drafts.verify(rows, first, token_ids)
            tokens = StepTokens(
                token_ids=token_ids,
                positions=first,
                lengths=verified.lengths,
                num_valid=verified.num_valid,
                num_drafted=verified.num_drafted,
                num_matched=verified.num_matched,
            )
        if not search.proposes:
            return replace(tokens, draft_ids=self._drafts.miss(rows, token_ids))
        drafts = self._proposer.propose(
            SteppedTokens(rows, tokens.lengths, token_ids, tokens.num_valid, max_length, hidden)
        )
        self._drafts.remember(rows, drafts)
        return replace(tokens, draft_ids=drafts.draft_ids)


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
