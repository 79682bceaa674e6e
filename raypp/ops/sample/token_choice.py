"""The choice of tokens as the last stage's sampler calls it: the protocol, and plain torch for any device.

`raypp.ops.cuda.kernel_token_choice` does it by kernels.

A draw is the argmax of `logits / temperature + Gumbel noise`, which has exactly the softmax distribution (the
Gumbel-max trick, E. J. Gumbel 1954). The noise is a pure function of (seed, position, token id): not of the batch, not
of the row, not of whether the token was drafted. So a request's text depends on its own seed alone. The bits are
SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): each (seed, position) is a stream, the token id its index.

R rows, V vocabulary.
"""

from __future__ import annotations

from functools import cache, reduce
from typing import NamedTuple, Protocol

import torch

from raypp.ops.row_tokens import StepTokens
from raypp.ops.sample.adjust import adjusted
from raypp.ops.sample.draw_sizes import MAX_REPORTED
from raypp.ops.sample.tables import AdjustedLogits, Adjustments, RowTables, StepMasks, hold
from raypp.ops.sample.token_history import TokenHistory
from raypp.ops.sample.truncation import Truncation, may_draw
from raypp.ops.sample.vocabulary_part import VocabularyPart


class TopLogprobs(NamedTuple):
    """Log-probabilities at N positions: column 0 is the chosen token, then the L most likely ones, best first."""

    token_ids: torch.Tensor  # [N, 1 + L] int32
    logprobs: torch.Tensor  # [N, 1 + L] float32
    ranks: torch.Tensor  # [N] int32, of the chosen token; 1 is the most likely

    def packed(self) -> torch.Tensor:
        """Return all of it side by side, int32 [N, 2 * (1 + L) + 1]: one copy brings it to the host."""
        return torch.cat((self.token_ids, self.logprobs.view(torch.int32), self.ranks.unsqueeze(1)), dim=1)


def top_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, num_top: int, part: VocabularyPart | None = None
) -> TopLogprobs:
    """Return the log-softmax of the logits at the chosen tokens and at the most likely ones.

    Shapes: logits [N, V], [N, C] of a part, left as they are; chosen [N] int64; num_top: L <= V. Never synchronizes
    with the host.
    """
    logits = logits.to(torch.float32)
    if part is not None:
        chosen_logits, top = part.chosen(logits, chosen), logits.topk(min(num_top, logits.shape[1]), dim=1)
        num_likelier = (logits > chosen_logits).sum(dim=1, dtype=torch.int32)
        normalizers = logits.logsumexp(dim=1, keepdim=True)
        return top_of_members(chosen, chosen_logits, normalizers, *top, num_likelier, part, num_top)
    normalizer = logits.logsumexp(dim=1, keepdim=True)
    chosen = chosen.unsqueeze(1)
    chosen_logits = logits.gather(1, chosen)
    ranks = (logits > chosen_logits).sum(dim=1, dtype=torch.int32) + 1
    top = logits.topk(num_top, dim=1)
    return TopLogprobs(
        token_ids=torch.cat((chosen, top.indices), dim=1).to(torch.int32),
        logprobs=torch.cat((chosen_logits, top.values), dim=1).sub_(normalizer),
        ranks=ranks,
    )


def top_of_members(
    chosen: torch.Tensor,
    chosen_logits: torch.Tensor,
    normalizers: torch.Tensor,
    values: torch.Tensor,
    places: torch.Tensor,
    num_likelier: torch.Tensor,
    part: VocabularyPart,
    num_top: int | None = None,
) -> TopLogprobs:
    """Return log-probabilities of what each member has found among its logits.

    Args:
        chosen: [N] int64.
        chosen_logits: [N, 1] float32.
        normalizers: [N, 1] float32, of this member's logits.
        values: [N, L] float32, its highest logits.
        places: [N, L], where they are.
        num_likelier: [N] int32, how many of its tokens are likelier than the chosen one.
        part: Its tokens.
        num_top: How many of the most likely tokens there are; None: L.
    """
    num_positions, width = values.shape
    token_ids = (places + part.first).to(torch.int32)
    bits = (normalizers.view(torch.int32), values.contiguous().view(torch.int32))
    of_all = part.members.gathered(torch.cat((*bits, num_likelier.unsqueeze(1), token_ids), 1))
    sums, of_parts, counts, ids = of_all.split((1, width, 1, width), 2)
    first, *others = sums.contiguous().view(torch.float32)
    normalizer = reduce(torch.logaddexp, others, first)  # in one order, however many positions there are
    of_parts, ids = (each.transpose(0, 1).reshape(num_positions, -1) for each in (of_parts, ids))
    best = of_parts.view(torch.float32).topk(width if num_top is None else num_top, dim=1)
    return TopLogprobs(
        token_ids=torch.cat((chosen.to(torch.int32).unsqueeze(1), ids.gather(1, best.indices)), dim=1),
        logprobs=torch.cat((chosen_logits, best.values), dim=1).sub_(normalizer),
        ranks=counts.sum(dim=0, dtype=torch.int32).squeeze(1) + 1,
    )


_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
_LOW_32 = 0xFFFFFFFF
_BELOW_ONE = 1.0 - 2.0**-24


def _shift_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Return the logical shift of signed 64-bit integers, whose own `>>` copies the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    return bits ^ _shift_right(bits, 31)


@cache
def _stream_offsets(first: int, end: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(1 + first, 1 + end, dtype=torch.int64, device=device) * _GOLDEN).unsqueeze(0)


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, num_tokens: int, first: int = 0) -> torch.Tensor:
    """Return standard Gumbel noise of the tokens from `first` on, float32 [R, num_tokens].

    Shapes: seeds [R] int64; positions [R] int64, the absolute position of the token that is being chosen.
    """
    keys = _mix(_mix(seeds + _GOLDEN) + (positions + 1) * _GOLDEN).unsqueeze(1)
    bits = _mix(keys + _stream_offsets(first, first + num_tokens, seeds.device)) & _LOW_32
    # The winner's uniform lies near 0, where float32 is finest: -log1p(-u) keeps its 32 bits.
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def mask_truncated(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    truncation: Truncation,
    part: VocabularyPart | None = None,
    highest: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return tempered logits, with those of tokens that may not be drawn at -inf.

    Shapes: see `draw_scores`. Rows of temperature 0 are not truncated.
    """
    is_greedy, logits = temperature == 0, logits.to(torch.float32)
    highest = logits.amax(dim=-1) if highest is None else highest
    given = (logits, highest, torch.where(is_greedy, 1.0, temperature), truncation)
    kept = may_draw(*given) if part is None else may_draw(*given, part.total)
    return temper(logits, temperature, highest).masked_fill_(~(kept | is_greedy.unsqueeze(1)), -torch.inf)


def sample_greedy(logits: torch.Tensor, part: VocabularyPart | None = None) -> torch.Tensor:
    """Return each row's most likely token, int64 [R]; -1 where logits are not finite. Shapes: see `draw_scores`."""
    highest, tokens = _best(logits, part)
    return tokens.masked_fill_(~(highest < torch.inf), -1)


def temper(logits: torch.Tensor, temperature: torch.Tensor, highest: torch.Tensor | None = None) -> torch.Tensor:
    """Return float32 logits divided by their row's temperature, the highest 0; of rows of temperature 0 only shifted.

    Shapes: logits [R, V]; temperature [R] float32; highest [R], the rows' highest logits, if others are to be shifted.
    """
    logits = logits.to(torch.float32)
    highest = logits.amax(dim=-1) if highest is None else highest
    logits = logits - highest.unsqueeze(1)  # so that a tiny temperature cannot overflow
    return logits / torch.where(temperature == 0, 1.0, temperature).unsqueeze(1)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    truncation: Truncation | None = None,
    part: VocabularyPart | None = None,
) -> torch.Tensor:
    """Draw each row's token from its tempered, truncated distribution; rows of temperature 0 take the most likely one.

    Shapes: see `draw_scores`. Returns: int64 [R], -1 where logits are not finite. Never synchronizes with the host.
    """
    highest, _ = _best(logits, part)
    scores = draw_scores(logits, temperature, seeds, positions, truncation, part, highest)
    _, tokens = _best(scores, part)
    return tokens.masked_fill_(~(highest < torch.inf), -1)


def _best(values: torch.Tensor, part: VocabularyPart | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's largest value and its token, the lowest of equals, both [R]."""
    return values.max(dim=-1) if part is None else part.best(values)


def draw_scores(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    truncation: Truncation | None = None,
    part: VocabularyPart | None = None,
    highest: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the scores of a draw, float32 [R, V], whose largest wins: tempered, truncated logits with noise.

    Shapes: logits [R, V], [R, C] of a part; temperature [R] float32; seeds, positions [R] int64; truncation, or None
    when no row truncates; highest [R], the rows' highest logits of all parts, if there are any. No noise where the
    temperature is 0.
    """
    first = 0 if part is None else part.first
    if truncation is None:
        logits = temper(logits, temperature, highest)
    else:
        logits = mask_truncated(logits, temperature, truncation, part, highest)
    noise = gumbel_noise(seeds, positions, logits.shape[1], first)
    return logits + noise.masked_fill_((temperature == 0).unsqueeze(1), 0.0)


class TokenChoice(Protocol):
    """Chooses tokens from logits; never waits for the device. N positions, V vocabulary.

    Where a stage has members, each is given its part of the logits, and all choose the same tokens.
    """

    def adjust(self, logits: torch.Tensor, asked: Adjustments) -> AdjustedLogits:
        """Do to the logits what rows and masks ask for; see `raypp.ops.sample.adjust.adjusted`. The model's own stay.

        What it returns is valid until the next call.

        Shapes: logits [N, V]; N at most `draw_sizes.MAX_CHANGED_POSITIONS`.
        """

    def remember(self, tokens: StepTokens, needs: torch.Tensor, history: TokenHistory, *, counts: bool) -> None:
        """Write tokens to the history of at least those rows whose needs ask for it.

        Args:
            tokens: What rows have generated, or drafts.
            needs: By row; see `RowTables`.
            history: Where to.
            counts: Whether they are counted, or only among the last tokens.
        """

    def hold(
        self, tokens: StepTokens, masks: StepMasks, table: torch.Tensor, draft_table: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Let each row under a grammar keep at most as many tokens as it has masks for; return the rows' lengths.

        See `raypp.ops.sample.tables.hold`.
        """

    def report(
        self, logits: torch.Tensor, rows: torch.Tensor, chosen: torch.Tensor, num_reported: torch.Tensor
    ) -> TopLogprobs:
        """Return the log-probabilities of the chosen tokens and of the most likely ones, valid until the next call.

        Of a position whose row asks for n of the most likely, columns 0 to n count; of others, nothing does.

        Shapes: logits [N, V], the model's own; rows, chosen [N] int64; num_reported by row, int32: 1 + n, at most
        1 + `draw_sizes.MAX_REPORTED`; 0 for rows that do not ask.
        """

    def greedy(self, logits: AdjustedLogits) -> torch.Tensor:
        """Return each position's most likely token, the lowest of equals, int64 [N]. Shapes: logits [N, V]."""

    def draw(
        self,
        logits: AdjustedLogits,
        rows: torch.Tensor,
        positions: torch.Tensor,
        tables: RowTables,
        *,
        truncates: bool = True,
    ) -> torch.Tensor:
        """Return a draw per position, int64 [N]; see `raypp.ops.sample.token_choice.sample`, whose draws these are.

        Shapes: logits [N, V]; rows, positions [N] int64. `truncates` says whether any row does: kernels find that out
        row by row, torch does it for all.
        """


class TorchTokenChoice:
    """See `TokenChoice`.

    Args:
        part: Whose logits are given; None: all are.
    """

    def __init__(self, part: VocabularyPart | None = None) -> None:
        self._part = part

    def adjust(self, logits: torch.Tensor, asked: Adjustments) -> AdjustedLogits:
        """Do what needs and masks say to all rows."""
        return AdjustedLogits(adjusted(logits, asked, self._part))

    def remember(self, tokens: StepTokens, needs: torch.Tensor, history: TokenHistory, *, counts: bool) -> None:
        """Write tokens to the history of all rows."""
        history.remember(tokens, counts=counts)

    hold = staticmethod(hold)

    def report(
        self, logits: torch.Tensor, rows: torch.Tensor, chosen: torch.Tensor, num_reported: torch.Tensor
    ) -> TopLogprobs:
        """Return the log-probabilities of all rows, as many as any may ask for."""
        vocab_size = logits.shape[1] if self._part is None else self._part.vocab_size
        return top_logprobs(logits, chosen, min(MAX_REPORTED, vocab_size), self._part)

    def greedy(self, logits: AdjustedLogits) -> torch.Tensor:
        """Return each position's most likely token."""
        return sample_greedy(logits.own, self._part)

    def draw(
        self,
        logits: AdjustedLogits,
        rows: torch.Tensor,
        positions: torch.Tensor,
        tables: RowTables,
        *,
        truncates: bool = True,
    ) -> torch.Tensor:
        """Return a draw per position."""
        temperature, seeds = tables.temperature.index_select(0, rows), tables.seed.index_select(0, rows)
        truncation = None
        if truncates:
            top_k, top_p, min_p = (table.index_select(0, rows) for table in (tables.top_k, tables.top_p, tables.min_p))
            truncation = top_k, top_p, min_p
        return sample(logits.own, temperature, seeds, positions, truncation, self._part)
