"""The driver's interface to encoders: orders go in, embeddings or errors come out, in any order.

The same whether they are actors or run in this process. `EncoderShares` decides which encoder encodes which item: items
wait in one queue, and free encoders get shares of equal cost. It knows no actors.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from raypp.errors import RayppError
from raypp.prompt_items import EncoderItem


@dataclass(frozen=True, slots=True)
class ItemsStored:
    """The first stage has the embeddings of these items."""

    keys: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class ItemsDropped:
    """The first stage no longer has the embeddings of these items."""

    keys: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class ItemFailed:
    """An item cannot be encoded."""

    key: bytes
    error: RayppError


ItemEvent = ItemsStored | ItemsDropped | ItemFailed


class ItemEncoders(Protocol):
    """Encoders, and their way to the first stage."""

    def encode(self, items: Sequence[EncoderItem]) -> None:
        """Have items encoded and brought to the first stage. Each ends in an event. Does not wait."""

    def drop(self, keys: Sequence[bytes]) -> None:
        """Have the first stage drop embeddings. Each ends in an event. Does not wait."""

    def poll(self) -> list[ItemEvent]:
        """Return what happened since the last call; does not wait."""

    def stats(self) -> dict[str, Any]:
        """Return figures of the encoders, as plain data; what is known without asking them.

        `encoders`: of each and of all, see `encoder_sums` for the others, which are sums.
        """


_SUMS = {
    "num_encoder_items": ("num_items",),
    "num_encoder_cache_hits": ("cache_hits",),
    "num_encoder_tokens": ("num_tokens", "num_padding_tokens"),
    "num_encoder_padding_tokens": ("num_padding_tokens",),
}


def encoder_sums(counted: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the counters of several encoders together, under the names that an engine's figures have for them.

    Args:
        counted: What each has counted, see `EncoderStats`; of one that died, what is known of its last life.
    """
    counters = list(counted)
    return {total: sum(of[name] for of in counters for name in names) for total, names in _SUMS.items()}


MAX_CALLS = 2
"""Calls of one encoder that may be under way: one that runs, and one behind it."""

MAX_ATTEMPTS = 3
"""An item whose encoders died as often as this is not tried again: it may be what kills them."""

_ATTENTION_PATCHES = 8192  # of an item, at which attention costs as much as everything else
_NUM_HOMES = 1 << 14


def cost_of(item: EncoderItem) -> float:
    """Return what encoding an item costs, in patches of a small one: attention is over all patches of the item."""
    num_patches = len(item.patches)
    return num_patches * (1 + num_patches / _ATTENTION_PATCHES)


@dataclass(eq=False)
class EncodeCall:
    """Items that an encoder was given at once."""

    encoder_index: int
    items: list[EncoderItem]
    cost: float


class EncoderShares:
    """Items to be encoded, and the encoders that are up.

    Args:
        num_encoders: All of them; none is up yet.
        max_call_items: The most items of a call. A call's embeddings are confirmed together.
    """

    def __init__(self, num_encoders: int, max_call_items: int) -> None:
        self._max_call_items = max_call_items
        self._waiting: list[EncoderItem] = []
        self._calls: list[list[EncodeCall]] = [[] for _ in range(num_encoders)]
        self.up: set[int] = set()
        """The encoders that take calls."""
        self._attempts: Counter[bytes] = Counter()
        self._homes: OrderedDict[bytes, int] = OrderedDict()  # which encoder had an item last, and may have cached it

    @property
    def num_waiting(self) -> int:
        """Items that no encoder was given yet."""
        return len(self._waiting)

    def calls_of(self, encoder_index: int) -> Sequence[EncodeCall]:
        """Return an encoder's calls under way, the oldest first."""
        return self._calls[encoder_index]

    def add(self, items: Sequence[EncoderItem]) -> None:
        """Take in items to be encoded."""
        self._waiting += items

    def note_up(self, encoder_index: int) -> None:
        """Take in that an encoder takes calls."""
        self.up.add(encoder_index)

    def note_down(self, encoder_index: int) -> list[EncoderItem]:
        """Take in that an encoder died; what it had under way waits again. Return what is not tried any more."""
        self.up.discard(encoder_index)
        lost = [item for call in self._calls[encoder_index] for item in call.items]
        self._calls[encoder_index] = []
        # Only what it had begun may be the reason.
        self._attempts.update(item.key for item in lost)
        given_up = [item for item in lost if self._attempts[item.key] >= MAX_ATTEMPTS]
        for item in given_up:
            del self._attempts[item.key]
        self._waiting = [item for item in lost if item not in given_up] + self._waiting
        return given_up

    def note_done(self, call: EncodeCall) -> bool:
        """Take in that a call has ended well; return False when its encoder was given up before."""
        calls = self._calls[call.encoder_index]
        if call not in calls:
            return False
        calls.remove(call)
        for item in call.items:
            self._attempts.pop(item.key, None)
            self._homes[item.key] = call.encoder_index
            self._homes.move_to_end(item.key)
        while len(self._homes) > _NUM_HOMES:
            self._homes.popitem(last=False)
        return True

    def give_up(self) -> list[EncoderItem]:
        """Return, and forget, all that waits: no encoder will come up again."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def assign(self) -> list[EncodeCall]:
        """Return calls to make now, which are counted as under way.

        The oldest items go first. They are shared out over the encoders that are free, the costly ones before the
        others, each to the encoder with the least to do; an item goes to the one that may have it in its cache.
        """
        free = [index for index in sorted(self.up) if len(self._calls[index]) < MAX_CALLS]
        if not free or not self._waiting:
            return []
        # An idle encoder starts at once; one that is busy gets something to do next only when none is idle.
        idle = [index for index in free if not self._calls[index]]
        takers = idle or free
        window = self._waiting[: self._max_call_items * len(takers)]
        shares: dict[int, list[EncoderItem]] = {index: [] for index in takers}
        loads = {index: sum(call.cost for call in self._calls[index]) for index in takers}
        for item in sorted(window, key=lambda item: -cost_of(item)):
            home = self._homes.get(item.key)
            open_to = [index for index in takers if len(shares[index]) < self._max_call_items]
            index = home if home in open_to else min(open_to, key=lambda index: loads[index])
            shares[index].append(item)
            if index != home:
                loads[index] += cost_of(item)
        order = {item.key: place for place, item in enumerate(window)}
        calls = []
        for index, items in shares.items():
            if items:
                items.sort(key=lambda item: order[item.key])
                call = EncodeCall(index, items, sum(map(cost_of, items)))
                self._calls[index].append(call)
                calls.append(call)
        self._waiting = self._waiting[len(window) :]
        return calls
