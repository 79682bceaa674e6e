"""The HTTP app on a real port, around a real engine in threads: everything but Ray."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from raypp.api.async_llm import AsyncLLM
from raypp.config.http_settings import HttpSettings
from raypp.testing import launch_in_threads
from serve_app.http_app import make_context, make_http_app
from serve_app.metrics import EngineMetrics

ENGINE = {"num_stages": 2, "kv_cache_bytes": 1 << 23, "max_model_len": 256, "max_num_seqs": 8}


class RunningApp:
    """A server in a thread. `call` runs a function of the context in its event loop."""

    def __init__(
        self,
        settings: HttpSettings,
        engine: dict[str, Any],
        replica: str,
        wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    ) -> None:
        self._settings = settings
        self._replica = replica
        self._wrap = wrap
        self._engine = engine
        self._error: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(60)
        if self._error is not None:
            raise self._error

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def call(self, function: Callable[[], Any]) -> Any:
        async def run() -> Any:
            result = function()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(30)

    def stats(self) -> dict[str, Any]:
        return self.call(self.context.llm.stats)

    def wait_until(self, condition: Callable[[], bool], hope: str) -> None:
        """Wait until something has come to pass, for at most a minute."""
        ends = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < ends, f"{hope}: it did not come to pass; {self.stats()}"
            time.sleep(0.005)  # a thread that only asks would keep the others of this process from answering

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
            self._ready.set()
            raise

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        llm = await AsyncLLM.create(**{"launch": launch_in_threads, "model": "tiny", **ENGINE, **self._engine})
        metrics = EngineMetrics("tiny", self._replica, as_vllm=self._settings.vllm_metrics)
        self.context = make_context(llm, self._settings, metrics=metrics)
        self.app: FastAPI = make_http_app(self.context)
        config = uvicorn.Config(self._wrap(self.app), port=0, log_level="warning", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        try:
            serving = asyncio.create_task(self._server.serve())
            while not self._server.started:
                await asyncio.sleep(0.01)
            self._port = self._server.servers[0].sockets[0].getsockname()[1]
            self._ready.set()
            await serving
        finally:
            await llm.close()


@contextlib.contextmanager
def running_app(
    settings: dict[str, Any] | None = None,
    *,
    replica: str = "test",
    wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    **engine: Any,
) -> Iterator[RunningApp]:
    app = RunningApp(HttpSettings(**(settings or {})), engine, replica, wrap)
    try:
        yield app
    finally:
        app.close()
