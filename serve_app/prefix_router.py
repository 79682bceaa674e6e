"""Ray Serve's router for several replicas: `PrefixChoice` chooses, Serve sends.

Each of Serve's proxies has a router of its own, and learns from what it sends itself. Serve brings this module to
proxies by value: what the middleware shares with it is in `prefix_keys.py`.
"""

from __future__ import annotations

import pickle
import random
from typing import Any

from ray.serve._private.replica_result import ReplicaResult
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from serve_app.prefix_choice import PrefixChoice
from serve_app.prefix_keys import SCOPE_KEY, want_keys


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
