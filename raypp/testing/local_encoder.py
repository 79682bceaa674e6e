"""The encoder of an engine that lives in one process: encodes at once, in the calling thread. For tests."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from raypp.driver.engine_plan import EnginePlan
from raypp.models.registry import build_encoder
from raypp.models.weights import open_weights
from raypp.prompt_items import EncoderItem, unique_items
from raypp.stage.item_store import ItemStore


class LocalEncoder:
    """Encodes items one by one with the plan's own tower, and puts them where the first stage finds them.

    Args:
        plan: Of the engine.
        store: Its first stage's. Nothing is ever dropped from it.
    """

    def __init__(self, plan: EnginePlan, store: ItemStore) -> None:
        self._store = store
        device = torch.device(plan.device)
        source = open_weights(plan.config.model.load_format, plan.model_path, plan.config.model.seed, device)
        self._model = build_encoder(plan.model, dtype=getattr(torch, plan.dtype), device=device, source=source)

    @torch.inference_mode()
    def encode(self, items: Iterable[EncoderItem]) -> None:
        """Encode those of the items that are not there yet."""
        for item in unique_items(items):
            if item.key not in self._store:
                batch = self._model.select_items([item], [0])
                for encoded in self._model.split_output(self._model.eager_forward(batch), batch):
                    self._store.put(encoded)
