"""`AsyncLLM`: the engine for servers. Outputs are streamed as they come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from raypp.api.conversation import Rendering, RenderingOptions
from raypp.api.frontend import Frontend
from raypp.api.launch import EngineOwner, ExitHook, Launch, Model, OpenEngine, launch_on_ray, open_engine
from raypp.api.picture_prompts import EncodedPrompt
from raypp.api.prepare import Params, Priority
from raypp.api.running_request import PreparedRequest
from raypp.api.timeline import Timeline, read_timeline
from raypp.api.tokenizer import ChatMessage, Tokenizer
from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError, EngineDeadError, StageDiedError
from raypp.pictures.content import has_pictures
from raypp.pictures.reader import PictureReader
from raypp.types import Prompt, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from raypp.stage.build_stage import StageFactory  # imports torch

_HEALTH_TIMEOUT_S = 5.0
"""Driver and stages hear of each other every half second. More patience than that is for a machine under load."""


class AsyncLLM(EngineOwner):
    """A model, ready to generate, on the event loop in which it is first used.

    async with await AsyncLLM.create("tiny", num_stages=2) as llm:
        async for output in llm.generate("def main(", SamplingParams(max_tokens=64)):
            print(output.outputs[0].text)
    """

    def __init__(
        self,
        model: Model | OpenEngine,
        *,
        stage_factory: StageFactory | None = None,
        launch: Launch = launch_on_ray,
        freeze_gc: bool = True,
        **settings: object,
    ) -> None:
        """Start an engine. Blocks until it can be used: inside of an event loop, `create` is the better way.

        Args and errors are those of `LLM`; an engine that is open already is taken over, and closed in the end.
        """
        if not isinstance(model, OpenEngine):
            model = open_engine(model, settings, stage_factory, launch, freeze_gc=freeze_gc)
        self._engine = engine = model
        self._frontend: Frontend | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._close_engine = ExitHook(self, engine.handle.close)

    @classmethod
    async def create(
        cls,
        model: Model,
        *,
        stage_factory: StageFactory | None = None,
        launch: Launch = launch_on_ray,
        freeze_gc: bool = True,
        **settings: object,
    ) -> Self:
        """Start an engine without blocking the event loop."""
        opened = asyncio.to_thread(open_engine, model, settings, stage_factory, launch, freeze_gc=freeze_gc)
        return cls(await opened)

    @property
    def max_model_len(self) -> int:
        """The most tokens of a request, prompt and output together."""
        return int(self._engine.handle.model_info["max_model_len"])

    def draw_seeds_as(self, name: str) -> None:
        """Draw the seeds of requests that bring none as the engine of this name: others of the same seed draw others.

        Engines of one configuration that stand side by side would else give the same random texts.
        """
        self._engine.preparer.draw_seeds_as(name)

    def generate(
        self,
        prompt: Prompt | EncodedPrompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        deltas: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt; the outputs that come are cumulative. Leaving the iterator early aborts the request.

        Images are read in another thread, when the first output is asked for; errors about them come then.

        Args:
            prompt: One, as for `LLM.generate`.
            params: How to sample; None: as `get_default_sampling_params` says.
            request_id: Its public id; made up by default.
            priority: Smaller is served first.
            deltas: Let each output have only the text, the tokens and their log-probabilities that are new in it.

        Raises:
            RequestError: it cannot be run.
            EngineDeadError: the engine died.
        """
        request_ids = None if request_id is None else [request_id]
        prepare = partial(self._engine.preparer.prompts, params=params, request_ids=request_ids, priority=priority)
        if _has_images([prompt]):
            return self._stream_beside(partial(self._with_pictures, [prompt], prepare), deltas=deltas)
        return self._stream(prepare([prompt]), deltas=deltas)

    def chat(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        **rendering: Unpack[RenderingOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation; otherwise as `generate`.

        Args:
            messages: A list of `{"role": ..., "content": ...}`; content with images as for `LLM.chat`.
            params: How to sample; None: as `get_default_sampling_params` says.
            request_id: Its public id; made up by default.
            priority: Smaller is served first.
            **rendering: Further values for the chat template, as for `LLM.chat`.
        """
        prepare = partial(self._prepare_chat, params, request_id, Rendering(**rendering), priority)
        if has_pictures(messages):
            return self._stream_beside(partial(self._with_pictures_in, messages, prepare))
        return self._stream(prepare(messages))

    async def complete(
        self,
        prompts: Sequence[Prompt | EncodedPrompt],
        params: Params = None,
        request_ids: Sequence[str] | None = None,
        *,
        priority: Priority = None,
    ) -> list[RequestOutput]:
        """Continue prompts and return their finished outputs, in order; cheaper than streams. Cancelling aborts them.

        Args:
            prompts: Each as for `LLM.generate`.
            params: One for all, or one per prompt; None: as `get_default_sampling_params` says.
            request_ids: Their public ids; made up by default.
            priority: One for all, or one per prompt; smaller is served first.

        Raises:
            RequestError: one cannot be run; the others are aborted.
            EngineDeadError: the engine died.
        """
        frontend = self._frontend_here()

        prepare = partial(self._engine.preparer.prompts, params=params, request_ids=request_ids, priority=priority)
        has_images = _has_images(prompts)
        return await frontend.complete(await self._with_pictures(prompts, prepare) if has_images else prepare(prompts))

    async def complete_chat(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        **rendering: Unpack[RenderingOptions],
    ) -> RequestOutput:
        """Answer a conversation and return the finished output; otherwise as `chat`. Cancelling aborts it."""
        frontend = self._frontend_here()
        prepare = partial(self._prepare_chat, params, request_id, Rendering(**rendering), priority)
        has_images = has_pictures(messages)
        prepared = await self._with_pictures_in(messages, prepare) if has_images else prepare(messages)
        return (await frontend.complete(prepared))[0]

    async def abort(self, request_id: str) -> None:
        """End a request with what it has. An id that is not running is ignored."""
        self._frontend_here().abort([request_id])

    async def stats(self, *, spans_after_us: int | None = None) -> dict[str, Any]:
        """Return the engine's counters, since it was started or started again, and how often that was.

        While it is started again this returns at once, with `is_recovering` and what there is to tell.

        Args:
            spans_after_us: Microseconds since the epoch. Adds `spans`: the stages' latest forwards that ended after it,
                each the fields of `raypp.api.timeline.Forward`, as reported within 0.1 s.
        """
        return await self._frontend_here().stats(self.config.faults.step_timeout_s, spans_after_us)

    async def check_health(self) -> None:
        """Return if the engine can serve: the driver answers, and hears from every stage; or it is started again.

        Raises:
            EngineDeadError, StageDiedError: it is dead, or a stage has fallen silent.
            DeadlineError: the driver does not answer.
        """
        stats = await self._frontend_here().stats(_HEALTH_TIMEOUT_S)
        silent_s = stats.get("stage_silent_s", [0.0])
        if max(silent_s) > _HEALTH_TIMEOUT_S:
            stage_index = silent_s.index(max(silent_s))
            raise StageDiedError(
                f"stage {stage_index} does not answer",
                stage_index=stage_index,
                got=f"no sign of it for {max(silent_s):.1f} s",
                expected=f"a heartbeat within {_HEALTH_TIMEOUT_S:g} s",
            )

    def check_alive(self) -> None:
        """Return unless the engine is dead for good; what has only frozen is noticed later, and started again.

        Raises:
            EngineDeadError: it is dead, or was closed.
        """
        self._frontend_here().check_alive()

    @property
    def is_recovering(self) -> bool:
        """Whether the engine is being started again: requests wait, and go on then."""
        return self._frontend is not None and self._frontend.is_recovering

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None with `skip_tokenizer_init`."""
        return self._engine.tokenizer

    @property
    def pictures(self) -> PictureReader | None:
        """Reads the images of the model's prompts; None for a model that takes text alone."""
        return self._engine.pictures

    @property
    def takes_images(self) -> bool:
        """Whether prompts may hold images."""
        return self._engine.pictures is not None

    @property
    def model_info(self) -> Mapping[str, Any]:
        """What clients must know of the model: model_path, vocab_size, max_model_len, eos_token_ids."""
        return self._engine.handle.model_info

    async def timeline(self, last_s: float | None = None) -> Timeline:
        """Return what the stages did during the last burst of work; see `LLM.timeline`."""
        timeout_s = self.config.faults.step_timeout_s
        return await read_timeline(self._frontend_here(), self.plan(), last_s=last_s, timeout_s=timeout_s)

    async def restart(self, config: EngineConfig | None = None, **settings: object) -> None:
        """Start the engine again with other settings, under its requests; see `LLM.restart`."""
        await asyncio.to_thread(self._engine.restart, config, settings)

    def encoder_actors(self) -> list[Any]:
        """Return the Ray actors that encode images, for callers that need embeddings themselves. Blocks."""
        return self._engine.handle.encoder_actors()

    async def close(self) -> None:
        """Stop the engine. Requests that still run end with EngineDeadError. Closing twice, or in a fork, does nothing.

        May be called in any event loop, also when the one that the engine was used in has ended.
        """
        if self._close_engine.is_inherited:
            return  # the loop's file descriptors are shared with the process that runs it
        if not self._is_closed:
            self._is_closed = True
            if self._frontend is not None and self._loop is not None:
                await _run_in(self._loop, self._frontend.close, self.config.faults.close_timeout_s)
        await asyncio.to_thread(self._close_engine)

    def close_when_replaced(self) -> None:
        """Stop the engine from whatever thread: a notebook's cell is about to start another under the same name."""
        if self._close_engine.is_inherited:
            return
        self._is_closed = True
        if self._frontend is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._frontend.close)
        self._close_engine()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _frontend_here(self) -> Frontend:
        """Return the frontend, which lives on the loop of the first call."""
        if self._is_closed:
            raise EngineDeadError("the engine was closed", hint="start a new engine")
        loop = asyncio.get_running_loop()
        if self._frontend is None:
            self._frontend, self._loop = Frontend(self._engine), loop
        if self._loop is not loop:
            raise ConfigError(
                "an AsyncLLM belongs to one event loop",
                got="a call from another one",
                expected="the loop of its first call",
                hint="LLM can be used from everywhere",
            )
        return self._frontend

    async def _with_pictures(
        self,
        prompts: Sequence[Prompt | EncodedPrompt],
        prepare: Callable[[Sequence[Prompt | EncodedPrompt]], list[PreparedRequest]],
    ) -> list[PreparedRequest]:
        """Prepare prompts with images beside the event loop; a model that takes none says so at once."""
        pictures = self._engine.pictures
        return prepare(prompts) if pictures is None else await pictures.beside.prompts(prompts, prepare)

    async def _with_pictures_in(
        self, messages: Sequence[ChatMessage], prepare: Callable[[Sequence[ChatMessage]], list[PreparedRequest]]
    ) -> list[PreparedRequest]:
        """Do the same for a conversation."""
        pictures = self._engine.pictures
        return prepare(messages) if pictures is None else await pictures.beside.messages(messages, prepare)

    def _prepare_chat(
        self,
        params: SamplingParams | None,
        request_id: str | None,
        rendering: Rendering,
        priority: int,
        messages: Sequence[ChatMessage],
    ) -> list[PreparedRequest]:
        request_ids = None if request_id is None else [request_id]
        return self._engine.preparer.chats([messages], params, request_ids, rendering, priority)

    def _stream(self, prepared: list[PreparedRequest], *, deltas: bool = False) -> AsyncGenerator[RequestOutput, None]:
        return self._frontend_here().stream(prepared[0], deltas=deltas)

    async def _stream_beside(
        self, prepare: Callable[[], Awaitable[list[PreparedRequest]]], *, deltas: bool = False
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream a request that takes its time to be prepared."""
        async with contextlib.aclosing(self._stream(await prepare(), deltas=deltas)) as outputs:
            async for output in outputs:
                yield output


def _has_images(prompts: Sequence[Prompt | EncodedPrompt]) -> bool:
    return any(isinstance(prompt, Mapping) and "multi_modal_data" in prompt for prompt in prompts)


async def _run_in(loop: asyncio.AbstractEventLoop, function: Callable[[], None], timeout_s: float) -> None:
    """Run a function in a loop that others may be using; here, if it is this one or runs no more."""
    if loop is not asyncio.get_running_loop() and loop.is_running():

        async def run() -> None:
            function()

        with contextlib.suppress(TimeoutError):  # the loop ends just now: it will touch nothing any more
            await asyncio.wait_for(asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), loop)), timeout_s)
            return
    function()
