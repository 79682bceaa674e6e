"""The Ray Serve deployment: one replica owns one engine, its placement group, and the HTTP app in front of it.

The app lives in the replica that talks to the driver: no token crosses a deployment handle.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from prometheus_client.core import Metric
from prometheus_client.samples import Sample
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.util.metrics import Counter, Gauge

from raypp.api.async_llm import AsyncLLM
from raypp.api.launch import freeze_start
from raypp.config.engine_config import EngineConfig
from raypp.config.http_settings import HttpSettings
from raypp.config.log import log_to_stderr
from raypp.errors import RayppError
from serve_app.encoder import ServedPictures
from serve_app.http_app import OwnAnswers, make_context, make_http_app, model_names, stats_if_alive
from serve_app.metrics import EngineMetrics
from serve_app.runner import OpenGate, PictureGate, Question

if TYPE_CHECKING:
    from raypp.stage.build_stage import StageFactory  # imports torch


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
                if sample.name.endswith("_created"):  # when a series began: nobody asks
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
        self._pictures: PictureGate = OpenGate()
        if encoder is not None:
            self._pictures = ServedPictures(encoder, context.replica_id.unique_id, self._llm.encoder_actors)
        self._own = OwnAnswers(self._llm, self._metrics)
        self._siblings = _Replicas(context.deployment, context.app_name, self._own)
        if settings.ray_metrics_period_s:
            self._telling = asyncio.create_task(self._tell_ray(settings.ray_metrics_period_s))

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the HTTP app. Serve calls this once the constructor is done."""
        context = make_context(
            self._llm, self._settings, metrics=self._metrics, siblings=self._siblings, pictures=self._pictures
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
        return await self._own.answer(question)

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


class _Replicas:
    """All replicas of the deployment, this one included."""

    def __init__(self, deployment: str, app_name: str, own: OwnAnswers) -> None:
        self._deployment = deployment
        self._app_name = app_name
        self._own = own

    async def ask(self, question: Question) -> list[Any]:
        """Return every replica's answer. One that does not answer, since it starts or ends just now, is left out."""
        handle = serve.get_deployment_handle(self._deployment, self._app_name)
        try:
            answers = await handle.broadcast("answer", question).results_async(
                timeout_s=_SIBLING_TIMEOUT_S, return_exceptions=True
            )
        except (TimeoutError, RuntimeError) as error:
            logger.warning("the replicas could not be asked (%s): %s", question, error)
            answers = []
        return [answer for answer in answers if not isinstance(answer, BaseException)] or await self._own.ask(question)
