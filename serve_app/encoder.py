"""The Serve deployment in front of the engines' encoder actors: a proxy without a GPU.

    HTTP app --pictures--> EncoderProxy --> encoder actors   embeddings stay in their caches, on their GPUs
        |                  bounded queue        ^
        +--request--> driver --orders-----------+            found there, and brought to the first stage

An engine's images wait here, in a queue with an end, before their request is sent to its driver: so what is too much
is refused with 429 and not piled up. Callable by itself, `serve.get_deployment_handle("encoder", "raypp")`, it returns
embeddings. Notebook and batch job have the actors without it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle

from raypp.driver.item_encoders import EncodeCall, EncoderShares
from raypp.errors import EncoderDiedError, QueueFullError, RayppError
from raypp.prompt_items import EncoderItem, unique_items

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DEPLOYMENT_NAME = "encoder"
_RETRY_AFTER_S = 1
_MAX_JOIN_TRIES = 2
_PING_TIMEOUT_S = 2.0

logger = logging.getLogger(__name__)


class EncoderProxy:
    """Passes images to encoder actors, shared out by cost. Serve bounds how many calls run, and how many wait."""

    def __init__(self) -> None:
        self._engines: dict[str, list[Any]] = {}  # those that joined last at the end

    async def join(self, engine: str, actors: list[Any]) -> None:
        """Take note of an engine's encoder actors, in place of those that it had; forget engines that have died.

        One whose encoders were only being started again joins anew with its next images.

        Args:
            engine: Any name of its own.
            actors: Handles.
        """
        self._engines.pop(engine, None)
        others = dict(self._engines)
        self._engines[engine] = actors
        answers = await asyncio.gather(*map(_which_answer, others.values()))
        for (name, old), answering in zip(others.items(), answers, strict=True):
            if not any(answering) and self._engines.get(name) is old:
                del self._engines[name]

    async def prepare(self, engine: str, items: Sequence[EncoderItem]) -> bool:
        """Have an engine's encoders encode items, and keep what comes of them.

        Returns:
            False when this replica does not know the engine: it has to join.
        """
        actors = self._engines.get(engine)
        if actors is None:
            return False
        calls = self._shared_out(items, len(actors))
        await asyncio.gather(*(actors[call.encoder_index].prepare.remote(call.items) for call in calls))
        return True

    async def encode(self, items: Sequence[EncoderItem], engine: str | None = None) -> list[NDArray[np.float32]]:
        """Return the embeddings of items, in their order: float32 [1 + L, N, H] each, deepstack rows behind the first.

        Args:
            items: Images, see `raypp.pictures`.
            engine: Whose encoders; None: any, the one that joined last before others.

        Raises:
            EncoderDiedError: there is no engine with encoders, or they have died.
            RequestError: an item cannot be encoded.
        """
        candidates = [actors for name, actors in reversed(self._engines.items()) if engine in (None, name)]
        if not candidates:
            raise EncoderDiedError(
                "no engine with encoders is known here", got=f"engine {engine!r}", expected=sorted(self._engines)
            )
        failure: ray.exceptions.RayActorError | None = None
        for actors in candidates:
            try:
                return await self._encoded_by(actors, items)
            except ray.exceptions.RayActorError as error:
                failure = error
        raise EncoderDiedError("an encoder died", got=str(failure).splitlines()[0], hint="try again") from failure

    async def _encoded_by(self, actors: list[Any], items: Sequence[EncoderItem]) -> list[NDArray[np.float32]]:
        calls = self._shared_out(items, len(actors))
        answers = await asyncio.gather(*(actors[call.encoder_index].encode.remote(call.items) for call in calls))
        found: dict[bytes, Any] = {key: result for answer in answers for key, result in answer.items()}
        for result in found.values():
            if isinstance(result, RayppError):
                raise result
        return [found[item.key] for item in items]

    async def health(self) -> dict[str, list[bool]]:
        """Return, for every engine, which of its encoders answer."""
        return {engine: await _which_answer(actors) for engine, actors in self._engines.items()}

    @staticmethod
    def _shared_out(items: Sequence[EncoderItem], num_encoders: int) -> list[EncodeCall]:
        """Return calls as the driver of an engine that has nothing else to do would make them: caches are then hit."""
        once = unique_items(items)
        shares = EncoderShares(num_encoders, max_call_items=max(len(once), 1))
        for index in range(num_encoders):
            shares.note_up(index)
        shares.add(once)
        return shares.assign()


async def _which_answer(actors: list[Any]) -> list[bool]:
    async def answers(actor: Any) -> bool:
        try:
            async with asyncio.timeout(_PING_TIMEOUT_S):
                await actor.process.remote()
        except (TimeoutError, ray.exceptions.RayError):
            return False
        return True

    return list(await asyncio.gather(*map(answers, actors)))


class ServedPictures:
    """A `PictureGate` in front of the deployment, for one engine.

    Args:
        handle: Of the deployment.
        engine: The engine's name there.
        actors: Returns its encoders: others when it has been started again. May block.
    """

    def __init__(self, handle: DeploymentHandle[Any], engine: str, actors: Callable[[], list[Any]]) -> None:
        self._handle = handle
        self._engine = engine
        self._actors = actors
        self._is_stale = False  # whether the deployment may know encoders that have died

    async def pass_on(self, items: Sequence[EncoderItem]) -> None:
        """Return when the encoders have seen the items. If they cannot be reached: their engine knows what to do.

        Raises:
            QueueFullError: too many images wait already.
        """
        try:
            for _ in range(_MAX_JOIN_TRIES):
                if not self._is_stale and await self._handle.prepare.remote(self._engine, list(items)):
                    return
                actors = await asyncio.to_thread(self._actors)
                await self._handle.broadcast("join", self._engine, actors).results_async()
                self._is_stale = False
        except BackPressureError as error:
            raise QueueFullError(
                "too many images are waiting",
                retry_after_s=_RETRY_AFTER_S,
                got=str(error),
                expected="fewer at a time; max_encodes and max_encodes_waiting",
            ) from error
        except (ray.exceptions.RayError, RayppError, RuntimeError) as error:
            self._is_stale = True
            logger.warning("images were not encoded ahead: %s", str(error).strip().splitlines()[0])


def encoder_deployment(*, num_cpus: float, max_ongoing: int, max_queued: int) -> serve.Deployment:
    """Return the deployment.

    Args:
        num_cpus: That it asks Ray for; placement only.
        max_ongoing: Calls that run at once.
        max_queued: Calls that may wait; more are refused.
    """
    return serve.deployment(
        name=DEPLOYMENT_NAME,
        num_replicas=1,
        max_ongoing_requests=max_ongoing,
        max_queued_requests=max_queued,
        ray_actor_options={"num_cpus": num_cpus},
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=2.0,
    )(EncoderProxy)
