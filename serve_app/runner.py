"""Requests on their way through the engine: admitted, observed, several prompts of one body merged into one stream.

A replica takes a bounded amount of work at once: what runs, and what waits.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from raypp.api.async_llm import AsyncLLM
from raypp.config.http_settings import HttpSettings
from raypp.errors import QueueFullError, RayppError, RequestError
from raypp.openai_api.body_preparer import BodyPreparer
from raypp.openai_api.from_outputs import AnyPrepared
from raypp.openai_api.request_fields import RequestFields, naming_form
from raypp.prompt_items import EncoderItem
from raypp.types import RequestOutput
from serve_app.answers import UnknownModelError
from serve_app.metrics import EngineMetrics, LiveFeed, RequestWatch

Question = Literal["exposition", "load", "reset_prefix_cache"]
"""What a replica asks of all; `own_answer` has what each answers."""


@dataclass(frozen=True)
class AppContext:
    """One engine, what the routes need to serve it, and how it runs what they have prepared."""

    llm: AsyncLLM
    settings: HttpSettings
    metrics: EngineMetrics
    admission: Admission
    preparer: BodyPreparer
    live: LiveFeed
    ask_all: Callable[[Question], Awaitable[list[Any]]]
    """Returns the answers of the replicas behind the same address, this one's among them."""
    model_names: tuple[str, ...]
    """What requests may call the model; the first name is the one in answers."""
    created_s: int = 0
    """When the engine was started, seconds since the epoch."""
    encode_ahead: Callable[[Sequence[EncoderItem]], Awaitable[None]] | None = None
    """Returns when encoders have seen a request's images; QueueFullError: too many wait. None: the engine encodes."""

    def check_model(self, name: str | None) -> None:
        """Accept the model's names, and none.

        Raises:
            UnknownModelError: another name.
        """
        if name is not None and name not in self.model_names:
            raise UnknownModelError(name, self.model_names)

    async def run(
        self, body: RequestFields, prepared: AnyPrepared, request_id: str
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield (index of the prompt, what is new of its outputs) whenever there is anything, until all have ended.

        Closing the generator aborts what is left.

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
                self.llm.generate(prompt, prepared.params, engine_id, priority=body.priority or 0, deltas=True)
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
            outputs = await self.llm.complete(prepared.prompts, prepared.params, ids, priority=body.priority or 0)
            for watch, output in zip(watches, outputs, strict=True):
                watch.see_whole(output, submitted_s)
        return outputs

    @asynccontextmanager
    async def _admitted(self, body: RequestFields, prepared: AnyPrepared) -> AsyncIterator[list[RequestWatch]]:
        """Count a body's work while it runs, and how its sequences end."""
        started_s, prompts, num_continuations = time.monotonic(), prepared.prompts, prepared.params.n
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        with self.admission.admit(len(prompts) * num_continuations, num_tokens):
            items = [item for prompt in prompts if prompt.items for item in prompt.items.items]
            if items and self.encode_ahead is not None:
                await self.encode_ahead(items)
            watches = [RequestWatch(self.metrics, started_s, num_continuations) for _ in prompts]
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


_RETRY_AFTER_S = 1


class ReadingGate:
    """Counts the requests whose images are read, waiting ones included. Lives on one event loop.

    Args:
        max_reading: The most of them.
        timeout_s: How long each may take, the wait for others included.
    """

    def __init__(self, max_reading: int, timeout_s: float) -> None:
        self._max_reading = max_reading
        self._timeout_s = timeout_s
        self._num_reading = 0

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """Count a request while its images are read.

        Raises:
            QueueFullError: too many are counted already, or it took too long.
        """
        if self._num_reading >= self._max_reading:
            raise QueueFullError(
                "too many requests have their images read",
                retry_after_s=_RETRY_AFTER_S,
                got=f"{self._num_reading} requests",
                expected=f"fewer than max_encodes + max_encodes_waiting = {self._max_reading}",
            )
        self._num_reading += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError:
            raise QueueFullError(
                "the images of a request were not read in time",
                retry_after_s=_RETRY_AFTER_S,
                got=f"{self._num_reading} requests whose images are read",
                expected=f"image_wait_timeout_s = {self._timeout_s:g} s",
            ) from None
        finally:
            self._num_reading -= 1


_NEWEST_SHARE = 0.1  # of the newest request in the mean duration
_MAX_RETRY_AFTER_S = 60


@dataclass(frozen=True)
class AdmissionLimits:
    """What a replica takes at once, and of one body."""

    max_running: int
    """Sequences that the engine runs at once."""
    max_queued: int
    """Sequences that may wait beside them."""
    max_unfinished_tokens: int = 1 << 23
    """Prompt tokens of all unfinished requests."""
    max_body_sequences: int = 256
    """Sequences of one body."""
    max_body_tokens: int = 1 << 20
    """Prompt tokens of one body with several prompts; a single prompt may be as long as the model's context."""

    def check_body(self, num_prompts: int, n: int) -> None:
        """Refuse a body that asks for more than is ever admitted.

        Raises:
            RequestError: it does.
        """
        limit = min(self.max_body_sequences, self.max_running + self.max_queued)
        if num_prompts * n > limit:
            raise RequestError(
                "one request asks for too many sequences",
                got=f"{num_prompts} prompts with n = {n}, which is {num_prompts * n} sequences",
                expected=f"at most {limit}: max_sequences_per_request, and no more than "
                "max_num_seqs + max_queued_requests",
                hint="send several requests, or raise these settings",
                param="prompt" if num_prompts > 1 else "n",
            )

    def check_tokens(self, num_prompts: int, num_tokens: int) -> None:
        """Refuse a body with too many prompt tokens.

        Raises:
            RequestError: it has.
        """
        if num_prompts > 1 and num_tokens > self.max_body_tokens:
            raise RequestError(
                "the prompts of one request have too many tokens",
                got=f"{num_prompts} prompts, at least {num_tokens} tokens",
                expected=f"at most max_tokens_per_request = {self.max_body_tokens}",
                hint="send several requests, or raise max_tokens_per_request",
                param="prompt",
            )


class Admission:
    """Counts the unfinished sequences and prompt tokens of one replica. Lives on one event loop."""

    def __init__(self, limits: AdmissionLimits, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin empty.

        Args:
            limits: What is taken at once.
            clock: Returns seconds; for tests.
        """
        self.limits = limits
        self._clock = clock
        self._mean_s = 1.0
        self.num_unfinished = 0
        self.num_unfinished_tokens = 0

    @contextmanager
    def admit(self, num_sequences: int, num_tokens: int) -> Iterator[None]:
        """Count a request's work while it runs.

        Args:
            num_sequences: Its prompts times `n`.
            num_tokens: Of all its prompts; continuations share their prompt.

        Raises:
            QueueFullError: too much is unfinished already.
        """
        self._check_room(num_sequences, num_tokens)
        self.num_unfinished += num_sequences
        self.num_unfinished_tokens += num_tokens
        started = self._clock()
        try:
            yield
        finally:
            self.num_unfinished -= num_sequences
            self.num_unfinished_tokens -= num_tokens
            self._mean_s += _NEWEST_SHARE * (self._clock() - started - self._mean_s)

    def check(self, num_prompts: int, n: int) -> None:
        """Refuse a body before it is tokenized, if it can be told by then.

        Raises:
            RequestError: it asks for more than is ever admitted.
            QueueFullError: too much is unfinished already.
        """
        self.limits.check_body(num_prompts, n)
        self._check_room(num_prompts * n, 0)

    def _check_room(self, num_sequences: int, num_tokens: int) -> None:
        limits = self.limits
        if self.num_unfinished + num_sequences > limits.max_running + limits.max_queued:
            raise self._refusal(
                f"{self.num_unfinished} unfinished, and {num_sequences} more",
                f"at most {limits.max_running} running and {limits.max_queued} waiting",
            )
        # A prompt that is longer than the whole queue is let in alone: it would else never be.
        if (
            num_tokens
            and self.num_unfinished_tokens + num_tokens > limits.max_unfinished_tokens
            and self.num_unfinished
        ):
            raise self._refusal(
                f"{self.num_unfinished_tokens} prompt tokens unfinished, and {num_tokens} more",
                f"at most max_unfinished_tokens = {limits.max_unfinished_tokens}",
            )

    def _refusal(self, got: str, expected: str) -> QueueFullError:
        return QueueFullError(
            "too many requests are waiting", retry_after_s=self._retry_after_s(), got=got, expected=expected
        )

    def _retry_after_s(self) -> int:
        """Return about how long it takes until as many have ended as wait now, in whole seconds from 1 to 60."""
        max_running = self.limits.max_running
        waves = max(self.num_unfinished - max_running, 1) / max_running
        return max(1, min(math.ceil(self._mean_s * waves), _MAX_RETRY_AFTER_S))


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
