"""The numbers of a request that the choice of its tokens depends on, declared once: a column each.

    SamplingParams --scheduler/plan_builder.py--> StepPlan.start_params, a record per row that starts
                   --starting_rows.py--> the last stage's device, one copy
                   --ops/sample/tables.py--> tables by row, one operation; kernels and their twins read these

A new number is a line here, and whatever reads it. Lists (biases, bad words) travel in `raypp.messages.StartLists`.
"""

from __future__ import annotations

from enum import IntFlag
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Needs(IntFlag):
    """What a row's parameters ask of the sampler."""

    GREEDY = 0
    DRAW = 1
    TRUNCATE = 2
    BIAS = 4
    PENALTIES = 8
    MIN_TOKENS = 16
    BAD_WORDS = 32
    ALLOWED = 64
    LOGPROBS = 128
    GRAMMAR = 256
    # Those that change the logits themselves, before grammar and temperature, in this order.
    CHANGES = BIAS | PENALTIES | MIN_TOKENS | BAD_WORDS | ALLOWED
    # Those that look at earlier tokens.
    HISTORY = PENALTIES | BAD_WORDS | GRAMMAR
    ALL = DRAW | TRUNCATE | CHANGES | LOGPROBS


class Column(NamedTuple):
    """One number of each row."""

    name: str
    dtype: Literal["f4", "i4", "i8"]
    neutral: float
    """What rows have that ask for nothing."""
    needs: Needs = Needs.GREEDY
    """What any other value asks of the sampler."""
    parameter: str = ""
    """The field of `SamplingParams` that it is; empty: `scheduler/plan_builder.py` says what it is."""


COLUMNS = (
    Column("seed", "i8", 0),
    Column("temperature", "f4", 0, Needs.DRAW, "temperature"),  # 0 is greedy
    Column("top_p", "f4", 1, Needs.TRUNCATE, "top_p"),
    Column("top_k", "i4", 0, Needs.TRUNCATE, "top_k"),  # 0 keeps all
    Column("min_p", "f4", 0, Needs.TRUNCATE, "min_p"),
    Column("repetition_penalty", "f4", 1, Needs.PENALTIES, "repetition_penalty"),
    Column("frequency_penalty", "f4", 0, Needs.PENALTIES, "frequency_penalty"),
    Column("presence_penalty", "f4", 0, Needs.PENALTIES, "presence_penalty"),
    Column("min_length", "i4", 0),  # no end token is drawn for a position before this one: prompt + min_tokens
    Column("num_end_tokens", "i4", 0, Needs.MIN_TOKENS),  # 0 without min_tokens; these and the following are lists
    Column("num_biased", "i4", 0, Needs.BIAS),
    Column("num_allowed", "i4", 0, Needs.ALLOWED),  # 0 when all are
    Column("num_bad_words", "i4", 0, Needs.BAD_WORDS),
    Column("num_reported", "i4", 0, Needs.LOGPROBS),  # 1 + the most likely tokens to report; 0: nothing at all
    Column("num_prompt_reported", "i4", 0),  # the same for prompt tokens
    Column("has_grammar", "i4", 0, Needs.GRAMMAR),  # 1 for rows that choose no token without a mask
)
RowParams = NDArray[np.void]
"""Records of `DTYPE`, one per row."""
DTYPE = np.dtype([(column.name, "<" + column.dtype) for column in COLUMNS])
WORDS = tuple(column for column in COLUMNS if column.dtype != "i8")
"""The columns of four bytes each."""


def needs_of(params: RowParams) -> NDArray[np.int32]:
    """Return what each row asks of the sampler, [S] of `Needs`."""
    needs = np.zeros(len(params), np.int32)
    for column in COLUMNS:
        if column.needs:
            needs |= (params[column.name] != column.neutral) * np.int32(column.needs)
    needs[(needs & Needs.DRAW) == 0] &= ~int(Needs.TRUNCATE)  # greedy rows truncate nothing
    return needs


def words_of(params: RowParams) -> NDArray[np.int32]:
    """Return the columns of four bytes each as bits, [len(WORDS), S]."""
    words: NDArray[Any] = np.stack([np.ascontiguousarray(params[column.name]).view("<i4") for column in WORDS])
    return words
