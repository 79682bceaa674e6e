"""Requests on their way through the engine: admitted, observed, several prompts of one body merged into one stream."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass

from raypp.api.async_llm import AsyncLLM
from raypp.api.picture_prompts import EncodedPrompt
from raypp.errors import RayppError, RequestError
from raypp.openai_api.request_fields import naming_form
from raypp.types import RequestOutput, SamplingParams
from serve_app.admission import Admission
from serve_app.metrics import EngineMetrics, RequestWatch
from serve_app.pictures import PictureGate


@dataclass(frozen=True)
class Job:
    """What one HTTP request asks of the engine."""

    request_id: str  # as its client knows it; two clients may choose the same
    prompts: Sequence[EncodedPrompt]
    params: SamplingParams
    priority: int  # smaller is served first
    form_param: str = "structured_outputs"  # the field of the body that a constraint comes from

    @property
    def num_sequences(self) -> int:
        """How many it adds to the queue."""
        return len(self.prompts) * self.params.n

    @property
    def num_tokens(self) -> int:
        """How many prompt tokens it adds to the queue."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    def engine_ids(self) -> list[str]:
        """Return a name for each prompt's request, unlike any other in the engine; logs show it."""
        unique = uuid.uuid4().hex
        return [f"{self.request_id}-{unique}-{index}" for index in range(len(self.prompts))]


class RequestRunner:
    """Runs jobs on one engine. Closing the generator that `run` returns aborts what is left of the job."""

    def __init__(self, llm: AsyncLLM, admission: Admission, metrics: EngineMetrics, pictures: PictureGate) -> None:
        self._llm = llm
        self._admission = admission
        self._metrics = metrics
        self._pictures = pictures

    async def run(self, job: Job) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield (index of the prompt, its outputs so far) whenever there are new ones, until all have ended.

        Raises:
            QueueFullError: too many requests, or too many images, wait.
            RequestError: it cannot be run.
            EngineDeadError: the engine died.
        """
        async with self._admitted(job) as watches, aclosing(self._outputs(job)) as outputs:
            async for index, output in outputs:
                watches[index].see(output)
                yield index, output

    async def complete(self, job: Job) -> list[RequestOutput]:
        """Run a job to its end and return its outputs, one per prompt. Cheaper than `run`, and raises as that does."""
        async with self._admitted(job) as watches:
            submitted_s = time.monotonic()
            outputs = await self._llm.complete(job.prompts, job.params, job.engine_ids(), priority=job.priority)
            for watch, output in zip(watches, outputs, strict=True):
                watch.see_whole(output, submitted_s)
        return outputs

    @asynccontextmanager
    async def _admitted(self, job: Job) -> AsyncIterator[list[RequestWatch]]:
        """Count a job's work while it runs, and how its sequences end."""
        started_s = time.monotonic()
        with self._admission.admit(job.num_sequences, job.num_tokens):
            if items := [item for prompt in job.prompts if prompt.items for item in prompt.items.items]:
                await self._pictures.pass_on(items)
            watches = [self._metrics.watch(started_s, job.params.n) for _ in job.prompts]
            reason = "abort"
            try:
                with naming_form(job.form_param):
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

    def _outputs(self, job: Job) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        # All are checked before the first one runs.
        streams = [
            self._llm.generate(prompt, job.params, engine_id, priority=job.priority)
            for prompt, engine_id in zip(job.prompts, job.engine_ids(), strict=True)
        ]
        return _single(streams[0]) if len(streams) == 1 else _merged(streams)


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
