"""An encoder as unlike Qwen3-VL's as the protocol allows, and exact: it computes with small integers.

Like an audio encoder it pools patches in threes, the last group of an item being shorter, so that tokens and patches
are in no fixed proportion. Every token also gets the sum over its item, by segment ids in place of prefix sums: an item
that saw its neighbours, or the padding, comes out wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from raypp.encoder.protocol import BatchShape, BudgetRange, EncodedItem, EncoderGraphConfig, Per, TensorSpec
from raypp.prompt_items import EncoderItem

POOL = 3
PATCH_DIM = 4
HIDDEN = 5
NUM_TAPS = 2


def toy_item(num_patches: int, seed: int = 0) -> EncoderItem:
    patches = np.random.default_rng(seed).integers(0, 50, (num_patches, PATCH_DIM), np.uint8)
    return EncoderItem.of(patches, (num_patches, 1, 1), -(-num_patches // POOL))


@dataclass
class ToyBatch:
    sound: torch.Tensor  # [P, PATCH_DIM]
    token_of_patch: torch.Tensor  # [P]
    item_of_token: torch.Tensor  # [T]
    items: list[EncoderItem]


class ToyTower:
    def __init__(self, min_tokens: int = 2, max_tokens: int = 24, device: str = "cpu") -> None:
        self._range = BudgetRange(min_tokens, max_tokens)
        self._weight = (torch.arange(PATCH_DIM * HIDDEN).reshape(PATCH_DIM, HIDDEN) % 7 - 3.0).to(device)
        self._device = torch.device(device)
        self.num_eager = 0

    def graph_config(self) -> EncoderGraphConfig:
        return EncoderGraphConfig(
            patches_per_token=POOL,
            inputs=(
                TensorSpec("sound", torch.uint8, Per.PATCH, (PATCH_DIM,)),
                TensorSpec("token_of_patch", torch.int64, Per.PATCH),
                TensorSpec("item_of_token", torch.int64, Per.TOKEN),
                TensorSpec("items", torch.float32, Per.ITEM, (HIDDEN,), extra_rows=1),
            ),
        )

    def budget_range(self) -> BudgetRange:
        return self._range

    def select_items(self, items: Sequence[EncoderItem], indices: Sequence[int]) -> ToyBatch:
        chosen = [items[index] for index in indices]
        starts = np.cumsum([0, *(item.num_tokens for item in chosen)])
        token_of_patch = [start + np.arange(len(i.patches)) // POOL for i, start in zip(chosen, starts, strict=False)]
        return ToyBatch(
            sound=torch.from_numpy(np.concatenate([item.patches for item in chosen])),
            token_of_patch=torch.from_numpy(np.concatenate(token_of_patch)),
            item_of_token=torch.repeat_interleave(torch.tensor([item.num_tokens for item in chosen])),
            items=chosen,
        )

    def capture_batch(self, shape: BatchShape, num_items: int = 1) -> ToyBatch:
        each, left = divmod(shape.num_tokens, num_items)
        items = [toy_item((each + (index < left)) * POOL) for index in range(num_items)]
        return self.select_items(items, range(num_items))

    def replay_values(self, batch: ToyBatch, shape: BatchShape) -> Mapping[str, torch.Tensor]:
        num_patches, num_tokens = len(batch.sound), len(batch.item_of_token)
        padded_patches = shape.num_tokens * POOL - num_patches
        # Without a spare token, left-over patches still need one that is nobody's: it is dropped from the output.
        return {
            "sound": batch.sound,
            "token_of_patch": torch.cat([batch.token_of_patch, torch.full((padded_patches,), shape.num_tokens)]),
            "item_of_token": torch.cat(
                [batch.item_of_token, torch.full((shape.num_tokens - num_tokens,), shape.max_items)]
            ),
            "items": torch.zeros(shape.max_items + 1, HIDDEN),
        }

    def captured_forward(self, inputs: Mapping[str, torch.Tensor], shape: BatchShape) -> torch.Tensor:
        return self._forward(
            inputs["sound"], inputs["token_of_patch"], inputs["item_of_token"], inputs["items"], shape.num_tokens
        )

    def eager_forward(self, batch: ToyBatch) -> torch.Tensor:
        self.num_eager += 1
        on = self._device
        return self._forward(
            batch.sound.to(on),
            batch.token_of_patch.to(on),
            batch.item_of_token.to(on),
            torch.zeros(len(batch.items), HIDDEN, device=on),
            len(batch.item_of_token),
        )

    def split_output(self, output: torch.Tensor, batch: ToyBatch) -> list[EncodedItem]:
        encoded, start = [], 0
        for item in batch.items:
            end = start + item.num_tokens
            encoded.append(EncodedItem(item.key, output[:, start:end].clone()))
            start = end
        return encoded

    def _forward(
        self,
        sound: torch.Tensor,
        token_of_patch: torch.Tensor,
        item_of_token: torch.Tensor,
        items: torch.Tensor,
        num_tokens: int,
    ) -> torch.Tensor:
        hidden = sound.to(torch.float32) @ self._weight
        tokens = torch.zeros(num_tokens + 1, HIDDEN, device=hidden.device)
        tokens = tokens.index_add(0, token_of_patch, hidden)[:num_tokens]
        items = items.index_add(0, item_of_token, tokens)
        mixed = tokens + 2 * items[item_of_token]
        return torch.stack([mixed, tokens, -mixed])
