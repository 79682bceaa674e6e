"""Pictures in a step: from the first stage's embeddings to what its layers, and those of other stages, are given."""

from __future__ import annotations

import torch

from raypp.models.decoder import Deepstack
from raypp.stage.item_rows import StepItems
from raypp.stage.item_store import ItemStore


def place_items(hidden: torch.Tensor, items: StepItems, store: ItemStore) -> tuple[torch.Tensor, Deepstack | None]:
    """Put embeddings in the place of placeholders; return the hidden states, [T, H], and the rows for deepstack.

    Shapes: hidden [T, H], the embedded tokens; is overwritten.
    """
    rows = torch.cat([store.rows(part.key)[:, part.start : part.end] for part in items.parts], dim=1)
    hidden.index_copy_(0, items.token_indices, rows[0].to(hidden.dtype))
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
