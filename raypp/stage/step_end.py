"""The end of a step on the last stage: tokens are chosen, drafts verified, the first stage and the driver told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from raypp.messages import StepPlan
from raypp.ops.row_tokens import NewTokens, RowTokens
from raypp.ops.sample.step_masks import StepMasks
from raypp.ops.sample.tables import Needs
from raypp.specdec.proposer import StepHidden
from raypp.stage.grammar_masks import GrammarMasks, body_mark
from raypp.stage.sampler import Sampler
from raypp.stage.speculation import Search, Speculation
from raypp.stage.step_result import StepTokens, ToldTokens, write_feedback
from raypp.stage.step_shape import StepShape
from raypp.starting_rows import StartingRows

_MAX_KEPT = 64


@dataclass(frozen=True, eq=False)
class LastHidden:
    """What the layers of the last stage gave. N tokens have a successor to be chosen."""

    logits: torch.Tensor  # [N, V]
    positions: torch.Tensor  # [N] int64, of the tokens that are chosen
    hidden: StepHidden  # of all tokens of the step


@dataclass(frozen=True, eq=False)
class EndInputs:
    """What the end of a step does beside what every step's does."""

    needs: Needs = Needs.GREEDY  # at least what the step's rows ask for
    search: Search = field(default_factory=Search)  # what a step without drafts does for later ones
    masks: StepMasks | None = None  # of rows under a grammar; None: there are none


class EndOutputs(NamedTuple):
    """What became of it."""

    chosen: torch.Tensor  # [N] int64, the model's own token at every position
    tokens: StepTokens  # what the rows yield
    told: ToldTokens  # the same for the driver


class StepEnd:
    """Samples every position, verifies drafts, and tells the first stage and the driver. Never waits for the device.

    Steps that are called and steps that are recorded end the same way. What they differ in is who proposes the next
    drafts, and where the message to the first stage lies.

    Args:
        tokens: Of all rows.
        sampler: Likewise.
        grammars: Likewise.
        speculation: None when nobody drafts.
        device: The stage's.
    """

    def __init__(
        self,
        tokens: RowTokens,
        sampler: Sampler,
        grammars: GrammarMasks,
        speculation: Speculation | None,
        device: torch.device,
    ) -> None:
        self._tokens = tokens
        self.sampler = sampler
        self.grammars = grammars
        self.speculation = speculation
        self._device = device
        self._needs: dict[StepShape, Needs] = {}  # of steps that only decode, until rows start

    def start(self, starting: StartingRows) -> None:
        """Take over rows that start."""
        self._needs.clear()
        if self.speculation is not None or starting.extras is not None:  # else nobody looks back
            self._tokens.start(starting.plan)
        self.sampler.start(starting)
        self.grammars.start(starting)
        if self.speculation is not None:
            self.speculation.start(starting)

    def inputs(self, plan: StepPlan, shape: StepShape, num_yielding: int, num_positions: int) -> EndInputs:
        """Return what a step's end is to do; called once for each. Waits for masks as long as the plan allows.

        Args:
            plan: The step.
            shape: Its rows, without padding.
            num_yielding: Rows that yield, and padding.
            num_positions: Positions at which tokens are chosen, and padding.
        """
        masks = self.grammars.of_step(plan, shape, num_yielding, num_positions, body_mark(self._device))
        search = Search() if self.speculation is None else self.speculation.search_of(plan)
        return EndInputs(self._needs_of(shape), search, masks)

    def run(
        self,
        shape: StepShape,
        last: LastHidden,
        inputs: EndInputs,
        feedback: dict[str, torch.Tensor],
        draft: Callable[[StepTokens], StepTokens] | None,
    ) -> EndOutputs:
        """End a step.

        Args:
            shape: The step.
            last: What the layers gave.
            inputs: What to do.
            feedback: The message to the first stage, to be written.
            draft: Returns the tokens with the next drafts; None when nobody drafts.
        """
        needs, masks, sampler, speculation = inputs.needs, inputs.masks, self.sampler, self.speculation
        self._place_drafts(shape, last, needs)
        of_positions = None if masks is None else masks.of_positions
        chosen = sampler.choose(last.logits, shape.rows_of_logits(), last.positions, needs, of_positions)
        token_ids = chosen.to(torch.int32)  # the driver is told of those below 0; all others take them for token 0
        if speculation is None:
            tokens = StepTokens.one_each(token_ids, last.positions)
        else:
            tokens = speculation.verify(shape, token_ids, last.positions, inputs.search)
        if masks is not None:
            draft_ids = None if speculation is None else speculation.tables.draft_ids
            tokens = sampler.hold(shape.sampled_rows, tokens, masks, draft_ids)
        kept = NewTokens(shape.sampled_rows, tokens.positions, tokens.token_ids, tokens.num_valid)
        sampler.remember(kept, needs, counts=True)
        if draft is not None:
            tokens = draft(tokens)
        write_feedback(feedback, shape, tokens)
        return EndOutputs(chosen.clamp(min=0), tokens, ToldTokens.of(tokens, tells_drafts=masks is not None))

    def _needs_of(self, shape: StepShape) -> Needs:
        """Return what a step's rows ask for; of steps that repeat, found out once."""
        needs = self._needs.get(shape)
        if needs is None:
            needs = self.sampler.rows.needs(shape.logits_rows_np)
            if shape.num_decode_rows == shape.num_rows:
                if len(self._needs) >= _MAX_KEPT:
                    self._needs.clear()
                self._needs[shape] = needs
        return needs

    def _place_drafts(self, shape: StepShape, last: LastHidden, needs: Needs) -> None:
        """Let every position see the drafts in front of it, for needs that depend on what was generated before."""
        width = shape.decode_query_len
        if self.speculation is not None and width > 1 and needs.history:
            decode = slice(0, shape.num_decode_rows * width, width)
            drafts = NewTokens(shape.rows_of_logits()[decode], last.positions[decode], self.speculation.drafts(shape))
            self.sampler.remember(drafts, needs, counts=False)
