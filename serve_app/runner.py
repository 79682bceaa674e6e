"""Requests on their way through the engine: admitted, observed, several prompts of one body merged into one stream."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

from raypp.api.async_llm import AsyncLLM
from raypp.errors import RayppError, RequestError
from raypp.openai_api.prepared import AnyPrepared
from raypp.openai_api.request_fields import RequestFields, naming_form
from raypp.types import RequestOutput
from serve_app.admission import Admission
from serve_app.metrics import EngineMetrics, RequestWatch
from serve_app.pictures import PictureGate


class RequestRunner:
    """Runs prepared bodies on one engine. Closing the generator that `run` returns aborts what is left."""

    def __init__(self, llm: AsyncLLM, admission: Admission, metrics: EngineMetrics, pictures: PictureGate) -> None:
        self._llm = llm
        self._admission = admission
        self._metrics = metrics
        self._pictures = pictures

    async def run(
        self, body: RequestFields, prepared: AnyPrepared, request_id: str
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield (index of the prompt, its outputs so far) whenever there are new ones, until all have ended.

        Args:
            body: Of the HTTP request.
            prepared: What it became.
            request_id: As its client knows it; two clients may choose the same.

        Raises:
            QueueFullError: too many requests, or too many images, wait.
            RequestError: it cannot be run.
            EngineDeadError: the engine died.
        """
        async with self._admitted(body, prepared) as watches:
            # All are checked before the first one runs.
            streams = [
                self._llm.generate(prompt, prepared.params, engine_id, priority=body.priority or 0)
                for prompt, engine_id in zip(prepared.prompts, _engine_ids(request_id, prepared), strict=True)
            ]
            async with aclosing(_single(streams[0]) if len(streams) == 1 else _merged(streams)) as outputs:
                async for index, output in outputs:
                    watches[index].see(output)
                    yield index, output

    async def complete(self, body: RequestFields, prepared: AnyPrepared, request_id: str) -> list[RequestOutput]:
        """Run a body to its end and return its outputs, one per prompt. Cheaper than `run`, and raises as that does."""
        async with self._admitted(body, prepared) as watches:
            submitted_s, ids = time.monotonic(), _engine_ids(request_id, prepared)
            outputs = await self._llm.complete(prepared.prompts, prepared.params, ids, priority=body.priority or 0)
            for watch, output in zip(watches, outputs, strict=True):
                watch.see_whole(output, submitted_s)
        return outputs

    @asynccontextmanager
    async def _admitted(self, body: RequestFields, prepared: AnyPrepared) -> AsyncIterator[list[RequestWatch]]:
        """Count a body's work while it runs, and how its sequences end."""
        started_s, prompts, num_continuations = time.monotonic(), prepared.prompts, prepared.params.n
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        with self._admission.admit(len(prompts) * num_continuations, num_tokens):
            if items := [item for prompt in prompts if prompt.items for item in prompt.items.items]:
                await self._pictures.pass_on(items)
            watches = [self._metrics.watch(started_s, num_continuations) for _ in prompts]
            reason = "abort"
            try:
                with naming_form(body.form_param):
                    yield watches
            except RequestError:
                reason = "refused"
                raise
            except RayppError:
                reason = "error"
                raise
            finally:
                for watch in watches:
                    watch.close(reason)


def _engine_ids(request_id: str, prepared: AnyPrepared) -> list[str]:
    """Return a name for each prompt's request, unlike any other in the engine; logs show it."""
    unique = uuid.uuid4().hex
    return [f"{request_id}-{unique}-{index}" for index in range(len(prepared.prompts))]


async def _single(
    stream: AsyncGenerator[RequestOutput, None],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    async with aclosing(stream):
        async for output in stream:
            yield 0, output


async def _merged(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield from all streams as they come; the first error ends them all."""
    arrived: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue()

    async def forward(index: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with aclosing(stream):
                async for output in stream:
                    arrived.put_nowait((index, output))
            arrived.put_nowait((index, None))
        except Exception as error:
            arrived.put_nowait((index, error))

    tasks = [asyncio.create_task(forward(index, stream)) for index, stream in enumerate(streams)]
    async with AsyncExitStack() as ended:
        ended.push_async_callback(_cancel, tasks)
        num_left = len(tasks)
        while num_left:
            index, output = await arrived.get()
            if isinstance(output, BaseException):
                raise output
            if output is None:
                num_left -= 1
            else:
                yield index, output


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
