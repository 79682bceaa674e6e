"""The sampling parameters of running requests, in tables indexed by row, on the last stage's device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raypp.messages import StartExtras
from raypp.ops.host_to_device import to_device
from raypp.ops.row_tokens import NO_TOKEN
from raypp.ops.sample.draw_sizes import MAX_REPORTED
from raypp.ops.sample.tables import ANY_TOKEN, DrawTables, Needs, RowTables, Widths
from raypp.sampling_params import (
    MAX_BAD_WORD_SPELLINGS,
    MAX_BAD_WORD_TOKENS,
    MAX_BIASED_TOKENS,
    MAX_END_TOKENS,
)
from raypp.stage.stage_spec import StageSpec
from raypp.starting_rows import StartingRows


class SamplingRows:
    """Parameters by row, in tables of fixed width: what a request brings is limited before it gets here."""

    def __init__(self, spec: StageSpec, device: torch.device) -> None:
        rows, words = spec.max_num_seqs, -(-spec.vocab_size // 32)
        self._device = device
        self._vocab_size = spec.vocab_size

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def floats(*shape: int) -> torch.Tensor:
            return zeros(*shape, dtype=torch.float32)

        self.draws = DrawTables(
            temperature=floats(rows),
            top_k=zeros(rows),
            top_p=torch.ones(rows, device=device),
            min_p=floats(rows),
            seeds=zeros(rows, dtype=torch.int64),
        )
        self.tables = RowTables(
            needs=zeros(rows),
            bias_token_ids=zeros(rows, MAX_BIASED_TOKENS),
            bias=floats(rows, MAX_BIASED_TOKENS),
            num_biased=zeros(rows),
            repetition=torch.ones(rows, device=device),
            frequency=floats(rows),
            presence=floats(rows),
            min_lengths=zeros(rows, dtype=torch.int64),
            end_token_ids=zeros(rows, MAX_END_TOKENS).fill_(NO_TOKEN),
            bad_words=zeros(rows, MAX_BAD_WORD_SPELLINGS, MAX_BAD_WORD_TOKENS).fill_(ANY_TOKEN),
            num_bad_words=zeros(rows),
            allowed=zeros(rows, words).fill_(-1),
            num_reported=zeros(rows),
        )
        self.widths = Widths(1, 1, 1)
        """The most entries that any row has had."""
        # The host's own copy of what decides what a step does, so that no step asks the device.
        self._needs_np = np.zeros(rows, np.int32)
        self._had_extras_np = np.zeros(rows, np.bool_)

    def reserve(self) -> None:
        """Take all entries for used from now on: recordings do."""
        self.widths = Widths(MAX_BIASED_TOKENS, MAX_END_TOKENS, MAX_BAD_WORD_SPELLINGS)

    def needs(self, rows_np: NDArray[np.integer[Any]]) -> Needs:
        """Return what any of these rows needs."""
        return Needs(int(np.bitwise_or.reduce(self._needs_np[rows_np], initial=0)))

    def start(self, starting: StartingRows) -> None:
        """Take over the parameters of rows that start."""
        plan, extras, rows = starting.plan, starting.extras, starting.rows
        for name, table in vars(self.draws).items():
            table.index_copy_(0, rows, getattr(starting, name))
        truncates = (plan.start_top_p < 1) | (plan.start_top_k > 0) | (plan.start_min_p > 0)
        is_drawn = plan.start_temperature > 0
        self._needs_np[plan.start_rows] = is_drawn * int(Needs.DRAW) | (is_drawn & truncates) * int(Needs.TRUNCATE)
        if self._had_extras_np[plan.start_rows].any():
            self._clear(rows)
            self._had_extras_np[plan.start_rows] = False
        if extras is not None:
            self._apply_extras(extras)
            self._had_extras_np[extras.rows] = True
            self.tables.needs.index_copy_(0, rows, self._upload(self._needs_np[plan.start_rows]))

    def _clear(self, rows: torch.Tensor) -> None:
        tables = self.tables
        tables.repetition.index_fill_(0, rows, 1.0)
        for table in (tables.frequency, tables.presence, tables.min_lengths, tables.needs, tables.bias):
            table.index_fill_(0, rows, 0)
        for table in (tables.num_biased, tables.num_bad_words, tables.num_reported):
            table.index_fill_(0, rows, 0)
        tables.end_token_ids.index_fill_(0, rows, NO_TOKEN)
        tables.bad_words.index_fill_(0, rows, ANY_TOKEN)
        tables.allowed.index_fill_(0, rows, -1)

    def _apply_extras(self, extras: StartExtras) -> None:
        rows_np, tables = extras.rows, self.tables
        rows = self._upload(rows_np.astype(np.int64))
        for table, values in (
            (tables.repetition, extras.repetition_penalty),
            (tables.frequency, extras.frequency_penalty),
            (tables.presence, extras.presence_penalty),
            (tables.min_lengths, extras.min_lengths.astype(np.int64)),
            (tables.num_biased, extras.num_biased),
            (tables.num_bad_words, extras.num_bad_words),
            (tables.num_reported, np.minimum(1 + extras.num_logprobs, 1 + MAX_REPORTED)),
        ):
            table.index_copy_(0, rows, self._upload(values))
        is_penalized = (
            (extras.repetition_penalty != 1) | (extras.frequency_penalty != 0) | (extras.presence_penalty != 0)
        )
        for has_some, need in (
            (is_penalized, Needs.PENALTIES),
            (extras.has_grammar > 0, Needs.GRAMMAR),
            (extras.num_end_tokens > 0, Needs.MIN_TOKENS),
            (extras.num_biased > 0, Needs.BIAS),
            (extras.num_allowed > 0, Needs.ALLOWED),
            (extras.num_bad_words > 0, Needs.BAD_WORDS),
            (extras.num_logprobs >= 0, Needs.LOGPROBS),
        ):
            self._needs_np[rows_np] |= has_some * np.int32(need)
        self.widths = Widths(
            *(
                max(width, int(counts.max(initial=0)))
                for width, counts in zip(
                    astuple(self.widths), (extras.num_biased, extras.num_end_tokens, extras.num_bad_words), strict=True
                )
            )
        )
        for row, token_ids in _lists(rows_np, extras.num_end_tokens, extras.end_token_ids):
            self._set(tables.end_token_ids, row, token_ids)
        for row, indices in _lists(rows_np, extras.num_biased, np.arange(len(extras.bias))):
            # Unused places repeat an entry: torch writes all of them, in any order.
            places = np.pad(indices, (0, MAX_BIASED_TOKENS - len(indices)), mode="edge")
            self._set(tables.bias_token_ids, row, extras.bias_token_ids[places])
            self._set(tables.bias, row, extras.bias[places])
        for row, token_ids in _lists(rows_np, extras.num_allowed, extras.allowed_token_ids):
            self._set(tables.allowed, row, bitmask_of(token_ids, self._vocab_size))
        lens, ends = extras.bad_word_lens, np.cumsum(extras.bad_word_lens)
        for row, indices in _lists(rows_np, extras.num_bad_words, np.arange(len(lens))):
            words = np.full((len(indices), MAX_BAD_WORD_TOKENS), ANY_TOKEN, np.int32)
            for word, num_tokens, end in zip(words, lens[indices], ends[indices], strict=True):
                word[-num_tokens:] = extras.bad_word_token_ids[end - num_tokens : end]
            self._set(tables.bad_words, row, words)

    def _set(self, table: torch.Tensor, row: int, entries: NDArray[Any]) -> None:
        """Write a row's first entries."""
        assert len(entries) <= table.shape[1], "no more is accepted, see `raypp.sampling_params`"
        table[row, : len(entries)] = self._upload(entries)

    def _upload(self, array: NDArray[np.generic]) -> torch.Tensor:
        return to_device(array, self._device)


def bitmask_of(token_ids: NDArray[np.int32], vocab_size: int) -> NDArray[np.int32]:
    """Return the tokens as bits, int32 [ceil(vocab_size / 32)]; see `raypp.ops.sample.adjust.allow_only`."""
    is_allowed = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    is_allowed[token_ids] = True
    return np.packbits(is_allowed, bitorder="little").view("<i4")


def _lists(
    rows: NDArray[np.int32], counts: NDArray[np.int32], values: NDArray[Any]
) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield each row that has any of `values`, which lie one row after the other, and its share of them."""
    ends = np.cumsum(counts)
    for row, start, end in zip(rows.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True):
        if end > start:
            yield row, values[start:end]
