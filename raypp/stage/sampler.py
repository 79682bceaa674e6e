"""The last stage's sampler: a token for every position that wants one, by the parameters of the position's row.

    copy of the logits -> bias -> penalties -> bans -> grammar -> temperature, truncation, draw -> tokens

A step does what any of its rows needs (`Needs`), on all of them: it is neutral, bit by bit, for those without the
parameter. So what a CUDA graph records for more needs serves a step with fewer, and rows do not feel each other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raypp.messages import StartExtras, StepPlan
from raypp.ops.backend import choose_token_choice
from raypp.ops.logits import add_bias, allow_only, ban, completes_bad_word, penalize
from raypp.request_limits import MAX_BAD_WORD_TOKENS
from raypp.stage.sampling_rows import Needs, SamplingRows
from raypp.stage.spec import StageSpec
from raypp.stage.step_masks import StepMasks
from raypp.stage.token_history import TokenHistory


class Sampler:
    """Chooses tokens. N positions, of which a row may have several; V vocabulary."""

    def __init__(self, spec: StageSpec, device: torch.device) -> None:
        self.rows = SamplingRows(spec, device)
        self.history = TokenHistory(spec, device)
        self._choice = choose_token_choice(device, spec.max_step_rows * (1 + spec.max_drafts))

    def apply(self, plan: StepPlan, extras: StartExtras | None) -> None:
        """Take over the parameters and known tokens of rows that start."""
        if not len(plan.start_rows):
            return
        self.rows.apply(plan, extras)
        if extras is None:
            return
        ends = np.cumsum(plan.start_num_tokens).tolist()
        for index, row in enumerate(plan.start_rows.tolist()):
            needs = self.rows.needs(plan.start_rows[index : index + 1])
            if needs.history:
                token_ids = plan.start_token_ids[ends[index] - int(plan.start_num_tokens[index]) : ends[index]]
                prompt_len = int(plan.start_prompt_lens[index])
                self.history.start(row, token_ids, prompt_len, counts=Needs.PENALTIES in needs)

    def reserve(self) -> None:
        """Have all tables from now on, at addresses that recordings may read while `is_steady`."""
        self.rows.reserve()
        self.history.reserve()

    @property
    def is_steady(self) -> bool:
        """Whether all tables are where they were reserved."""
        return not self.rows.have_moved

    def needs(self, rows_np: NDArray[np.integer[Any]]) -> Needs:
        """Return what a step with these rows needs."""
        return self.rows.needs(rows_np)

    def choose(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        needs: Needs,
        masks: StepMasks | None = None,
    ) -> torch.Tensor:
        """Return the token of each position, int64 [N]. Leaves the logits as they are. Never waits for the device.

        With drafts, `history.place_drafts` comes before, so that each position sees the drafts in front of it.

        Args:
            logits: [N, V].
            rows: [N] int64, the row of each.
            positions: [N] int64, absolute, of the token that is chosen.
            needs: At least what the rows need.
            masks: Of the rows under a grammar.
        """
        if needs.changes:
            logits = logits.to(torch.float32, copy=True)
            for need in needs.changes:
                self.change(need, logits, rows, positions)
        if masks is not None:
            logits = masks.apply(logits)
        if Needs.DRAW not in needs:
            return self._choice.greedy(logits)
        params = self.rows
        top_k, top_p, min_p, temperature, seeds = (
            table.index_select(0, rows)
            for table in (params.top_k, params.top_p, params.min_p, params.temperature, params.seeds)
        )
        truncation = (top_k, top_p, min_p)
        return self._choice.draw(logits, temperature, seeds, positions, truncation, truncates=Needs.TRUNCATE in needs)

    def commit(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        token_ids: torch.Tensor,
        needs: Needs,
        num_valid: torch.Tensor | None = None,
    ) -> None:
        """Take in what was kept of the tokens that were chosen; once per step, after `choose`.

        Shapes: rows [R] int64; positions [R] int64, of each row's first new token; token_ids [R, W]; num_valid [R], how
        many of them were kept, None when all were.
        """
        if needs.history:
            self.history.commit(rows, positions, token_ids, num_valid)

    def change(
        self,
        need: Needs,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Do what one need asks, in place. Tables that are not there nobody needs.

        Shapes: logits [N, V] float32; rows, positions [N] int64.
        """
        params, history = self.rows, self.history
        if need == Needs.BIAS and params.bias.is_there:
            add_bias(logits, params.bias_token_ids.gather(rows), params.bias.gather(rows))
        elif need == Needs.PENALTIES and history.has_counts:
            weights = (t.index_select(0, rows) for t in (params.repetition, params.frequency, params.presence))
            penalize(logits, *history.counts(rows, positions), *weights)
        elif need == Needs.MIN_TOKENS and params.end_token_ids.is_there:
            end_token_ids = params.end_token_ids.gather(rows)
            is_early = positions < params.min_lengths.index_select(0, rows)
            ban(logits, end_token_ids, is_early.unsqueeze(1).expand_as(end_token_ids))
        elif need == Needs.BAD_WORDS and params.bad_words.is_there:
            words = params.bad_words.gather(rows)
            is_banned = completes_bad_word(words, history.before(rows, positions, MAX_BAD_WORD_TOKENS - 1))
            ban(logits, words[:, :, -1].to(torch.int64), is_banned)
        elif need == Needs.ALLOWED and params.allowed.is_there:
            allow_only(logits, params.allowed.gather(rows))
