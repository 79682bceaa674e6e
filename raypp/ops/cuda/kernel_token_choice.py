"""The choice of tokens by kernels: what the last stage's sampler calls on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from raypp.ops.cuda.adjust_kernel import LogitAdjuster, remember
from raypp.ops.cuda.draw_kernels import TokenChooser
from raypp.ops.cuda.kernel_launch import Device, Workspace, arrives_last, start
from raypp.ops.cuda.member_draws import MemberChooser
from raypp.ops.cuda.thresholds import load_logits
from raypp.ops.cuda.verify_kernels import hold
from raypp.ops.row_tokens import StepTokens
from raypp.ops.sample.draw_sizes import MAX_CHANGED_POSITIONS, MAX_REPORTED, MAX_SCORED
from raypp.ops.sample.tables import AdjustedLogits, Adjustments
from raypp.ops.sample.token_choice import TopLogprobs, top_of_members
from raypp.ops.sample.token_history import TokenHistory
from raypp.ops.sample.vocabulary_part import VocabularyPart

_PART = 8192
_WIDTH = triton.next_power_of_2(MAX_REPORTED)
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)


class Reporter:
    """Reports log-probabilities, in buffers of its own.

    Args:
        max_positions: The most positions of a call.
        vocab_size: V.
        device: Where it runs.
        part: Of V tokens, whose logits are given; None: all are.
    """

    def __init__(self, max_positions: int, vocab_size: int, device: Device, part: VocabularyPart | None = None) -> None:
        self._device = device
        self._part = part
        self._num_parts = triton.cdiv(vocab_size, _PART)
        at = device.torch_device
        shape = (max_positions, self._num_parts, _WIDTH)
        self._part_values = torch.empty(shape, device=at)
        self._part_tokens = torch.empty(shape, dtype=torch.int32, device=at)
        self._part_sums = torch.empty(max_positions, self._num_parts, 2, device=at)
        self._part_ranks = torch.empty(max_positions, self._num_parts, dtype=torch.int32, device=at)
        self._counters = torch.zeros(max_positions, dtype=torch.int32, device=at)
        self._top = TopLogprobs(
            token_ids=torch.zeros(max_positions, 1 + MAX_REPORTED, dtype=torch.int32, device=at),
            logprobs=torch.zeros(max_positions, 1 + MAX_REPORTED, device=at),
            ranks=torch.ones(max_positions, dtype=torch.int32, device=at),
        )

    def report(
        self, logits: torch.Tensor, rows: torch.Tensor, chosen: torch.Tensor, num_reported: torch.Tensor
    ) -> TopLogprobs:
        """Return the log-probabilities of positions whose rows ask, until the next call; others are of any value.

        Shapes: logits [N, V] contiguous; rows, chosen [N] int64; num_reported by row, int32, see `TokenChoice.report`.
        """
        num_positions, vocab_size = logits.shape
        top = TopLogprobs(*(column[:num_positions] for column in self._top))
        part = self._part
        # Of a part, the chosen token's logit is another member's, or lies at another place.
        chosen_logits = None if part is None else part.chosen(logits, chosen)
        if num_positions:
            _report[(num_positions, self._num_parts)](
                logits,
                rows,
                chosen,
                logits if chosen_logits is None else chosen_logits,
                num_reported,
                self._part_values,
                self._part_tokens,
                self._part_sums,
                self._part_ranks,
                self._counters,
                *top,
                vocab_size,
                PART=_PART,
                WIDTH=_WIDTH,
                COLUMNS=1 + MAX_REPORTED,
                IS_PART=part is not None,
                NUM_PARTS=triton.next_power_of_2(self._num_parts),
                OVERLAPS=self._device.has_dependent_launch,
                num_warps=8,
                **self._device.launch_options,
            )
        if part is None or chosen_logits is None:
            return top
        normalizers, values = top.logprobs.split((1, MAX_REPORTED), 1)
        return top_of_members(chosen, chosen_logits, normalizers, values, top.token_ids[:, 1:], top.ranks - 1, part)


@triton.jit
def _take_best(values, tokens):
    """Return the best of a vector of tokens, the lowest of equals, and the vector without it."""
    value = tl.max(values, 0)
    token = tl.min(tl.where(values == value, tokens, _NO_TOKEN), 0)
    is_it = tokens == token
    return value, token, tl.where(is_it, -float("inf"), values), tl.where(is_it, _NO_TOKEN, tokens)


@triton.jit(do_not_specialize_on_alignment=["rows", "chosen"])  # an element per program
def _report(
    logits,
    rows,
    chosen,
    chosen_logits,
    num_reported,
    part_values,
    part_tokens,
    part_sums,
    part_ranks,
    counters,
    token_ids,
    logprobs,
    ranks,
    vocab_size,
    PART: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_PART: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    at, part, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    start(OVERLAPS)
    wanted = tl.load(num_reported + tl.load(rows + at))
    if wanted > 0:
        of_row = logits + at.to(tl.int64) * vocab_size
        tokens = part * PART + tl.arange(0, PART)
        values = load_logits(of_row, tokens, vocab_size)
        tokens = tl.where(tokens < vocab_size, tokens, _NO_TOKEN)
        chosen_token = tl.load(chosen + at)
        of_chosen = of_row + chosen_token
        if IS_PART:
            of_chosen = chosen_logits + at
        chosen_logit = tl.load(of_chosen).to(tl.float32)
        highest = tl.max(values, 0)
        powers = tl.where(values == -float("inf"), 0.0, tl.exp(values - highest))
        mine = at.to(tl.int64) * num_parts + part
        tl.store(part_sums + 2 * mine, highest)
        tl.store(part_sums + 2 * mine + 1, tl.sum(powers, 0))
        tl.store(part_ranks + mine, tl.sum((values > chosen_logit).to(tl.int32), 0))
        place = tl.arange(0, WIDTH)
        best_values = tl.full((WIDTH,), -float("inf"), tl.float32)
        best_tokens = tl.full((WIDTH,), _NO_TOKEN, tl.int32)
        for index in range(wanted - 1):
            value, token, values, tokens = _take_best(values, tokens)
            best_values = tl.where(place == index, value, best_values)
            best_tokens = tl.where(place == index, token, best_tokens)
        tl.store(part_values + mine * WIDTH + place, best_values)
        tl.store(part_tokens + mine * WIDTH + place, best_tokens)
        if arrives_last(counters + at, num_parts):
            number = tl.arange(0, NUM_PARTS)
            is_part = number < num_parts
            of_parts = at.to(tl.int64) * num_parts + number
            highests = tl.load(part_sums + 2 * of_parts, mask=is_part, other=-float("inf"), cache_modifier=".cg")
            sums = tl.load(part_sums + 2 * of_parts + 1, mask=is_part, other=0.0, cache_modifier=".cg")
            most = tl.max(highests, 0)
            total = tl.sum(tl.where(sums == 0.0, 0.0, sums * tl.exp(highests - most)), 0)
            normalizer = most + tl.log(total)
            likelier = tl.load(part_ranks + of_parts, mask=is_part, other=0, cache_modifier=".cg")
            tl.store(ranks + at, 1 + tl.sum(likelier, 0))
            into = at.to(tl.int64) * COLUMNS
            tl.store(token_ids + into, chosen_token.to(tl.int32))
            if IS_PART:  # others have a part of the sum, too
                tl.store(logprobs + into, normalizer)
                normalizer = 0.0
                tl.store(logprobs + into + 1 + place, -float("inf"), mask=(place >= wanted - 1) & (place < COLUMNS - 1))
            else:
                tl.store(logprobs + into, chosen_logit - normalizer)
            entry = tl.arange(0, NUM_PARTS * WIDTH)
            first = at.to(tl.int64) * num_parts * WIDTH
            inside = entry < num_parts * WIDTH
            of_all = tl.load(part_values + first + entry, mask=inside, other=-float("inf"), cache_modifier=".cg")
            all_tokens = tl.load(part_tokens + first + entry, mask=inside, other=_NO_TOKEN, cache_modifier=".cg")
            for index in range(wanted - 1):
                best, token, of_all, all_tokens = _take_best(of_all, all_tokens)
                tl.store(token_ids + into + 1 + index, tl.minimum(token, vocab_size - 1))
                tl.store(logprobs + into + 1 + index, best - normalizer)


class KernelTokenChoice:
    """See `raypp.ops.sample.token_choice.TokenChoice`. Buffers are made at first use, before recording.

    Args:
        max_positions: The most positions of a call.
        device: Where it runs.
        workspace: For the parts' results.
        part: Whose logits are given; None: all are.
    """

    def __init__(
        self, max_positions: int, device: Device, workspace: Workspace, part: VocabularyPart | None = None
    ) -> None:
        sizes = (max_positions, device, workspace)
        chooser = TokenChooser(*sizes) if part is None else MemberChooser(*sizes, part)
        self.greedy, self.draw = chooser.greedy, chooser.draw
        self._part = part
        self._device = device
        self._max_positions = max_positions
        self._adjuster: LogitAdjuster | None = None
        self._reporter: Reporter | None = None

    def adjust(self, logits: torch.Tensor, asked: Adjustments) -> AdjustedLogits:
        """Do what rows and masks ask for. Shapes: logits [N, V] contiguous; N at most MAX_CHANGED_POSITIONS."""
        if self._adjuster is None:
            most = min(self._max_positions, MAX_CHANGED_POSITIONS)
            self._adjuster = LogitAdjuster(
                most, logits.shape[1], self._device, 0 if self._part is None else self._part.first
            )
        return self._adjuster.adjust(logits, asked)

    def remember(self, tokens: StepTokens, needs: torch.Tensor, history: TokenHistory, *, counts: bool) -> None:
        """Write tokens to the history of rows that need it."""
        remember(tokens, needs, history, self._device, counts=counts)

    hold = staticmethod(hold)

    def report(
        self, logits: torch.Tensor, rows: torch.Tensor, chosen: torch.Tensor, num_reported: torch.Tensor
    ) -> TopLogprobs:
        """Return the log-probabilities of positions whose rows ask; see `Reporter`."""
        if self._reporter is None:
            most = max(self._max_positions, MAX_SCORED)
            self._reporter = Reporter(most, logits.shape[1], self._device, self._part)
        return self._reporter.report(logits, rows, chosen, num_reported)
