"""Proposes n-gram drafts in one launch, by reading the rows' whole table. Twin: `raypp.ops.ngram.propose_ngrams`.

    program (row, part): look through a part of the row for the newest longest match -> atomic maximum over the parts
    whoever of a row's programs comes last gathers the drafts, and leaves the scratch as it found it

The launch's shape depends on nothing but sizes: rows, lengths and tokens are read on the GPU, so a CUDA graph can hold
it. A part that holds no token equal to the row's last one costs a read and a comparison; only others look further back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_N = 15
"""The longest match that a key has room for."""
MAX_WINDOW = 1 << 27
"""The widest table that a key has room for, tokens."""

_AGE_BITS = tl.constexpr(27)
_OLDEST = tl.constexpr((1 << 27) - 1)

_BLOCK = 2048  # tokens that a program compares at a time: 16 for each of 128 threads, read 16 bytes at once
_SMALL_TABLE = 1 << 20  # tokens; more programs than a GPU holds at a time only cost their start
_NUM_WARPS = 4


class NgramKernel:
    """Looks for n-grams in the rows' tokens; owns the scratch, and the outputs' fixed addresses."""

    def __init__(
        self, tokens: torch.Tensor, *, window: int, min_n: int, max_n: int, num_drafts: int, max_rows: int
    ) -> None:
        """Allocate.

        Args:
            tokens: The table, int32 [num_rows, W], position p in column p mod W.
            window: The newest tokens of a row that are searched, at most W.
            min_n: The shortest match.
            max_n: The longest run that is compared, at most MAX_N.
            num_drafts: K.
            max_rows: The most rows of one call.
        """
        assert tokens.dtype == torch.int32
        assert tokens.is_contiguous()
        assert 1 <= min_n <= max_n <= MAX_N
        assert window <= tokens.shape[1] <= MAX_WINDOW
        self._tokens = tokens
        self._window = window
        self._min_n, self._max_n, self._num_drafts = min_n, max_n, num_drafts
        # Between two launches every key is -1, no match, and every ticket 0.
        self._keys = torch.full((max_rows,), -1, dtype=torch.int32, device=tokens.device)
        self._tickets = torch.zeros(max_rows, dtype=torch.int32, device=tokens.device)
        self._drafts = torch.zeros(max_rows, num_drafts, dtype=torch.int32, device=tokens.device)
        self._num_proposed = torch.zeros(max_rows, dtype=torch.int32, device=tokens.device)

    def __call__(self, rows: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return draft_ids [R, K] int32 and num_proposed [R] int32; they are overwritten by the next call.

        Shapes: rows [R] int64, all different; lengths [R] int64, 0 for padding.
        """
        num_rows, width = len(rows), self._tokens.shape[1]
        part = _BLOCK if num_rows * width <= _SMALL_TABLE else 2 * _BLOCK
        _propose[(num_rows, triton.cdiv(width, part))](
            self._tokens,
            rows,
            lengths,
            self._keys,
            self._tickets,
            self._drafts,
            self._num_proposed,
            width,
            self._window,
            MIN_N=self._min_n,
            MAX_N=self._max_n,
            K=self._num_drafts,
            BLOCK_K=triton.next_power_of_2(self._num_drafts),
            PART=part,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )
        return self._drafts[:num_rows], self._num_proposed[:num_rows]


@triton.jit(do_not_specialize_on_alignment=["rows", "lengths"])  # an element per program
def _propose(
    tokens,
    rows,
    lengths,
    keys,
    tickets,
    drafts,
    num_proposed,
    width,
    window,
    MIN_N: tl.constexpr,
    MAX_N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index, part = tl.program_id(0), tl.program_id(1)
    text = tokens + tl.load(rows + index).to(tl.int64) * width
    length = tl.load(lengths + index).to(tl.int32)
    known = tl.minimum(length, window)
    last_column = (tl.maximum(length, 1) - 1) % width
    last = tl.load(text + last_column)

    best = tl.full((), -1, tl.int32)
    for block in tl.static_range(PART // BLOCK):
        first = part * PART + block * BLOCK
        if first < tl.minimum(length, width):
            # Whole blocks are read, for a mask at the row's length would break the 16-byte reads up.
            columns = first + tl.arange(0, BLOCK)
            alive = tl.load(text + columns, mask=columns < width, other=-1) == last
            if tl.max(alive.to(tl.int32), axis=0) > 0:
                # A token's age: 0 is the row's last one, no match of itself; from `known` on nothing is there.
                ages = last_column - columns
                ages = tl.where(ages < 0, ages + width, ages)
                alive = alive & (ages > 0) & (ages < known)
                found = alive.to(tl.int32)
                for j in tl.static_range(1, MAX_N):
                    suffix_column = last_column - j
                    suffix_column = tl.where(suffix_column < 0, suffix_column + width, suffix_column)
                    wanted = tl.load(text + suffix_column, mask=j < known, other=-1)
                    before = columns - j
                    before = tl.where(before < 0, before + width, before)
                    alive = alive & (ages + j < known)
                    alive = alive & (tl.load(text + before, mask=alive, other=-2) == wanted)
                    found += alive.to(tl.int32)
                found_keys = tl.where(found >= MIN_N, (found << _AGE_BITS) + (_OLDEST - ages), -1)
                best = tl.maximum(best, tl.max(found_keys, axis=0))

    if best != -1:
        tl.atomic_max(keys + index, best)
    ticket = tl.atomic_add(tickets + index, 1)  # releases the maximum, and acquires those of all that came before
    if ticket == tl.num_programs(1) - 1:
        key = tl.atomic_xchg(keys + index, -1)
        tl.atomic_xchg(tickets + index, 0)
        is_match = key != -1
        age = tl.where(is_match, _OLDEST - (key & _OLDEST), 1)
        places = tl.arange(0, BLOCK_K)
        # What followed the match; when the row's end is reached, once more from there.
        draft_ages = tl.where(is_match, age - 1 - places % age, 0)
        draft_columns = last_column - draft_ages
        draft_columns = tl.where(draft_columns < 0, draft_columns + width, draft_columns)
        draft_ids = tl.load(text + draft_columns)
        tl.store(drafts + index * K + places, draft_ids, mask=places < K)
        tl.store(num_proposed + index, tl.where(is_match, K, 0))
