"""Holds requests with images until the first stage has the embeddings that they need.

    push -> (text alone) ---------------------------------------------------> WaitingQueue
      +---> held --room on the first stage--> ordered --all are stored------------^
                                                +-- one cannot be encoded --> failed

It decides what the first stage holds, and keeps a mirror of that stage's store, with a limit. What a request needs is
pinned from its order until the last chunk that reads it was collected. Requests without images do not wait here.

The time of a call depends on the request or the items that it is about, not on how many requests wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from raypp.encoder.lru_cache import LruCache
from raypp.errors import RayppError, RequestError
from raypp.prompt_items import EncoderItem, unique_items
from raypp.request import Request
from raypp.scheduler.request_state import ItemPin, RequestState, WaitingQueue

_ITEMS_AT_ONCE = 64
"""Items of requests that leave the held ones in one call. Thousands may wait for the same image."""

_MOST_ORDERED = 1024
"""Requests that wait for embeddings under way: enough to keep encoders busy, few enough to enter the queue at once."""


class ItemAdmission:
    """Orders embeddings, drops them, and moves requests to the queue when theirs are on the first stage.

    Args:
        queue: Where requests without images go at once.
        max_tokens: Rows of embeddings that the first stage may hold.
        max_item_tokens: Of one image, which a step must compute whole; None: images may be cut.
    """

    def __init__(self, queue: WaitingQueue, max_tokens: int, max_item_tokens: int | None = None) -> None:
        self._queue = queue
        self._max_item_tokens = max_item_tokens
        self._room: LruCache[bytes, None] = LruCache(max_tokens)
        self._held = WaitingQueue()
        self._ordered: dict[RequestState, int] = {}  # with their pins; the value counts the items still missing
        # Items that were ordered and are not stored yet, with the requests that need them. Each has one pin for that.
        self._under_way: dict[bytes, dict[RequestState, None]] = {}
        self._leaving: set[bytes] = set()  # being dropped; may be ordered again after that
        self._orders: list[EncoderItem] = []
        self._drops: list[bytes] = []
        self.num_query_items = 0
        """Items that requests needed."""
        self.num_hit_items = 0
        """Of these, items that were stored already, or ordered for another request."""

    def __len__(self) -> int:
        return len(self._held) + len(self._ordered)

    def __contains__(self, state: RequestState) -> bool:
        return state in self._ordered or state in self._held

    def __iter__(self) -> Iterator[RequestState]:
        return iter([*self._held, *self._ordered])

    @property
    def num_stored_tokens(self) -> int:
        """Rows of embeddings on the first stage, those under way included."""
        return self._room.used

    def check(self, request: Request) -> None:
        """Refuse a request whose images could never be held together, or one of them never computed.

        Raises:
            RequestError: with the numbers.
        """
        if request.items is None:
            return
        num_tokens = sum(item.num_tokens for item in unique_items(request.items.items))
        if num_tokens > self._room.limit:
            raise RequestError(
                "the images of the request have more embeddings than stage_embedding_bytes allows",
                request_id=request.request_id,
                got=f"{num_tokens} tokens of images",
                expected=f"at most {self._room.limit}",
                hint="fewer or smaller images, or a larger stage_embedding_bytes",
            )
        longest = max(item.num_tokens for item in request.items.items)
        if self._max_item_tokens is not None and longest > self._max_item_tokens:
            raise RequestError(
                "an image has more tokens than a step takes beside rows that decode, and this model's cannot be cut",
                request_id=request.request_id,
                got=f"{longest} tokens",
                expected=f"at most {self._max_item_tokens}",
                hint="a larger max_num_batched_tokens, more KV blocks, or a smaller max_num_seqs",
            )

    def push(self, state: RequestState) -> None:
        """Take in a request that wants to be computed: a new one, or one that was preempted."""
        if state.request.items is None:
            self._queue.push(state)
            return
        self._held.push(state)
        self._order()

    def remove(self, state: RequestState) -> None:
        """Take a request out that waits, here or in the queue. What it ordered is still encoded, and may be used."""
        if state in self._ordered:
            self._forget_ordered(state)
        elif state in self._held:
            self._held.remove(state)
        else:
            self._queue.remove(state)
        if state.item_pin is not None:
            self.unpin(state.item_pin)
            state.item_pin = None
        self._order()

    def note_growth(self, state: RequestState, num_tokens: int) -> None:
        """Count tokens that a waiting request got from steps dispatched before it was preempted."""
        if state not in self._ordered:
            (self._held if state in self._held else self._queue).note_growth(num_tokens)

    def unpin(self, pin: ItemPin) -> None:
        """Unpin what a request needed: no step in flight reads it for this request."""
        for key in pin.keys:
            self._room.unpin(key)
        self._order()

    def note_stored(self, keys: Collection[bytes]) -> None:
        """Take in that the first stage has these embeddings."""
        for key in keys:
            if (waiting := self._under_way.pop(key, None)) is None:
                continue
            self._room.unpin(key)
            for state in waiting:
                self._ordered[state] -= 1
                if not self._ordered[state]:
                    del self._ordered[state]
                    self._queue.push(state)
        self._order()

    def note_dropped(self, keys: Collection[bytes]) -> None:
        """Take in that the first stage no longer has these embeddings."""
        self._leaving.difference_update(keys)
        self._order()

    def note_failed(self, key: bytes) -> list[RequestState]:
        """Take in that an item cannot be encoded; return the requests that need it. The caller ends them."""
        if key not in self._under_way:
            return []
        failed = list(self._under_way[key])
        for state in failed:
            self._forget_ordered(state)
            self._ordered[state] = 0  # until the caller ends it
            assert state.item_pin is not None
            for pinned in state.item_pin.keys:
                self._room.unpin(pinned)
            state.item_pin = None
        del self._under_way[key]
        self._room.unpin(key)
        self._room.remove(key)
        self._order()  # other requests may wait for its room
        return failed

    def take_orders(self) -> Sequence[EncoderItem]:
        """Return what has to be encoded and brought to the first stage; each is returned once."""
        self._order()
        taken, self._orders = self._orders, []
        return taken

    def take_drops(self) -> Sequence[bytes]:
        """Return what the first stage has to drop; no plan that was dispatched and not collected reads it."""
        taken, self._drops = self._drops, []
        return taken

    def check_integrity(self, pins: Iterable[ItemPin]) -> None:
        """Assert that exactly what somebody needs is pinned.

        Args:
            pins: Of the running requests, and of steps in flight.
        """
        self._room.check_integrity()
        pins = [*pins, *(state.item_pin for state in (*self._ordered, *self._queue) if state.item_pin is not None)]
        needed = {key for pin in pins for key in pin.keys} | set(self._under_way)
        assert all(self._room.is_pinned(key) for key in needed)
        assert self._room.pinned == sum(map(self._room.size_of, needed))
        assert not any(key in self._room for key in self._leaving)
        assert all(state.item_pin is None for state in self._held)
        missing = Counter(state for waiting in self._under_way.values() for state in waiting)
        assert missing == self._ordered
        self._held.check_integrity(())

    def _order(self) -> None:
        """Order what the next held requests need, as far as there is room for all of a request's items.

        Requests beyond the limits wait for a later call: there is one in every turn of the driver's loop.
        """
        num_left = _ITEMS_AT_ONCE
        while self._held and num_left > 0 and len(self._ordered) < _MOST_ORDERED:
            state = self._held.head
            assert state.request.items is not None
            items = unique_items(state.request.items.items)
            if any(item.key in self._leaving for item in items):
                return
            wanted = sum(item.num_tokens for item in items if not self._room.is_pinned(item.key))
            if not self._room.has_room(wanted):
                return
            self._held.remove(state)
            num_left -= len(items)
            self._pin(state, items)
            missing = [item.key for item in items if item.key in self._under_way]
            if not missing:
                self._queue.push(state)
                continue
            self._ordered[state] = len(missing)
            for key in missing:
                self._under_way[key][state] = None

    def _pin(self, state: RequestState, items: Sequence[EncoderItem]) -> None:
        known = [item for item in items if item.key in self._room]
        for item in known:  # first, so that the others do not push them out
            self._room.pin(item.key)
        for item in items:
            if item.key not in self._room:
                evicted = self._room.put(item.key, None, item.num_tokens)
                self._drops += evicted
                self._leaving.update(evicted)
                self._room.pin(item.key)  # for the request
                self._room.pin(item.key)  # until it is stored
                self._under_way[item.key] = {}
                self._orders.append(item)
        self.num_query_items += len(items)
        self.num_hit_items += len(known)
        placed = state.request.items
        assert placed is not None
        end = max(start + item.num_tokens for item, start in zip(placed.items, placed.starts, strict=True))
        state.item_pin = ItemPin(tuple(item.key for item in items), end)

    def _forget_ordered(self, state: RequestState) -> None:
        """Take out a request that waits for embeddings."""
        del self._ordered[state]
        if state.item_pin is not None:
            for key in state.item_pin.keys:
                if key in self._under_way:
                    self._under_way[key].pop(state, None)


def item_error(request_id: str, cause: RayppError) -> RayppError:
    """Return the error of a request whose image cannot be encoded: through its own fault, or that of the encoders."""
    if not isinstance(cause, RequestError):
        return cause
    return RequestError(
        f"an image of the request could not be encoded: {cause.message}",
        request_id=request_id,
        got=cause.got,
        expected=cause.expected,
        hint=cause.hint,
    )
