"""The last stage's sampler: a token for every position that wants one, by the parameters of the position's row.

    logits -> bias -> penalties -> bans -> grammar -> temperature, truncation, draw -> tokens

Each row gets what it asks for. Kernels read that on the device, so what a CUDA graph records for all needs serves every
step; torch does what any of a step's rows needs to all of them, which is neutral, bit by bit, for the others. So rows
do not feel each other.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from raypp.ops.device_kernels import choose_token_choice
from raypp.ops.row_tokens import NewTokens, RowTokens
from raypp.ops.sample.draw_sizes import MAX_CHANGED_POSITIONS
from raypp.ops.sample.logprobs import TopLogprobs
from raypp.ops.sample.step_masks import StepMasks, YieldedTokens
from raypp.ops.sample.tables import AdjustedLogits, Asked, Needs, PositionMasks
from raypp.ops.sample.token_history import TokenHistory
from raypp.stage.sampling_rows import SamplingRows
from raypp.stage.stage_spec import StageSpec
from raypp.stage.step_result import StepTokens
from raypp.starting_rows import StartingRows


class Sampler:
    """Chooses tokens. N positions, of which a row may have several; V vocabulary.

    Args:
        spec: The last stage's.
        device: Its device.
        tokens: Of all rows; `start` finds those of rows that start written.
    """

    def __init__(self, spec: StageSpec, device: torch.device, tokens: RowTokens) -> None:
        self.rows = SamplingRows(spec, device)
        self.history = TokenHistory(tokens, spec.vocab_size, spec.max_drafts, device)
        self._choice = choose_token_choice(device, spec.max_step_rows * (1 + spec.max_drafts))
        if device.type == "cuda":
            self.reserve()

    def start(self, starting: StartingRows) -> None:
        """Take over the parameters and known tokens of rows that start."""
        self.rows.start(starting)
        if starting.extras is None:
            return
        prompt_lens = starting.plan.start_prompt_lens.tolist()
        for row, token_ids, prompt_len in zip(starting.rows_np.tolist(), starting.token_ids, prompt_lens, strict=True):
            needs = self.rows.needs(np.array([row]))
            if needs.history:
                self.history.start(row, token_ids, prompt_len, counts=Needs.PENALTIES in needs)

    def reserve(self) -> None:
        """Have all tables from now on, in full: recordings read them."""
        self.rows.reserve()
        self.history.reserve()

    def choose(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        needs: Needs,
        masks: PositionMasks | None = None,
    ) -> torch.Tensor:
        """Return the token of each position, int64 [N]. Leaves the logits as they are. Never waits for the device.

        With drafts, `remember` comes before, so that each position sees the drafts in front of it.

        Args:
            logits: [N, V].
            rows: [N] int64, the row of each.
            positions: [N] int64, absolute, of the token that is chosen.
            needs: At least what the rows need.
            masks: Of the positions under a grammar.
        """
        if not needs.changes and masks is None:
            return self._draw(AdjustedLogits(logits), rows, positions, needs)
        chosen = []
        asked = Asked(rows, positions, self.rows.tables, self.history, needs, self.rows.widths, masks)
        for first in range(0, max(len(logits), 1), MAX_CHANGED_POSITIONS):
            places = slice(first, first + MAX_CHANGED_POSITIONS)
            part = asked.part(places)
            chosen.append(self._draw(self._choice.adjust(logits[places], part), part.rows, part.positions, needs))
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen)

    def _draw(self, logits: AdjustedLogits, rows: torch.Tensor, positions: torch.Tensor, needs: Needs) -> torch.Tensor:
        if Needs.DRAW not in needs:
            return self._choice.greedy(logits)
        return self._choice.draw(logits, rows, positions, self.rows.draws, truncates=Needs.TRUNCATE in needs)

    def report(self, logits: torch.Tensor, rows: torch.Tensor, chosen: torch.Tensor) -> TopLogprobs:
        """Return the log-probabilities of positions whose rows ask for some, until the next call.

        Shapes: logits [N, V], the model's own; rows, chosen [N] int64. See `TokenChoice.report`.
        """
        return self._choice.report(logits, rows, chosen, self.rows.tables.num_reported)

    def hold(
        self, rows: torch.Tensor, tokens: StepTokens, masks: StepMasks, draft_ids: torch.Tensor | None
    ) -> StepTokens:
        """Return the tokens that rows keep: under a grammar, each at most as many as it has masks for.

        Args:
            rows: [Y] int64, those that yield.
            tokens: What they yield, after verification; some of it changes in place.
            masks: Of the step.
            draft_ids: [max_num_seqs, K or more] int32, the drafts by row; None when nobody drafts.
        """
        num_valid = tokens.num_valid
        if num_valid is None:  # one token each
            num_valid = torch.ones_like(rows, dtype=torch.int32)
        compared = tuple(count for count in (tokens.num_drafted, tokens.num_matched) if count is not None)
        yielded = YieldedTokens(rows, tokens.positions, tokens.token_ids, num_valid, compared, draft_ids)
        lengths = self._choice.hold(yielded, masks, self.history.tokens.table)
        return replace(tokens, num_valid=num_valid, lengths=lengths)

    def remember(self, new: NewTokens, needs: Needs, *, counts: bool) -> None:
        """Let later positions see tokens, where that matters: drafts, before `choose`; after it, what was kept.

        Args:
            new: The tokens.
            needs: Of the step.
            counts: Whether they are kept, and counted.
        """
        if needs.history:
            self._choice.remember(new, self.rows.tables.needs, self.history, counts=counts)
