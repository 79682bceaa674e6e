"""The sampling parameters of running requests, in tables indexed by row, on the last stage's device."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntFlag
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raypp.messages import StartExtras, StepPlan
from raypp.ops.host_to_device import to_device, to_device_together
from raypp.ops.logits import ANY_TOKEN, NO_TOKEN
from raypp.request_limits import MAX_BAD_WORD_TOKENS
from raypp.stage.sampler_sizes import BAD_WORDS, BIASED_TOKENS, END_TOKENS
from raypp.stage.spec import StageSpec
from raypp.stage.wide_table import WideTable


class Needs(IntFlag):
    """What a row's parameters ask of the sampler. A step does what any of its rows needs, neutrally for the others."""

    GREEDY = 0
    DRAW = 1
    TRUNCATE = 2
    BIAS = 4
    PENALTIES = 8
    MIN_TOKENS = 16
    BAD_WORDS = 32
    ALLOWED = 64
    GRAMMAR = 128
    CHANGES = BIAS | PENALTIES | MIN_TOKENS | BAD_WORDS | ALLOWED

    @property
    def history(self) -> bool:
        """Whether it matters what was generated before."""
        return bool(self & (Needs.PENALTIES | Needs.BAD_WORDS))

    @property
    def changes(self) -> Needs:
        """Those that change the logits themselves, before the grammar and the temperature; in their order."""
        return self & Needs.CHANGES


class SamplingRows:
    """Parameters by row. What few requests have is allocated when the first of them comes."""

    def __init__(self, spec: StageSpec, device: torch.device) -> None:
        rows = spec.max_num_seqs
        self._device = device
        self._vocab_size = spec.vocab_size
        self.temperature = torch.zeros(rows, device=device)
        self.top_p = torch.ones(rows, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.int32, device=device)
        self.min_p = torch.zeros(rows, device=device)
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self.repetition = torch.ones(rows, device=device)
        self.frequency = torch.zeros(rows, device=device)
        self.presence = torch.zeros(rows, device=device)
        self.min_lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.end_token_ids = WideTable(rows, NO_TOKEN, torch.int64, device)
        self.bias_token_ids = WideTable(rows, 0, torch.int64, device)
        self.bias = WideTable(rows, 0.0, torch.float32, device)
        self.bad_words = WideTable(rows, ANY_TOKEN, torch.int32, device, entry_len=MAX_BAD_WORD_TOKENS)
        self.allowed = WideTable(rows, -1, torch.int32, device)  # a bit per token of the vocabulary
        self._wide = {
            "end tokens": self.end_token_ids,
            "biased tokens": self.bias_token_ids,
            "bias": self.bias,
            "bad words": self.bad_words,
            "allowed tokens": self.allowed,
        }
        # The host's own copy of what decides what a step does, so that no step asks the device.
        self._needs_np = np.zeros(rows, np.uint8)
        self._had_extras_np = np.zeros(rows, np.bool_)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tables that every request has parameters in; they keep their addresses."""
        return {
            "temperatures": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "seeds": self.seeds,
        }

    def reserve(self) -> None:
        """Have all tables from now on; they keep their addresses unless a request has more entries than reserved."""
        widths = (END_TOKENS, BIASED_TOKENS, BIASED_TOKENS, BAD_WORDS, -(-self._vocab_size // 32))
        for table, width in zip(self._wide.values(), widths, strict=True):
            table.reserve(width)

    @property
    def have_moved(self) -> bool:
        """Whether any table is no longer where it was reserved."""
        return any(table.has_moved for table in self._wide.values())

    def reserved_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tables that few requests have parameters in."""
        few = {
            "repetition": self.repetition,
            "frequency": self.frequency,
            "presence": self.presence,
            "min lengths": self.min_lengths,
        }
        return few | {name: table.tensor() for name, table in self._wide.items()}

    def needs(self, rows_np: NDArray[np.integer[Any]]) -> Needs:
        """Return what any of these rows needs."""
        return Needs(int(np.bitwise_or.reduce(self._needs_np[rows_np], initial=0)))

    def apply(self, plan: StepPlan, extras: StartExtras | None) -> None:
        """Take over the parameters of the rows that start with a plan."""
        tables = (self.temperature, self.top_p, self.top_k, self.min_p, self.seeds)
        given = (plan.start_temperature, plan.start_top_p, plan.start_top_k, plan.start_min_p, plan.start_seed)
        rows, *columns = to_device_together((plan.start_rows.astype(np.int64), *given), self._device)
        for table, values in zip(tables, columns, strict=True):
            table.index_copy_(0, rows, values)
        truncates = (plan.start_top_p < 1) | (plan.start_top_k > 0) | (plan.start_min_p > 0)
        draws = plan.start_temperature > 0
        self._needs_np[plan.start_rows] = draws * np.uint8(Needs.DRAW) | (draws & truncates) * np.uint8(Needs.TRUNCATE)
        if self._had_extras_np[plan.start_rows].any():
            self._clear(rows)
            self._had_extras_np[plan.start_rows] = False
        if extras is not None:
            self._apply_extras(extras)
            self._had_extras_np[extras.rows] = True

    def _clear(self, rows: torch.Tensor) -> None:
        self.repetition.index_fill_(0, rows, 1.0)
        for table in (self.frequency, self.presence, self.min_lengths):
            table.index_fill_(0, rows, 0)
        for wide in self._wide.values():
            wide.clear(rows)

    def _apply_extras(self, extras: StartExtras) -> None:
        rows_np = extras.rows
        rows = self._upload(rows_np.astype(np.int64))
        for table, values in (
            (self.repetition, extras.repetition_penalty),
            (self.frequency, extras.frequency_penalty),
            (self.presence, extras.presence_penalty),
            (self.min_lengths, extras.min_lengths.astype(np.int64)),
        ):
            table.index_copy_(0, rows, self._upload(values))
        is_penalized = (
            (extras.repetition_penalty != 1) | (extras.frequency_penalty != 0) | (extras.presence_penalty != 0)
        )
        self._needs_np[rows_np] |= is_penalized * np.uint8(Needs.PENALTIES)
        self._needs_np[rows_np] |= (extras.has_grammar > 0) * np.uint8(Needs.GRAMMAR)
        for row, token_ids in _lists(rows_np, extras.num_end_tokens, extras.end_token_ids):
            self.end_token_ids.set(row, token_ids)
            self._needs_np[row] |= Needs.MIN_TOKENS
        for row, indices in _lists(rows_np, extras.num_biased, np.arange(len(extras.bias))):
            self.bias_token_ids.set(row, extras.bias_token_ids[indices])
            self.bias.set(row, extras.bias[indices])
            self._needs_np[row] |= Needs.BIAS
        for row, token_ids in _lists(rows_np, extras.num_allowed, extras.allowed_token_ids):
            self.allowed.set(row, bitmask_of(token_ids, self._vocab_size))
            self._needs_np[row] |= Needs.ALLOWED
        lens, ends = extras.bad_word_lens, np.cumsum(extras.bad_word_lens)
        for row, indices in _lists(rows_np, extras.num_bad_words, np.arange(len(lens))):
            words = np.full((len(indices), MAX_BAD_WORD_TOKENS), ANY_TOKEN, np.int32)
            for word, num_tokens, end in zip(words, lens[indices], ends[indices], strict=True):
                word[-num_tokens:] = extras.bad_word_token_ids[end - num_tokens : end]
            self.bad_words.set(row, words)
            self._needs_np[row] |= Needs.BAD_WORDS

    def _upload(self, array: NDArray[np.generic]) -> torch.Tensor:
        return to_device(array, self._device)


def bitmask_of(token_ids: NDArray[np.int32], vocab_size: int) -> NDArray[np.int32]:
    """Return the tokens as bits, int32 [ceil(vocab_size / 32)]; see `raypp.ops.logits.allow_only`."""
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
