"""Ray Serve's router for several replicas: `PrefixChoice` chooses, Serve sends.

Each of Serve's proxies has a router of its own, and learns from what it sends itself. Serve brings this module to
proxies by value: what the middleware shares with it is in `prefix_keys.py`.
"""

from __future__ import annotations

import pickle
import random
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

from ray.serve._private.replica_result import ReplicaResult
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from serve_app.prefix_keys import SCOPE_KEY, covered_bytes, want_keys

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


class PrefixRouter(RequestRouter):
    """Sends a request where the beginning of its prompt probably is in the cache."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Take in the arguments that the deployment gives: those of `PrefixChoice`."""
        self._choice = PrefixChoice(**kwargs)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in ranks: Serve takes the first one that has room."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # after each round of all replicas
        if len(candidate_replicas) == 1:
            return [candidate_replicas]
        keys = _keys(pending_request)
        if not keys:  # as Serve does by default: the one of two with the shorter queue
            return [random.sample(candidate_replicas, 2), candidate_replicas]
        chosen = self._choice.replica_of(keys)
        best = [replica for replica in candidate_replicas if _name(replica.replica_id) == chosen]
        return [best, [replica for replica in candidate_replicas if replica not in best]]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take note of the replicas there are."""
        super().update_replicas(replicas)
        self._note_replicas()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Take note that a replica has died: what it had is lost."""
        super().on_replica_actor_died(replica_id)
        self._note_replicas()

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Count a request that is sent."""
        super().on_send_request(replica_id)
        self._choice.began(_name(replica_id))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count the end of a request, however it ended."""
        super().on_request_completed(replica_id, internal_request_id)
        self._choice.ended(_name(replica_id))

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """Take note that a replica has accepted a request."""
        if len(self._replicas_list) > 1:
            self._choice.learn(_name(replica_id), _keys(pending_request))

    def _note_replicas(self) -> None:
        self._choice.update([_name(replica_id) for replica_id in self.curr_replicas])
        want_keys(self, wanted=len(self.curr_replicas) > 1)


def _name(replica_id: ReplicaID) -> str:
    name: str = replica_id.unique_id
    return name


def _keys(request: PendingRequest | None) -> tuple[bytes, ...]:
    """Return the names of a request's beginnings: of its text, else that of the session that its header names."""
    if request is None:
        return ()
    metadata: Any = request.metadata
    if metadata.is_http_request and request.args and isinstance(request.args[0], bytes):
        keys: tuple[bytes, ...] = pickle.loads(request.args[0]).asgi_scope.get(SCOPE_KEY, ())
        if keys:
            return keys
    return (metadata.session_id.encode(),) if metadata.session_id else ()
