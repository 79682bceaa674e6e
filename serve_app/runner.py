"""Requests on their way through the engine: admitted, observed, several prompts of one body merged into one stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

from raypp.api.async_llm import AsyncLLM
from raypp.api.picture_prompts import EncodedPrompt
from raypp.errors import RayppError
from raypp.types import RequestOutput, SamplingParams
from serve_app.admission import Admission
from serve_app.metrics import EngineMetrics
from serve_app.pictures import PictureGate


@dataclass(frozen=True)
class Job:
    """What one HTTP request asks of the engine."""

    request_id: str
    prompts: Sequence[EncodedPrompt]
    params: SamplingParams
    priority: int  # smaller is served first

    @property
    def num_sequences(self) -> int:
        """How many it adds to the queue."""
        return len(self.prompts) * self.params.n

    @property
    def num_tokens(self) -> int:
        """How many prompt tokens it adds to the queue."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)


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
            QueueFullError: too many requests, or too many pictures, wait.
            RequestError: it cannot be run.
            EngineDeadError: the engine died.
        """
        started_s = time.monotonic()
        with self._admission.admit(job.num_sequences, job.num_tokens):
            if items := [item for prompt in job.prompts if prompt.items for item in prompt.items.items]:
                await self._pictures.pass_on(items)
            async with aclosing(self._outputs(job)) as outputs:
                watches = [self._metrics.watch(started_s, len(prompt.token_ids)) for prompt in job.prompts]
                try:
                    async for index, output in outputs:
                        watches[index].see(output)
                        yield index, output
                except RayppError:
                    self._metrics.count_end("error")
                    raise
                finally:
                    for watch in watches:
                        watch.close()

    async def complete(self, job: Job) -> list[RequestOutput]:
        """Run a job to its end and return its outputs, one per prompt. Raises as `run` does."""
        async with aclosing(self.run(job)) as outputs:
            last = {index: output async for index, output in outputs}
        return [last[index] for index in range(len(job.prompts))]

    def _outputs(self, job: Job) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        # All are checked before the first one runs.
        streams = [
            self._llm.generate(prompt, job.params, f"{job.request_id}-{index}", priority=job.priority)
            for index, prompt in enumerate(job.prompts)
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
