"""The last stage's reports of log-probabilities: of the tokens that a step yields, and of its prompt tokens.

They are of the model's own logits, whatever the sampler makes of these. A prompt's are computed slice by slice, since
the logits of a whole chunk may be larger than everything else in the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raypp.messages import Bytes, Int32s, StepLogprobs, pack_inside
from raypp.ops.host_to_device import to_device
from raypp.ops.sample.draw_sizes import MAX_REPORTED, MAX_SCORED
from raypp.ops.sample.token_choice import TopLogprobs, top_logprobs
from raypp.stage.stage_spec import StageSpec
from raypp.stage.step_batch import StepBatch
from raypp.stage.step_end import Sampler
from raypp.stage.step_result import to_host
from raypp.starting_rows import StartingRows

_SLICE_TOKENS = MAX_SCORED
"""Prompt tokens whose logits are held at a time."""

_NONE = -1

PendingLogprobs = Callable[[], Bytes]
"""Packs a `StepLogprobs`, or nothing; to be called when a `PendingResult` that was made later is complete."""


PendingTop = Callable[[], tuple[NDArray[Any], ...]]
"""Returns the columns of `TopLogprobs` that were copied to the host; likewise."""

_NO_TOP = (np.empty((0, 1), np.int32), np.empty((0, 1), np.float32), np.empty(0, np.int32))


@dataclass(frozen=True, eq=False)
class _Prompt:
    """A row whose prompt tokens are reported."""

    token_ids: Int32s
    num_top: int


@dataclass(frozen=True, eq=False)
class _Chunk:
    """The prompt tokens that a step reports of one row."""

    index: int  # of the row in the step
    first_token: int  # of the step: the one before the first that is reported
    start: int  # position of the first that is reported
    count: int
    prompt: _Prompt

    def slices(self) -> Iterator[tuple[int, Int32s]]:
        """Yield pieces of bounded size: their first token of the step, and the tokens that follow it and the next."""
        end = self.start + self.count
        for position in range(self.start, end, _SLICE_TOKENS):
            token_ids = self.prompt.token_ids[position : min(position + _SLICE_TOKENS, end)]
            yield self.first_token + position - self.start, token_ids


class LogprobReporter:
    """Knows which rows ask for log-probabilities. Costs nothing in steps in which none does."""

    def __init__(self, spec: StageSpec, sampler: Sampler) -> None:
        """Know of no request yet.

        Args:
            spec: Of the last stage.
            sampler: Of its rows; reports where it can.
        """
        self._device = torch.device(spec.device)
        self._sampler = sampler
        self._vocab_size = spec.vocab_size
        self._num_top_np = np.full(spec.max_num_seqs, _NONE, np.int32)
        self.prompts: dict[int, _Prompt] = {}
        """By row, those whose tokens are reported."""

    def start(self, starting: StartingRows) -> None:
        """Take over what rows that start ask for."""
        rows, params = starting.rows_np.tolist(), starting.params
        self._num_top_np[starting.rows_np] = params["num_reported"] - 1
        num_prompt_tops, prompt_lens = params["num_prompt_reported"] - 1, starting.plan.start_prompt_lens
        for row in rows:
            self.prompts.pop(row, None)
        for index in np.flatnonzero(num_prompt_tops != _NONE).tolist():
            token_ids = starting.token_ids[index][: prompt_lens[index]]
            self.prompts[rows[index]] = _Prompt(token_ids, int(num_prompt_tops[index]))

    def report(
        self,
        batch: StepBatch,
        logits: torch.Tensor,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> PendingLogprobs | None:
        """Queue the report of a step; None where there is nothing to report.

        Shapes: logits [N, V], as the model gave them; token_ids [N], what was chosen; hidden [T, H], of all the step's
        tokens.
        """
        chunks = self._chunks(batch) if self.prompts else []
        sampled, scored = self._sampled(batch, logits, token_ids), self._scored(chunks, hidden, compute_logits)
        if sampled is None and scored is None:
            return None
        return _pending(self._sampled_rows(batch), sampled, chunks, scored)

    def report_full_graph(
        self, batch: StepBatch, logits: torch.Tensor, token_ids: torch.Tensor, top: torch.Tensor
    ) -> PendingLogprobs:
        """Queue the same for a full graph, which has padding; `top` is `TopLogprobs.packed` of all its positions."""
        num_positions = len(batch.logits_rows_np)
        if self._num_top_np[batch.rows_np].max() > MAX_REPORTED:
            sampled = self._sampled(batch, logits[:num_positions], token_ids[:num_positions])
            return _pending(self._sampled_rows(batch), sampled, [], None)
        asking, num_top = self._asking(batch)
        on_host = to_host(top[:num_positions])

        def of_asking() -> tuple[NDArray[Any], ...]:
            packed = on_host.numpy()[asking]
            width, num_columns = packed.shape[1] // 2, 1 + num_top
            logprobs = packed[:, width : width + num_columns].view(np.float32)
            return packed[:, :num_columns], logprobs, packed[:, -1]

        return _pending(self._sampled_rows(batch), of_asking, [], None)

    def _sampled_rows(self, batch: StepBatch) -> NDArray[np.int64]:
        """Return the rows that yield tokens and ask for their log-probabilities, as indices into the step's rows."""
        asking: NDArray[np.int64] = batch.sampled_np[self._num_top_np[batch.rows_np[batch.sampled_np]] != _NONE]
        return asking

    def _asking(self, batch: StepBatch) -> tuple[NDArray[np.int64], int]:
        """Return the positions whose rows ask, as indices into the step's logits, and the most that one asks for."""
        num_top = self._num_top_np[batch.logits_rows_np]
        return np.flatnonzero(num_top != _NONE), int(num_top.max(initial=_NONE))

    def _sampled(self, batch: StepBatch, logits: torch.Tensor, token_ids: torch.Tensor) -> PendingTop | None:
        asking, num_top = self._asking(batch)
        if not len(asking):
            return None
        positions = to_device(asking, self._device)
        chosen = token_ids.index_select(0, positions).to(torch.int64)
        num_top = min(num_top, self._vocab_size)
        asked = logits.index_select(0, positions)
        return _to_host([self._top(asked, chosen, num_top)])

    def _top(self, logits: torch.Tensor, chosen: torch.Tensor, num_top: int) -> TopLogprobs:
        """Return log-probabilities of positions. By a kernel where there is one: its sums have fixed parts."""
        if num_top > MAX_REPORTED or self._device.type == "cpu":
            return top_logprobs(logits, chosen, num_top, self._sampler.part)
        rows = torch.arange(len(chosen), device=self._device)
        counts = torch.full((len(chosen),), 1 + num_top, dtype=torch.int32, device=self._device)
        top = self._sampler.report(logits, rows, chosen, counts)  # until the next call
        return TopLogprobs(
            top.token_ids[:, : 1 + num_top].clone(), top.logprobs[:, : 1 + num_top].clone(), top.ranks.clone()
        )

    def _chunks(self, batch: StepBatch) -> list[_Chunk]:
        chunks, plan = [], batch.plan
        first_token = batch.num_decode_rows * batch.query_len
        for index in range(batch.num_decode_rows, batch.num_rows):
            num_tokens = int(plan.num_scheduled_tokens[index])
            prompt = self.prompts.get(int(plan.rows[index]))
            if prompt is not None:
                # The token at position p says how likely the one at p + 1 was; the last one's successor is generated.
                start = int(plan.num_computed_tokens[index]) + 1
                count = min(num_tokens, len(prompt.token_ids) - start)
                if count > 0:
                    chunks.append(_Chunk(index, first_token, start, count, prompt))
            first_token += num_tokens
        return chunks

    def _scored(
        self, chunks: list[_Chunk], hidden: torch.Tensor, compute_logits: Callable[[torch.Tensor], torch.Tensor]
    ) -> PendingTop | None:
        if not chunks:
            return None
        num_top, tops = max(chunk.prompt.num_top for chunk in chunks), []
        for chunk in chunks:
            for first_token, token_ids in chunk.slices():
                logits = compute_logits(hidden[first_token : first_token + len(token_ids)])
                wanted = to_device(token_ids.astype(np.int64), self._device)
                tops.append(self._top(logits, wanted, min(num_top, self._vocab_size)))
        return _to_host(tops)


def _to_host(tops: list[TopLogprobs]) -> PendingTop:
    """Queue the copies of all of them, joined."""
    on_host = [to_host(torch.cat(column)) for column in zip(*tops, strict=True)]
    return lambda: tuple(column.numpy() for column in on_host)


def _pending(
    sampled_rows: NDArray[np.int64], sampled: PendingTop | None, chunks: list[_Chunk], scored: PendingTop | None
) -> PendingLogprobs:
    return lambda: pack_inside(
        StepLogprobs(
            indices=sampled_rows.astype(np.int32),
            **_columns("", sampled),
            prompt_indices=_int32s([chunk.index for chunk in chunks]),
            prompt_starts=_int32s([chunk.start for chunk in chunks]),
            prompt_counts=_int32s([chunk.count for chunk in chunks]),
            **_columns("prompt_", scored),
        )
    )


def _columns(prefix: str, pending: PendingTop | None) -> dict[str, NDArray[Any]]:
    columns = zip(TopLogprobs._fields, _NO_TOP if pending is None else pending(), strict=True)
    return {f"{prefix}{name}": np.ascontiguousarray(column) for name, column in columns}


def _int32s(values: list[int]) -> Int32s:
    return np.array(values, np.int32)
