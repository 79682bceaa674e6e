"""Changes the logits of rows that ask for it, in one pass over them. Twin: `raypp.ops.sample.adjust`.

    adjust (position, part)   copies and changes the part's logits; nothing where the row asks for nothing
    remember (row)            writes tokens to the history of a row that needs it

Each part of the vocabulary belongs to one program. It changes single tokens (biases, bans) by writing and reading them
between barriers of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from raypp.ops.cuda.kernel_launch import Device, start
from raypp.ops.row_tokens import NO_TOKEN, StepTokens
from raypp.ops.sample.adjust import BANNED
from raypp.ops.sample.tables import ANY_TOKEN, AdjustedLogits, Adjustments
from raypp.ops.sample.token_history import TokenHistory
from raypp.row_params import Needs

_TILE = 2048
_MIN_PART = 8192
_WORDS = 16  # bad words that are compared at a time

_BIAS = tl.constexpr(int(Needs.BIAS))
_PENALTIES = tl.constexpr(int(Needs.PENALTIES))
_MIN_TOKENS = tl.constexpr(int(Needs.MIN_TOKENS))
_BAD_WORDS = tl.constexpr(int(Needs.BAD_WORDS))
_ALLOWED = tl.constexpr(int(Needs.ALLOWED))
_CHANGES = tl.constexpr(int(Needs.CHANGES))
_HISTORY = tl.constexpr(int(Needs.HISTORY))
_BANNED = tl.constexpr(BANNED)
_ANY_TOKEN = tl.constexpr(ANY_TOKEN)
_NO_TOKEN = tl.constexpr(NO_TOKEN)


class LogitAdjuster:
    """Changes logits, in a buffer of its own.

    Args:
        max_positions: The most positions of a call.
        vocab_size: V.
        device: Where it runs.
        first: The token of the first logit, where a member of a stage has a part of them.
    """

    def __init__(self, max_positions: int, vocab_size: int, device: Device, first: int = 0) -> None:
        self._device = device
        self._first = first
        self._changed = torch.empty(max_positions, vocab_size, device=device.torch_device)
        self._is_changed = torch.zeros(max_positions, dtype=torch.int32, device=device.torch_device)

    def adjust(self, logits: torch.Tensor, asked: Adjustments) -> AdjustedLogits:
        """Do what each position's row and mask ask for. Shapes: logits [N, V] contiguous."""
        tables, history, masks = asked.tables, asked.history, asked.masks
        num_positions, vocab_size = logits.shape
        if not num_positions:
            return AdjustedLogits(logits)
        wanted = max(1, min(triton.cdiv(vocab_size, _MIN_PART), 4 * self._device.num_processors // num_positions))
        num_tiles = triton.cdiv(triton.cdiv(vocab_size, wanted), _TILE)
        num_parts = triton.cdiv(vocab_size, num_tiles * _TILE)
        mask_of, bitmasks = (asked.rows, tables.allowed) if masks is None else (masks.mask_of, masks.bitmasks)
        _adjust[(num_positions, num_parts)](
            logits,
            self._changed,
            self._is_changed,
            asked.rows,
            asked.positions,
            tables.needs,
            tables.bias_token_ids,
            tables.bias,
            tables.num_biased,
            tables.repetition_penalty,
            tables.frequency_penalty,
            tables.presence_penalty,
            history.output_counts,
            history.in_prompt.view(torch.uint8),
            history.tokens.table,
            history.lengths,
            tables.min_length,
            tables.end_token_ids,
            tables.bad_words,
            tables.num_bad_words,
            tables.allowed,
            mask_of,
            bitmasks,
            vocab_size,
            self._first,
            history.output_counts.shape[1],
            tables.allowed.shape[1],
            num_tiles,
            HAS_MASKS=masks is not None,
            MAX_DRAFTS=history.max_drafts,
            BIASED=tables.bias.shape[1],
            END_TOKENS=tables.end_token_ids.shape[1],
            BAD_WORDS=tables.bad_words.shape[1],
            WORD_LEN=tables.bad_words.shape[2],
            HISTORY_LEN=history.tokens.table.shape[1],
            TILE=_TILE,
            WORDS=_WORDS,
            OVERLAPS=self._device.has_dependent_launch,
            num_warps=4,
            enable_fp_fusion=False,  # a product and a sum are rounded as torch rounds them: twice
            **self._device.launch_options,
        )
        return AdjustedLogits(logits, self._changed, self._is_changed)


def remember(tokens: StepTokens, needs: torch.Tensor, history: TokenHistory, device: Device, *, counts: bool) -> None:
    """Write tokens to the history of rows that need it; see `raypp.ops.sample.token_choice.TokenChoice.remember`."""
    rows, positions, num_valid, width = tokens.rows, tokens.positions, tokens.num_valid, tokens.token_ids.shape[1]
    if not len(rows):
        return
    _remember[(len(rows),)](
        rows,
        rows.stride(0),
        positions,
        positions.stride(0),
        tokens.token_ids.contiguous(),
        rows if num_valid is None else num_valid,
        needs,
        history.tokens.table,
        history.lengths,
        history.output_counts,
        history.output_counts.shape[1],
        HAS_VALID=num_valid is not None,
        COUNTS=counts,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        HISTORY_LEN=history.tokens.table.shape[1],
        OVERLAPS=device.has_dependent_launch,
        num_warps=1,
        **device.launch_options,
    )


@triton.jit
def _is_allowed(bitmask, token, vocab_size):
    """Return the tokens' bits."""
    word = tl.load(bitmask + token // 32, mask=token < vocab_size, other=0)
    return ((word >> (token % 32)) & 1) != 0


@triton.jit
def _ban(changed, token, is_banned):
    logit = tl.load(changed + token, mask=is_banned, other=0.0)
    tl.store(changed + token, tl.minimum(logit, _BANNED), mask=is_banned)


# One kernel for any number of rows, wherever those begin of which a program touches an element.
@triton.jit(
    do_not_specialize=["num_tiles", "first_token"], do_not_specialize_on_alignment=["rows", "positions", "mask_of"]
)
def _adjust(
    logits,
    changed,
    is_changed,
    rows,
    positions,
    needs,
    bias_token_ids,
    bias,
    num_biased,
    repetition,
    frequency,
    presence,
    output_counts,
    in_prompt,
    last,
    lengths,
    min_lengths,
    end_token_ids,
    bad_words,
    num_bad_words,
    allowed,
    mask_of,
    bitmasks,
    vocab_size,
    first_token,
    num_tokens,
    mask_words,
    num_tiles,
    HAS_MASKS: tl.constexpr,
    MAX_DRAFTS: tl.constexpr,
    BIASED: tl.constexpr,
    END_TOKENS: tl.constexpr,
    BAD_WORDS: tl.constexpr,
    WORD_LEN: tl.constexpr,
    HISTORY_LEN: tl.constexpr,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    at, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start(OVERLAPS)
    row = tl.load(rows + at)
    need = tl.load(needs + row)
    mask = tl.full((), -1, tl.int32)
    if HAS_MASKS:
        mask = tl.load(mask_of + at)
    asks = ((need & _CHANGES) != 0) | (mask >= 0)
    if part == 0:
        tl.store(is_changed + at, asks.to(tl.int32))
    if asks:
        position = tl.load(positions + at)
        first = part * num_tiles * TILE
        end = tl.minimum(first + num_tiles * TILE, vocab_size)
        offset = tl.arange(0, TILE)
        own, out = logits + at * vocab_size, changed + at * vocab_size
        has_bias = (need & _BIAS) != 0
        if has_bias:
            for begin in range(first, end, TILE):
                token = begin + offset
                value = tl.load(own + token, mask=token < vocab_size, other=0.0)
                tl.store(out + token, value.to(tl.float32), mask=token < vocab_size)
            tl.debug_barrier()
            entry = tl.arange(0, BIASED)
            inside = entry < tl.load(num_biased + row)
            token = tl.load(bias_token_ids + row * BIASED + entry, mask=inside, other=-1) - first_token
            inside &= (token >= first) & (token < end)
            value = tl.load(out + token, mask=inside, other=0.0)
            value += tl.load(bias + row * BIASED + entry, mask=inside, other=0.0)
            tl.store(out + token, value, mask=inside)
            tl.debug_barrier()
        factor, per_count, once = tl.load(repetition + row), tl.load(frequency + row), tl.load(presence + row)
        num_uncounted = tl.minimum(position - tl.load(lengths + row), MAX_DRAFTS).to(tl.int32)
        for begin in range(first, end, TILE):
            token = begin + offset
            is_here, of_all = token < vocab_size, first_token + token
            inside = is_here & (of_all < num_tokens)
            if has_bias:
                value = tl.load(out + token, mask=is_here, other=0.0)
            else:
                value = tl.load(own + token, mask=is_here, other=0.0).to(tl.float32)
            if (need & _PENALTIES) != 0:
                count = tl.load(output_counts + row * num_tokens + of_all, mask=inside, other=0)
                for back in range(1, num_uncounted + 1):
                    drafted = tl.load(last + row * HISTORY_LEN + (position - back) % HISTORY_LEN)
                    count += (of_all == drafted).to(tl.int32)
                was_seen = (tl.load(in_prompt + row * num_tokens + of_all, mask=inside, other=0) != 0) | (count > 0)
                weakened = tl.where(value > 0.0, tl.div_rn(value, factor), value * factor)
                value = tl.where(was_seen, weakened, value)
                value = value - count.to(tl.float32) * per_count
                value = value - (count > 0).to(tl.float32) * once
            if (need & _ALLOWED) != 0:
                value = tl.where(_is_allowed(allowed + row * mask_words, of_all, num_tokens), value, -float("inf"))
            if mask >= 0:
                bits = bitmasks + mask.to(tl.int64) * mask_words
                value = tl.where(_is_allowed(bits, of_all, num_tokens), value, -float("inf"))
            tl.store(out + token, value, mask=is_here)
        if (need & (_MIN_TOKENS | _BAD_WORDS)) != 0:
            tl.debug_barrier()
        if ((need & _MIN_TOKENS) != 0) & (position < tl.load(min_lengths + row)):
            token = tl.load(end_token_ids + row * END_TOKENS + tl.arange(0, END_TOKENS)) - first_token
            _ban(out, token, (token >= first) & (token < end))
        if (need & _BAD_WORDS) != 0:
            place = tl.arange(0, WORD_LEN)
            at_place = position - (WORD_LEN - 1) + place
            is_before = (place < WORD_LEN - 1) & (at_place >= 0)
            seen = tl.load(last + row * HISTORY_LEN + at_place % HISTORY_LEN, mask=is_before, other=_NO_TOKEN)
            number = tl.load(num_bad_words + row)
            for begin in range(0, number, WORDS):
                word = begin + tl.arange(0, WORDS)
                words = bad_words + (row * BAD_WORDS + word) * WORD_LEN
                ending = tl.load(words + WORD_LEN - 1, mask=word < number, other=_ANY_TOKEN)
                ending -= first_token
                inside = (ending >= first) & (ending < end)
                tokens = tl.load(words[:, None] + place[None, :], mask=inside[:, None], other=_ANY_TOKEN)
                fits = (tokens == seen[None, :]) | (tokens == _ANY_TOKEN) | (place == WORD_LEN - 1)[None, :]
                _ban(out, ending, inside & (tl.min(fits.to(tl.int32), 1) != 0))


@triton.jit(
    do_not_specialize=["row_stride", "position_stride"],
    do_not_specialize_on_alignment=["rows", "positions", "num_valid", "needs"],  # an element per program
)
def _remember(
    rows,
    row_stride,
    positions,
    position_stride,
    token_ids,
    num_valid,
    needs,
    last,
    lengths,
    output_counts,
    vocab_size,
    HAS_VALID: tl.constexpr,
    COUNTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HISTORY_LEN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    start(OVERLAPS)
    row = tl.load(rows + at * row_stride)
    if (tl.load(needs + row) & _HISTORY) != 0:
        position = tl.load(positions + at * position_stride)
        place = tl.arange(0, BLOCK)
        inside = place < WIDTH
        token = tl.load(token_ids + at * WIDTH + place, mask=inside, other=0).to(tl.int32)
        tl.store(last + row * HISTORY_LEN + (position + place) % HISTORY_LEN, token, mask=inside)
        if COUNTS:
            count = tl.full((), WIDTH, tl.int64)
            if HAS_VALID:
                count = tl.load(num_valid + at).to(tl.int64)
            tl.store(lengths + row, position + count)
            is_counted = inside & (place < count) & (token >= 0)
            tl.atomic_add(output_counts + row * vocab_size + token, 1, mask=is_counted)
