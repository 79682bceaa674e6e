"""The end of a step on the last stage: choose tokens, verify drafts, write the feedback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from raypp.ops.row_tokens import RowTokens, StepTokens
from raypp.ops.sample.step_masks import StepMasks
from raypp.row_params import Needs
from raypp.stage.grammar_masks import GrammarMasks, body_mark
from raypp.stage.sampler import Sampler
from raypp.stage.speculation import Search, Speculation
from raypp.stage.step_batch import StepBatch
from raypp.stage.step_layers import LastHidden
from raypp.stage.step_result import PackedResult, write_feedback
from raypp.starting_rows import StartingRows


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
    result: PackedResult  # the same for the driver


class StepEnd:
    """Samples every position, verifies drafts, and writes the feedback. Never waits for the device.

    Eager steps and full graphs end the same way. What they differ in is what proposes the next drafts, and where the
    message to the first stage lies.

    Args:
        tokens: Of all rows.
        sampler: Likewise.
        grammars: Likewise.
        speculation: None without drafts.
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
        self._mark_body = body_mark(device)

    def start(self, starting: StartingRows) -> None:
        """Take over rows that start."""
        if self.speculation is not None or (starting.needs_np & Needs.HISTORY).any():  # else no step looks back
            self._tokens.start(starting.plan)
        self.sampler.start(starting)
        self.grammars.start(starting)
        if self.speculation is not None:
            self.speculation.tables.start(starting)

    def inputs(self, batch: StepBatch) -> EndInputs:
        """Return what a step's end is to do; called once for each. Waits for masks as long as the plan allows."""
        needs, masks = batch.needs, None
        if needs is None:
            needs = batch.needs = self.sampler.rows.needs(batch.logits_rows_np)
        if Needs.GRAMMAR in needs:
            masks = self.grammars.of_step(batch, self._mark_body)
        elif not self.grammars.is_neutral:
            self.grammars.make_neutral()
        search = Search() if self.speculation is None else self.speculation.search_of(batch.plan)
        return EndInputs(needs, search, masks)

    def run(
        self,
        batch: StepBatch,
        last: LastHidden,
        inputs: EndInputs,
        feedback: dict[str, torch.Tensor],
        draft: Callable[[StepTokens], StepTokens] | None,
    ) -> EndOutputs:
        """End a step.

        Args:
            batch: The step.
            last: What the layers gave.
            inputs: What to do.
            feedback: The message to the first stage, to be written.
            draft: Returns the tokens with the next drafts; None without speculation.
        """
        needs, masks, sampler, speculation = inputs.needs, inputs.masks, self.sampler, self.speculation
        looks_back, width, rows = bool(needs & Needs.HISTORY), batch.query_len, batch.rows_of_logits()
        if looks_back and speculation is not None and width > 1:
            # Every position is to see the drafts in front of it.
            decode = slice(0, batch.num_decode_rows * width, width)
            drafts = StepTokens(rows[decode], last.positions[decode], speculation.drafts(batch))
            sampler.remember(drafts, counts=False)
        of_positions = None if masks is None else masks.of_positions
        chosen = sampler.choose(last.logits, rows, last.positions, needs, of_positions)
        token_ids = chosen.to(torch.int32)  # below 0 where logits are not finite: only the driver sees those
        if speculation is None:
            reported, positions = token_ids.unsqueeze(1), last.positions
            yielded = (batch.sampled_rows, positions, reported.clamp(min=0))
            tokens = StepTokens(*yielded, lengths=positions + 1, reported_ids=reported)
        else:
            tokens = speculation.verify(batch, token_ids, last.positions, inputs.search)
        if masks is not None:
            tokens = sampler.hold(tokens, masks, None if speculation is None else speculation.tables.draft_ids)
        if looks_back:
            sampler.remember(tokens, counts=True)
        if draft is not None:
            tokens = draft(tokens)
        write_feedback(feedback, batch, tokens)
        return EndOutputs(chosen.clamp(min=0), tokens, PackedResult.of(tokens, has_drafts=masks is not None))
