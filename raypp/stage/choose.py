"""The end of a step on the last stage: the model's tokens, and which of them, with the drafts in front, are kept."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from raypp.ops.sample.step_masks import StepMasks
from raypp.ops.sample.tables import Needs
from raypp.specdec.proposer import SteppedHidden
from raypp.stage.sampler import Sampler
from raypp.stage.speculation import Search, Speculation
from raypp.stage.step_shape import StepShape
from raypp.stage.step_tokens import StepTokens


@dataclass(frozen=True, eq=False)
class LastHidden:
    """What the layers of the last stage gave. N tokens have a successor to be chosen."""

    logits: torch.Tensor  # [N, V]
    positions: torch.Tensor  # [N] int64, of the tokens that are chosen
    hidden: SteppedHidden  # of all tokens of the step


@dataclass(frozen=True, eq=False)
class Choice:
    """What became of it."""

    chosen: torch.Tensor  # [N] int64, the model's own token at every position
    tokens: StepTokens  # what the rows yield


class Drafting(Protocol):
    """Proposes drafts after a step that was verified."""

    def draft(
        self, shape: StepShape, tokens: StepTokens, hidden: SteppedHidden, max_length: int, search: Search
    ) -> StepTokens:
        """Return the step's tokens with the next drafts; see `raypp.stage.speculation.Speculation.draft`."""


def choose_tokens(
    shape: StepShape,
    last: LastHidden,
    sampler: Sampler,
    speculation: Speculation | None,
    needs: Needs,
    max_length: int,
    search: Search,
    masks: StepMasks | None = None,
) -> Choice:
    """Sample every position, verify drafts and propose the next ones. Never waits for the device.

    Args:
        shape: The step.
        last: What the layers gave.
        sampler: Of all rows.
        speculation: None when nobody drafts.
        needs: At least what the step's rows need.
        max_length: An upper bound of the rows' lengths after the step.
        search: What a step without drafts does for later ones.
        masks: Of its rows under a grammar; None when there are none.
    """
    choice = verify_tokens(shape, last, sampler, speculation, needs, search, masks)
    if speculation is None:
        return choice
    return replace(choice, tokens=speculation.draft(shape, choice.tokens, last.hidden, max_length, search))


def verify_tokens(
    shape: StepShape,
    last: LastHidden,
    sampler: Sampler,
    speculation: Speculation | None,
    needs: Needs,
    search: Search,
    masks: StepMasks | None = None,
) -> Choice:
    """Sample every position and verify drafts; propose nothing. For the arguments see `choose_tokens`."""
    _place_drafts(shape, last, sampler, speculation, needs)
    of_positions = None if masks is None else masks.of_positions
    chosen = sampler.choose(last.logits, shape.rows_of_logits(), last.positions, needs, of_positions)
    token_ids = chosen.to(torch.int32)  # the driver is told of those below 0; all others take them for token 0
    if speculation is None:
        tokens = StepTokens.one_each(token_ids, last.positions)
    else:
        tokens = speculation.verify(shape, token_ids, last.positions, search)
    if masks is not None:
        draft_ids = None if speculation is None else speculation.draft_ids
        tokens = sampler.hold(shape.sampled_rows, tokens, masks, draft_ids)
    sampler.commit(shape.sampled_rows, tokens.positions, tokens.token_ids, needs, tokens.num_valid)
    return Choice(chosen.clamp(min=0), tokens)


def _place_drafts(
    shape: StepShape, last: LastHidden, sampler: Sampler, speculation: Speculation | None, needs: Needs
) -> None:
    """Let every position see the drafts in front of it, for needs that depend on what was generated before."""
    width = shape.decode_query_len
    if speculation is not None and width > 1 and needs.history:
        decode = slice(0, shape.num_decode_rows * width, width)
        rows = shape.rows_of_logits()
        sampler.place_drafts(rows[decode], last.positions[decode], speculation.drafts(shape), needs)
