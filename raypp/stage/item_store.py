"""The first stage's embeddings of pictures, by key: put in and let go of from outside, read by its steps."""

from __future__ import annotations

import torch

from raypp.encoder.items import EncodedItem


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
