"""What a stage knows of the pictures in its rows' prompts: where their tokens stand, and rotary positions along axes.

A row without pictures has the same position on every axis, its index. Behind a picture all three are its index plus a
constant, so only tokens of pictures need three numbers, and a decode step never does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from raypp.messages import StepPlan
from raypp.ops.host_to_device import to_device, to_device_together
from raypp.prompt_items import keys_of_array
from raypp.stage.spec import StageSpec
from raypp.stage.step_shape import StepShape
from raypp.starting_rows import StartingRows


@dataclass(frozen=True)
class ItemPart:
    """The part of an item whose tokens a step computes."""

    key: bytes
    start: int  # of the item's tokens
    end: int  # exclusive


@dataclass(frozen=True, eq=False)
class StepItems:
    """The tokens of a step that stand for pictures. M of them."""

    token_indices: torch.Tensor  # [M] int64, ascending
    parts: tuple[ItemPart, ...]  # whose they are, in order


@dataclass(frozen=True, eq=False)
class _Prompt:
    rope_positions: NDArray[np.int32]  # [prompt tokens, 3]
    starts: list[int]
    lens: list[int]
    keys: list[bytes]


class ItemRows:
    """Tables by row: the constant behind the prompt on the device, the prompts themselves on the host."""

    def __init__(self, spec: StageSpec, device: torch.device) -> None:
        self._device = device
        self._offsets = torch.zeros(spec.max_num_seqs, dtype=torch.int64, device=device)
        self._prompts: dict[int, _Prompt] = {}

    def start(self, starting: StartingRows) -> None:
        """Take over rows that start."""
        offsets = dict.fromkeys(starting.rows_np.tolist(), 0)
        for row in offsets:
            self._prompts.pop(row, None)
        items = starting.items
        if items is not None:
            position_ends, item_ends = np.cumsum(items.num_positions), np.cumsum(items.num_items)
            keys = keys_of_array(items.item_keys)
            for index, row in enumerate(items.rows.tolist()):
                of_row = slice(item_ends[index] - items.num_items[index], item_ends[index])
                first = position_ends[index] - items.num_positions[index]
                offsets[row] = int(items.position_offsets[index])
                self._prompts[row] = _Prompt(
                    items.rope_positions[first : position_ends[index]],
                    items.item_starts[of_row].tolist(),
                    items.item_lens[of_row].tolist(),
                    keys[of_row],
                )
        self._offsets.index_copy_(0, starting.rows, to_device(np.array([*offsets.values()]), self._device))

    def rope_positions(self, shape: StepShape, plan: StepPlan | None, positions: torch.Tensor) -> torch.Tensor:
        """Return the rotary positions of a step's tokens: int64 [T], and [T, 3] when tokens of pictures are among them.

        Without a plan all rows decode: what is said of them is in the tables. Shapes: positions [T] int64, the tokens'
        indices in their rows.
        """
        offsets = self._offsets.index_select(0, shape.rows)
        rope = positions + (offsets if shape.has_one_token_per_row else offsets.index_select(0, shape.token_rows))
        if plan is None:
            return rope
        indices: list[NDArray[np.int64]] = []
        values: list[NDArray[np.int32]] = []
        for prompt, token, start, end in self._chunks(shape, plan):
            in_prompt = prompt.rope_positions[start:end]
            indices.append(np.arange(token, token + len(in_prompt)))
            values.append(in_prompt)
        if not indices:
            return rope
        at, known = to_device_together((np.concatenate(indices), np.concatenate(values).astype(np.int64)), self._device)
        if not plan.num_item_tokens:
            return rope.index_copy_(0, at, known[:, 0].contiguous())  # the same on every axis
        return rope.unsqueeze(1).repeat(1, 3).index_copy_(0, at, known)

    def step_items(self, shape: StepShape, plan: StepPlan) -> StepItems | None:
        """Return the step's tokens that stand for pictures; None when there are none."""
        if not plan.num_item_tokens:
            return None
        indices: list[NDArray[np.int64]] = []
        parts: list[ItemPart] = []
        for prompt, token, start, end in self._chunks(shape, plan):
            for first, length, key in zip(prompt.starts, prompt.lens, prompt.keys, strict=True):
                begin, stop = max(first, start), min(first + length, end)
                if begin < stop:
                    indices.append(np.arange(token + begin - start, token + stop - start))
                    parts.append(ItemPart(key, begin - first, stop - first))
        assert sum(map(len, indices)) == plan.num_item_tokens, "the scheduler and the stages count differently"
        return StepItems(to_device(np.concatenate(indices), self._device), tuple(parts))

    def _chunks(self, shape: StepShape, plan: StepPlan) -> list[tuple[_Prompt, int, int, int]]:
        """Return prompt, first token in the step, and first and last position, of chunks of prompts with pictures.

        What a chunk recomputes behind the prompt, after a preemption, is left to whoever clips to the prompt.
        """
        if not self._prompts:
            return []
        chunks, token = [], shape.num_decode_rows * shape.decode_query_len
        first = shape.num_decode_rows
        rows, starts = plan.rows[first:].tolist(), plan.num_computed_tokens[first:].tolist()
        for row, start, count in zip(rows, starts, shape.prefill_query_lens, strict=True):
            if row in self._prompts:
                chunks.append((self._prompts[row], token, start, start + count))
            token += count
        return chunks
