"""Which rows' states are kept for prompts that begin alike, and the copies that the next plan orders."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from raypp.messages import NO_BYTES, NO_STEP, Bytes, StateCopies, pack_inside
from raypp.scheduler.cpu_blocks import CpuBlocks


class StateSnapshots:
    """Copies of rows' states, by the keys of the last blocks whose tokens they cover; see `raypp.ops.row_state`.

    A snapshot that is made when none is free takes the place of the least recently used one. That one goes to CPU
    memory, if there is some, and comes back to a place on the device when a row begins with it.

    Args:
        num_snapshots: There are so many on the device.
        num_in_cpu_memory: Besides, there is room for so many.
    """

    def __init__(self, num_snapshots: int, num_in_cpu_memory: int = 0) -> None:
        self._snapshot_of: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._blank = list(range(num_snapshots - 1, -1, -1))
        self._num_snapshots = num_snapshots
        self._last_steps = [NO_STEP] * num_snapshots  # whose plans copied to or from them
        self._begun_with: set[bytes] = set()
        self._saved: dict[int, int] = {}  # ordered since the last plan: snapshot -> row
        self._restored: dict[int, int] = {}  # likewise, row -> snapshot
        self.in_cpu_memory = CpuBlocks(num_in_cpu_memory)
        """Snapshots that had to make room, and those that are copied back."""

    def __len__(self) -> int:
        return len(self._snapshot_of)

    def longest_prefix(self, keys: Sequence[bytes]) -> int:
        """Return the most leading blocks behind which a snapshot stands, on the device or in CPU memory."""
        for end in range(len(keys), 0, -1):
            if keys[end - 1] in self._snapshot_of or keys[end - 1] in self.in_cpu_memory:
                return end
        return 0

    def save(self, key: bytes, row: int, before: bytes | None = None) -> None:
        """Order a copy of a row's state as the last plan leaves it, unless there is one on the device.

        Args:
            key: Of the last block whose tokens it covers.
            row: Whose it is.
            before: The key of an earlier one of the row: if nobody has begun with it, it makes room first.
        """
        if key not in self._snapshot_of:
            snapshot = self._place()
            self._snapshot_of[key] = snapshot
            self._saved[snapshot] = row
        self._snapshot_of.move_to_end(key)
        if before is not None and before in self._snapshot_of and before not in self._begun_with:
            self._snapshot_of.move_to_end(before, last=False)

    def can_restore(self, key: bytes, *, beside_others: bool) -> bool:
        """Return whether a row may start with a snapshot in the next plan; else it stays until the one after that.

        Args:
            key: `longest_prefix` found it.
            beside_others: Whether the steps of other rows wait for its copy. Then a plan brings one back from CPU
                memory.
        """
        if key in self._snapshot_of:
            return True
        self.in_cpu_memory.hold([key])
        if beside_others and self.in_cpu_memory.num_ordered_in:
            return False
        return len(set(self._restored.values())) < self._num_snapshots

    def restore(self, key: bytes, row: int) -> None:
        """Order a copy of a snapshot to a row that starts with the next plan, as `can_restore` allowed."""
        if key not in self._snapshot_of:
            # Those that this plan restores were used last, and there is another one: not one of them makes room.
            snapshot = self._place()
            self._saved.pop(snapshot, None)
            self.in_cpu_memory.bring_back([key], [snapshot], self._last_steps[snapshot])
            self._snapshot_of[key] = snapshot
        self._restored[row] = self._snapshot_of[key]
        self._begun_with.add(key)
        self._snapshot_of.move_to_end(key)

    def take_copies(self, step_id: int) -> Bytes:
        """Return a packed `StateCopies` of what was ordered since the last call; nothing where nothing was.

        Args:
            step_id: Of the plan that orders them.
        """
        if not self._saved and not self._restored:
            return NO_BYTES
        for snapshot in (*self._saved, *self._restored.values()):
            self._last_steps[snapshot] = step_id
        parts = (self._saved.values(), self._saved.keys(), self._restored.values(), self._restored.keys())
        copies = StateCopies(*(np.fromiter(part, np.int32) for part in parts))
        self._saved, self._restored = {}, {}
        return pack_inside(copies)

    def _place(self) -> int:
        """Return a blank snapshot, or that of the least recently used key, which is forgotten on the device."""
        if self._blank:
            return self._blank.pop()
        key, snapshot = self._snapshot_of.popitem(last=False)
        self._begun_with.discard(key)
        if snapshot not in self._saved:  # else no step has written it
            self.in_cpu_memory.keep(key, snapshot, self._last_steps[snapshot])
        return snapshot

    def check_integrity(self) -> None:
        """Assert that every snapshot is blank or has one key."""
        used = list(self._snapshot_of.values())
        assert self._begun_with <= set(self._snapshot_of)
        assert sorted([*used, *self._blank]) == list(range(self._num_snapshots)), "a snapshot leaked, or has two keys"
        assert {*self._saved, *self._restored.values()} <= set(used), "a snapshot of a copy was given away"
        self.in_cpu_memory.check_integrity()
