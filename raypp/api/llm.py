"""`LLM`: the engine for scripts and notebooks. Every call blocks until its result is there."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, Unpack

from raypp.api.beam_search import BeamSearchOutput, BeamSearchParams, search_beams
from raypp.api.conversation import Rendering, RenderingOptions
from raypp.api.frontend import Frontend
from raypp.api.launch import EngineHandle, EngineOwner, ExitHook, Launch, Model, launch_on_ray, open_engine
from raypp.api.picture_prompts import EncodedPrompt, is_one_prompt
from raypp.api.prepare import Params, Priority
from raypp.api.running_request import PreparedRequest
from raypp.api.timeline import Timeline, read_timeline
from raypp.api.tokenizer import ChatMessage
from raypp.config.engine_config import EngineConfig
from raypp.errors import EngineDeadError, RequestError
from raypp.types import Prompt, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from raypp.stage.build_stage import StageFactory  # imports torch


T = TypeVar("T")

_LAST_TASKS_TIMEOUT_S = 1.0
_SIGNALS_S = 0.5  # a signal that comes just before a wait does not end it: this late it is taken notice of


class EventLoopThread:
    """Runs coroutines on its own thread. A daemon: a process that does not close it can still exit."""

    def __init__(self, name: str) -> None:
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._is_closed = False
        self._lock = threading.RLock()  # between the last coroutine that is begun and the end of the loop
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(started)), name=name, daemon=True)
        self._thread.start()
        started.wait()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and return its result. What interrupts the caller, Ctrl-C above all, cancels it.

        Raises:
            EngineDeadError: the thread was closed.
            Exception: whatever the coroutine raises.
        """
        work = _Work(coroutine)
        try:
            self._hand_over(work)
            is_alive = True
            while not (ended := work.await_end(_SIGNALS_S)):
                if not is_alive:  # for that long: in a forked process, say
                    raise _closed()
                is_alive = self._thread.is_alive()
        except BaseException:
            try:
                self._loop.call_soon_threadsafe(work.cancel)
            except RuntimeError:  # the loop has ended, and cancelled what was in it
                coroutine.close()
            raise
        if ended.cancelled():
            raise _closed()
        return ended.result()

    def call(self, function: Callable[[], T]) -> T:
        """Run a function in the loop and return its result."""
        if self._is_current():
            return function()

        async def run() -> T:
            return function()

        return self.run(run())

    def finish(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine to its end. In the loop itself it is only begun: a wait there would block the loop."""
        if self._is_current():
            _Work(coroutine).begin()  # only the loop holds it, so its first step must be its last
        else:
            self.run(coroutine)

    def close(self) -> None:
        """End the thread, once what was begun has ended; what does not end soon is cancelled."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._loop.call_soon_threadsafe(self._stop.set)
        if not self._is_current():
            self._thread.join()

    def _is_current(self) -> bool:
        """Return whether this is the loop's thread: the garbage collector may run any finalizer there."""
        return threading.current_thread() is self._thread

    def _hand_over(self, work: _Work[T]) -> None:
        with self._lock:
            if self._is_closed:
                raise _closed()
            self._loop.call_soon_threadsafe(work.begin)

    async def _run(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        started.set()
        await self._stop.wait()
        if last_tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(last_tasks, timeout=_LAST_TASKS_TIMEOUT_S)


class _Work(Generic[T]):
    """A coroutine on its way into the loop, through it, or out of it again.

    Ctrl-C may strike anywhere, also while the coroutine is handed over. So what it is cancelled by is there before, and
    the caller waits in C: a future of `concurrent.futures` can be left locked, and the loop would wait for it for ever.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._ended: queue.SimpleQueue[asyncio.Task[T]] = queue.SimpleQueue()
        self._coroutine = coroutine
        self._task: asyncio.Task[T] | None = None

    def await_end(self, timeout_s: float) -> asyncio.Task[T] | None:
        """Return its task as soon as it has ended, or None when it does not in time. For the caller."""
        try:
            return self._ended.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def begin(self) -> None:
        """Start it. In the loop."""
        self._task = asyncio.create_task(self._coroutine)
        self._task.add_done_callback(self._ended.put)

    def cancel(self) -> None:
        """Cancel it, whether it has begun or not. In the loop."""
        if self._task is None:
            self._coroutine.close()
        else:
            self._task.cancel()


def _closed() -> EngineDeadError:
    return EngineDeadError("the engine was closed", hint="start a new engine")


class LLM(EngineOwner):
    """A model, ready to generate.

        with LLM("tiny", num_stages=2) as llm:
            outputs = llm.generate(["def main("], SamplingParams(max_tokens=64))

    Works in a script and inside a running event loop; may be used from several threads. Close it, or leave its `with`
    block, to stop the engine; a forgotten one is closed when it is collected, at the latest at exit.
    """

    def __init__(
        self,
        model: Model,
        *,
        stage_factory: StageFactory | None = None,
        launch: Launch = launch_on_ray,
        freeze_gc: bool = True,
        **settings: object,
    ) -> None:
        """Start an engine. Blocks until it can be used.

        Args:
            model: `tiny`, a directory, a Hugging Face model id; or a whole EngineConfig, or the path of one, `*.toml`.
            stage_factory: Makes a stage in place of the model's own; for tests.
            launch: Starts the engine.
            freeze_gc: Once the first engine of this process has started, collect garbage and call `gc.freeze()`, so
                that later collections do not visit what the start left behind, which stops all requests for 0.2 s.
            **settings: Fields of EngineConfig by their names alone, e.g. `num_stages=2`.

        Raises:
            ConfigError: a setting that cannot be.
            RayppError: the engine cannot start.
        """
        self._engine = open_engine(model, settings, stage_factory, launch, freeze_gc=freeze_gc)
        thread = EventLoopThread("raypp-llm")
        try:
            self._frontend = thread.call(lambda: Frontend(self._engine))
        except BaseException:
            thread.close()
            self._engine.handle.close()
            raise
        self._thread = thread
        self._end = ExitHook(self, partial(_shut_down, self._frontend, thread, self._engine.handle))

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer, a `PreTrainedTokenizerBase` of transformers. Do not change it.

        Raises:
            RequestError: the engine has none.
        """
        if self._engine.tokenizer is None:
            raise RequestError(
                "the engine has no tokenizer",
                got="skip_tokenizer_init=True",
                expected="an engine with one",
                hint="start the engine without skip_tokenizer_init",
            )
        return self._engine.tokenizer.transformers_tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        request_ids: Sequence[str] | None = None,
        priority: Priority = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Continue prompts and return the outputs, in order. Ctrl-C aborts them.

        Args:
            prompts: One or more, each a str, a list of token ids, `{"prompt": "..."}` or `{"prompt_token_ids": [...]}`;
                the latter two may have `multi_modal_data` and `cache_salt`, see `raypp.types.PromptDetails`.
            sampling_params: One for all, or one per prompt; None: those of `get_default_sampling_params`. What is
                given holds as it is, whatever the model's generation_config.json says.
            request_ids: Their public ids, to abort them by; made up by default.
            priority: One for all, or one per prompt; smaller is served first, 0 by default.
            use_tqdm: Show a progress bar.

        Raises:
            RequestError: one cannot be run; then none was.
            EngineDeadError: the engine died.
        """
        listed: Any = [prompts] if is_one_prompt(prompts) else prompts
        prepared = self._engine.preparer.prompts(listed, sampling_params, request_ids, priority)
        return self._complete(prepared, use_tqdm)

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: Params = None,
        *,
        request_ids: Sequence[str] | None = None,
        priority: Priority = None,
        use_tqdm: bool = False,
        **rendering: Unpack[RenderingOptions],
    ) -> list[RequestOutput]:
        """Answer conversations and return the outputs, in order; a list also for a single one.

        Args:
            messages: One conversation, or several: lists of `{"role": ..., "content": ...}`. Content is a str or a list
                of parts: `{"type": "text", "text": ...}`; for models that take images also
                `{"type": "image", "image": X}` with a PIL image, a path, bytes or an array,
                `{"type": "image_url", "image_url": {"url": "data:..."}}`, and
                `{"type": "video", "video": [X, ...], "fps": 2.0}`.
            sampling_params: One for all, or one per conversation; None as for `generate`.
            request_ids: Their public ids, to abort them by; made up by default.
            priority: One for all, or one per conversation; smaller is served first, 0 by default.
            use_tqdm: Show a progress bar.
            **rendering: Further values for the chat template: fields of `raypp.api.conversation.Rendering`, such as
                `tools`, `continue_final_message`, or `chat_template_kwargs={"enable_thinking": False}`.

        Raises:
            RequestError: one cannot be run; then none was.
            EngineDeadError: the engine died.
        """
        is_one = isinstance(messages, Sequence) and bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if is_one else messages
        prepared = self._engine.preparer.chats(
            conversations, sampling_params, request_ids, Rendering(**rendering), priority
        )
        return self._complete(prepared, use_tqdm)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """Return the likeliest continuations of prompts, in order, each prompt's best first.

        Every token of a beam is a request of its own; the model's log-probabilities count, whatever its
        generation_config.json says. Prompts with images are refused.

        Args:
            prompts: As for `generate`.
            params: How to search. Twice `beam_width` is at most the engine's `max_logprobs`.

        Raises:
            RequestError: a prompt that cannot be run, or too many beams; then nothing was run.
            EngineDeadError: the engine died.
        """
        listed: Any = [prompts] if is_one_prompt(prompts) else prompts
        engine, most = self._engine, self.config.model.max_logprobs
        if -1 < most < 2 * params.beam_width:
            raise RequestError(
                "beam_width is larger than the engine's log-probabilities allow",
                got=params.beam_width,
                expected=f"at most {most // 2}, half of max_logprobs = {most}",
                hint="start the engine with a larger max_logprobs (-1: no limit)",
                param="beam_width",
            )
        prepared = engine.preparer.prompts(listed)
        for request in (one.request for one in prepared):
            if request.items is not None:
                raise RequestError(
                    "beam search takes no images", got="a prompt with images", expected="text", hint="use generate"
                )
        found = search_beams(
            [EncodedPrompt(one.request.prompt_token_ids, cache_salt=one.request.cache_salt) for one in prepared],
            params,
            lambda asked, one: self._complete(engine.preparer.prompts(asked, one), use_tqdm=False),
            eos=engine.eos_token_ids,
            max_model_len=int(engine.handle.model_info["max_model_len"]),
        )
        for sequence in (one for output in found for one in output.sequences):
            sequence.text = None if engine.tokenizer is None else engine.tokenizer.decode(sequence.tokens)
        return found

    def stream(
        self,
        prompt: Prompt | Sequence[ChatMessage],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **rendering: Unpack[RenderingOptions],
    ) -> Iterator[RequestOutput]:
        """Continue one prompt, or answer one conversation, and yield the outputs so far whenever there are new tokens.

        Leaving the iterator early, or Ctrl-C, aborts the request.

        Args:
            prompt: A prompt as for `generate`, or a conversation: a list of `{"role": ..., "content": ...}`.
            sampling_params: How to sample; None as for `generate`.
            request_id: Its public id; made up by default.
            **rendering: Of a conversation: further values for the chat template, as for `chat`.

        Raises:
            RequestError: it cannot be run.
            EngineDeadError: the engine died.
        """
        preparer, ids = self._engine.preparer, None if request_id is None else [request_id]
        given: Any = prompt
        if is_one_prompt(given):
            (prepared,) = preparer.prompts([given], sampling_params, ids)
        else:
            (prepared,) = preparer.chats([given], sampling_params, ids, Rendering(**rendering))
        return self._stream(prepared)

    def abort(self, request_id: str) -> None:
        """End a request with what it has. An id that is not running is ignored."""
        self._thread.call(lambda: self._frontend.abort([request_id]))

    def stats(self) -> dict[str, Any]:
        """Return the engine's counters, since it was started or started again, and how often that was.

        While it is started again this returns at once, with `is_recovering` and what there is to tell.

        Raises:
            DeadlineError: the driver does not answer.
            EngineDeadError: the engine died for good.
        """
        return self._thread.run(self._frontend.stats(self.config.faults.step_timeout_s))

    def timeline(self, last_s: float | None = None) -> Timeline:
        """Return what the stages did during the last burst of work: in a notebook, an image.

        Args:
            last_s: Keep at most this many seconds of it, the last ones.

        Raises:
            ConfigError: the engine has not worked yet.
            EngineDeadError: the engine died.
        """
        timeout_s = self.config.faults.step_timeout_s
        return self._thread.run(read_timeline(self._frontend, self.plan(), last_s=last_s, timeout_s=timeout_s))

    def restart(self, config: EngineConfig | None = None, **settings: object) -> None:
        """Start the engine again with other settings, under its requests, which go on with the same texts.

            llm.restart(num_stages=2, layer_partition=None)

        What may change: stages, layers and links, KV blocks, graphs, speculation, encoders, rows and tokens of steps.

        Args:
            config: The whole configuration; None: the present one.
            settings: What is to be different, by name.

        Raises:
            ConfigError: a setting that cannot be, or cannot change while requests run.
            ResourceError, ModelLoadError, DeadlineError: it does not start so, and goes on as it was.
            EngineDeadError: the engine died for good, or was closed.
        """
        self._engine.restart(config, settings)

    def close(self) -> None:
        """Stop the engine. Requests that still run end with EngineDeadError. Twice, or in a fork, it does nothing."""
        self._end()

    def close_when_replaced(self) -> None:
        """Stop the engine: a notebook's cell is about to start another under the same name."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _stream(self, prepared: PreparedRequest) -> Iterator[RequestOutput]:
        outputs = self._frontend.stream(prepared)
        try:
            while (output := self._thread.run(_next_of(outputs))) is not None:
                yield output
        finally:
            with contextlib.suppress(EngineDeadError):
                self._thread.finish(outputs.aclose())

    def _complete(self, prepared: list[PreparedRequest], use_tqdm: bool) -> list[RequestOutput]:
        with _progress(len(prepared), use_tqdm) as on_end:
            return self._thread.run(self._frontend.complete(prepared, on_end))


async def _next_of(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput | None:
    return await anext(outputs, None)


@contextlib.contextmanager
def _progress(total: int, enabled: bool) -> Iterator[Callable[[], None] | None]:
    if not enabled:
        yield None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, unit="request") as bar:
        yield lambda: bar.update(1)


def _shut_down(frontend: Frontend, thread: EventLoopThread, handle: EngineHandle) -> None:
    try:
        thread.call(frontend.close)
        thread.close()
    finally:
        handle.close()
