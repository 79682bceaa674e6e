"""Pictures in steps: their embeddings on the first stage, their places in prompts, and what layers are given of them.

The driver puts embeddings in and has them dropped. A stage knows of each row where images stand in its prompt, and
which rotary positions its tokens have. Deepstack rows travel with the hidden states where later stages need them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from raypp.encoder.protocol import EncodedItem
from raypp.models.decoder import Deepstack
from raypp.ops.attention import Span
from raypp.ops.host_to_device import to_device, to_device_together
from raypp.prompt_items import keys_of_array
from raypp.stage.stage_spec import StageSpec
from raypp.stage.step_batch import ItemPart, StepBatch, StepItems
from raypp.starting_rows import StartingRows


class ItemStore:
    """Holds what the driver had put here until it has it dropped.

    Decides nothing: whoever puts an item in counts the bytes, and drops it when no plan that was dispatched and not
    collected names it. `put` and `drop` may be called from another thread than the stage's own, while it steps.
    """

    def __init__(self) -> None:
        self._items: dict[bytes, EncodedItem] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._items

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: EncodedItem) -> None:
        """Take an item in; what is under its key already is replaced.

        On a GPU its rows must be complete: whoever wrote them has waited for that, or has made the stage's stream wait.
        """
        self._items[item.key] = item

    def drop(self, key: bytes) -> None:
        """Let an item go; an unknown key is ignored. Steps that have begun keep what they took."""
        self._items.pop(key, None)

    def rows(self, key: bytes) -> torch.Tensor:
        """Return an item's rows, [1 + L, N, H]; the memory stays theirs until the current stream has used it."""
        item = self._items.get(key)
        assert item is not None, f"a plan names item {key.hex()}, which nobody has put here"
        if item.rows.is_cuda:
            item.rows.record_stream(torch.cuda.current_stream(item.rows.device))
        return item.rows


@dataclass(frozen=True, eq=False)
class _Prompt:
    rope_positions: NDArray[np.int32]  # [prompt tokens, 3]; [0, 3]: as in text
    starts: list[int]
    lens: list[int]
    keys: list[bytes]


class ItemRows:
    """Tables by row: the constant behind the prompt on the device, the prompts themselves on the host."""

    def __init__(self, spec: StageSpec, device: torch.device) -> None:
        self._device = device
        self._sees_ahead = spec.items_see_ahead
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

    def rope_positions(self, batch: StepBatch) -> torch.Tensor:
        """Return the rotary positions of a step's tokens: int64 [T], and [T, 3] when tokens of images are among them.

        Of decode rows the tables say everything.
        """
        positions, offsets = batch.positions, self._offsets.index_select(0, batch.rows)
        rope = positions + (offsets if batch.has_one_token_per_row else offsets.index_select(0, batch.token_rows))
        indices: list[NDArray[np.int64]] = []
        values: list[NDArray[np.int32]] = []
        for prompt, token, start, end in self._chunks(batch):
            in_prompt = prompt.rope_positions[start:end]
            if not len(prompt.rope_positions):  # as in text
                continue
            indices.append(np.arange(token, token + len(in_prompt)))
            values.append(in_prompt)
        if not indices:
            return rope
        at, known = to_device_together((np.concatenate(indices), np.concatenate(values).astype(np.int64)), self._device)
        if not batch.plan.num_item_tokens:
            return rope.index_copy_(0, at, known[:, 0].contiguous())  # the same on every axis
        return rope.unsqueeze(1).repeat(1, 3).index_copy_(0, at, known)

    def step_items(self, batch: StepBatch) -> StepItems | None:
        """Return the step's tokens that stand for images; None when there are none."""
        if not batch.plan.num_item_tokens:
            return None
        indices: list[NDArray[np.int64]] = []
        parts: list[ItemPart] = []
        for prompt, token, start, end in self._chunks(batch):
            for first, length, key in zip(prompt.starts, prompt.lens, prompt.keys, strict=True):
                begin, stop = max(first, start), min(first + length, end)
                if begin < stop:
                    indices.append(np.arange(token + begin - start, token + stop - start))
                    parts.append(ItemPart(key, begin - first, stop - first))
        assert sum(map(len, indices)) == batch.plan.num_item_tokens, "the scheduler and the stages count differently"
        return StepItems(to_device(np.concatenate(indices), self._device), tuple(parts))

    def spans(self, batch: StepBatch) -> list[list[Span]] | None:
        """Return what of each prefill row are tokens of one image, of a model whose images are seen whole, else None.

        See `AttentionBatch.prefill_spans`. A chunk ends with no part of an image: the scheduler sees to that.
        """
        if not self._sees_ahead or not batch.plan.num_item_tokens:
            return None
        first, plan, spans = batch.num_decode_rows, batch.plan, list[list[Span]]()
        rows, starts = plan.rows[first:].tolist(), plan.num_computed_tokens[first:].tolist()
        for row, start, count in zip(rows, starts, batch.prefill_query_lens, strict=True):
            prompt, of_row = self._prompts.get(row), list[Span]()
            for at, length in () if prompt is None else zip(prompt.starts, prompt.lens, strict=True):
                if at < start + count and start < at + length:
                    assert at + length <= start + count, "a chunk ends within an image that is seen whole"
                    of_row.append((max(0, at - start), at + length - start))
            spans.append(of_row)
        return spans

    def _chunks(self, batch: StepBatch) -> list[tuple[_Prompt, int, int, int]]:
        """Return prompt, first token in the step, and first and last position, of chunks of prompts with images.

        What a chunk recomputes behind the prompt, after a preemption, the caller cuts off.
        """
        if batch.is_decode or not self._prompts:
            return []
        first, plan = batch.num_decode_rows, batch.plan
        chunks, token = [], first * batch.query_len
        rows, starts = plan.rows[first:].tolist(), plan.num_computed_tokens[first:].tolist()
        for row, start, count in zip(rows, starts, batch.prefill_query_lens, strict=True):
            if row in self._prompts:
                chunks.append((self._prompts[row], token, start, start + count))
            token += count
        return chunks


def place_items(
    hidden: torch.Tensor, items: StepItems, store: ItemStore, embed_items: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, Deepstack | None]:
    """Put embeddings in the place of placeholders; return what enters the layers, [T, H], and the rows for deepstack.

    Args:
        hidden: The embedded tokens, [T, H]; is overwritten.
        items: The step's.
        store: Has their embeddings.
        embed_items: The model's; see `StageModel`.
    """
    rows = torch.cat([store.rows(part.key)[:, part.start : part.end] for part in items.parts], dim=1)
    hidden.index_copy_(0, items.token_indices, embed_items(rows[0].to(hidden.dtype)))
    return hidden, Deepstack(items.token_indices, rows[1:], first_layer=0) if len(rows) > 1 else None


def carried_rows(deepstack: Deepstack, num_carried: int) -> torch.Tensor:
    """Return the last `num_carried` layers' rows as they travel, [M, num_carried, H]."""
    return deepstack.rows[len(deepstack.rows) - num_carried :].transpose(0, 1)


def received_deepstack(items: StepItems, carried: torch.Tensor, num_layers: int) -> Deepstack:
    """Return what the stage before has sent.

    Args:
        items: The step's.
        carried: [M, num_carried, H].
        num_layers: Leading layers of the model that take rows; the last of them were carried.
    """
    return Deepstack(items.token_indices, carried.transpose(0, 1), first_layer=num_layers - carried.shape[1])
