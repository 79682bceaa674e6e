"""The end of a step on the last stage: choose tokens, verify drafts, write the feedback.

    logits -> bias -> penalties -> bans -> grammar -> temperature, truncation, draw -> tokens

Each row gets what it asks for. Kernels read that on the device, so one CUDA graph for all needs serves every step;
torch does what any of a step's rows needs to all of them, which is neutral, bit by bit, for the others. So rows do not
feel each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from raypp.messages import StartLists
from raypp.ops.device_kernels import choose_token_choice
from raypp.ops.host_to_device import to_device
from raypp.ops.row_tokens import RowTokens, StepTokens
from raypp.ops.sample.draw_sizes import MAX_CHANGED_POSITIONS, MAX_REPORTED
from raypp.ops.sample.tables import ANY_TOKEN, AdjustedLogits, Adjustments, PositionMasks, RowTables, StepMasks, Widths
from raypp.ops.sample.token_choice import TopLogprobs
from raypp.ops.sample.token_history import TokenHistory
from raypp.ops.sample.vocabulary_part import VocabularyPart
from raypp.row_params import Needs, RowParams
from raypp.sampling_params import (
    MAX_BAD_WORD_SPELLINGS,
    MAX_BAD_WORD_TOKENS,
    MAX_BIASED_TOKENS,
    MAX_END_TOKENS,
)
from raypp.stage.grammar_masks import GrammarMasks, body_mark
from raypp.stage.speculation import Search, Speculation
from raypp.stage.stage_spec import StageSpec
from raypp.stage.step_batch import LastHidden, StepBatch
from raypp.stage.step_result import PackedResult, write_feedback
from raypp.starting_rows import StartingRows


class Sampler:
    """Chooses tokens. N positions, of which a row may have several; V vocabulary.

    Args:
        spec: The last stage's.
        device: Its device.
        tokens: Of all rows; `start` finds those of rows that start written.
        part: Of the tokens whose logits are given, of a member of the stage; None: all are.
    """

    def __init__(
        self, spec: StageSpec, device: torch.device, tokens: RowTokens, part: VocabularyPart | None = None
    ) -> None:
        self.part = part
        self.rows = SamplingRows(spec, device)
        self.history = TokenHistory(tokens, spec.vocab_size, spec.max_drafts, device)
        self._choice = choose_token_choice(device, spec.max_step_rows * (1 + spec.max_drafts), part)
        if device.type == "cuda":
            self.reserve()

    def start(self, starting: StartingRows) -> None:
        """Take over the parameters and known tokens of rows that start."""
        self.rows.start(starting)
        prompt_lens = starting.plan.start_prompt_lens.tolist()
        for index in np.flatnonzero(starting.needs_np & Needs.HISTORY).tolist():
            row, counts = int(starting.rows_np[index]), bool(starting.needs_np[index] & Needs.PENALTIES)
            self.history.start(row, starting.token_ids[index], prompt_lens[index], counts=counts)

    def reserve(self) -> None:
        """Have all tables from now on, in full: graphs read them."""
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
        if not needs & Needs.CHANGES and masks is None:
            return self._draw(AdjustedLogits(logits), rows, positions, needs)
        chosen = []
        asked = Adjustments(rows, positions, self.rows.tables, self.history, needs, self.rows.widths, masks)
        for first in range(0, max(len(logits), 1), MAX_CHANGED_POSITIONS):
            places = slice(first, first + MAX_CHANGED_POSITIONS)
            part = asked.part(places)
            chosen.append(self._draw(self._choice.adjust(logits[places], part), part.rows, part.positions, needs))
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen)

    def _draw(self, logits: AdjustedLogits, rows: torch.Tensor, positions: torch.Tensor, needs: Needs) -> torch.Tensor:
        if Needs.DRAW not in needs:
            return self._choice.greedy(logits)
        return self._choice.draw(logits, rows, positions, self.rows.tables, truncates=Needs.TRUNCATE in needs)

    def report(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        chosen: torch.Tensor,
        num_reported: torch.Tensor | None = None,
    ) -> TopLogprobs:
        """Return the log-probabilities of positions whose rows ask for some, until the next call.

        Shapes: logits [N, V], the model's own; rows, chosen [N] int64; num_reported by row int32, None: what the
        requests of rows ask for. See `TokenChoice.report`.
        """
        asked = self.rows.tables.num_reported if num_reported is None else num_reported
        return self._choice.report(logits, rows, chosen, asked)

    def hold(self, tokens: StepTokens, masks: StepMasks, draft_table: torch.Tensor | None) -> StepTokens:
        """Return the tokens that rows keep: under a grammar, each at most as many as it has masks for.

        Args:
            tokens: What rows yield, after verification; some of it changes in place.
            masks: Of the step.
            draft_table: [max_num_seqs, K or more] int32, the drafts by row; None without speculation.
        """
        if tokens.num_valid is None:  # one token each
            tokens = replace(tokens, num_valid=torch.ones_like(tokens.rows, dtype=torch.int32))
        lengths = self._choice.hold(tokens, masks, self.history.tokens.table, draft_table)
        return replace(tokens, lengths=lengths)

    def remember(self, tokens: StepTokens, *, counts: bool) -> None:
        """Let later positions see tokens: drafts, before `choose`; after it, what was kept. For needs with a history.

        Args:
            tokens: The tokens.
            counts: Whether they are kept, and counted.
        """
        self._choice.remember(tokens, self.rows.tables.needs, self.history, counts=counts)


class SamplingRows:
    """Parameters by row, in tables of fixed width: what a request brings is limited before it gets here."""

    def __init__(self, spec: StageSpec, device: torch.device) -> None:
        self._device = device
        self._vocab_size = spec.vocab_size
        self.tables = RowTables.neutral(spec.max_num_seqs, spec.vocab_size, device)
        self.widths = Widths(1, 1, 1)
        """The most entries that any row has had."""
        # The host's own copy of what decides what a step does, so that no step asks the device.
        self._needs_np = np.zeros(spec.max_num_seqs, np.int32)
        self._had_lists_np = np.zeros(spec.max_num_seqs, np.bool_)

    def reserve(self) -> None:
        """Take all entries for used from now on: graphs do."""
        self.widths = Widths(MAX_BIASED_TOKENS, MAX_END_TOKENS, MAX_BAD_WORD_SPELLINGS)

    def needs(self, rows_np: NDArray[np.integer[Any]]) -> Needs:
        """Return what any of these rows needs."""
        return Needs(int(np.bitwise_or.reduce(self._needs_np[rows_np], initial=0)))

    def start(self, starting: StartingRows) -> None:
        """Take over the parameters of rows that start."""
        rows_np, lists, tables = starting.rows_np, starting.lists, self.tables
        tables.start(starting.rows, starting.needs, starting.words, starting.seeds)
        if starting.params["num_reported"].max() > 1 + MAX_REPORTED:  # of more, torch reports
            tables.num_reported.clamp_(max=1 + MAX_REPORTED)
        self._needs_np[rows_np] = starting.needs_np
        if self._had_lists_np[rows_np].any():
            tables.clear_lists(starting.rows)
            self._had_lists_np[rows_np] = False
        if lists is not None:
            self._take_lists(rows_np, starting.params, lists)
            self._had_lists_np[rows_np] = True

    def _take_lists(self, rows_np: NDArray[np.int64], params: RowParams, lists: StartLists) -> None:
        tables, counts = self.tables, (params["num_biased"], params["num_end_tokens"], params["num_bad_words"])
        widths = zip(astuple(self.widths), counts, strict=True)
        self.widths = Widths(*(max(width, int(of_rows.max())) for width, of_rows in widths))
        for row, token_ids in _lists(rows_np, params["num_end_tokens"], lists.end_token_ids):
            self._set(tables.end_token_ids, row, token_ids)
        for row, indices in _lists(rows_np, params["num_biased"], np.arange(len(lists.bias))):
            # Unused places repeat an entry: torch writes all of them, in any order.
            places = np.pad(indices, (0, MAX_BIASED_TOKENS - len(indices)), mode="edge")
            self._set(tables.bias_token_ids, row, lists.bias_token_ids[places])
            self._set(tables.bias, row, lists.bias[places])
        for row, token_ids in _lists(rows_np, params["num_allowed"], lists.allowed_token_ids):
            self._set(tables.allowed, row, bitmask_of(token_ids, self._vocab_size))
        lens, ends = lists.bad_word_lens, np.cumsum(lists.bad_word_lens)
        for row, indices in _lists(rows_np, params["num_bad_words"], np.arange(len(lens))):
            words = np.full((len(indices), MAX_BAD_WORD_TOKENS), ANY_TOKEN, np.int32)
            for word, num_tokens, end in zip(words, lens[indices], ends[indices], strict=True):
                word[-num_tokens:] = lists.bad_word_token_ids[end - num_tokens : end]
            self._set(tables.bad_words, row, words)

    def _set(self, table: torch.Tensor, row: int, entries: NDArray[Any]) -> None:
        """Write a row's first entries."""
        assert len(entries) <= table.shape[1], "no more is accepted, see `raypp.sampling_params`"
        table[row, : len(entries)] = to_device(entries, self._device)


def bitmask_of(token_ids: NDArray[np.int32], vocab_size: int) -> NDArray[np.int32]:
    """Return the tokens as bits, int32 [ceil(vocab_size / 32)]; see `raypp.ops.sample.adjust.allow_only`."""
    is_allowed = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    is_allowed[token_ids] = True
    return np.packbits(is_allowed, bitorder="little").view("<i4")


def _lists(
    rows: NDArray[np.int64], counts: NDArray[np.int32], values: NDArray[Any]
) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield each row that has any of `values`, which lie one row after the other, and its share of them."""
    ends = np.cumsum(counts)
    for row, start, end in zip(rows.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True):
        if end > start:
            yield row, values[start:end]


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
