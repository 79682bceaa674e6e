"""What is in CPU memory of a group's KV blocks, or of snapshots of states, and the copies that the next plan orders."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from raypp.messages import NO_STEP


class CopyOrders(NamedTuple):
    """Blocks of a group, or snapshots, that the next plan copies; see `BlockCopies`."""

    after: int
    out: dict[int, int]  # device block -> CPU block
    back: dict[int, int]  # likewise, the other way


class CpuBlocks:
    """Which blocks CPU memory holds, by the keys of the prefix cache, and the copies that the next plan orders.

    Snapshots of rows' states are kept likewise: their places on the device are the blocks then.

    Args:
        num_blocks: There is room for so many; 0: nothing is ever kept.
    """

    def __init__(self, num_blocks: int) -> None:
        self._block_of: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._num_blocks = num_blocks
        self._out: dict[int, int] = {}  # ordered since the last plan: device block -> CPU block
        self._in: dict[int, int] = {}  # likewise, device block -> CPU block
        self._held: set[int] = set()  # CPU blocks of ordered copies
        self._after = NO_STEP
        self.num_copied_out = 0
        """Blocks, since the start."""
        self.num_copied_in = 0

    @property
    def num_ordered_in(self) -> int:
        """Blocks that the next plan brings back."""
        return len(self._in)

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, key: object) -> bool:
        return key in self._block_of

    def keep(self, key: bytes, block: int, last_step: int) -> None:
        """Order a copy of a cached device block that is about to be overwritten, unless its content is here.

        It is lost when all room is taken by blocks of copies that the next plan orders.

        Args:
            key: Of its content.
            block: On the device.
            last_step: The last dispatched step that contains a row which had the block.
        """
        self._in.pop(block, None)  # a copy in that nobody waits for any more
        if key in self._block_of:
            self._block_of.move_to_end(key)
            return
        cpu_block = self._make_room()
        if cpu_block is None:
            return
        self._block_of[key] = cpu_block
        self._held.add(cpu_block)
        self._out[block] = cpu_block
        self._after = max(self._after, last_step)
        self.num_copied_out += 1

    def hold(self, keys: Iterable[bytes]) -> None:
        """Let these blocks stay until the next plan; they are here."""
        for key in keys:
            self._block_of.move_to_end(key)
            self._held.add(self._block_of[key])

    def bring_back(self, keys: Sequence[bytes], blocks: Sequence[int], last_step: int) -> None:
        """Order copies of held blocks to device blocks.

        Args:
            keys: Of their content.
            blocks: On the device, which nobody uses otherwise.
            last_step: The last dispatched step that contains a row which had any of these.
        """
        for key, block in zip(keys, blocks, strict=True):
            self._in[block] = self._block_of[key]
        self._after = max(self._after, last_step)
        self.num_copied_in += len(keys)

    def take_copies(self) -> CopyOrders:
        """Return what was ordered since the last call."""
        orders = CopyOrders(self._after, self._out, self._in)
        self._after, self._out, self._in = NO_STEP, {}, {}
        self._held.clear()
        return orders

    def check_integrity(self) -> None:
        """Assert that every CPU block is blank or holds one content, and that no batch uses one for two things."""
        used = list(self._block_of.values())
        assert sorted([*used, *self._blank]) == list(range(self._num_blocks)), "a CPU block leaked, or is used twice"
        out = list(self._out.values())
        assert len(out) == len(set(out)), "two copies to one CPU block"
        assert {*out, *self._in.values()} <= self._held <= set(used), "a CPU block of a batch was given away"

    def _make_room(self) -> int | None:
        if self._blank:
            return self._blank.pop()
        # What is held was used last, so if the first is, all are.
        key = next(iter(self._block_of), None)
        if key is None or self._block_of[key] in self._held:
            return None
        return self._block_of.pop(key)
