"""Which replica a request goes to: the one that probably has the longest beginning of its prompt, unless it is busy.

What a replica has is not asked for: it is what was sent there before. Knows nothing of Ray.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Collection, Sequence

from serve_app.prefix_keys import covered_bytes

MAX_KEYS = 1 << 14
"""Per replica, the most recent ones: 8 MiB of text or more, and about 3 MiB of memory."""

_LEAST_SHARE = 0.5  # of a prompt; less is no reason: its replica would get more and more of what others could begin
_MOST_RATIO = 1.5  # between the requests of two replicas


class _Replica:
    """What one replica has been sent."""

    def __init__(self) -> None:
        self.num_ongoing = 0
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def num_known(self, keys: Sequence[bytes]) -> int:
        """Return how many of the leading keys it was sent."""
        known = self._keys
        return next((index for index, key in enumerate(keys) if key not in known), len(keys))

    def learn(self, keys: Sequence[bytes]) -> None:
        """Take note of a prompt. Shorter beginnings count as newer: a longer one is of no use without them."""
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > MAX_KEYS:
            self._keys.popitem(last=False)


class PrefixChoice:
    """Chooses among replicas, by their names. Lives on one event loop.

    Args:
        max_excess: Requests that a replica may have beyond 1.5 times those of the least busy one and still get another
            one for its cache.
    """

    def __init__(self, max_excess: int) -> None:
        self._max_excess = max_excess
        self._replicas: dict[str, _Replica] = {}

    def update(self, names: Collection[str]) -> None:
        """Take note of the replicas there are. New ones have nothing; of those that are gone nothing is kept."""
        self._replicas = {name: self._replicas.get(name) or _Replica() for name in names}

    def replica_of(self, keys: Sequence[bytes]) -> str:
        """Return the replica for a prompt; among equal ones that with the fewest requests, then with the least text.

        Args:
            keys: Of the prompt's beginnings, the shortest first.
        """
        fewest = min(replica.num_ongoing for replica in self._replicas.values())
        limit = _MOST_RATIO * fewest + self._max_excess
        enough = covered_bytes(len(keys)) * _LEAST_SHARE

        def rank(name: str) -> tuple[int, int, int, float]:
            replica = self._replicas[name]
            known = covered_bytes(replica.num_known(keys))
            useful = known if known >= enough and replica.num_ongoing <= limit else 0
            return -useful, replica.num_ongoing, len(replica), random.random()

        return min(self._replicas, key=rank)

    def began(self, name: str) -> None:
        """Count a request that is sent to a replica."""
        if name in self._replicas:
            self._replicas[name].num_ongoing += 1

    def ended(self, name: str) -> None:
        """Count the end of one."""
        if name in self._replicas:
            self._replicas[name].num_ongoing = max(0, self._replicas[name].num_ongoing - 1)

    def learn(self, name: str, keys: Sequence[bytes]) -> None:
        """Take note that a replica has taken a prompt."""
        if name in self._replicas:
            self._replicas[name].learn(keys)
