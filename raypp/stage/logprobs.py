"""The last stage's reports of log-probabilities: of the tokens that a step yields, and of its prompt tokens.

They are of the model's own logits, whatever the sampler makes of these. A prompt's are computed slice by slice, since
the logits of a whole chunk may be larger than everything else in the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from raypp.messages import NO_BYTES, Bytes, Int32s, StartExtras, StepLogprobs, StepPlan, pack_inside
from raypp.ops.logprobs import TopLogprobs, top_logprobs
from raypp.stage.pending_result import to_host
from raypp.stage.spec import StageSpec
from raypp.stage.step_shape import StepShape

_SLICE_TOKENS = 128
"""Prompt tokens whose logits are held at a time: 78 MB in float32 for a vocabulary of 152,000."""

_NONE = -1


@dataclass(frozen=True, eq=False)
class _Prompt:
    """A row whose prompt tokens are reported."""

    token_ids: NDArray[np.int32]
    num_top: int


@dataclass(frozen=True, eq=False)
class _Report:
    """Positions of one kind, on their way to the host."""

    indices: list[int]  # which of the step's rows
    starts: list[int]
    counts: list[int]
    top: TopLogprobs


_EMPTY = _Report(
    [],
    [],
    [],
    TopLogprobs(torch.empty(0, 1, dtype=torch.int32), torch.empty(0, 1), torch.empty(0, dtype=torch.int32)),
)


def no_logprobs() -> Bytes:
    """Return the report of a step in which no row asks for any."""
    return NO_BYTES


class LogprobReporter:
    """Knows which rows ask for log-probabilities. Costs nothing in steps in which none does."""

    def __init__(self, spec: StageSpec, device: torch.device) -> None:
        self._device = device
        self._num_top_np = np.full(spec.max_num_seqs, _NONE, np.int32)
        self._prompts: dict[int, _Prompt] = {}

    def apply(self, plan: StepPlan, extras: StartExtras | None) -> None:
        """Take over what the rows that start ask for."""
        rows = plan.start_rows
        if not len(rows):
            return
        self._num_top_np[rows] = _NONE
        if self._prompts:
            for row in rows.tolist():
                self._prompts.pop(row, None)
        if extras is None:
            return
        self._num_top_np[extras.rows] = extras.num_logprobs
        num_prompt_tops = dict(zip(extras.rows.tolist(), extras.num_prompt_logprobs.tolist(), strict=True))
        ends = np.cumsum(plan.start_num_tokens)
        for index, row in enumerate(rows.tolist()):
            num_top = num_prompt_tops.get(row, _NONE)
            if num_top != _NONE:
                start = int(ends[index] - plan.start_num_tokens[index])
                token_ids = plan.start_token_ids[start : start + int(plan.start_prompt_lens[index])]
                self._prompts[row] = _Prompt(token_ids, num_top)

    def report(
        self,
        plan: StepPlan,
        shape: StepShape,
        logits: torch.Tensor,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> Callable[[], Bytes]:
        """Queue the computation; return what packs the `StepLogprobs` once a `PendingResult` made later is complete.

        Shapes: logits [N, V], as the model gave them; token_ids [N] int64, what was chosen; hidden [T, H], of all the
        step's tokens.
        """
        sampled = self._sampled(shape, logits, token_ids)
        prompt = self._prompt(plan, shape, hidden, compute_logits) if self._prompts else _EMPTY
        if not sampled.indices and not prompt.indices:
            return no_logprobs
        return partial(_packed, sampled, prompt)

    def report_decode(self, shape: StepShape, logits: torch.Tensor, token_ids: torch.Tensor) -> Callable[[], Bytes]:
        """Return the same for a step of decode rows alone."""
        sampled = self._sampled(shape, logits, token_ids)
        return partial(_packed, sampled, _EMPTY) if sampled.indices else no_logprobs

    def is_asked(self, rows: Int32s) -> bool:
        """Return whether any of these rows, int32 [R], asks for log-probabilities of its tokens."""
        return bool((self._num_top_np[rows] != _NONE).any())

    def _sampled(self, shape: StepShape, logits: torch.Tensor, token_ids: torch.Tensor) -> _Report:
        num_top = self._num_top_np[shape.logits_rows_np]
        if not len(num_top) or num_top.max() == _NONE:
            return _EMPTY
        asking = np.flatnonzero(num_top != _NONE)
        positions = torch.from_numpy(asking).to(self._device)
        top = top_logprobs(
            logits.index_select(0, positions),
            token_ids.index_select(0, positions),
            min(int(num_top.max()), logits.shape[1]),
        )
        sampled_rows = shape.rows_np[shape.sampled_np]
        indices = shape.sampled_np[self._num_top_np[sampled_rows] != _NONE].tolist()
        return _to_host(indices, [], [], [top])

    def _prompt(
        self,
        plan: StepPlan,
        shape: StepShape,
        hidden: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> _Report:
        chunks: list[tuple[int, int, int]] = []  # index of the row, first reported position, count
        parts: list[tuple[int, _Prompt, int]] = []  # first token of the step, prompt, ...
        first_token = shape.num_decode_rows * shape.decode_query_len
        for index in range(shape.num_decode_rows, shape.num_rows):
            num_tokens = int(plan.num_scheduled_tokens[index])
            prompt = self._prompts.get(int(plan.rows[index]))
            if prompt is not None:
                # The token at position p says how likely the one at p + 1 was; the last one's successor is generated.
                start = int(plan.num_computed_tokens[index]) + 1
                count = min(num_tokens, len(prompt.token_ids) - start)
                if count > 0:
                    chunks.append((index, start, count))
                    parts.append((first_token, prompt, start))
            first_token += num_tokens
        if not chunks:
            return _EMPTY
        num_top = max(prompt.num_top for _, prompt, _ in parts)
        tops = [
            self._slice(hidden, first + offset, prompt.token_ids[start + offset : start + end], num_top, compute_logits)
            for (first, prompt, start), (_, _, count) in zip(parts, chunks, strict=True)
            for offset, end in _slices(count)
        ]
        return _to_host([c[0] for c in chunks], [c[1] for c in chunks], [c[2] for c in chunks], tops)

    def _slice(
        self,
        hidden: torch.Tensor,
        first_token: int,
        token_ids: NDArray[np.int32],
        num_top: int,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> TopLogprobs:
        logits = compute_logits(hidden[first_token : first_token + len(token_ids)])
        wanted = torch.from_numpy(token_ids.astype(np.int64)).to(self._device)
        return top_logprobs(logits, wanted, min(num_top, logits.shape[1]))


def _slices(count: int) -> list[tuple[int, int]]:
    return [(start, min(start + _SLICE_TOKENS, count)) for start in range(0, count, _SLICE_TOKENS)]


def _to_host(indices: list[int], starts: list[int], counts: list[int], tops: list[TopLogprobs]) -> _Report:
    """Return a report whose copy to the host is queued, in three pieces."""
    return _Report(
        indices,
        starts,
        counts,
        TopLogprobs(
            to_host(torch.cat([top.token_ids for top in tops])),
            to_host(torch.cat([top.logprobs for top in tops])),
            to_host(torch.cat([top.ranks for top in tops])),
        ),
    )


def _packed(sampled: _Report, prompt: _Report) -> Bytes:
    return pack_inside(
        StepLogprobs(
            indices=np.array(sampled.indices, np.int32),
            token_ids=sampled.top.token_ids.numpy(),
            logprobs=sampled.top.logprobs.numpy(),
            ranks=sampled.top.ranks.numpy(),
            prompt_indices=np.array(prompt.indices, np.int32),
            prompt_starts=np.array(prompt.starts, np.int32),
            prompt_counts=np.array(prompt.counts, np.int32),
            prompt_token_ids=prompt.top.token_ids.numpy(),
            prompt_logprobs=prompt.top.logprobs.numpy(),
            prompt_ranks=prompt.top.ranks.numpy(),
        )
    )
