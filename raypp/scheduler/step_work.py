"""What a step has to do, counted: what its time is predicted from, and what it is compared with afterwards."""

from __future__ import annotations

from typing import NamedTuple

from raypp.messages import Bools, Int32s


class StepWork(NamedTuple):
    """The work of one step, the same on every stage. Lengths of decode rows are upper bounds."""

    num_decode_rows: int = 0
    num_decode_tokens: int = 0
    """1 + K of each decode row."""
    num_decode_kv: int = 0
    """Tokens whose KV the decode rows read."""
    num_prompt_tokens: int = 0
    num_prompt_kv: int = 0
    """Tokens whose KV the prompt chunks read, their own included."""
    num_prompt_pairs: int = 0
    """Pairs of a token of a chunk and one that it attends to, itself included."""
    num_logits: int = 0
    """Tokens whose successor is chosen."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return self.num_decode_tokens + self.num_prompt_tokens


def prompt_pairs(start: int, num_tokens: int) -> int:
    """Return the pairs of a token of a chunk and one that it attends to.

    Args:
        start: Tokens of the row before the chunk.
        num_tokens: Of the chunk.
    """
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


def step_work(
    num_decode_rows: int, num_scheduled_tokens: Int32s, num_computed_tokens: Int32s, samples: Bools
) -> StepWork:
    """Return the work of a plan, whose fields these are."""
    num_new = num_scheduled_tokens.astype("int64")
    ends = num_computed_tokens + num_new
    num_prompt_new, starts = num_new[num_decode_rows:], ends[num_decode_rows:] - num_new[num_decode_rows:]
    num_decode_tokens = int(num_new[:num_decode_rows].sum())
    return StepWork(
        num_decode_rows=num_decode_rows,
        num_decode_tokens=num_decode_tokens,
        num_decode_kv=int(ends[:num_decode_rows].sum()),
        num_prompt_tokens=int(num_prompt_new.sum()),
        num_prompt_kv=int(ends[num_decode_rows:].sum()),
        num_prompt_pairs=int((num_prompt_new * starts + num_prompt_new * (num_prompt_new + 1) // 2).sum()),
        num_logits=num_decode_tokens + int(samples[num_decode_rows:].sum()),
    )
