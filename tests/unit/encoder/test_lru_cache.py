"""The cache of embeddings: its limit, its order, its pins."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from raypp.encoder.lru_cache import LruCache


def test_the_least_recently_used_goes_first():
    cache: LruCache[str, int] = LruCache(10)
    assert [cache.put(key, 0, 4) for key in ("a", "b")] == [[], []]
    assert cache.get("a") == 0
    assert cache.put("c", 0, 4) == ["b"]
    assert "b" not in cache
    assert cache.get("b") is None


def test_what_is_pinned_stays_and_what_has_no_room_is_not_kept():
    cache: LruCache[str, int] = LruCache(10)
    cache.put("a", 0, 6)
    cache.pin("a")
    assert not cache.has_room(5)
    assert cache.put("b", 0, 5) == ["b"]
    assert cache.put("c", 0, 4) == []
    assert cache.put("d", 0, 3) == ["c"]
    cache.unpin("a")
    assert cache.put("e", 0, 9) == ["a", "d"]


class CacheMachine(RuleBasedStateMachine):
    """Against a list in the order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: LruCache[int, int] = LruCache(20)
        self.order: list[int] = []
        self.sizes: dict[int, int] = {}
        self.pins: dict[int, int] = {}

    def use(self, key: int) -> None:
        self.order.remove(key)
        self.order.append(key)

    @rule(key=st.integers(0, 9), size=st.integers(0, 12))
    def put(self, key, size):
        if key in self.sizes:
            return
        pinned = sum(self.sizes[k] for k, count in self.pins.items() if count)
        gone = self.cache.put(key, key, size)
        if pinned + size > 20:
            assert gone == [key]
            return
        expected, used = [], sum(self.sizes.values()) + size
        for other in self.order:
            if used <= 20:
                break
            if not self.pins.get(other):
                expected.append(other)
                used -= self.sizes[other]
        assert gone == expected
        for other in gone:
            self.order.remove(other)
            del self.sizes[other]
        self.order.append(key)
        self.sizes[key] = size

    @rule(key=st.integers(0, 9))
    def get(self, key):
        assert self.cache.get(key) == (key if key in self.sizes else None)
        if key in self.sizes:
            self.use(key)

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def pin(self, data):
        key = data.draw(st.sampled_from(self.order))
        self.cache.pin(key)
        self.use(key)
        self.pins[key] = self.pins.get(key, 0) + 1

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data())
    def unpin(self, data):
        key = data.draw(st.sampled_from([k for k, count in self.pins.items() if count]))
        self.cache.unpin(key)
        self.pins[key] -= 1

    @invariant()
    def counts_add_up(self):
        self.cache.check_integrity()
        assert self.cache.used == sum(self.sizes.values())
        assert all(self.cache.is_pinned(key) == bool(self.pins.get(key)) for key in self.sizes)


TestCache = CacheMachine.TestCase
