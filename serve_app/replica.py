"""The Ray Serve deployment: one replica owns one engine, its placement group, and the HTTP app in front of it.

The app lives in the replica that talks to the driver: no token crosses a deployment handle.

    HTTP app --images--> EncoderProxy --> encoder actors     embeddings stay in their caches, on their GPUs
        |                bounded queue          ^
        +--request--> driver --orders-----------+            found there, and brought to the first stage

An engine's images wait in a deployment of its own, in a queue with an end, before their request is sent to its driver:
so what is too much is refused with 429 and not piled up. Callable by itself,
`serve.get_deployment_handle("encoder", "raypp")`, it returns embeddings. Notebook and batch job have the actors
without it.

Whatever `metrics.py` collects is passed on to Ray every few seconds: no request and no token waits for that.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import ray
from fastapi import FastAPI
from prometheus_client.core import Metric
from prometheus_client.samples import Sample
from ray import serve
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from ray.util.metrics import Counter, Gauge

from raypp.api.async_llm import AsyncLLM
from raypp.api.launch import freeze_start
from raypp.config.engine_config import EngineConfig
from raypp.config.env import log_to_stderr
from raypp.config.http_settings import HttpSettings
from raypp.driver.item_encoders import EncodeCall, EncoderShares
from raypp.errors import EncoderDiedError, QueueFullError, RayppError
from raypp.prompt_items import EncoderItem, unique_items
from serve_app.http_app import make_context, make_http_app, model_names, own_answer, stats_if_alive
from serve_app.metrics import EngineMetrics
from serve_app.runner import Question

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from raypp.stage.build_stage import StageFactory  # imports torch


DEPLOYMENT_NAME = "encoder"
_RETRY_AFTER_S = 1
_MAX_JOIN_TRIES = 2
_PING_TIMEOUT_S = 2.0


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
    """Passes the images of one engine on to the deployment.

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


class RayMetrics:
    """Passes series on to Ray, under their own names and labels.

    Ray's histograms only take one value at a time. The counts by bucket, the number and the sum of a histogram are
    gauges there: `histogram_quantile(0.9, rate(ray_..._bucket[1m]))` reads them all the same.
    """

    def __init__(self) -> None:
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._told: dict[tuple[str, ...], float] = {}  # of each counter's series: its value when Ray was told last

    def tell(self, families: Iterable[Metric]) -> None:
        """Tell Ray how all series stand."""
        for family in families:
            for sample in family.samples:
                if sample.name.endswith("_created"):  # when a series began: of no use
                    continue
                if family.type == "counter":
                    self._count(sample, family.documentation)
                else:
                    self._set(sample, family.documentation)

    def _count(self, sample: Sample, what: str) -> None:
        key = (sample.name, *sample.labels.values())
        told = self._told.get(key, 0.0)
        grown = sample.value - (told if sample.value >= told else 0.0)  # a new engine begins at zero
        if grown > 0:
            if sample.name not in self._counters:
                self._counters[sample.name] = Counter(sample.name, what, tuple(sample.labels))
            self._counters[sample.name].inc(grown, sample.labels)
            self._told[key] = sample.value

    def _set(self, sample: Sample, what: str) -> None:
        if sample.name not in self._gauges:
            self._gauges[sample.name] = Gauge(sample.name, what, tuple(sample.labels))
        self._gauges[sample.name].set(sample.value, sample.labels)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_LARGE_BYTES = 1 << 20


def give_back_freed_memory() -> None:
    """Have glibc unmap large blocks when they are freed.

    By itself it raises its limit for such blocks, up to 32 MiB, as soon as one is freed; those that it then keeps lie
    between others and are seldom given back. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)


_SIBLING_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


class EngineReplica:
    """Hosts one engine and its HTTP app. What the app does is the app's affair."""

    async def __init__(  # type: ignore[misc]
        self,
        config: EngineConfig,
        settings: HttpSettings,
        stage_factory: StageFactory | None,
        encoder: DeploymentHandle[Any] | None = None,
    ) -> None:
        """Start the engine.

        Args:
            config: Of the engine.
            settings: Of HTTP.
            stage_factory: Makes other models than the real ones.
            encoder: The deployment that images pass; None for a model that reads text alone.
        """
        log_to_stderr()  # not Serve's affair: its log has other lines
        give_back_freed_memory()
        self._settings = settings
        self._is_healthy = True
        self._llm = await AsyncLLM.create(config, stage_factory=stage_factory, freeze_gc=False)
        processes = await asyncio.to_thread(self._llm.processes)
        logger.info("the engine runs: driver pid %s, stages' pids %s", processes["driver"], processes["stages"])
        context = serve.get_replica_context()
        name = model_names(config.model.model, settings)[0]
        self._metrics = EngineMetrics(name, context.replica_id.unique_id, as_vllm=settings.vllm_metrics)
        self._deployment, self._app_name = context.deployment, context.app_name
        self._encode_ahead = None
        if encoder is not None:
            pictures = ServedPictures(encoder, context.replica_id.unique_id, self._llm.encoder_actors)
            self._encode_ahead = pictures.pass_on
        if settings.ray_metrics_period_s:
            self._telling = asyncio.create_task(self._tell_ray(settings.ray_metrics_period_s))

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the HTTP app. Serve calls this once the constructor is done."""
        context = make_context(
            self._llm,
            self._settings,
            metrics=self._metrics,
            ask_all=self._ask_all,
            encode_ahead=self._encode_ahead,
        )
        app = make_http_app(context)
        freeze_start()  # not when the engine started: the app is part of what stays
        return app

    async def check_health(self) -> None:
        """Raise if the engine cannot serve. After a few times Serve puts another replica in this one's place.

        That would end the streams of an engine that is started again, or will be once it is known to have frozen.
        """
        try:
            if self._llm.config.faults.max_engine_restarts:
                self._llm.check_alive()
            else:
                await self._llm.check_health()
        except RayppError as error:
            if self._is_healthy:
                logger.error("this replica (pid %d) is not healthy: %s", os.getpid(), error)
            self._is_healthy = False
            raise
        self._is_healthy = True

    async def restart(self, config: EngineConfig) -> str | None:
        """Go on under another configuration, if it is another; return why that cannot be, None if it could."""
        if config == self._llm.config:
            return None
        try:
            await self._llm.restart(config)
        except RayppError as error:
            logger.warning("the configuration cannot be followed: %s", error)
            return str(error)
        return None

    async def answer(self, question: Question) -> Any:
        """Return this replica's answer to what one of them asks of all."""
        return await own_answer(self._llm, self._metrics, question)

    async def _ask_all(self, question: Question) -> list[Any]:
        """Return every replica's answer. One that does not answer, since it starts or ends just now, is left out."""
        handle = serve.get_deployment_handle(self._deployment, self._app_name)
        try:
            answers = await handle.broadcast("answer", question).results_async(
                timeout_s=_SIBLING_TIMEOUT_S, return_exceptions=True
            )
        except (TimeoutError, RuntimeError) as error:
            logger.warning("the replicas could not be asked (%s): %s", question, error)
            answers = []
        return [answer for answer in answers if not isinstance(answer, BaseException)] or [await self.answer(question)]

    async def processes(self) -> dict[str, object]:
        """Return the process ids of the replica itself, the driver, the stages and the encoders."""
        return {"replica": os.getpid(), **await asyncio.to_thread(self._llm.processes)}

    async def _tell_ray(self, period_s: float) -> None:
        view, ray_metrics = self._metrics.view(), RayMetrics()
        while True:
            ray_metrics.tell(view.look(await stats_if_alive(self._llm)).collect())
            await asyncio.sleep(period_s)

    async def __del__(self) -> None:
        """Stop the engine, before another replica looks for the resources that it has."""
        if hasattr(self, "_telling"):
            self._telling.cancel()
        if hasattr(self, "_llm"):
            await self._llm.close()
